"""Runs of tasks that were started each by itself: which processes belong together, and how they have ended."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from tfdist_cli.launch.run.history import Outcome, read_run
from tfdist_cli.protocol import task_events
from tfdist_cli.protocol.records import ENABLED, TASK_EVENTS, emit
from tfdist_cli.spec.task_id import TaskId

BEGAN = datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)
CHIEF, WORKER = "chief-0", "worker-0"


class Folder:
    """A run's directory."""

    def __init__(self, path, strategy):
        self.path = path
        (path / "manual").mkdir(parents=True)
        tasks = [{"task": "chief:0"}, {"task": "worker:0"}]
        plan = {"name": "digits", "strategy": strategy, "manual": True, "tasks": tasks}
        (path / "plan.json").write_text(json.dumps(plan))

    def happened(self, task, seconds, event, **fields):
        line = {"time": (BEGAN + timedelta(seconds=seconds)).isoformat(), "event": event} | fields
        with (self.path / "manual" / f"{task}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lived(self, task, began, ended=None, code=0):
        status = "done" if code == 0 else "stopped" if code == 143 else "failed"
        self.happened(task, began, "started", pid=2**22 + 1, host="a")
        if ended is not None:
            self.happened(task, ended, "exited", code=code, status=status)


@pytest.fixture
def folder(tmp_path):
    return lambda strategy="parameter_server": Folder(tmp_path / "run", strategy)


def states(view):
    return [(each.state, each.starts) for each in view.tasks]


@pytest.mark.parametrize(
    ("code", "outcome", "state"),
    [(0, Outcome.DONE, "done"), (1, Outcome.FAILED, "failed"), (143, Outcome.STOPPED, "stopped")],
)
def test_the_deciding_task_is_the_result(folder, code, outcome, state):
    run = folder()
    run.lived(WORKER, 0, 30)
    run.happened(CHIEF, 5, "started", pid=7, host="b")
    run.happened(CHIEF, 6, "error", message="no memory", code="out-of-memory")
    run.happened(CHIEF, 30, "exited", code=code, status=state)
    view = read_run(run.path)
    assert (view.outcome, view.seconds, view.manual) == (outcome, 30.0, True)
    assert states(view) == [(state, 1), ("done", 1)]
    assert view.result.get("code") == (None if code == 0 else "out-of-memory")
    assert view.result.get("signal") == ("SIGTERM" if code == 143 else None)
    assert ("no memory" in view.headline) is (code == 1)


def test_all_workers_of_a_mirrored_training_decide(folder):
    run = folder("multi_worker_mirrored")
    run.lived(CHIEF, 0, 30)
    run.lived(WORKER, 0, 29, 3)
    view = read_run(run.path)
    assert (view.outcome, view.headline) == (Outcome.FAILED, "worker:0: exit code 3")


def test_a_task_without_a_last_line_is_lost(folder):
    run = folder()
    run.lived(CHIEF, 0)
    view = read_run(run.path)
    assert (view.outcome, states(view)) == (Outcome.LOST, [("lost", 1), ("not started", 0)])


def test_a_program_that_has_reported_that_it_is_done_is_done(folder):
    run = folder()
    run.lived(CHIEF, 0)
    run.happened(CHIEF, 3, "state", state="done")
    assert read_run(run.path).outcome is Outcome.DONE


def test_tasks_that_lived_at_once_are_one_launch(folder):
    run = folder()
    run.lived(WORKER, 0, 30)
    run.lived(CHIEF, 10, 30, 1)
    run.lived(WORKER, 40, 60, 2)
    run.lived(WORKER, 50, 90)
    run.lived(CHIEF, 55, 90)
    view = read_run(run.path)
    assert (view.began, view.seconds) == (BEGAN + timedelta(seconds=40), 50.0)
    assert states(view) == [("done", 1), ("done", 2)]


def test_a_task_holds_its_file_as_long_as_it_lives(folder):
    run = folder()
    run.lived(CHIEF, 0)
    path = task_events.path_of(run.path, TaskId("chief", 0))
    assert task_events.is_held(path) is False
    descriptor = task_events.hold(path)
    view = read_run(run.path)
    assert (view.outcome, view.tasks[0].pid) == (Outcome.RUNNING, 2**22 + 1)
    descriptor.close()
    assert read_run(run.path).outcome is Outcome.LOST


def test_damaged_files_do_no_harm(folder):
    run = folder()
    (run.path / "manual" / "nobody-0.jsonl").write_text('{"event": "started"}\n')
    (run.path / "manual" / "chief-0.jsonl").write_text('{"event": 3, "time": "2026-01-02"}\n{"event": "started"}\nno\n')
    view = read_run(run.path)
    assert (view.outcome, view.seconds) == (Outcome.LOST, 0.0)


def test_records_go_to_the_file_if_no_launcher_reads_them(tmp_path, monkeypatch, capfd):
    path = tmp_path / "chief-0.jsonl"
    monkeypatch.setenv(TASK_EVENTS, str(path))
    monkeypatch.setenv("TFDIST_SECRETS", "KEY")
    monkeypatch.setenv("KEY", "very-secret")
    emit("state", state="training")
    emit("progress", step=3)
    emit("error", message="it was very-secret")
    task_events.exited(143)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["state", "error", "exited"]
    assert "***" in lines[1]["message"]
    assert "very-secret" not in lines[1]["message"]
    assert (lines[2]["code"], lines[2]["status"]) == (143, "stopped")
    monkeypatch.setenv(ENABLED, "1")
    emit("state", state="done")
    task_events.exited(0)
    assert len(path.read_text().splitlines()) == 3
    assert "done" in capfd.readouterr().err
