"""The spark-submit command, and what is checked before it runs."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.spark import driver, launcher
from tfdist_cli.spec.sections.cluster import Cluster

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
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
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
        ("[SPARK-24942]: Barrier execution mode does not support dynamic …", "dynamic-allocation"),
        ("SparkContext has been shutdown", "spark-unreachable"),
        ("Job aborted. Most recent failure reason: ExecutorLostFailure (executor 1 exited)\n\nDriver …", "slots-lost"),
    ],
)
def test_reasons_of_spark(message, code):
    error = driver.driver_error(SimpleNamespace(java_exception=SimpleNamespace(getMessage=lambda: message)), 3)
    assert error.code == code
    assert code != "slots-lost" or error.message == "ExecutorLostFailure (executor 1 exited)"
