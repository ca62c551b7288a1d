"""The report of a job that has ended, and the event_log of how it got there."""

import errno
import inspect
import json
import math
import os
import re
import resource
import signal
from datetime import datetime, timezone

import pytest

from tfdist_cli.cli.console.progress import metrics_text
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.run import event_log
from tfdist_cli.launch.run.event_log import EventLog
from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.run.report import describe_exit, make_report
from tfdist_cli.launch.run.snapshot import KEPT_LINES, Progress, RunSnapshot
from tfdist_cli.launch.supervisor.events import (
    Exited,
    NetworkReady,
    Output,
    ProfileAccepted,
    ProfileRefused,
    RecordReceived,
    RequestAnswered,
    ResizeAccepted,
    SignalReceived,
    Started,
    Tick,
)
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobPolicy, Status, Timeouts
from tfdist_cli.protocol.profile_order import ProfileOrder
from tfdist_cli.spec.task_id import TaskId

CHIEF, PS, WORKER, EVALUATOR = (TaskId.parse(role) for role in ("chief", "ps", "worker", "evaluator"))
W1 = TaskId("worker", 1)


class Played:
    """Events through the supervisor to everything that keeps them."""

    def __init__(self, folder, *tasks, reports=False):
        self.snapshot = RunSnapshot()
        self.event_log = EventLog(folder / "events.jsonl", 1, lambda: datetime(2026, 3, 14, tzinfo=timezone.utc))
        self.logs = TaskLogs(lambda number: folder / f"attempt_{number}")
        rules = JobPolicy("parameter_server", reports, Timeouts(start=100, evaluator=50, shutdown=30))
        self.state, _ = begin(rules, tasks, 0.0)
        self.path = folder / "events.jsonl"

    def at(self, now, *events):
        for event in events:
            self.state, _ = step(self.state, event, now)
            for watcher in (self.snapshot, self.event_log):
                watcher.on_event(event, self.state, now)
        return self

    @property
    def report(self):
        return make_report(self.state, self.snapshot, self.logs, 99.0)

    @property
    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def played(tmp_path):
    return lambda *tasks, **options: Played(tmp_path, *tasks, **options)


def record(task, kind, /, **fields):
    return RecordReceived(task, {"kind": kind, **fields})


def test_the_first_failure_is_the_headline_and_the_rest_are_consequences(played):
    job = played(CHIEF, WORKER, PS)
    job.at(7.25, Output(PS, "stderr", tuple(f"line {number}" for number in range(30)), "unfini"), Exited(PS, -9))
    lost = record(CHIEF, "error", type="UnavailableError", message="lost ps:0", hint=None, traceback="")
    job.at(8, lost, Exited(CHIEF, 1), Exited(WORKER, -15))
    report = job.report
    assert report.exit_code == 137
    assert report.headline.startswith("ps:0 failed after 7.2 s, ")
    assert "SIGKILL" in report.headline
    assert (report.code, report.as_json()["code"]) == ("task-killed", "task-killed")
    assert report.failures[0].last_lines == (*(f"line {number}" for number in range(20, 30)), "unfini")
    (consequence,) = report.failures[1:]
    assert (consequence.task, consequence.seconds, consequence.code) == (CHIEF, 8.0, "task-failed")
    assert consequence.summary.endswith("UnavailableError: lost ps:0")
    assert [(end.task, end.status, end.code) for end in report.tasks] == [
        (CHIEF, Status.FAILED, 1), (WORKER, Status.STOPPED, -15), (PS, Status.FAILED, -9)
    ]  # fmt: skip


def test_a_loss_that_another_task_noticed_first_is_the_headline_all_the_same(played):
    """The launcher was busy, or what the ps had started took its time."""
    job = played(CHIEF, WORKER, PS)
    lost = "worker:0: failed to connect to all addresses; /job:ps/replica:0/task:0 is gone"
    job.at(8, record(CHIEF, "error", type="UnavailableError", message=lost)).at(8.1, Exited(CHIEF, 1))
    job.at(8.3, Exited(PS, -9), Exited(WORKER, -15))
    assert job.report.headline.startswith("ps:0 failed")
    assert "8.3 s, killed by SIGKILL" in job.report.headline
    assert job.report.exit_code == 137
    assert [failure.task for failure in job.report.failures] == [PS, CHIEF]
    (consequence,) = job.report.as_json()["consequences"]
    assert consequence.startswith("chief:0 failed")
    assert consequence.endswith(f"exit code 1: UnavailableError: {lost}")


def test_a_training_that_went_well(played):
    job = played(CHIEF, PS, EVALUATOR)
    job.at(1, record(CHIEF, "checkpoint", step=10, path="/c/10"), record(CHIEF, "checkpoint", step=20, path="/c/20"))
    job.at(2, record(CHIEF, "result", step=20, metrics={"loss": 0.5, "odd": "x"}, seconds=1.5, examples=640))
    job.at(2, record(CHIEF, "exported", paths=["/x/saved_model"]), Exited(CHIEF, 0))
    job.at(3, record(EVALUATOR, "evaluation", step=20, final=True, metrics={"loss": 0.6}))
    job.at(3, Exited(EVALUATOR, 0), Exited(PS, -15))
    written = job.report.as_json()
    assert json.loads(json.dumps(written)) == written
    assert written["exit_code"] == 0
    assert written["headline"] is None
    assert written["metrics"] == {"loss": 0.5}
    assert written["evaluation"] == {"step": 20, "final": True, "metrics": {"loss": 0.6}}
    assert written["checkpoints"] == [{"path": "/c/10", "step": 10}, {"path": "/c/20", "step": 20}]
    assert written["exports"] == ["/x/saved_model"]
    assert written["tasks"][0] == {"task": "chief:0", "status": "done", "code": 0, "seconds": 2, "restarts": 0}


def test_tasks_that_did_not_come_up_are_named_with_what_they_last_written(played):
    job = played(CHIEF, WORKER, PS, reports=True)
    job.at(1, record(CHIEF, "state", state="waiting"), record(PS, "state", state="serving"))
    job.at(2, Output(WORKER, "stderr", ("downloading", "")))
    job.at(100, Tick())
    job.at(101, *(Exited(task, -15) for task in (CHIEF, WORKER, PS)))
    assert job.report.exit_code == 124
    assert job.report.code == "start-timeout"
    assert job.report.headline.endswith("100 s: worker:0")
    assert [failure.last_lines for failure in job.report.failures] == [("downloading",)]


def test_the_code_of_a_tasks_error_is_that_of_the_headline(played):
    fields = {"type": "TrainingError", "message": "3 examples, batches of 4", "code": "no-full-batch", "hint": "use 3"}
    job = played(CHIEF, PS).at(1, record(CHIEF, "error", **fields)).at(2, Exited(CHIEF, 1), Exited(PS, -15))
    assert job.report.code == job.report.as_json()["code"] == "no-full-batch"
    assert [(failure.code, failure.hint) for failure in job.report.failures] == [("no-full-batch", "use 3")]


def test_an_interrupted_job(played):
    job = played(CHIEF, PS).at(1, SignalReceived(signal.SIGINT), Exited(CHIEF, 0), Exited(PS, -15))
    assert job.report.headline == "ended by SIGINT"
    assert job.report.as_json()["signal"] == "SIGINT"
    assert job.report.failures == ()


@pytest.mark.parametrize(
    ("records", "last"),
    [([("progress", 5)], 5), ([("progress", 5), ("checkpoint", 10)], 10), ([("checkpoint", 5), ("progress", 8)], 8)],
)
def test_how_far_a_training_came_that_was_not_done(played, records, last):
    job = played(CHIEF).at(1, *(record(CHIEF, kind, step=at, path=f"/c/{at}") for kind, at in records))
    assert job.at(2, Exited(CHIEF, 1)).report.as_json()["step"] == last


def test_warnings(played):
    job = played(CHIEF, PS, EVALUATOR).at(1, Exited(CHIEF, 0)).at(51, Tick()).at(81, Tick()).at(91, Tick())
    job.logs.write(PS, "stdout", b"no folder was made for it")
    unscored, left, log = job.report.warnings
    assert "50 s" in unscored
    assert left.endswith("ps:0, evaluator:0")
    assert "stdout.log" in log
    assert job.report.exit_code == 0


def test_checkpoints_that_could_not_be_written_or_were_damaged(played):
    job = played(CHIEF, EVALUATOR)
    damage = {"step": 40, "reason": "variables.index has 3 bytes instead of 30"}
    for task in (CHIEF, EVALUATOR):
        job.at(1, record(task, "checkpoint_damaged", **damage))
    job.at(2, record(CHIEF, "checkpoint_failed", step=50, reason=os.strerror(errno.ENOSPC)))
    damaged, failed, *_ = job.report.warnings
    assert "step 40" in damaged
    assert damaged.endswith(damage["reason"])
    assert failed.endswith(f"step 50: {os.strerror(errno.ENOSPC)}")
    job.at(3, record(CHIEF, "checkpoint_failed", step=60, reason=os.strerror(errno.EIO)))
    assert job.report.warnings[1].startswith("2 checkpoints")
    assert job.report.warnings[1].endswith(f"step 60: {os.strerror(errno.EIO)}")


def test_metrics_that_could_not_be_written(played):
    job = played(CHIEF, EVALUATOR)
    reason = "/runs/metrics.jsonl is not complete: No space left on device"
    for _ in range(2):
        job.at(1, record(CHIEF, "metrics_failed", reason=reason))
    assert job.report.warnings[0] == reason
    assert "metrics" not in job.report.warnings[1]


@pytest.mark.parametrize(
    ("exits", "words"),
    [
        ([Exited(PS, 0)], ["exit code 0", "before the training"]),
        ([Exited(PS, -9, oom_killed=True)], ["SIGKILL", ", by the kernel"]),
        ([Exited(PS, -9, oom_killed=False)], ["SIGKILL", "not by the kernel"]),
        ([Exited(PS, 137, oom_killed=True)], ["exit code 137", "SIGKILL", ", by the kernel"]),
        ([Exited(PS, 137)], ["exit code 137", "SIGKILL", "perhaps"]),
        ([Exited(PS, -64)], ["SIGRTMAX"]),
        ([Exited(PS, 255, cause="the connection to h2 was lost")], ["the connection to h2 was lost"]),
        ([Exited(CHIEF, 0), Exited(PS, 255, cause="h2 could not be reached")], ["h2 could not be reached"]),
        ([Exited(PS, -63)], ["signal 63"]),
        ([Exited(CHIEF, 0), Exited(PS, -15)], ["done"]),
        ([Exited(CHIEF, 0), Exited(PS, 143)], ["done"]),
        ([Exited(CHIEF, 1), Exited(PS, 143)], ["by the launcher"]),
        ([Exited(CHIEF, 0), Exited(PS, 1)], ["by the launcher", "exit code 1"]),
        ([Exited(CHIEF, 0), Exited(PS, -11)], ["by the launcher", "SIGSEGV"]),
        ([Exited(CHIEF, 0)], ["not exited"]),
        ([], ["running"]),
    ],
)
def test_how_an_exit_is_described(played, exits, words):
    text = describe_exit(played(CHIEF, PS).at(1, *exits).state.tasks[PS])
    assert all(word in text for word in words)


def test_an_error_of_a_task_that_the_launcher_then_ended(played):
    job = played(CHIEF, PS).at(1, record(PS, "error", type="LoginError", message="no")).at(2, Exited(CHIEF, 3))
    report = job.at(3, Exited(PS, -15)).report
    assert report.headline.startswith("ps:0 failed after 1.0 s, ")
    assert report.headline.endswith("LoginError: no")
    assert report.exit_code == 3


@pytest.mark.parametrize(
    ("error", "lines", "oom_killed"),
    [
        ({"type": "MemoryError"}, (), True),
        ({"type": "ResourceExhaustedError", "message": "OOM when allocating tensor with shape[9]"}, (), True),
        ({"type": "ResourceExhaustedError", "message": "a.index; No space left on device"}, (), False),
        ({"type": "ValueError", "message": "no"}, ("MemoryError",), False),
        (None, ("terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"), True),
        (None, ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 TiB",), True),
        (None, ("MemoryError",), True),
        (None, ("no MemoryError here",), False),
    ],
)
def test_lack_of_memory_has_its_hint(played, error, lines, oom_killed):
    job = played(CHIEF).at(1, *([record(CHIEF, "error", **error)] if error else []), Output(CHIEF, "stderr", lines))
    (failure,) = job.at(2, Exited(CHIEF, 1)).report.failures
    assert (failure.code == "out-of-memory", bool(failure.hint)) == (oom_killed, oom_killed)
    job = played(CHIEF).at(1, Exited(CHIEF, -9, oom_killed=True))
    assert job.report.failures[0].code == job.report.code == "out-of-memory"


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (None, "ModuleNotFoundError: No module named 'tfdist'", "wrong-import"),
        (None, "ModuleNotFoundError: No module named 'tfdist_cli'", "task-failed"),
        ({"type": "ModuleNotFoundError", "message": "No module named 'tfdist'"}, "", "wrong-import"),
    ],
)
def test_the_name_of_the_package_is_the_hint_at_the_commands_name(played, error, line, code):
    job = played(CHIEF).at(1, *([record(CHIEF, "error", **error)] if error else []), Output(CHIEF, "stderr", (line,)))
    (failure,) = job.at(2, Exited(CHIEF, 1)).report.failures
    assert (failure.code, bool(failure.hint)) == (code, code == "wrong-import")


def test_the_log_that_reports_most(tmp_path):
    logs = TaskLogs(lambda _: tmp_path)
    folder = logs.begin(PS, 1)
    assert logs.of(PS) == folder
    logs.write(PS, "stdout", b"x")
    assert logs.of(PS) == folder / "stdout.log"
    logs.write(PS, "stderr", b"x")
    assert logs.of(PS) == folder / "stderr.log"
    logs.close()


def test_the_last_lines_are_those_that_say_something():
    snapshot = RunSnapshot()
    state, _ = begin(JobPolicy("single"), (CHIEF,), 0.0)
    snapshot.on_event(Output(CHIEF, "stdout", ("kept", " ", *("" for _ in range(5)))), state, 0.0)
    snapshot.on_event(Output(CHIEF, "stderr", ("also",)), state, 0.0)
    assert list(snapshot.of(CHIEF).lines) == ["kept", "also"]
    snapshot.on_event(Output(CHIEF, "stdout", tuple(str(number) for number in range(1000))), state, 0.0)
    assert len(snapshot.of(CHIEF).lines) == KEPT_LINES
    assert snapshot.of(CHIEF).last == "999"


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "progress"},
        {"kind": "progress", "step": "many"},
        {"kind": "state", "state": 5},
        {"kind": "checkpoint"},
        {"kind": "exported", "paths": 3},
        {"kind": "result", "metrics": [1]},
        {"kind": "error", "message": {"a": 1}},
    ],
)
def test_odd_records_of_a_users_program_break_nothing(played, odd):
    job = played(CHIEF).at(1, RecordReceived(CHIEF, odd), Exited(CHIEF, 1))
    assert json.dumps(job.report.as_json())
    assert job.snapshot.progress is None


def test_progress_is_read_with_what_is_there():
    full = {"step": 5, "total": 10, "epoch": 1, "epochs": 2, "steps_per_second": 2.5, "metrics": {"loss": 1}}
    assert Progress.read(full | {"workers": {"worker:0": 2.5}}) == Progress(
        5, 10, 1, 2, 2.5, {"loss": 1}, {"worker:0": 2.5}
    )
    assert Progress.read({"step": 5, "total": None}) == Progress(5, None, None, None, 0.0, {}, {})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, pytest.param(10**400, id="huge"), True, "5", None])
def test_what_cannot_be_counted_with_is_no_progress(value):
    assert Progress.read({"step": value}) is None
    read = Progress.read({"step": 5, "total": value, "epoch": value, "epochs": value, "steps_per_second": value})
    assert read == Progress(5, None, None, None, 0.0, {}, {})


def test_a_metric_that_is_not_finite_is_shown_and_null_in_json(played):
    job = played(CHIEF).at(1, record(CHIEF, "progress", step=5, metrics={"loss": math.nan, "big": 10**400}))
    assert metrics_text(job.snapshot.progress.metrics) == "loss nan"
    job.at(2, record(CHIEF, "result", step=5, metrics={"loss": math.nan}), record(CHIEF, "odd", values=[math.inf, 1]))
    loaded = json.loads(to_json(job.report.as_json()), parse_constant=pytest.fail)
    assert loaded["metrics"] == {"loss": None}
    (odd,) = [line for line in job.lines if line["event"] == "odd"]
    assert odd["values"] == [None, 1]


@pytest.mark.parametrize("kind", ["started", "exited", "phase", "launch", "scale", "scaled", "loss", "record"])
def test_what_a_program_reports_does_not_pass_for_what_the_launcher_does(kind, played):
    job = played(CHIEF).at(1, record(CHIEF, kind, pid="abc", phase="ended", task="worker:0", request="1"))
    (line,) = job.lines
    assert (line["event"], line["task"]) == ("record", "chief:0")
    assert line["record"] == {"kind": kind, "pid": "abc", "phase": "ended", "task": "worker:0", "request": "1"}


def test_all_that_the_launcher_tells_of_is_kept_apart():
    """By the events that the event_log writes, as its code has them."""
    written = re.findall(r'"event": "(\w+)"', inspect.getsource(event_log))
    assert sorted(event_log._RESERVED) == sorted(set(written))


def test_the_event_log_has_each_transition_and_its_cause(played):
    job = played(CHIEF, PS)
    job.at(0.5, Started(CHIEF, 11), Output(CHIEF, "stdout", ("no line of its own",)))
    job.at(1, record(CHIEF, "state", state="training"), record(CHIEF, "progress", step=1))
    job.at(2, record(CHIEF, "odd", event="mine", time="never", task="me"))
    job.at(3, SignalReceived(signal.SIGTERM), Tick(), Exited(CHIEF, 0), Exited(PS, -15))
    when = {"time": "2026-03-14T00:00:00.000+00:00", "attempt": 1}
    stopped = describe_exit(job.state.tasks[PS])
    assert job.lines == [
        {**when, "seconds": 0.5, "event": "started", "task": "chief:0", "pid": 11},
        {**when, "seconds": 1, "state": "training", "event": "state", "task": "chief:0"},
        {**when, "seconds": 2, "event": "odd", "task": "chief:0"},
        {**when, "seconds": 3, "event": "signal", "signal": "SIGTERM"},
        {**when, "seconds": 3, "event": "phase", "from": "running", "phase": "saving", "cause": "SIGTERM"},
        {**when, "seconds": 3, "event": "exited", "task": "chief:0", "code": 0, "status": "stopped",
         "cause": stopped},
        {**when, "seconds": 3, "event": "phase", "from": "saving", "phase": "stopping",
         "cause": f"chief:0: {stopped}"},
        {**when, "seconds": 3, "event": "exited", "task": "ps:0", "code": -15, "status": "stopped",
         "cause": stopped},
        {**when, "seconds": 3, "event": "phase", "from": "stopping", "phase": "ended",
         "cause": f"ps:0: {stopped}"},
    ]  # fmt: skip


def test_a_event_log_that_cannot_be_written_ends_nothing(tmp_path):
    event_log = EventLog(tmp_path / "nowhere" / "events.jsonl", 1)
    state, _ = begin(JobPolicy("single"), (CHIEF,), 0.0)
    event_log.on_event(Started(CHIEF, 1), state, 0.0)
    assert event_log.problem.startswith(f"{tmp_path / 'nowhere' / 'events.jsonl'} ")


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path):
    event_log = EventLog(tmp_path / "events.jsonl", 1)
    state, _ = begin(JobPolicy("single"), (CHIEF,), 0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        event_log.on_event(Started(CHIEF, 1), state, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    event_log.on_event(Started(CHIEF, 2), state, 1.0)
    cut, line = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(cut) == 20
    assert json.loads(line)["pid"] == 2
    assert event_log.problem.endswith("File too large")


def test_a_line_that_an_earlier_launcher_has_not_ended_takes_no_other_with_it(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "launch"}\n{"event": "sta')
    for _ in range(2):
        EventLog(path, 2).begin({})
    first, cut, *more = path.read_text().splitlines()
    assert (first, cut) == ('{"event": "launch"}', '{"event": "sta')
    assert [json.loads(line)["event"] for line in more] == ["launch", "launch"]


def test_other_numbers_of_tasks(played):
    job = played(CHIEF, WORKER, PS)
    more = ResizeAccepted("a", {"worker": (1, 2)}, (CHIEF, WORKER, TaskId("worker", 1), PS))
    job.at(3, record(CHIEF, "progress", step=7), RequestAnswered("x", "refused", {}, "no", "try"), more)
    job.at(4, Exited(CHIEF, 143), Exited(WORKER, -15), Exited(PS, -15), Tick())
    assert job.state.attempt == 2
    job.at(6, record(CHIEF, "resumed", step=9, path="/c/9"), record(CHIEF, "progress", step=10))
    job.at(7, Exited(CHIEF, 0), Exited(WORKER, -15), Exited(TaskId("worker", 1), -15), Exited(PS, -15))
    loaded = [line for line in job.lines if line["event"] in ("scale", "scaled")]
    assert [(line["seconds"], line["attempt"], line["event"], line.get("answer")) for line in loaded] == [
        (3, 1, "scale", "refused"), (3, 1, "scale", "accepted"), (6, 2, "scaled", None)
    ]  # fmt: skip
    assert (loaded[0]["reason"], loaded[0]["hint"]) == ("no", "try")
    assert {key: loaded[2][key] for key in ("request", "replicas", "resumed", "step", "took")} == {
        "request": "a", "replicas": {"worker": [1, 2]}, "resumed": 9, "step": 10, "took": 3.0
    }  # fmt: skip
    first = next(line for line in job.lines if line["event"] == "phase")
    assert first["phase"] == "saving"
    assert (job.report.exit_code, job.report.lost_tasks) == (0, ())
    assert job.report.as_json()["resizes"] == [
        {"replicas": {"worker": [1, 2]}, "attempt": 1, "seconds": 3, "step": 7, "resumed": 9, "trained": 6, "took": 3}
        | {"live": False, "joined": [], "left": [], "failed": [], "lost": [], "reverted": None}
    ]


def test_profiles_and_what_a_program_may_not_write(played):
    job = played(CHIEF, PS)
    order = ProfileOrder("a", 2.0, "profile/x")
    job.at(3, ProfileAccepted(PS, order), ProfileRefused("b", PS, "why", "try", "profile-in-progress"))
    job.at(5, record(PS, "profiled", request="a", recorded=2.0), record(PS, "profile", request="a", answer="refused"))
    lines = [line for line in job.lines if line["event"] in ("profile", "profiled", "record")]
    assert [(line["event"], line["task"], line.get("answer"), line.get("request")) for line in lines] == [
        ("profile", "ps:0", "accepted", "a"),
        ("profile", "ps:0", "refused", "b"),
        ("profiled", "ps:0", None, "a"),
        ("record", "ps:0", None, None),
    ]
    assert (lines[0]["path"], lines[0]["duration"], lines[2]["recorded"]) == ("profile/x", 2.0, 2.0)
    assert (lines[1]["reason"], lines[1]["hint"], lines[1]["code"]) == ("why", "try", "profile-in-progress")


def test_tasks_that_cannot_be_ended_for_others(played):
    job = played(CHIEF, PS).at(3, ResizeAccepted("a", {"ps": (1, 2)}, (CHIEF, PS, TaskId("ps", 1))))
    job.at(4, Exited(CHIEF, 143)).at(34, Tick()).at(50, Tick())
    assert job.report.exit_code == 124
    assert job.report.code == "resize-failed"


@pytest.mark.parametrize(
    ("private", "message", "hinted"),
    [
        (True, "[Errno -3] Temporary failure in name resolution", True),
        (True, "[Errno 101] Network is unreachable", True),
        (False, "[Errno -3] Temporary failure in name resolution", False),
        (True, "no such file", False),
    ],
)
def test_a_task_that_misses_the_machines_network_is_reported_how_to_have_it(played, private, message, hinted):
    job = played(CHIEF).at(1, NetworkReady(private, "…"))
    job.at(2, record(CHIEF, "error", type="OSError", message=message, hint=None, traceback=""), Exited(CHIEF, 1))
    assert ("network: host" in job.report.failures[0].hint) == hinted
    assert [line["private"] for line in job.lines if line["event"] == "network"] == [private]


def test_each_workers_figures_come_in_several_records(played):
    job = played(CHIEF, WORKER, W1, reports=True)
    job.at(1.0, record(CHIEF, "workers", workers={"worker:0": [300, 2400, 20.5], "broken": [1], "worse": 3}))
    job.at(1.1, record(CHIEF, "workers", workers={"worker:1": [100, 800, None]}), record(CHIEF, "workers", workers=[]))
    report = job.report
    assert report.as_json()["workers"] == {
        "worker:0": {"steps": 300, "examples": 2400, "share": 0.75, "steps_per_second": 20.5},
        "worker:1": {"steps": 100, "examples": 800, "share": 0.25, "steps_per_second": None},
    }
