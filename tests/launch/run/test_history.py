"""What a run has come to, from its directory alone."""

import errno
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run import history
from tfdist_cli.launch.run.history import Outcome, leftover_processes, log_files, read_run, runs_in
from tfdist_cli.spec.task_id import TaskId


class Folder:
    """A run's directory."""

    def __init__(self, path, tasks=("chief:0", "worker:0")):
        self.path = path
        path.mkdir(parents=True)
        plan = {"name": "digits", "strategy": "parameter_server", "tasks": [{"task": task} for task in tasks]}
        (path / "plan.json").write_text(json.dumps(plan))
        (path / "launcher.lock").write_text("")

    def happened(self, seconds, **event):
        line = {"time": f"2026-01-02T03:04:{seconds:02}+00:00", "seconds": float(seconds), "attempt": 1} | event
        self.add("events.jsonl", line)

    def add(self, name, line):
        with (self.path / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "runs" / "digits-1")


def started(folder, seconds=0):
    folder.happened(seconds, event="launch")
    folder.happened(seconds, event="started", task="chief:0", pid=2**22 + 1)
    folder.happened(seconds, event="started", task="worker:0", pid=2**22 + 2)


def ended(folder, code, headline=None, seconds=9, signum=None):
    folder.happened(seconds, event="exited", task="chief:0", code=code, status="failed", cause=f"exit code {code}")
    folder.happened(seconds, event="phase", phase="ended", cause="")
    (folder.path / "result.json").write_text(json.dumps({"exit_code": code, "headline": headline, "signal": signum}))


@pytest.mark.parametrize(
    ("code", "signum", "outcome"),
    [
        (0, None, Outcome.DONE),
        (1, None, Outcome.FAILED),
        (124, None, Outcome.FAILED),
        (130, "SIGINT", Outcome.STOPPED),
        (143, "SIGTERM", Outcome.STOPPED),
        (143, None, Outcome.FAILED),  # a task that another process terminated
    ],
)
def test_how_it_ended(folder, code, signum, outcome):
    started(folder)
    ended(folder, code, "chief:0 failed" if code == 1 else None, signum=signum)
    run_view = read_run(folder.path)
    assert (run_view.outcome, run_view.launcher, run_view.seconds) == (outcome, None, 9.0)
    assert run_view.headline == ("chief:0 failed" if code == 1 else "")
    chief, worker = run_view.tasks
    assert (chief.state, chief.pid, chief.cause) == ("failed", None, f"exit code {code}")
    assert (worker.state, worker.pid) == ("starting", 2**22 + 2)


def test_what_each_task_was_given(folder):
    """From the plan, or from the task's own machine."""
    started(folder)
    plan = json.loads((folder.path / "plan.json").read_text())
    plan["tasks"][1] |= {"gpus": ["0"], "memory": "2 GiB", "intra_op_threads": 4, "env": {"A": "b"}}
    (folder.path / "plan.json").write_text(json.dumps(plan))
    chief, worker = read_run(folder.path).tasks
    assert not any(chief.resources.values())
    assert {name: value for name, value in worker.resources.items() if value} == {
        "gpus": ["0"], "memory": "2 GiB", "intra_op_threads": 4
    }  # fmt: skip
    (folder.path / "attempt_1" / "worker-0").mkdir(parents=True)
    (folder.path / "attempt_1" / "worker-0" / "task.json").write_text(json.dumps({"gpus": ["3"]}))
    run_view = read_run(folder.path)
    assert (run_view.tasks[1].resources["gpus"], run_view.tasks[1].resources["memory"]) == (["3"], None)
    assert run_view.as_json()["tasks"][1]["gpus"] == ["3"]


def test_a_run_whose_launcher_was_killed(folder):
    started(folder)
    folder.happened(3, event="state", task="chief:0", state="training")
    run_view = read_run(folder.path)
    assert run_view.outcome is Outcome.LOST
    assert [task.state for task in run_view.tasks] == ["training", "starting"]
    assert leftover_processes(run_view) == []


def test_a_run_that_was_not_even_started(folder):
    run_view = read_run(folder.path)
    assert (run_view.outcome, run_view.began, run_view.seconds) == (Outcome.LOST, None, 0.0)
    assert [task.state for task in run_view.tasks] == ["not started"] * 2


def test_only_the_last_launch_counts(folder):
    started(folder)
    ended(folder, 1, "an old story")
    started(folder, seconds=1)
    folder.happened(2, event="state", task="chief:0", state="training")
    run_view = read_run(folder.path)
    assert (run_view.outcome, run_view.headline) == (Outcome.LOST, "")
    assert [(task.state, task.starts) for task in run_view.tasks] == [("training", 1), ("starting", 1)]


def test_a_launch_after_one_that_was_killed(folder):
    """The launcher was killed before its first event."""
    started(folder)
    started(folder, seconds=50)
    assert [task.starts for task in read_run(folder.path).tasks] == [1, 1]


def test_a_task_that_was_started_again(folder):
    started(folder)
    folder.happened(2, event="exited", task="worker:0", code=-9, status="lost", cause="killed by SIGKILL")
    folder.happened(3, event="started", task="worker:0", pid=2**22 + 3)
    worker = read_run(folder.path).tasks[1]
    assert (worker.state, worker.pid, worker.starts, worker.cause) == ("starting", 2**22 + 3, 2, "")


def test_the_last_line_of_the_training_counts(folder):
    folder.add("metrics.jsonl", {"split": "train", "step": 10, "values": {"loss": 0.5}})
    folder.add("metrics.jsonl", {"split": "train", "step": 20, "values": {"loss": 0.25}})
    folder.add("metrics.jsonl", {"split": "test", "step": 20, "values": {"loss": 0.75}})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "step": 3')  # it is being written
    run_view = read_run(folder.path)
    assert (run_view.step, run_view.metrics) == (20, {"loss": 0.25})
    assert json.loads(json.dumps(run_view.as_json()))["step"] == 20


def test_of_a_file_that_is_long_only_the_end_is_read(folder):
    for step in range(6000):
        folder.add("metrics.jsonl", {"split": "train", "step": step, "values": {"loss": 1.0}, "more": "x" * 50})
    assert read_run(folder.path).step == 5999


def test_processes_of_a_run_behind_a_link(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder.path.parent)
    environment = os.environ | {"TFDIST_TASK_DIR": str(link / folder.path.name / "attempt_1" / "worker-0")}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        started(folder)
        folder.happened(1, event="started", task="worker:0", pid=process.pid)
        assert [each.pid for each in leftover_processes(read_run(folder.path))] == [process.pid]
        process.communicate(b"\n")


def test_processes_of_others_are_none_of_its_own(folder):
    started(folder)
    folder.happened(1, event="started", task="worker:0", pid=os.getpid())  # the number has been given to another
    assert leftover_processes(read_run(folder.path)) == []


def test_runs_are_listed_by_when_they_were_launched(tmp_path):
    parent = tmp_path / "runs"
    for number, name in enumerate(("b", "c", "a")):
        made = Folder(parent / name)
        os.utime(made.path / "launcher.lock", (number, number))
    (parent / "latest").symlink_to("a")
    (parent / "other").mkdir()
    assert [path.name for path in runs_in(parent)] == ["b", "c", "a"]


def test_a_run_without_its_lock_is_listed_by_its_plan(tmp_path):
    for name, seconds in (("copied", 5), ("a", 3), ("b", 7)):
        made = Folder(tmp_path / name)
        for file in made.path.iterdir():
            os.utime(file, (seconds, seconds))
    (tmp_path / "copied" / "launcher.lock").unlink()
    assert [path.name for path in runs_in(tmp_path)] == ["a", "copied", "b"]


def test_a_folder_that_cannot_be_looked_into_hides_no_run_and_may_be_one(tmp_path, monkeypatch):
    for name in ("mine", "theirs"):
        Folder(tmp_path / name)
    exists = Path.exists

    def refused(path):
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    assert [path.name for path in runs_in(tmp_path)] == ["theirs", "mine"]


def test_what_may_not_be_read_is_reported(folder, monkeypatch):
    started(folder)
    opened = os.open

    def refused(path, *args, **options):
        if Path(path).name == "events.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    with raises(UsageError, "unreadable-file") as caught:
        read_run(folder.path)
    assert "digits-1/events.jsonl" in caught.value.message
    assert "Permission denied" in caught.value.message
    monkeypatch.setattr(Path, "iterdir", lambda path: refused(path / "events.jsonl"))
    with raises(UsageError, "unreadable-file") as caught:
        list(runs_in(folder.path))
    assert str(folder.path) in caught.value.message


def test_lines_that_no_launcher_wrote_are_left_out(folder):
    started(folder)
    for line in ({}, {"seconds": "soon", "time": "2026-01-02T03:04:05+00:00"}, {"seconds": 3.0, "time": None}):
        folder.add("events.jsonl", line)
    assert read_run(folder.path).seconds == 0.0


def test_a_run_takes_until_now_while_it_continues(folder, monkeypatch):
    began = datetime.now(timezone.utc) - timedelta(minutes=5)
    line = {"time": (began + timedelta(seconds=2)).isoformat(), "seconds": 2.0, "attempt": 1, "event": "launch"}
    folder.add("events.jsonl", line)
    assert read_run(folder.path).seconds == 2.0
    monkeypatch.setattr(history, "launcher_of", lambda run: 4711)
    assert read_run(folder.path).seconds == pytest.approx(300, abs=60)


def test_logs_in_order(folder):
    for place in ("attempt_2/worker-0/stdout.log", "attempt_2/worker-0/stderr.log", "attempt_10/chief-0/stderr.log"):
        path = folder.path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    worker = TaskId("worker")
    assert list(log_files(folder.path)) == [
        (2, worker, "stderr"), (2, worker, "stdout"), (10, TaskId("chief"), "stderr")
    ]  # fmt: skip


@pytest.mark.parametrize("text", [None, "", "[]", '{"tasks": [{}]}', '{"tasks": [{"task": "boss:0"}]}'])
def test_what_is_no_run(tmp_path, text):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with raises(UsageError, "not-a-run-dir"):
        read_run(tmp_path)


def test_a_run_that_was_scaled(folder):
    started(folder)
    for number, answer in (("a", "accepted"), ("b", "refused"), ("c", "accepted")):
        folder.happened(3, event="scale", request=number, answer=answer, replicas={"worker": [1, 3]})
    folder.happened(9, event="scaled", request="a", replicas={"worker": [1, 3]}, resumed=40, step=45, took=6.0)
    one = {
        "replicas": {"worker": [1, 3]},
        "seconds": 3.0,
        "live": False,
        "joined": [],
        "left": [],
        "failed": [],
        "lost": [],
        "reverted": None,
    }
    expected = [one | {"resumed": 40, "took": 6.0}, one | {"resumed": None, "took": None}]
    assert read_run(folder.path).as_json()["scaled"] == expected


def test_a_run_whose_tasks_joined_and_left(folder):
    started(folder)
    folder.happened(3, event="scale", request="a", answer="accepted", live=True, replicas={"worker": [1, 3]})
    names = {"joined": ["worker:1"], "left": [], "failed": ["worker:2"], "lost": [], "reverted": None}
    folder.happened(4, event="scaled", request="a", replicas={"worker": [1, 3]}, resumed=None, took=1.5, **names)
    (scaled,) = read_run(folder.path).scaled
    assert scaled == {
        "replicas": {"worker": [1, 3]}, "seconds": 3.0, "live": True, "resumed": None, "took": 1.5, **names
    }  # fmt: skip


def test_workers_that_are_not_in_the_plan(folder):
    """One was started by hand; another has left at a request, so that the plan does not have it any more."""
    started(folder)
    folder.happened(3, event="joined", task="chief:0", worker="worker:7", step=5)
    folder.happened(4, event="joined", task="chief:0", worker="worker:8", step=6)
    folder.happened(4, event="joined", task="chief:0", worker="nobody", step=6)
    folder.happened(5, event="exited", task="worker:8", code=0, status="left", cause="left the training")
    states = {str(task.task): task.state for task in read_run(folder.path).tasks}
    assert (states["worker:7"], states["worker:8"]) == ("joined", "left")
    folder.happened(5, event="exited", task="worker:6", code=0, status="left", cause="left the training")
    states = {str(task.task): task.state for task in read_run(folder.path).tasks}
    assert states["worker:6"] == "left"  # it was there at the start, so that it never joined
    folder.happened(6, event="left", task="chief:0", worker="worker:7", step=9)
    states = {str(task.task): task.state for task in read_run(folder.path).tasks}
    assert states["worker:7"] == "left"


def test_a_worker_that_is_not_in_the_plan_and_has_to_stay(folder):
    started(folder)
    folder.happened(3, event="started", task="worker:8", pid=4712)
    folder.happened(4, event="state", task="worker:8", state="serving")
    states = {str(task.task): task.state for task in read_run(folder.path).tasks}
    assert states["worker:8"] == "serving"
    folder.happened(5, event="started", task="chief:0", pid=4713, attempt=2)
    assert "worker:8" not in {str(task.task) for task in read_run(folder.path).tasks}
    assert "nobody" not in states


def test_what_tasks_use_is_shown_while_they_run(folder, monkeypatch):
    def line(seconds, **tasks):
        time = f"2026-01-02T03:04:{seconds:02}.000+00:00"
        folder.add("resources.jsonl", {"time": time, "seconds": 1.0, "attempt": 1, "tasks": tasks})

    line(1, **{"worker:0": {"cpu": 7.0}})  # of the launch before
    started(folder, 2)
    folder.happened(3, event="exited", task="chief:0", code=0, status="done", cause="")
    assert [task.usage for task in read_run(folder.path).tasks] == [None, None]
    monkeypatch.setattr(history, "launcher_of", lambda path: 4711)
    line(5, **{"worker:0": {"cpu": 1.5, "memory": 3}, "chief:0": {"cpu": 1.0}})
    line(6, **{"worker:0": "damaged"})
    chief, worker = read_run(folder.path).tasks
    assert (chief.usage, worker.usage.cpu, worker.usage.memory) == (None, 1.5, 3)
    assert json.loads(json.dumps(read_run(folder.path).as_json()))["tasks"][1]["usage"]["cpu"] == 1.5
