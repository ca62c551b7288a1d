"""The processes of trackers: they get the exit code of the job, and cannot hold it up."""

import json
import signal
import textwrap

import pytest

from tests.support.recorded import trained_run
from tfdist_cli.launch.tracking import TrackerProcesses, start_trackers


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Starts a program in place of a tracker."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "run").mkdir()

    def start(code, **limits):
        (tmp_path / "toy_tracker.py").write_text(textwrap.dedent(code))
        processes = TrackerProcesses(tmp_path / "run", **limits)
        processes.start("mlflow", "toy_tracker")
        return processes

    return start


def test_a_tracker_gets_the_exit_code(program, tmp_path):
    processes = program("import sys; open(sys.argv[1] + '/got', 'w').write(sys.stdin.read())")
    assert processes.finish(143) == []
    assert (tmp_path / "run" / "got").read_text() == "143\n"


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("import os, sys; os.write(1, b'no server'); sys.stdin.read(); sys.exit(1)", ("not complete", "no server")),
        ("import os, sys; os.write(1, b'no server'); sys.stdin.read()", ("complete now", "no server")),
        ("import os; os.abort()", ("not complete", f"-{signal.SIGABRT:d}")),
    ],
    ids=["failed", "recovered", "crashed"],
)
def test_a_failure_is_a_problem(program, code, parts):
    (problem,) = program(code).finish(0)
    assert problem.startswith("MLflow")
    assert all(part in problem for part in parts)


def test_a_tracker_that_hangs_is_killed(program):
    processes = program("import sys, threading; sys.stdin.read(); threading.Event().wait()", last_seconds=0.3)
    (problem,) = processes.finish(0)
    assert problem.startswith("MLflow")


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path):
    (tmp_path / "tracking").write_text("a file")
    processes = TrackerProcesses(tmp_path)
    processes.start("csv")
    assert len(processes.finish(0)) == 1


def test_an_error_of_the_launcher_ends_the_trackers(tmp_path):
    run = trained_run(tmp_path / "run").path
    with pytest.raises(RuntimeError), start_trackers(run, ["csv"]):
        raise RuntimeError
    assert (run / "tracking" / "csv" / "metrics.csv").read_text().count("train,") == 9


@pytest.mark.slow
def test_the_real_process_follows_a_run(tmp_path):
    run = trained_run(tmp_path / "run").path
    with start_trackers(run, ["csv", "tensorboard"]) as processes:
        assert processes.finish(0) == []
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    written = (run / "tracking" / "csv" / "metrics.csv").read_text()
    assert f"train,{last['step']},loss,{last['values']['loss']}" in written
    series = {path.name for path in (run / "tracking" / "tensorboard").iterdir()}
    assert series >= {"train", "test", "epoch", "worker-0"}
