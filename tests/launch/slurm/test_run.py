"""Following a job, with a stand-in for Slurm, and files in place of tasks."""

import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.slurm import commands, jobs, launcher, run
from tfdist_cli.launch.slurm.commands import Job
from tfdist_cli.launch.supervisor.events import (
    EventQueue,
    Exited,
    Output,
    Profile,
    Queued,
    RecordReceived,
    Start,
    Started,
    Stop,
    StopSignal,
    Tick,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.protocol.profile_order import ProfileOrder, take_order
from tfdist_cli.protocol.records import RECORD_SEPARATOR, TASK_DIR
from tfdist_cli.spec.task_id import TaskId

RUNNING, PENDING = Job("RUNNING"), Job("PENDING", 0, "Resources")
COMPLETING, CANCELLED = Job("COMPLETING"), Job("CANCELLED")


class Slurm:
    """Records the calls of its commands; the test sets the status of its first job, and of others."""

    def __init__(self):
        self.job, self.others, self.calls, self.queries = RUNNING, {}, [], 0

    async def submit(self, script, log, arguments, env):
        own = () if script.name == "slurm.sh" else (script.name,)
        self.calls.append(("submit", *arguments, *own))
        if not own:
            self.job = RUNNING
        return str(11 + len([call for call in self.calls if call[0] == "submit"]))

    async def query(self, job):
        self.queries += 1
        return self.others.get(job, self.job)

    async def queried(self, times, seconds=5.0):
        """Waits until the job has been queried this many times more; returns whether it has within the seconds."""
        enough, deadline = self.queries + times, time.monotonic() + seconds
        while self.queries < enough:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def terminate_tasks(self, job):
        self.calls.append(("term", job))

    async def kill_tasks(self, job):
        self.calls.append(("kill", job))

    async def cancel_and_wait(self, job, timeout):
        await self.cancel(job)

    async def cancel(self, job):
        self.calls.append(("cancel", job))
        if job in self.others:
            self.others[job] = CANCELLED
        else:
            self.job = CANCELLED


@pytest.fixture
def slurm(monkeypatch):
    fake = Slurm()
    for name in ("submit", "query", "terminate_tasks", "kill_tasks", "cancel", "cancel_and_wait"):
        monkeypatch.setattr(commands, name, getattr(fake, name))
    monkeypatch.setattr(jobs, "await_answer", fake.query)
    monkeypatch.setattr(jobs, "shutil", SimpleNamespace(which=lambda program: f"/usr/bin/{program}"))
    for name, seconds in {"POLL_SECONDS": 0.01, "QUERY_SECONDS": 0.01, "_REQUEUE_SECONDS": 0.1}.items():
        monkeypatch.setattr(run, name, seconds)
        monkeypatch.setattr(commands, name, seconds, raising=False)
    return fake


@pytest.fixture
def followed(slurm, make_cluster, plan_for, tmp_path):
    """Runs a scenario, an async function, with a run of two workers, or of another cluster."""

    def play(scenario, **cluster):
        plan = plan_for(make_cluster(**(cluster or {"worker": 2})), "true")
        logs = TaskLogs(lambda number: tmp_path / f"attempt_{number}")
        events = EventQueue()

        async def next_of(kind):
            while True:
                event = await events.get(5)
                assert not isinstance(event, Tick), f"no {kind.__name__} came"
                if isinstance(event, kind):
                    return event

        async def whole():
            context = LaunchContext(events, logs, lambda start: {TASK_DIR: str(logs.begin(start.task, start.attempt))})
            followed = run.SlurmRun(plan, context)

            def start(attempt=1):
                for planned in plan.tasks:
                    followed.act(Start(planned.task, attempt))

            def end(how):
                for planned in plan.tasks:
                    followed.act(Stop(planned.task, how))

            tasks = [planned.task for planned in plan.tasks]
            await scenario(SimpleNamespace(start=start, end=end, next=next_of, tasks=tasks, run=followed))
            await followed.close()

        asyncio.run(whole())
        logs.close()

    return play


def writes(tmp_path, attempt, task, *records, text=""):
    folder = tmp_path / f"attempt_{attempt}" / task.slug
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stderr.raw").open("a") as file:
        file.writelines(f"{RECORD_SEPARATOR}{json.dumps(record)}\n" for record in records)
        file.write(text)


def exited(code):
    return {"kind": "exited", "code": code}


def assert_cancelled_outside(event, task, code=-15):
    assert (event.task, event.code, event.cancelled) == (task, code, True)
    assert event.cause.startswith("job 12 was cancelled")


def test_a_job_from_its_submission_to_its_end(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        assert [(await on.next(Queued)).task for _ in on.tasks] == on.tasks
        assert (await on.next(Output)).lines[0].endswith(" job 12")
        first, second = on.tasks
        writes(tmp_path, 1, first, {"kind": "started"}, {"kind": "started", "pid": 7, "host": "n1"}, text="hello\nhalf")
        assert await on.next(Started) == Started(first, 7)
        assert (await on.next(Output)).lines == ("hello",)
        assert (await on.next(RecordReceived)).record == {"kind": "started"}, "a record of the program itself"
        writes(tmp_path, 1, first, text=" a line\n")
        assert (await on.next(Output)).lines == ("half a line",)
        writes(tmp_path, 1, second, exited(3))
        assert await on.next(Exited) == Exited(second, 3)
        writes(tmp_path, 1, first, exited(-9), text="the end")
        assert await on.next(Exited) == Exited(first, -9)
        slurm.job = Job("FAILED")

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]
    log = (tmp_path / "attempt_1" / "worker-0" / "stderr.log").read_text()
    assert log.splitlines()[1:] == ["hello", "half a line", "the end"]
    assert not list(tmp_path.rglob("*.raw"))
    assert (tmp_path / "slurm_job").read_text() == "12\n"


def test_a_task_gets_the_order_to_profile_itself(followed, tmp_path):
    order = ProfileOrder("a", 2.0, "x")

    async def scenario(on):
        on.start()
        await on.next(Output)
        on.run.act(Profile(on.tasks[1], order))
        assert take_order(tmp_path / "attempt_1" / on.tasks[1].slug) == order
        assert take_order(tmp_path / "attempt_1" / on.tasks[0].slug) is None
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(0))
            await on.next(Exited)

    followed(scenario)


def test_a_file_is_reopened_because_nfs_shows_additions_only_then(followed, slurm, tmp_path):
    """Here another file takes its place."""

    async def scenario(on):
        on.start()
        await on.next(Output)
        path = tmp_path / "attempt_1" / on.tasks[0].slug / "stderr.raw"
        writes(tmp_path, 1, on.tasks[0], text="one\n")
        assert (await on.next(Output)).lines == ("one",)
        (tmp_path / "new").write_text("one\ntwo\n")
        path.unlink()
        await slurm.queried(3)
        (tmp_path / "new").rename(path)
        assert (await on.next(Output)).lines == ("two",)

    followed(scenario)


def test_the_final_output_of_a_completed_job_may_appear_late(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = Job("COMPLETED")
        assert await slurm.queried(1)
        assert not await slurm.queried(1, seconds=0.2)
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(0), text="done")
            assert await on.next(Exited) == Exited(task, 0)

    followed(scenario)
    log = (tmp_path / "attempt_1" / "worker-0" / "stderr.log").read_text()
    assert log.splitlines()[1:] == ["done"]


@pytest.mark.parametrize("stopped", [False, True])
def test_final_output_that_never_appears_has_a_timeout(stopped, followed, slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "NFS_SECONDS", 60 if stopped else 0.1)

    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = Job("COMPLETED")
        await slurm.queried(1)
        if stopped:
            on.end(StopSignal.TERMINATE)
        for task in on.tasks:
            event = await on.next(Exited)
            assert (event.task, event.code) == (task, -15)
            assert event.cause.rpartition(" ")[2] == ("" if stopped else "completed")

    followed(scenario)


def test_a_job_that_slurm_ends_is_reported_with_slurms_messages(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        writes(tmp_path, 1, on.tasks[0], {"kind": "started", "pid": 7})
        await on.next(Started)
        message = "slurmstepd: error: *** JOB 12 CANCELLED DUE TO TIME LIMIT ***"
        (tmp_path / "slurm.log").write_text(f"{message}\n")
        slurm.job = Job("TIMEOUT", 0, "TimeLimit")
        lines = [(await on.next(Output)).lines[0] for _ in range(2)]
        assert lines[0].endswith("timeout (TimeLimit)")
        assert lines[1] == f"slurm: {message}"
        ends = [await on.next(Exited) for _ in on.tasks]
        assert {(end.code, end.cause.rpartition(" ")[2]) for end in ends} == {(-15, "timeout")}

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_requeued_job_is_the_next_attempt(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        writes(tmp_path, 1, on.tasks[0], {"kind": "started", "pid": 7})
        await on.next(Started)
        slurm.job = Job("PENDING", 1, "BeginTime")
        for _ in on.tasks:
            assert "requeued" in (await on.next(Exited)).cause
        on.start(2)
        lines = [(await on.next(Output)).lines[0] for _ in range(2)]
        assert lines[0].endswith("requeued")
        assert lines[1].endswith("pending: BeginTime")
        slurm.job = Job("RUNNING", 1)
        for task in on.tasks:
            writes(tmp_path, 2, task, {"kind": "started", "pid": 8}, exited(0))
            assert await on.next(Started) == Started(task, 8)
            assert await on.next(Exited) == Exited(task, 0)
        slurm.job = Job("COMPLETED", 1)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


@pytest.mark.parametrize("state", ["FAILED", "COMPLETING", "GONE"])
def test_a_job_that_slurm_does_not_requeue_is_submitted_again(state, followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(1))
            await on.next(Exited)
        on.start(2)
        await asyncio.sleep(0.05)
        slurm.job = Job(state)
        assert (await on.next(Output)).lines[0].endswith(" job 13")
        for task in on.tasks:
            writes(tmp_path, 2, task, exited(0))
            assert await on.next(Exited) == Exited(task, 0)
        slurm.job = Job("COMPLETED")

    followed(scenario)
    assert [call for call in slurm.calls if call[0] == "submit"] == [("submit", "1", ""), ("submit", "2", "")]


def test_a_job_cancelled_outside_is_over_whatever_its_tasks_return(followed, slurm, tmp_path):
    """The tasks may save as long as Slurm lets them."""

    async def scenario(on):
        on.start()
        await on.next(Output)
        first, second = on.tasks
        slurm.job = COMPLETING
        writes(tmp_path, 1, first, exited(143))
        await slurm.queried(2)
        writes(tmp_path, 1, second, text="saved\n")
        assert (await on.next(Output)).lines == ("saved",)
        slurm.job = CANCELLED
        assert_cancelled_outside(await on.next(Exited), first, 143)
        assert_cancelled_outside(await on.next(Exited), second)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_job_cancelled_outside_in_the_queue_is_over(followed, slurm):
    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = CANCELLED
        for task in on.tasks:
            assert_cancelled_outside(await on.next(Exited), task)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_job_cancelled_outside_while_its_tasks_exit_is_not_submitted_again(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(3))
            assert await on.next(Exited) == Exited(task, 3)
        slurm.job = COMPLETING
        on.start(2)
        await slurm.queried(2)
        slurm.job = CANCELLED
        for task in on.tasks:
            assert_cancelled_outside(await on.next(Exited), task)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_the_failure_of_a_task_is_reported_although_its_job_ends_with_it(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        await on.next(Output)
        first, second = on.tasks
        slurm.job = COMPLETING
        writes(tmp_path, 1, first, exited(3))
        await slurm.queried(2)
        slurm.job = Job("FAILED")
        assert await on.next(Exited) == Exited(first, 3)
        event = await on.next(Exited)
        assert (event.task, event.code, event.cause.rpartition(" ")[2]) == (second, -15, "failed")

    followed(scenario)


def test_waiting_for_a_job_that_slurm_cannot_end_has_a_timeout(followed, slurm, monkeypatch):
    monkeypatch.setattr(run, "_ENDING_SECONDS", 0.1)

    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = COMPLETING
        assert (await on.next(Exited)).cause.rpartition(" ")[2] == "completing"
        slurm.job = Job("FAILED")

    followed(scenario)


def test_all_tasks_are_stopped_with_one_command(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        writes(tmp_path, 1, on.tasks[0], {"kind": "started", "pid": 7})
        await on.next(Started)
        on.end(StopSignal.TERMINATE)
        while ("term", "12") not in slurm.calls:
            await asyncio.sleep(0.01)
        on.end(StopSignal.KILL)
        while slurm.calls.count(("kill", "12")) < 3:  # repeated until the tasks have exited
            await asyncio.sleep(0.01)
        slurm.job = Job("FAILED")
        ends = [await on.next(Exited) for _ in on.tasks]
        assert {(end.code, end.cause) for end in ends} == {(-15, "")}

    followed(scenario)
    assert list(dict.fromkeys(slurm.calls)) == [("submit", "1", ""), ("term", "12"), ("kill", "12")]


def test_tasks_that_start_after_a_kill_are_not_killed(followed, slurm, tmp_path, monkeypatch):
    """Not even where Slurm is slow."""

    async def scenario(on):
        began, over = asyncio.Event(), asyncio.Event()

        async def slow(job):
            slurm.calls.append(("kill", job))
            began.set()
            await over.wait()

        monkeypatch.setattr(commands, "kill_tasks", slow)
        on.start()
        await on.next(Output)
        on.end(StopSignal.KILL)
        await began.wait()
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(-9))
        for _ in on.tasks:
            await on.next(Exited)
        slurm.job = Job("FAILED")
        on.start(2)
        assert (await on.next(Output)).lines[0].endswith(" job 13")
        over.set()
        await slurm.queried(5)

    followed(scenario)
    assert ("submit", "2", "") in slurm.calls
    assert ("kill", "13") not in slurm.calls


def test_a_pending_job_is_cancelled(followed, slurm):
    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = PENDING
        assert (await on.next(Output)).lines[0].endswith("pending: Resources")
        on.end(StopSignal.TERMINATE)
        assert {(await on.next(Exited)).code, (await on.next(Exited)).code} == {-15}

    followed(scenario)
    assert slurm.calls == [("submit", "1", ""), ("cancel", "12")]


def test_a_job_of_tasks_that_were_stopped_before_it_was_submitted_is_cancelled(followed, slurm):
    async def scenario(on):
        on.start()
        on.end(StopSignal.TERMINATE)
        assert {(await on.next(Exited)).code, (await on.next(Exited)).code} == {-15}

    followed(scenario)
    assert slurm.calls == [("submit", "1", ""), ("cancel", "12")]


def test_closing_a_run_cancels_its_job(followed, slurm):
    async def scenario(on):
        on.start()
        await on.next(Output)

    followed(scenario)
    assert slurm.calls == [("submit", "1", ""), ("cancel", "12")]


ELASTIC = {"strategy": "parameter_server", "chief": 1, "ps": 1, "worker": {"replicas": 2, "max": 4}}
W1, W2 = TaskId("worker", 1), TaskId("worker", 2)


def stop_of(tmp_path, task):
    path = tmp_path / "attempt_1" / task.slug / "stop"
    return path.read_text() if path.exists() else ""


async def until(condition):
    """Waits until a condition of files holds."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
def add_third(slurm, make_cluster, plan_for):
    """Starts a run, and adds one worker to it."""

    async def add(on, state=RUNNING):
        on.start()
        assert (await on.next(Output)).lines[0].endswith(" job 12")
        on.run.follow(plan_for(make_cluster(**ELASTIC | {"worker": {"replicas": 3, "max": 4}}), "true"))
        slurm.others["13"] = state
        on.run.act(Start(W2, 1))
        while (queued := await on.next(Queued)).task != W2:
            assert queued.task in on.tasks

    return add


def test_an_added_task_has_a_job_of_its_own_and_leaves_alone(followed, slurm, tmp_path, add_third):
    async def scenario(on):
        await add_third(on)
        assert (await on.next(Output)).lines[0].endswith(" job 13")
        assert (tmp_path / "slurm_job").read_text() == "12\n13\n"
        writes(tmp_path, 1, W2, {"kind": "started", "pid": 7}, text="hello\n")
        assert await on.next(Started) == Started(W2, 7)
        on.run.act(Stop(W2, StopSignal.TERMINATE))
        await until(lambda: stop_of(tmp_path, W2) == "SIGTERM")
        writes(tmp_path, 1, W2, {"kind": "state", "state": "left"}, exited(0))
        assert await on.next(Exited) == Exited(W2, 0)
        slurm.others["13"] = Job("COMPLETED")
        slurm.others["14"] = RUNNING
        on.run.act(Start(W2, 1))  # it comes back
        writes(tmp_path, 1, W2, {"kind": "started", "pid": 8}, exited(0))
        assert await on.next(Started) == Started(W2, 8)
        assert await on.next(Exited) == Exited(W2, 0)

    followed(scenario, **ELASTIC)
    assert slurm.calls == [
        ("submit", "1", ""),
        ("submit", "1", "", "slurm_worker-2.sh"),
        ("submit", "1", "", "slurm_worker-2.sh"),
        ("cancel", "12"),
    ]
    assert not list(tmp_path.rglob("*worker-2/*.raw"))


def test_a_task_of_the_first_job_leaves_alone_and_comes_back_in_a_job_of_its_own(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        await on.next(Output)
        on.run.act(Stop(W1, StopSignal.TERMINATE))
        await until(lambda: stop_of(tmp_path, W1) == "SIGTERM")
        on.run.act(Stop(W1, StopSignal.KILL))
        await until(lambda: stop_of(tmp_path, W1) == "SIGKILL")
        writes(tmp_path, 1, W1, {"kind": "started", "pid": 7}, exited(-9), text="first\n")
        assert await on.next(Exited) == Exited(W1, -9)
        slurm.others["13"] = RUNNING
        on.run.act(Start(W1, 1))
        await until(lambda: ("submit", "1", "", "slurm_worker-1.sh") in slurm.calls)
        assert stop_of(tmp_path, W1) == ""
        writes(tmp_path, 1, W1, {"kind": "started", "pid": 8}, exited(0), text="second\n")
        while (await on.next(Started)).pid != 8:
            pass
        assert await on.next(Exited) == Exited(W1, 0)

    followed(scenario, **ELASTIC)
    assert not any(call[0] in ("term", "kill") for call in slurm.calls)
    log = (tmp_path / "attempt_1" / "worker-1" / "stderr.log").read_text().splitlines()
    assert [line for line in log if line in ("first", "second")] == ["first", "second"]


@pytest.mark.parametrize("how", [StopSignal.TERMINATE, StopSignal.KILL])
def test_an_added_task_that_waits_in_the_queue_is_cancelled(how, followed, slurm, add_third):
    async def scenario(on):
        await add_third(on, PENDING)
        while not (await on.next(Output)).lines[0].endswith("pending: Resources"):
            pass
        on.run.act(Stop(W2, how))
        event = await on.next(Exited)
        assert (event.task, event.code, event.cause) == (W2, -15, "")

    followed(scenario, **ELASTIC)
    assert ("cancel", "13") in slurm.calls


def test_an_added_task_whose_job_slurm_ends_has_exited(followed, slurm, add_third):
    async def scenario(on):
        await add_third(on)
        slurm.others["13"] = Job("NODE_FAIL")
        event = await on.next(Exited)
        assert (event.task, event.code, event.cause.rpartition(" is ")[2]) == (W2, -15, "node fail")

    followed(scenario, **ELASTIC)


def test_an_added_task_whose_job_is_rejected_has_failed(followed, slurm, monkeypatch):
    async def scenario(on):
        on.start()
        await on.next(Output)

        async def rejected(*_):
            raise UsageError("sbatch rejects the job: too many", code="slurm-job-rejected")

        monkeypatch.setattr(commands, "submit", rejected)
        on.run.act(Start(W2, 1))
        event = await on.next(Exited)
        assert (event.task, event.code) == (W2, 126)

    followed(scenario, **ELASTIC)


def test_all_tasks_are_stopped_with_those_that_were_added(followed, slurm, tmp_path, add_third):
    async def scenario(on):
        await add_third(on)
        await until(lambda: (tmp_path / "slurm_job").read_text() == "12\n13\n")
        for task in (*on.tasks, W2):
            on.run.act(Stop(task, StopSignal.TERMINATE))
        await until(lambda: stop_of(tmp_path, W2) == "SIGTERM")
        await until(lambda: ("term", "12") in slurm.calls)
        assert stop_of(tmp_path, W1) == ""

    followed(scenario, **ELASTIC)
    assert slurm.calls[-2:] == [("cancel", "13"), ("cancel", "12")]


def test_a_requeued_job_of_other_tasks_is_replaced(followed, slurm, tmp_path, add_third):
    async def scenario(on):
        await add_third(on)
        await until(lambda: ("submit", "1", "", "slurm_worker-2.sh") in slurm.calls)
        writes(tmp_path, 1, W2, exited(0))
        slurm.job = Job("PENDING", 1, "BeginTime")
        for _ in (*on.tasks, W2):
            await on.next(Exited)
        for task in (*on.tasks, W2):
            on.run.act(Start(task, 2))
        await until(lambda: ("submit", "2", "") in slurm.calls)
        assert "worker: {replicas: 3, max: 4}" in (tmp_path / "slurm.sh").read_text()
        writes(tmp_path, 2, W2, {"kind": "started", "pid": 9})
        while (await on.next(Started)).pid != 9:
            pass

    followed(scenario, **ELASTIC)
    assert slurm.calls.index(("cancel", "12")) < slurm.calls.index(("submit", "2", ""))


def test_a_job_without_a_task_that_has_left_is_the_next_attempt(followed, slurm, tmp_path, make_cluster, plan_for):
    async def scenario(on):
        on.start()
        await on.next(Output)
        before = plan_for(make_cluster(**ELASTIC), "true")
        smaller = plan_for(make_cluster(**ELASTIC | {"worker": {"replicas": 1, "max": 4}}), "true")
        on.run.follow(replace(smaller, tasks=(*smaller.tasks, before[W1])))  # it has the tasks that leave
        on.run.act(Stop(W1, StopSignal.TERMINATE))
        await until(lambda: stop_of(tmp_path, W1) == "SIGTERM")
        writes(tmp_path, 1, W1, {"kind": "state", "state": "left"}, exited(0))
        assert await on.next(Exited) == Exited(W1, 0)
        slurm.job = Job("PENDING", 1, "BeginTime")
        left = [task for task in on.tasks if task != W1]
        for _ in left:
            await on.next(Exited)
        for task in left:
            on.run.act(Start(task, 2))
        await until(lambda: ("submit", "2", "") in slurm.calls)

    followed(scenario, **ELASTIC)


def test_a_run_with_an_added_task_whose_job_is_still_active_is_refused(slurm, tmp_path):
    (tmp_path / "slurm_job").write_text("12\n13\n")
    slurm.job, slurm.others = Job("COMPLETED"), {"13": PENDING}
    with raises(UsageError, "job-still-active") as caught:
        jobs.SlurmJobs().refuse_active(tmp_path)
    assert caught.value.message.startswith("job 13 ")
    assert jobs.SlurmJobs().is_active(tmp_path)


def test_a_run_whose_job_is_still_active_is_refused(slurm, tmp_path):
    (tmp_path / "slurm_job").write_text("12\n")
    with raises(UsageError, "job-still-active") as caught:
        jobs.SlurmJobs().refuse_active(tmp_path)
    assert caught.value.message.startswith("job 12 ")
    assert slurm.calls == []


def test_a_run_without_an_active_job_is_not_refused(slurm, tmp_path, monkeypatch):
    jobs.SlurmJobs().refuse_active(tmp_path)
    (tmp_path / "slurm_job").write_text("12\n")
    slurm.job = Job("COMPLETED")
    jobs.SlurmJobs().refuse_active(tmp_path)
    slurm.job = Job("RUNNING")
    monkeypatch.setattr(
        jobs, "shutil", SimpleNamespace(which=lambda _: None)
    )  # the directory was copied to another machine
    jobs.SlurmJobs().refuse_active(tmp_path)


def test_hosts_in_the_file_are_refused(make_cluster):
    with raises(UsageError, "hosts-not-supported"):
        launcher.SlurmLauncher().preview_addresses(make_cluster(worker=["a:1", "b:1"]))
