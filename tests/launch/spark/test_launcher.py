"""The spark-submit command, and what is checked before it runs."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.slots.application import Application, Submission
from tfdist_cli.launch.slots.handshake import OPTIONS
from tfdist_cli.launch.spark import driver, launcher
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.secret import SecretSpec

CLUSTER = {"strategy": "multi_worker_mirrored", "launcher": "spark", "roles": {"worker": {"replicas": 3, "cpus": 2}}}


def cluster(**spark):
    return Cluster.model_validate({**CLUSTER, "name": "a b", "spark": spark})


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", "/java")
    return tmp_path


def test_the_command(home):
    conf = {"spark.executor.memory": "4g", "spark.executor.instances": 2}
    submission = launcher.SparkLauncher().submission(
        cluster(master_url="spark://127.0.0.1:7077", conf=conf, python="py")
    )
    argv = list(submission.argv("here:1"))
    options = dict(word.split("=", 1) for word in argv if word.startswith("spark.") and "=" in word)
    assert argv[:5] == [f"{home}/bin/spark-submit", "--master", "spark://127.0.0.1:7077", "--name", "a b"]
    assert argv[-3:] == [driver.__file__, "here:1", "3"]
    assert options["spark.executor.memory"] == "4g"
    assert options["spark.executor.instances"] == "2"
    assert options["spark.task.cpus"] == "2"
    assert options["spark.pyspark.python"] == "py"
    assert options["spark.pyspark.driver.python"] == sys.executable
    assert (submission.host, submission.slots) == ("127.0.0.1", 3)


@pytest.mark.parametrize(
    ("spec", "host"),
    [
        ({"master_url": "local[3]"}, "127.0.0.1"),
        ({"master_url": "k8s://https://127.0.0.1:6443"}, "127.0.0.1"),
        ({"master_url": "k8s://127.0.0.1:6443"}, "127.0.0.1"),
        ({"master_url": "spark://127.0.0.1:7077,other:7077"}, "127.0.0.1"),
        ({"master_url": "yarn", "conf": {"spark.driver.host": "edge"}}, "edge"),
        ({"master_url": "yarn", "address": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_the_address_for_executors(home, spec, host):
    assert launcher.SparkLauncher().submission(cluster(**spec)).host == host


def test_missing_programs(home, monkeypatch):
    check = launcher.SparkLauncher().check
    check(cluster(), ())
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME")
    with raises(UsageError, "program-not-found"):
        check(cluster(), ())
    monkeypatch.setenv("JAVA_HOME", "/java")
    monkeypatch.delenv("SPARK_HOME")
    client = SimpleNamespace(origin=f"{home}/pyspark/__init__.py")  # of pyspark-client: without spark-submit
    for found in (None, client):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        with raises(UsageError, "program-not-found"):
            check(cluster(), ())


def test_addresses_are_spark_s(home):
    given = {**CLUSTER, "roles": {"worker": {"hosts": ["a:1", "b:1"]}}}
    with raises(UsageError, "hosts-not-supported"):
        launcher.SparkLauncher().check(Cluster.model_validate(given), ())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("[SPARK-24819]: Barrier execution mode does not allow run …", "too-few-slots"),
        ("Traceback …\nModuleNotFoundError: No module named 'tfdist_cli'\n", "tfdist-missing"),
        (
            "…\nRuntimeError: the agent of … exited with code 1: ModuleNotFoundError: No module named 'yaml'\n",
            "tfdist-missing",
        ),
        ("[SPARK-24942]: Barrier execution mode does not support dynamic …", "dynamic-allocation"),
        ("SparkContext has been shutdown", "spark-unreachable"),
        ("Job aborted. Most recent failure reason: ExecutorLostFailure (executor 1 exited)\n\nDriver …", "slots-lost"),
    ],
)
def test_reasons_of_spark(message, code):
    error = driver.driver_error(SimpleNamespace(java_exception=SimpleNamespace(getMessage=lambda: message)), 3)
    assert error.code == code
    assert code != "slots-lost" or error.message == "ExecutorLostFailure (executor 1 exited)"


CLEAR = "very-secret-value"
SECRET = "spark.authenticate.secret"


@pytest.mark.parametrize("path", ["secret.txt", "~/secret.txt"])
def test_the_file_of_a_secret_property_is_beside_the_cluster_file(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "project" / "cluster.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps({**CLUSTER, "spark": {"conf": {SECRET: {"file": path}, "spark.executor.memory": "4g"}}}))
    folder = file.parent if path == "secret.txt" else tmp_path / "home"
    assert load_run(file)[0].spark.conf[SECRET].file == folder / "secret.txt"


@pytest.mark.parametrize("source", ["env", "file"])
def test_a_secret_property_is_in_no_command_and_no_file(source, home, monkeypatch, tmp_path):
    (tmp_path / "secret").write_text(CLEAR + "\n")
    monkeypatch.setenv("SPARK_SECRET", CLEAR)
    given = {"env": "SPARK_SECRET"} if source == "env" else {"file": str(tmp_path / "secret")}
    path = tmp_path / "cluster.yaml"
    conf = {SECRET: given, "spark.authenticate": "true", "spark.executor.memory": "4g"}
    path.write_text(json.dumps({**CLUSTER, "spark": {"conf": conf}}))
    loaded, _ = load_run(path)
    assert loaded.spark.conf["spark.executor.memory"] == "4g"
    again = tmp_path / "again.yaml"
    again.write_text(dump(loaded))
    assert load_run(again)[0].spark == loaded.spark
    submission = launcher.SparkLauncher().submission(loaded)
    plan = make_plan(
        loaded,
        None,
        addresses=launcher.SparkLauncher().preview_addresses(loaded),
        run_dir=tmp_path,
        machine=Machine(1),
        command=("true",),
    )
    shown = launcher.SparkLauncher().render(plan)
    assert submission.secrets[SECRET].source in shown
    for text in (shown, again.read_text(), " ".join(submission.argv("here:1")), repr(loaded)):
        assert CLEAR not in text
        assert f"{SECRET}={{" not in text
    assert submission.read_secrets() == {SECRET: CLEAR}


def test_the_driver_sets_secret_properties_and_its_output_is_masked(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_SECRET", CLEAR)
    program = f"import os; print(os.environ[{OPTIONS!r}]); print(os.environ['SPARK_SECRET'])"
    secrets = {SECRET: SecretSpec(env="SPARK_SECRET")}
    submission = Submission("Spark", lambda _: [sys.executable, "-c", program], "127.0.0.1", 1, 30, secrets=secrets)
    application = Application(submission)
    try:
        with raises(TfdistError, "application-ended") as raised:
            application.await_slots()
    finally:
        application.close()
    assert json.dumps({SECRET: "***"}) in raised.value.message
    assert raised.value.message.splitlines()[-1] == "***"
    assert CLEAR not in raised.value.message
    monkeypatch.delenv("SPARK_SECRET")
    with raises(UsageError, "secret-not-found"):
        Application(submission)


@pytest.mark.parametrize(
    "name",
    [SECRET, "spark.ssl.keyStorePassword", "spark.hadoop.fs.s3a.secret.key", "spark.hadoop.fs.s3a.session.token"],
)
def test_a_secret_in_the_file_is_an_error_that_does_not_repeat_it(name, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({**CLUSTER, "spark": {"conf": {name: CLEAR}}}))
    with raises(SpecError, "secret-in-clear") as raised:
        load_run(path)
    assert CLEAR not in str(raised.value)


def test_properties_that_only_name_a_secret_are_text():
    conf = {
        "spark.kubernetes.driver.secrets.spark-secret": "/etc/secrets",
        "spark.kubernetes.executor.secretKeyRef.MY_TOKEN": "name:key",
        "spark.kubernetes.authenticate.submission.oauthTokenFile": "/token",
    }
    assert cluster(conf=conf).spark.conf == conf


def test_a_wrong_source_is_an_error_that_does_not_repeat_it(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({**CLUSTER, "spark": {"conf": {SECRET: {"value": CLEAR}}}}))
    with pytest.raises(SpecError) as raised:
        load_run(path)
    assert CLEAR not in str(raised.value)
