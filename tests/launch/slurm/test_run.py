"""A job that is followed: a Slurm of a few lines, and tasks that are files."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.slurm import commands, launcher, run
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
BY_OTHERS = "job 12 was cancelled, and not by this launcher"


class Slurm:
    """Notes what it is asked to do; the test says how its one job stands."""

    def __init__(self):
        self.job, self.calls, self.looks = RUNNING, [], 0

    async def submit(self, script, log, arguments, env):
        self.calls.append(("submit", *arguments))
        self.job = RUNNING
        return str(11 + len([call for call in self.calls if call[0] == "submit"]))

    async def query(self, job):
        self.looks += 1
        return self.job

    async def looked_at(self, times, seconds=5.0):
        """Waits until it has been asked so often again."""
        enough, deadline = self.looks + times, time.monotonic() + seconds
        while self.looks < enough:
            assert time.monotonic() < deadline, "it is not asked any more"
            await asyncio.sleep(0.01)

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
    monkeypatch.setattr(launcher, "await_answer", fake.query)
    monkeypatch.setattr(launcher, "shutil", SimpleNamespace(which=lambda program: f"/usr/bin/{program}"))
    for name, seconds in {"POLL_SECONDS": 0.01, "_ASK": 0.01, "_SETTLE": 0.1}.items():
        monkeypatch.setattr(run, name, seconds)
    return fake


@pytest.fixture
def followed(slurm, make_cluster, plan_for, tmp_path):
    """Plays a scenario to a run of two workers: an async function of what there is to see and to do."""

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


def test_a_job_from_its_submission_to_its_end(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        assert [(await on.next(Queued)).task for _ in on.tasks] == on.tasks
        assert (await on.next(Output)).lines == ("slurm: submitted as job 12",)
        first, second = on.tasks
        writes(tmp_path, 1, first, {"kind": "started"}, {"kind": "started", "pid": 7, "host": "n1"}, text="hello\nhalf")
        assert await on.next(Started) == Started(first, 7)
        assert (await on.next(Output)).lines == ("hello",)
        assert (await on.next(RecordReceived)).record == {"kind": "started"}, "a program's own records are none of ours"
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
    assert log == "slurm: submitted as job 12\nhello\nhalf a line\nthe end"
    assert not list(tmp_path.rglob("*.raw"))
    assert (tmp_path / "slurm_job").read_text() == "12\n"


def test_a_file_is_read_on_though_only_who_opens_it_anew_sees_what_was_added(followed, slurm, tmp_path):
    """As on NFS; here another file takes its place."""

    async def scenario(on):
        on.start()
        await on.next(Output)
        path = tmp_path / "attempt_1" / on.tasks[0].slug / "stderr.raw"
        writes(tmp_path, 1, on.tasks[0], text="one\n")
        assert (await on.next(Output)).lines == ("one",)
        (tmp_path / "new").write_text("one\ntwo\n")
        path.unlink()
        await slurm.looked_at(3)
        (tmp_path / "new").rename(path)
        assert (await on.next(Output)).lines == ("two",)

    followed(scenario)


def test_the_last_words_of_a_job_that_is_done_may_show_late(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = Job("COMPLETED")
        await slurm.looked_at(1)
        with pytest.raises(AssertionError, match="not asked any more"):
            await slurm.looked_at(1, seconds=0.2)
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(0), text="done")
            assert await on.next(Exited) == Exited(task, 0)

    followed(scenario)
    log = (tmp_path / "attempt_1" / "worker-0" / "stderr.log").read_text()
    assert log == "slurm: submitted as job 12\ndone"


@pytest.mark.parametrize("told", [False, True])
def test_last_words_that_never_show_are_given_up(told, followed, slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_LATE", 60 if told else 0.1)

    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = Job("COMPLETED")
        await slurm.looked_at(1)
        if told:
            on.end(StopSignal.TERMINATE)
        cause = "" if told else "Slurm has its job for completed"
        for task in on.tasks:
            assert await on.next(Exited) == Exited(task, -15, cause=cause)

    followed(scenario)


def test_what_slurm_ends_is_told_with_slurms_own_word(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        writes(tmp_path, 1, on.tasks[0], {"kind": "started", "pid": 7})
        await on.next(Started)
        (tmp_path / "slurm.log").write_text("slurmstepd: error: *** JOB 12 CANCELLED DUE TO TIME LIMIT ***\n")
        slurm.job = Job("TIMEOUT", 0, "TimeLimit")
        lines = [(await on.next(Output)).lines[0] for _ in range(2)]
        assert lines == [
            "slurm: job 12 is timeout (TimeLimit)",
            "slurm: slurmstepd: error: *** JOB 12 CANCELLED DUE TO TIME LIMIT ***",
        ]
        ends = [await on.next(Exited) for _ in on.tasks]
        assert {(end.code, end.cause) for end in ends} == {(-15, "Slurm has its job for timeout")}

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_job_that_slurm_puts_back_is_the_next_attempt(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        writes(tmp_path, 1, on.tasks[0], {"kind": "started", "pid": 7})
        await on.next(Started)
        slurm.job = Job("PENDING", 1, "BeginTime")
        for _ in on.tasks:
            assert (await on.next(Exited)).cause == "Slurm has put its job back into the queue"
        on.start(2)
        lines = [(await on.next(Output)).lines[0] for _ in range(2)]
        assert lines == ["slurm: Slurm has put job 12 back into its queue", "slurm: job 12 waits: BeginTime"]
        slurm.job = Job("RUNNING", 1)
        for task in on.tasks:
            writes(tmp_path, 2, task, {"kind": "started", "pid": 8}, exited(0))
            assert await on.next(Started) == Started(task, 8)
            assert await on.next(Exited) == Exited(task, 0)
        slurm.job = Job("COMPLETED", 1)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


@pytest.mark.parametrize("state", ["FAILED", "COMPLETING", "GONE"])
def test_a_job_that_slurm_has_given_up_is_submitted_anew(state, followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(1))
            await on.next(Exited)
        on.start(2)
        await asyncio.sleep(0.05)
        slurm.job = Job(state)
        assert (await on.next(Output)).lines == ("slurm: submitted as job 13",)
        for task in on.tasks:
            writes(tmp_path, 2, task, exited(0))
            assert await on.next(Exited) == Exited(task, 0)
        slurm.job = Job("COMPLETED")

    followed(scenario)
    assert [call for call in slurm.calls if call[0] == "submit"] == [("submit", "1", ""), ("submit", "2", "")]


def test_a_job_that_others_cancel_is_over_whatever_its_tasks_come_to(followed, slurm, tmp_path):
    """They may save as long as Slurm lets them."""

    async def scenario(on):
        on.start()
        await on.next(Output)
        first, second = on.tasks
        slurm.job = COMPLETING
        writes(tmp_path, 1, first, exited(143))
        await slurm.looked_at(2)
        writes(tmp_path, 1, second, text="saved\n")
        assert (await on.next(Output)).lines == ("saved",)
        slurm.job = CANCELLED
        assert await on.next(Exited) == Exited(first, 143, cause=BY_OTHERS, cancelled=True)
        assert await on.next(Exited) == Exited(second, -15, cause=BY_OTHERS, cancelled=True)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_job_that_others_cancel_in_the_queue_is_over(followed, slurm):
    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = CANCELLED
        for task in on.tasks:
            assert await on.next(Exited) == Exited(task, -15, cause=BY_OTHERS, cancelled=True)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_job_that_others_cancel_while_its_tasks_end_has_no_successor(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        for task in on.tasks:
            writes(tmp_path, 1, task, exited(3))
            assert await on.next(Exited) == Exited(task, 3)
        slurm.job = COMPLETING
        on.start(2)
        await slurm.looked_at(2)
        slurm.job = CANCELLED
        for task in on.tasks:
            assert await on.next(Exited) == Exited(task, -15, cause=BY_OTHERS, cancelled=True)

    followed(scenario)
    assert slurm.calls == [("submit", "1", "")]


def test_a_task_that_fails_of_itself_is_told_as_such_though_its_job_ends_with_it(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        await on.next(Output)
        first, second = on.tasks
        slurm.job = COMPLETING
        writes(tmp_path, 1, first, exited(3))
        await slurm.looked_at(2)
        slurm.job = Job("FAILED")
        assert await on.next(Exited) == Exited(first, 3)
        assert await on.next(Exited) == Exited(second, -15, cause="Slurm has its job for failed")

    followed(scenario)


def test_a_job_that_slurm_cannot_end_is_given_up(followed, slurm, monkeypatch):
    monkeypatch.setattr(run, "_ENDING", 0.1)

    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = COMPLETING
        assert (await on.next(Exited)).cause == "Slurm has its job for completing"
        slurm.job = Job("FAILED")

    followed(scenario)


def test_the_tasks_are_told_to_end_once_however_many_there_are(followed, slurm, tmp_path):
    async def scenario(on):
        on.start()
        writes(tmp_path, 1, on.tasks[0], {"kind": "started", "pid": 7})
        await on.next(Started)
        on.end(StopSignal.TERMINATE)
        while ("term", "12") not in slurm.calls:
            await asyncio.sleep(0.01)
        on.end(StopSignal.KILL)
        while slurm.calls.count(("kill", "12")) < 3:  # as often as it takes
            await asyncio.sleep(0.01)
        slurm.job = Job("FAILED")
        ends = [await on.next(Exited) for _ in on.tasks]
        assert {(end.code, end.cause) for end in ends} == {(-15, "")}

    followed(scenario)
    assert list(dict.fromkeys(slurm.calls)) == [("submit", "1", ""), ("term", "12"), ("kill", "12")]


def test_what_is_started_after_a_kill_is_not_killed(followed, slurm, tmp_path, monkeypatch):
    """Not even where Slurm takes its time."""

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
        assert (await on.next(Output)).lines == ("slurm: submitted as job 13",)
        over.set()
        await slurm.looked_at(5)

    followed(scenario)
    assert ("submit", "2", "") in slurm.calls
    assert ("kill", "13") not in slurm.calls


def test_a_job_that_waits_is_cancelled(followed, slurm):
    async def scenario(on):
        on.start()
        await on.next(Output)
        slurm.job = PENDING
        assert (await on.next(Output)).lines == ("slurm: job 12 waits: Resources",)
        on.end(StopSignal.TERMINATE)
        assert {(await on.next(Exited)).code, (await on.next(Exited)).code} == {-15}

    followed(scenario)
    assert slurm.calls == [("submit", "1", ""), ("cancel", "12")]


def test_tasks_that_are_told_to_end_before_there_is_a_job_have_none_left(followed, slurm):
    async def scenario(on):
        on.start()
        on.end(StopSignal.TERMINATE)
        assert {(await on.next(Exited)).code, (await on.next(Exited)).code} == {-15}

    followed(scenario)
    assert slurm.calls == [("submit", "1", ""), ("cancel", "12")]


def test_a_run_that_is_left_ends_its_job(followed, slurm):
    async def scenario(on):
        on.start()
        await on.next(Output)

    followed(scenario)
    assert slurm.calls == [("submit", "1", ""), ("cancel", "12")]


def test_a_run_whose_job_is_still_there_is_refused(slurm, tmp_path):
    (tmp_path / "slurm_job").write_text("12\n")
    with pytest.raises(UsageError, match="job 12 of this run is still running"):
        launcher.refuse_running_job(tmp_path)
    assert slurm.calls == []


def test_a_run_without_a_job_that_runs_is_not_refused(slurm, tmp_path, monkeypatch):
    launcher.refuse_running_job(tmp_path)
    (tmp_path / "slurm_job").write_text("12\n")
    slurm.job = Job("COMPLETED")
    launcher.refuse_running_job(tmp_path)
    slurm.job = Job("RUNNING")
    monkeypatch.setattr(
        launcher, "shutil", SimpleNamespace(which=lambda _: None)
    )  # the directory was copied to another machine
    launcher.refuse_running_job(tmp_path)


def test_hosts_are_slurms_to_choose(make_cluster):
    with pytest.raises(UsageError, match=r"roles\.worker\.hosts names addresses"):
        launcher.SlurmLauncher().preview_addresses(make_cluster(worker=["a:1", "b:1"]))
