"""Run directories on a real S3 server with faults, from the launch to the commands that read them."""

import random
import shutil
import subprocess
import sys
import time

import pytest

import tfdist_cli as api
from tests.support.codes import codes_in, raises
from tests.support.s3 import BUCKET, CREDENTIALS
from tfdist_cli.errors import RunFailed, TimeoutExceeded
from tfdist_cli.run_storage import stored_run
from tfdist_cli.storage import retry

pytestmark = pytest.mark.slow
RUN = f"s3://{BUCKET}/runs/one"


@pytest.fixture
def launch(tfdist, s3, tmp_path, monkeypatch):
    """Launches a program with a run directory on the server, and with its credentials."""
    monkeypatch.chdir(tmp_path)
    secrets = ", ".join(f"{name}: {{env: {name}}}" for name in CREDENTIALS)
    (tmp_path / "cluster.yaml").write_text(f"strategy: single\nroles: {{chief: {{secrets: {{{secrets}}}}}}}\n")

    def launch(code="print('hello')", *options, run=RUN):
        return tfdist("launch", "cluster.yaml", "--run-dir", run, *options, "--", sys.executable, "-c", code)

    return launch


def one_of(chance, *faults):
    """Faults of one request in six."""
    return lambda method, _path: chance.choice(faults) if method != "DELETE" and chance.random() < 1 / 6 else None


def test_a_run_survives_faults_and_the_loss_of_its_disk(launch, s3, tfdist, tmp_path):
    s3.proxy.fault = one_of(random.Random(0), "503", "lost", "cut request", "cut response")
    assert launch("print('on the first machine')").code == 0
    shutil.rmtree(tmp_path / "runs")
    assert launch("print('on the second machine')").code == 0
    s3.proxy.fault = lambda *_: None
    shutil.rmtree(tmp_path / "runs")
    assert s3.proxy.injected.total() >= 4
    for attempt, words in enumerate(("on the first machine", "on the second machine"), 1):
        assert words in tfdist("logs", RUN, "--attempt", str(attempt)).out
    status = tfdist("status", RUN)
    assert (status.code, RUN in status.out, "done" in status.out) == (0, True, True)
    assert tfdist("report", RUN).code == 0
    assert "Traceback" not in (tmp_path / "report.html").read_text()
    assert "one" in tfdist("list", RUN.rpartition("/")[0]).out
    assert not list(tmp_path.glob("runs/*")), "readers leave nothing"


def test_a_service_that_is_down_is_told_and_does_not_stop_the_job(launch, s3, tfdist, monkeypatch, tmp_path):
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.2)
    s3.proxy.fault = lambda method, path: "503" if method == "PUT" and "launcher.json" not in path else None
    result = launch()
    assert (result.code, codes_in(result.err)) == (1, ["run-not-uploaded"])
    assert "hello" in result.err
    s3.proxy.fault = lambda *_: None
    assert codes_in(tfdist("status", "runs/one").out + result.err) == ["run-not-uploaded"], "result.json has it"
    assert launch(run="runs/one").code == 0
    assert "runs/one/attempt_1/chief-0/stdout.log" in s3.names(), "what was missing is uploaded"


def test_the_code_of_a_failed_job_stays(launch, s3, monkeypatch):
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.2)
    s3.proxy.fault = lambda method, path: "503" if method == "PUT" and "launcher.json" not in path else None
    assert launch("raise SystemExit(7)").code == 7


def test_a_bucket_that_does_not_exist(launch, tmp_path):
    result = launch(run="s3://missing/run")
    assert (result.code, codes_in(result.err)) == (2, ["storage-unreachable"])
    assert not (tmp_path / "runs" / "run").exists()


def test_no_credential_is_stored(launch, s3, tmp_path):
    result = launch("import os; print(os.environ['AWS_SECRET_ACCESS_KEY'])")
    assert result.code == 0
    stored = [s3.client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in s3.names()]
    local = [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(stored) > 5
    for value in CREDENTIALS.values():
        assert not any(value.encode() in content for content in (*stored, *local))
        assert value not in result.out + result.err


def test_runs_of_a_cluster_file(launch, s3, tfdist, tmp_path):
    with (tmp_path / "cluster.yaml").open("a") as file:
        file.write(f"name: digits\nrun_dir: s3://{BUCKET}/runs\n")
    assert tfdist("launch", "cluster.yaml", "-q", "--", "true").code == 0
    (name,) = {name.split("/")[1] for name in s3.names()}
    assert name.startswith("digits-")
    assert (tmp_path / "runs" / "latest").resolve() == (tmp_path / "runs" / name).resolve()


def test_a_dry_run_needs_no_service(launch, s3, tmp_path):
    assert launch("print()", "--dry-run").code == 0
    assert s3.proxy.requests == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.rotates(5, 2)
@pytest.mark.timeout(150)
def test_a_run_is_reached_from_another_machine(launch, s3, tfdist, tmp_path, monkeypatch):
    """Another folder is the other machine: it has nothing of the run but the address."""
    (tmp_path / "other").mkdir()
    code = "import time; print('hello', flush=True); time.sleep(600)"
    argv = ["launch", "cluster.yaml", "--run-dir", RUN, "-q", "--", sys.executable, "-c", code]
    with subprocess.Popen([sys.executable, "-m", "tfdist_cli", *argv], stderr=subprocess.PIPE) as launcher:
        monkeypatch.chdir(tmp_path / "other")
        deadline = time.monotonic() + 60
        while "runs/one/attempt_1/chief-0/stdout.log" not in s3.names("runs/one/attempt_1"):
            assert (launcher.poll(), time.monotonic() < deadline) == (None, True)
            time.sleep(0.2)
        run = api.Run(RUN)
        assert (run.status().outcome.value, run.url, run.logs("chief")) == ("running", RUN, "hello\n")
        with raises(TimeoutExceeded, "run-not-ended"):
            run.wait(0)
        refused = tfdist("scale", RUN, "worker=2")
        assert (refused.code, codes_in(refused.err)) == (2, ["scale-rejected"])
        assert tfdist("stop", RUN).code == 0
        assert launcher.wait() == 143
    assert run.status().outcome.value == run.stop().outcome.value == "stopped"
    with raises(RunFailed, "stopped-by-signal"):
        run.wait()
    assert "stopped" in tfdist("stop", RUN).out
    assert codes_in(tfdist("scale", RUN, "worker=2").err) == ["run-not-running"]
    assert codes_in(tfdist("profile", RUN, "--task", "chief").err) == ["run-not-running"]
    assert not list((tmp_path / "other").iterdir())
    assert not s3.names("runs/one/requests")


def test_an_upload_that_is_interrupted(launch, s3, monkeypatch, tmp_path):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(stored_run.UploadProcess, "_wait", interrupted)
    result = launch()
    assert (result.code, codes_in(result.err)) == (1, ["run-not-uploaded"])
