"""Following a job, with a stand-in for Slurm, and files in place of tasks."""

import asyncio
import json
import time
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
    Queued,
    RecordReceived,
    Start,
    Started,
    Stop,
    StopSignal,
    Tick,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.protocol.records import RECORD_SEPARATOR, TASK_DIR

RUNNING, PENDING = Job("RUNNING"), Job("PENDING", 0, "Resources")
COMPLETING, CANCELLED = Job("COMPLETING"), Job("CANCELLED")


class Slurm:
    """Records the calls of its commands; the test sets the status of its one job."""

    def __init__(self):
        self.job, self.calls, self.queries = RUNNING, [], 0

    async def submit(self, script, log, arguments, env):
        self.calls.append(("submit", *arguments))
        self.job = RUNNING
        return str(11 + len([call for call in self.calls if call[0] == "submit"]))

    async def query(self, job):
        self.queries += 1
        return self.job

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
        self.job = Job("CANCELLED")


@pytest.fixture
def slurm(monkeypatch):
    fake = Slurm()
    for name in ("submit", "query", "terminate_tasks", "kill_tasks", "cancel", "cancel_and_wait"):
        monkeypatch.setattr(commands, name, getattr(fake, name))
    monkeypatch.setattr(jobs, "await_answer", fake.query)
    monkeypatch.setattr(jobs, "shutil", SimpleNamespace(which=lambda program: f"/usr/bin/{program}"))
    for name, seconds in {"POLL_SECONDS": 0.01, "_QUERY_SECONDS": 0.01, "_REQUEUE_SECONDS": 0.1}.items():
        monkeypatch.setattr(run, name, seconds)
    return fake


@pytest.fixture
def followed(slurm, make_cluster, plan_for, tmp_path):
    """Runs a scenario, an async function, with a run of two workers."""

    def play(scenario):
        plan = plan_for(make_cluster(worker=2), "true")
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
    monkeypatch.setattr(run, "_NFS_SECONDS", 60 if stopped else 0.1)

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
