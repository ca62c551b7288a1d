"""Histories of events for the supervisor."""

import signal
from collections import Counter

from tfdist_cli.launch.supervisor.events import (
    Exited,
    RecordReceived,
    ResizeAccepted,
    SignalReceived,
    Start,
    Stop,
    StopSignal,
)
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobPolicy, Phase, Timeouts
from tfdist_cli.spec.task_id import TaskId

CHIEF, PS, W0, W1, EVALUATOR = (TaskId.parse(name) for name in ("chief", "ps", "worker:0", "worker:1", "evaluator"))
W2 = TaskId("worker", 2)
PS_TASKS = (CHIEF, W0, W1, PS)
TERM, KILL = StopSignal.TERMINATE, StopSignal.KILL
INT, TERMINATED = SignalReceived(signal.SIGINT), SignalReceived(signal.SIGTERM)
TIMES = Timeouts(start=100, evaluator=50, shutdown=30)


def make_policy(strategy="parameter_server", *, reports=False, **options):
    return JobPolicy(strategy, reports, TIMES, **options)


PS_POLICY = make_policy()


class History:
    """Passes events to the supervisor, and keeps its actions."""

    def __init__(self, *tasks, policy=PS_POLICY):
        self.state, self.actions = begin(policy, tasks, 0.0)
        assert self.actions == tuple(Start(task) for task in tasks)

    def at(self, now, *events):
        """Passes events at one time; returns the stop signals that follow, by task."""
        self.actions = ()
        for event in events:
            self.state, actions = step(self.state, event, float(now))
            self.actions += actions
        return {action.task: action.signal for action in self.actions if isinstance(action, Stop)}

    @property
    def ended(self):
        return self.state.phase is Phase.ENDED

    def statuses(self):
        return {task: state.status for task, state in self.state.tasks.items()}


def up(*tasks):
    return [RecordReceived(task, {"kind": "state", "state": "serving"}) for task in tasks]


def error(task, message="no", *, of="ValueError"):
    return RecordReceived(task, {"kind": "error", "type": of, "message": message})


def beat(task, cpu_seconds=0.0):
    return RecordReceived(task, {"kind": "beat", "computed": cpu_seconds})


def progress(step, task=CHIEF, **rates):
    return RecordReceived(task, {"kind": "progress", "step": step, "workers": rates})


def resized(*tasks, **replicas):
    """A resize to other tasks."""
    return ResizeAccepted("request", replicas, tasks)


def doing(what, task=CHIEF):
    return RecordReceived(task, {"kind": "state", "state": what})


class CheckedHistory(History):
    """Checks the invariants of any history."""

    def __init__(self, *tasks, policy):
        super().__init__(*tasks, policy=policy)
        self.exited, self.stop_sent, self.was_signalled = set(), {}, False
        self.started = Counter(tasks)
        """How often each current task was started since it was added."""
        self.alone, self.attempt = 0, 1

    def at(self, now, *events):
        (event,) = events
        before, attempt, was_over = list(Phase).index(self.state.phase), self.state.attempt, self.ended
        resizing = self.state.resizing
        if isinstance(event, Exited):
            self.exited.add(event.task)
        self.was_signalled |= isinstance(event, SignalReceived)
        answers = super().at(now, event)
        for task, how in answers.items():
            assert task not in self.exited, "no action for a task that has exited"
            assert (self.stop_sent.get(task), how) not in {(KILL, KILL), (KILL, TERM), (TERM, TERM)}, "no signal twice"
            self.stop_sent[task] = how
        assert not (was_over and self.actions), "no action after the end of the job"
        joins = event.joins if isinstance(event, ResizeAccepted) else ()
        self._check_starts([action for action in self.actions if isinstance(action, Start)], joins)
        too_late = resizing and self.state.phase in (Phase.EVALUATING, Phase.STOPPING) and not self.state.resizing
        came_back = self.state.attempt == attempt and list(Phase).index(self.state.phase) < before
        assert too_late or not came_back, "no phase comes back"
        assert set(self.state.tasks) - self.exited == set(self.state.alive)
        return answers

    def _check_starts(self, starts, joins):
        policy, tasks = self.state.policy, self.state.tasks
        resizes = sum(not (each.wanted.joins or each.wanted.leaves) for each in self.state.resizes)
        assert not (starts and self.was_signalled), "no start after a signal"
        for start in starts:
            assert start.task in self.exited or start.task not in self.started, "no start of a task that runs"
            assert start.attempt == self.state.attempt
            self.exited.discard(start.task)
            self.stop_sent.pop(start.task, None)
            self.started[start.task] += 1
        if starts and self.state.attempt > self.attempt:
            assert [start.task for start in starts] == list(tasks), "all tasks start in a new attempt"
            self.attempt = self.state.attempt
            self.exited &= tasks.keys()
            self.stop_sent = {task: how for task, how in self.stop_sent.items() if task in tasks}
            self.started = Counter({task: count for task, count in self.started.items() if task in tasks})
        else:
            self.alone += sum(start.task not in joins for start in starts)
        assert {task: each.restarts + 1 for task, each in tasks.items()} == self.started
        restarts = self.alone + self.state.attempt - 1 - resizes
        assert restarts <= len(self.state.lost_tasks)
        assert self.state.restarts <= policy.max_restarts, "restarts have a limit"
        for role in {task.role for task in tasks}:
            most = policy.restarts.get(role)
            if most and most.max is not None:
                counts = Counter(loss.task for loss in self.state.lost_tasks if loss.alone and loss.task.role == role)
                assert max(counts.values(), default=0) <= most.max

    def obey(self, now):
        """Every process exits after its stop signal."""
        while self.stop_sent.keys() - self.exited:
            task = min(self.stop_sent.keys() - self.exited, key=str)
            self.at(now, Exited(task, -9 if self.stop_sent[task] is KILL else -15))
