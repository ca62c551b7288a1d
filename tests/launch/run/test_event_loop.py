"""The event loop, with scripted tasks and a simulated clock."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from tfdist_cli.launch.run.event_loop import Supervisor, _signals_to, run_job
from tfdist_cli.launch.run.requests import SIGNAL as REQUEST
from tfdist_cli.launch.supervisor.events import (
    EventQueue,
    Exited,
    Output,
    RecordReceived,
    RequestAnswered,
    ResizeAccepted,
    SignalReceived,
    Start,
    Stop,
    StopSignal,
    Tick,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.launch.supervisor.state import JobPolicy, Phase, Timeouts
from tfdist_cli.spec.task_id import TaskId

_DEFAULTS = Timeouts()
CHIEF, PS, WORKER = TaskId("chief"), TaskId("ps"), TaskId("worker")


class Clock:
    """Stands still until the loop waits for something, and then jumps."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class ScriptedQueue(EventQueue):
    """Passes the time that the loop is willing to wait when there is no event."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    async def get(self, timeout):
        event = await super().get(0.0)
        if isinstance(event, Tick):
            self.clock.now += timeout
        return event


class ScriptedRun:
    """Answers actions with the events of a script."""

    def __init__(self, events, script):
        self.events, self.script, self.actions, self.plans = events, script, [], []

    def follow(self, plan):
        self.plans.append(plan)

    def act(self, action):
        self.actions.append(action)
        for event in self.script.get(action, ()):
            self.events.put(event)


class Seen:
    def __init__(self):
        self.all = []

    def on_event(self, event, state, now):
        self.all.append((event, state.phase, now))


async def supervise(run, plan, rules, events, watchers, clock, cpu_clock=lambda: 0.0):
    job = Supervisor(rules, plan, events, watchers, clock=clock, cpu_clock=cpu_clock)
    await job.supervise(run)
    return job.state


def play(cluster, plan_for, script, timeouts=_DEFAULTS):
    clock = Clock()
    seen = Seen()

    async def run():
        events = ScriptedQueue(clock)
        scripted = ScriptedRun(events, script)
        rules = JobPolicy(cluster.strategy, timeouts=timeouts)
        return await supervise(scripted, plan_for(cluster, "true"), rules, events, (seen,), clock), scripted

    state, scripted = asyncio.run(run())
    return state, scripted.actions, seen.all


@pytest.fixture
def cluster(make_cluster):
    return make_cluster("parameter_server", chief=1, worker=1, ps=1)


def test_a_run_to_its_end(cluster, plan_for):
    state, actions, seen = play(
        cluster,
        plan_for,
        {
            Start(PS): [Exited(CHIEF, 0)],
            Stop(PS, StopSignal.TERMINATE): [Exited(PS, -15)],
            Stop(WORKER, StopSignal.TERMINATE): [Exited(WORKER, -15)],
        },
    )
    assert state.exit_code == 0
    assert actions == [
        Start(CHIEF),
        Start(WORKER),
        Start(PS),
        Stop(WORKER, StopSignal.TERMINATE),
        Stop(PS, StopSignal.TERMINATE),
    ]
    assert [phase for _, phase, _ in seen] == [Phase.STOPPING, Phase.STOPPING, Phase.ENDED]


def test_time_passes_without_events(cluster, plan_for):
    state, actions, seen = play(
        cluster,
        plan_for,
        {
            Start(PS): [Exited(CHIEF, 0), Exited(WORKER, -15)],
            Stop(PS, StopSignal.KILL): [Exited(PS, -9)],
        },
        Timeouts(shutdown=7),
    )
    assert actions[-1] == Stop(PS, StopSignal.KILL)
    assert seen[-1][2] == pytest.approx(7)
    assert state.exit_code == 0


def test_a_deadline_is_kept_however_many_events_come(cluster, plan_for):
    flood = [Output(PS, "stdout", ("x",))] * 50

    class Busy(Clock):
        def __call__(self):
            self.now += 1
            return self.now

    async def run():
        events = EventQueue()
        scripted = ScriptedRun(events, {Stop(PS, StopSignal.KILL): [Exited(PS, -9)]})
        for event in (Exited(CHIEF, 0), Exited(WORKER, 0)):
            events.put(event)
        for output in flood:
            await events.put_output(output)
        rules = JobPolicy(cluster.strategy, timeouts=Timeouts(shutdown=10))
        await supervise(scripted, plan_for(cluster, "true"), rules, events, (), Busy())
        return scripted.actions

    assert asyncio.run(run())[-1] == Stop(PS, StopSignal.KILL)


def test_a_task_that_floods_waits_until_it_is_heard():
    async def run():
        events = EventQueue()

        async def flood():
            for number in range(1000):
                await events.put_output(Output(PS, "stdout", (str(number),)))

        writer = asyncio.create_task(flood())
        await asyncio.sleep(0)
        assert events._events.qsize() < 100
        events.put(SignalReceived(signal.SIGINT))  # never waits
        received = [await events.get(1) for _ in range(1001)]
        await writer
        assert [event.lines[0] for event in received if isinstance(event, Output)] == [str(n) for n in range(1000)]
        assert isinstance(await events.get(0.0), Tick)

    asyncio.run(run())


def test_records_wait_like_output_does():
    async def run():
        events = EventQueue()
        writers = [asyncio.create_task(events.put_output(RecordReceived(PS, {"kind": "x"}))) for _ in range(200)]
        await asyncio.sleep(0)
        assert events._events.qsize() < 100
        for _ in range(200):
            await events.get(1)
        await asyncio.gather(*writers)

    asyncio.run(run())


def test_a_bug_in_what_feeds_the_queue_is_not_waited_for():
    async def run():
        events = EventQueue()
        events.fail(ZeroDivisionError("a bug"))
        await events.get(1)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


def test_signals_are_heard_during_a_job_and_go_to_their_old_handler_after_it():
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append("before or after"))

    async def job():
        events = EventQueue()
        with _signals_to(events):
            signal.raise_signal(signal.SIGINT)
            return await events.get(5.0)

    try:
        assert asyncio.run(job()) == asyncio.run(job()) == SignalReceived(signal.SIGINT)
        assert received == []
        signal.raise_signal(signal.SIGINT)
        assert received == ["before or after"]
    finally:
        signal.signal(signal.SIGINT, before)


class ScriptedRequests:
    """Is asked for three workers, twice at once, and has a plan for them."""

    def __init__(self, plan):
        self.plan = lambda _tasks: plan
        self.left = ["first", "second"]

    def requests(self):
        while self.left:
            yield self.left.pop(0)

    def answer(self, request, state):
        if state.not_resizable_because:
            return RequestAnswered(request, "refused", code="job-not-resizable")
        return ResizeAccepted(request, {"worker": (1, 3)}, (CHIEF, *(TaskId("worker", n) for n in range(3)), PS))


class ScriptedLauncher:
    """Starts tasks that exit after their stop signals; in the second run the chief exits by itself."""

    def __init__(self):
        self.runs = []

    @asynccontextmanager
    async def start(self, plan, context):
        tasks = [planned.task for planned in plan.tasks]
        reactions = {Stop(task, StopSignal.TERMINATE): [Exited(task, 143 if task == CHIEF else -15)] for task in tasks}
        more = {Stop(TaskId("worker", n), StopSignal.TERMINATE): [Exited(TaskId("worker", n), -15)] for n in (1, 2)}
        second = {Start(PS, 2): [Exited(CHIEF, 0)]}
        self.runs.append(ScriptedRun(context.events, {**more, **reactions, **second}))
        if len(self.runs) == 1:
            os.kill(os.getpid(), REQUEST)
        yield self.runs[-1]


@pytest.mark.parametrize(("name", "runs"), [("local", 1), ("ssh", 2)])
def test_a_request_gives_the_job_another_plan(name, runs, cluster, make_cluster, plan_for):
    """Where tasks can join, the run itself goes on, with its fork servers and its network."""
    launcher, seen = ScriptedLauncher(), Seen()
    cluster = cluster.model_copy(update={"launcher": name})
    request_handler = ScriptedRequests(plan_for(make_cluster("parameter_server", chief=1, worker=3, ps=1), "true"))
    context = LaunchContext(EventQueue(), None, lambda _: {})
    state = asyncio.run(
        run_job(launcher, plan_for(cluster, "true"), JobPolicy(cluster.strategy), context, (seen,), request_handler)
    )
    assert (state.phase, state.exit_code, state.attempt, state.lost_tasks) == (Phase.ENDED, 0, 2, ())
    assert len(launcher.runs) == runs
    started = [action.task for run in launcher.runs for action in run.actions if isinstance(action, Start)]
    assert started == [CHIEF, WORKER, PS, CHIEF, *(TaskId("worker", number) for number in range(3)), PS]
    assert [plan for run in launcher.runs for plan in run.plans] == [request_handler.plan(())] * (2 - runs)
    answers = [event for event, _, _ in seen.all if isinstance(event, ResizeAccepted | RequestAnswered)]
    assert [type(answer) for answer in answers] == [ResizeAccepted, RequestAnswered]
    assert answers[1].code == "job-not-resizable"
    assert signal.getsignal(REQUEST) is signal.SIG_DFL


@pytest.mark.parametrize(("works", "late"), [(0, 10), (3600, 3600)])
def test_no_process_is_late_for_a_launcher_that_was_stopped_itself(cluster, plan_for, works, late):
    """It is stopped for an hour, or at work, while it waits for a ps that is to end within ten seconds."""
    clock = Clock()

    class Stopped(ScriptedQueue):
        async def get(self, timeout):
            event = await super().get(timeout)
            if isinstance(event, Tick) and self.clock.now < 1005:
                self.clock.now += 3600
            return event

    async def run():
        events = Stopped(clock)
        script = {Start(PS): [Exited(CHIEF, 0), Exited(WORKER, 0)], Stop(PS, StopSignal.KILL): [Exited(PS, -9)]}
        scripted = ScriptedRun(events, script)
        rules = JobPolicy(cluster.strategy, timeouts=Timeouts(shutdown=10))
        seen = Seen()
        worked = (lambda: clock.now - 1000) if works else (lambda: 0.0)
        await supervise(scripted, plan_for(cluster, "true"), rules, events, (seen,), clock, worked)
        return scripted.actions[-1], seen.all[-1][2]

    action, ended = asyncio.run(run())
    assert action == Stop(PS, StopSignal.KILL)
    assert ended == pytest.approx(late, abs=1)
