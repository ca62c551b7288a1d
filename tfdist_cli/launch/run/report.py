"""The report of a finished job: the first failure is the headline; failures after it are consequences."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfdist_cli.errors import ExitCode
from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.run.snapshot import RunSnapshot, WorkerFigures, numbers
from tfdist_cli.launch.supervisor.state import JobState, LostTask, Resize, Status, TaskState
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.task_id import TaskId

_NO_NETWORK = re.compile(
    r"name resolution|name or service not known|(could not|couldn't|failed to) resolve|network is unreachable"
    r"|getaddrinfo",
    re.IGNORECASE,
)
"""What libraries report when there is only the loopback network."""
_MEMORY_ERROR = re.compile(r"(\w+\.)*_?(Array)?MemoryError\b")  # of Python itself, and of NumPy
_OTHER_NAME = re.compile(r"ModuleNotFoundError: No module named 'tfdist'$")
_HINTS = {
    "out-of-memory": "use less memory per task (a smaller batch_size, embedding tables on more ps), run fewer tasks on "
    "this machine, or use one with more memory",
    "wrong-import": "write `import tfdist_cli as tfdist`: tfdist_cli is the name of the package",
    "no-network": "the tasks' private network reaches no other host: set 'network: host' if the recipe needs one",
}


@dataclass(frozen=True)
class Failure:
    """A task that failed.

    Args:
        task: the task.
        seconds: when it failed, from the start of the run.
        reason: how it exited, such as `exit code 3`.
        message: the error that it reported, `ValueError: …`; empty if it reported none.
        hint: what the user can do about it.
        traceback: the traceback in the user's code.
        last_lines: the last lines of its output.
        log: the file with all of its standard error.
        not_restarted_because: why it was not restarted, although restarts are allowed.
        code: the code of the problem: the one that the task reported, or the kind of its exit.
    """

    task: TaskId
    seconds: float
    reason: str
    message: str
    hint: str
    traceback: str
    last_lines: tuple[str, ...]
    log: Path
    not_restarted_because: str = ""
    code: str = ""

    @property
    def summary(self) -> str:
        """The failure in one sentence."""
        error = f": {self.message}" if self.message else ""
        return f"{self.task} failed after {self.seconds:.1f} s, {self.reason}{error}"


@dataclass(frozen=True)
class TaskExit:
    """How a task exited.

    Args:
        task: the task.
        status: done, failed or stopped. A task that served others until they were done is done as well.
        reason: how it exited, such as `exit code 0`.
        code: its exit code, or -n for signal n; None if it has not exited.
        seconds: when, from the start of the run.
        restarts: how often it was restarted.
    """

    task: TaskId
    status: Status
    reason: str
    code: int | None
    seconds: float | None
    restarts: int = 0


@dataclass(frozen=True)
class Report:
    """The result of a job.

    Args:
        exit_code: the exit code of the launch.
        headline: what ended the job; empty if its training was done.
        failures: the failed tasks, in order; the first is the headline's.
        tasks: how each task exited.
        seconds: how long the job took.
        result: the chief's `result` record.
        evaluation: the evaluator's last scores, with their step.
        checkpoints: path and step of each, oldest first.
        exports: the paths of the exported models.
        warnings: other problems that the user should know.
        lost_tasks: the failures that led to a restart, and those of a resize, oldest first.
        attempts: how often all tasks were started.
        resizes: the changes of the numbers of tasks, oldest first.
        signum: the signal to the launcher that ended the job.
        code: the code of the headline's problem.
        workers: what each worker did, by its name, in the order of their numbers.
        last_step: the last global step that is known, also of a training that was not done.
    """

    exit_code: int
    headline: str
    failures: tuple[Failure, ...]
    tasks: tuple[TaskExit, ...]
    seconds: float
    result: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    exports: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lost_tasks: tuple[LostTask, ...] = ()
    attempts: int = 1
    resizes: tuple[Resize, ...] = ()
    signum: int | None = None
    code: str = ""
    workers: Mapping[str, WorkerFigures] = field(default_factory=dict)
    last_step: int | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics of the training."""
        return numbers(self.result.get("metrics"))

    def share(self, worker: str) -> float:
        """The share of the examples that a worker trained on, from 0 to 1."""
        examples = sum(figures.examples for figures in self.workers.values())
        return self.workers[worker].examples / examples if examples else 0.0

    def with_warning(self, warning: str) -> Report:
        """The report with one more warning."""
        return replace(self, warnings=(*self.warnings, warning))

    def not_uploaded(self, problem: str) -> Report:
        """The report of a run whose directory is not complete in the storage service."""
        if self.exit_code:
            return self.with_warning(problem)
        return replace(self, exit_code=ExitCode.FAILED, headline=problem, code="run-not-uploaded")

    def as_json(self) -> dict[str, Any]:
        """The report in plain JSON types, as in result.json."""
        return {
            "exit_code": self.exit_code,
            "headline": self.headline or None,
            "code": self.code or None,
            "signal": signal_name(self.signum) if self.signum else None,
            "consequences": [failure.summary for failure in self.failures[1:]],
            "not_restarted_because": self.failures[0].not_restarted_because or None if self.failures else None,
            "attempts": self.attempts,
            "losses": [_lost_task_as_json(lost) for lost in self.lost_tasks],
            "resizes": [resize_as_json(resize) for resize in self.resizes],
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            "step": self.last_step,
            "examples": self.result.get("examples"),
            "training_seconds": self.result.get("seconds"),
            "metrics": self.metrics,
            "workers": {
                name: {
                    "steps": figures.steps,
                    "examples": figures.examples,
                    "share": round(self.share(name), 4),
                    "steps_per_second": figures.steps_per_second,
                }
                for name, figures in self.workers.items()
            },
            "evaluation": {key: value for key, value in self.evaluation.items() if key != "kind"} or None,
            "checkpoints": [{"path": path, "step": step} for path, step in self.checkpoints.items()],
            "exports": list(self.exports),
            "tasks": [_task_as_json(task) for task in self.tasks],
        }


def _lost_task_as_json(lost: LostTask) -> dict[str, Any]:
    return {
        "task": str(lost.task),
        "attempt": lost.attempt,
        "seconds": _rounded(lost.ended.failed_at),
        "cause": cause_of(lost),
        "restarts": "task" if lost.alone else "job",
        "step": lost.step,
        "follows": str(lost.caused_by) if lost.caused_by else None,
    }


def resize_as_json(resize: Resize) -> dict[str, Any]:
    """A resize in plain JSON types."""
    return {
        "replicas": {role: list(counts) for role, counts in resize.wanted.replicas.items()},
        "attempt": resize.attempt,
        "seconds": _rounded(resize.asked_at),
        "step": resize.step,
        "resumed": resize.resumed,
        "trained": _rounded(resize.trained_at),
        **resize_outcome(resize),
    }


def resize_outcome(resize: Resize) -> dict[str, Any]:
    """What became of a resize: how long it took, the tasks that joined and left, and those that it has cost."""
    took = None if resize.trained_at is None else round(resize.trained_at - resize.asked_at, 3)
    joined = [task for task in resize.wanted.joins if task not in resize.failed]
    left = [task for task in resize.wanted.leaves if task not in (*resize.kept, *resize.lost)]
    names = {"joined": joined, "left": left, "failed": resize.failed, "lost": resize.lost}
    lists = {key: [str(task) for task in tasks] for key, tasks in names.items()}
    reverted = None if resize.reverted is None else f"{resize.reverted.task}: {cause_of(resize.reverted)}"
    return {"live": resize.wanted.is_live, "took": took, **lists, "reverted": reverted}


def _task_as_json(task: TaskExit) -> dict[str, Any]:
    return {
        "task": str(task.task),
        "status": task.status.value,
        "code": task.code,
        "seconds": _rounded(task.seconds),
        "restarts": task.restarts,
    }


def make_report(state: JobState, snapshot: RunSnapshot, logs: TaskLogs, seconds: float) -> Report:
    """Makes the report of a finished job.

    Args:
        state: its final state.
        snapshot: what its tasks reported.
        logs: their output.
        seconds: how long it took.
    """
    names = state.start_timed_out or state.failures
    failures = tuple(make_failure(task, state, snapshot, logs) for task in names)
    exits = tuple(
        TaskExit(task, each.status, describe_exit(each), each.code, each.ended_at, each.restarts)
        for task, each in state.tasks.items()
    )
    headline, code = _headline(state, failures)
    return Report(
        state.exit_code,
        headline,
        failures,
        exits,
        seconds,
        snapshot.result,
        snapshot.evaluation,
        snapshot.checkpoints,
        tuple(snapshot.exports),
        (*snapshot.warnings, *_warnings(state, logs)),
        state.lost_tasks,
        state.attempt,
        state.resizes,
        state.signum,
        code,
        dict(snapshot.workers),
        snapshot.last_step,
    )


def describe_exit(task: TaskState) -> str:
    """How a task exited, in words."""
    if task.code is None:
        return "not exited" if task.stop_sent else "running"
    if task.stall_reason:
        return f"{task.stall_reason}, so the launcher killed it"
    if task.cause:
        return task.cause
    if task.stop_sent and (task.status is Status.STOPPED or (task.status is Status.DONE and task.code)):
        return _describe_stop(task)
    if task.code and task.ended_by_launcher:
        return "stopped by the launcher after its error"
    early = ", before the training was done" if task.code == 0 and task.status is Status.FAILED else ""
    return f"{_describe_code(task)}{early}"


def _describe_stop(task: TaskState) -> str:
    if task.status is Status.DONE:
        return "done"
    if not task.ended_by_launcher:
        return f"stopped by the launcher, {_describe_code(task)}"
    return "killed by the launcher: it did not exit after SIGTERM" if task.was_killed else "stopped by the launcher"


def cause_of(lost: LostTask) -> str:
    """Why a task was lost."""
    error = lost.ended.error.text.partition("\n")[0]
    cause = f", caused by the earlier failure of {lost.caused_by}" if lost.caused_by else ""
    return describe_exit(lost.ended) + (f": {error}" if error else "") + cause


def format_replicas(replicas: Mapping[Role, Sequence[int]]) -> str:
    """Returns `worker 1 → 3, ps 1 → 2`."""
    return ", ".join(f"{role} {before} → {after}" for role, (before, after) in replicas.items())


def _describe_code(task: TaskState) -> str:
    if task.status is Status.LEFT:
        return "left the training"
    code = task.code or 0
    if not task.was_killed:
        return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    which = "killed by SIGKILL" if code < 0 else f"exit code {code} (SIGKILL)"
    return which + _OOM_KILLED[task.oom_killed]


_OOM_KILLED = {
    True: ", by the kernel for lack of memory",
    False: ", not by the kernel for lack of memory",
    None: ", perhaps for lack of memory",
}


def signal_name(number: int) -> str:
    """Returns `SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def make_failure(name: TaskId, state: JobState, snapshot: RunSnapshot, logs: TaskLogs) -> Failure:
    """Describes a task that has failed."""
    task, seen = state.tasks[name], snapshot.of(name)
    error = seen.error or {}
    traceback = str(error.get("traceback") or "")
    if traceback and not traceback.startswith("Traceback"):
        traceback = f"…\n{traceback.partition(chr(10))[2]}"  # a record has room for its end only
    message = str(error.get("message", ""))
    if traceback:
        message = message.partition("\n")[0]  # the traceback ends with the whole message
    kind = str(error.get("type", ""))
    lines = (*seen.lines, *([seen.unfinished] if seen.unfinished else []))
    if name in state.start_timed_out:
        reason, seconds, code = "it was not up in time", state.policy.timeouts.start, "start-timeout"
    else:
        reason, seconds, code = describe_exit(task), task.failed_at, str(error.get("code") or "")
    if not code and _is_out_of_memory(task, kind, message, lines):
        code = "out-of-memory"
    elif not code and any(_OTHER_NAME.match(text) for text in (f"{kind}: {message}", *lines)):
        code = "wrong-import"
    elif not code and snapshot.private and any(_NO_NETWORK.search(text) for text in (message, traceback, *lines)):
        code = "no-network"
    return Failure(
        name,
        seconds,
        reason,
        ": ".join(part for part in (kind, message) if part),
        str(error.get("hint") or "") or _HINTS.get(code, ""),
        traceback,
        lines,
        logs.of(name),
        task.not_restarted_because,
        code or _exit_kind(task),
    )


def _exit_kind(task: TaskState) -> str:
    """The code of a failure for which the task reported none."""
    if task.stall_reason:
        return "task-stalled"
    if task.cause:
        return "ended-by-platform"
    return "task-killed" if (task.code or 0) < 0 else "task-failed"


def _is_out_of_memory(task: TaskState, kind: str, message: str, lines: tuple[str, ...]) -> bool:
    """Whether the task lacked memory; TensorFlow raises `ResourceExhaustedError` for a full disk as well."""
    if task.oom_killed or kind == "MemoryError":
        return True
    if kind == "ResourceExhaustedError":
        return "oom" in message.lower() or "allocat" in message.lower()
    return not kind and any("std::bad_alloc" in line or _MEMORY_ERROR.match(line) for line in lines)


def _headline(state: JobState, failures: tuple[Failure, ...]) -> tuple[str, str]:
    """What ended the job, and the code of that problem."""
    if state.signum is not None:
        return f"ended by {signal_name(state.signum)}", "stopped-by-signal"
    if state.start_timed_out:
        late = state.start_timed_out
        names = ", ".join(str(task) for task in late[:10]) + (" …" if len(late) > 10 else "")
        within = f"within {state.policy.timeouts.start:g} s"
        return f"{len(late)} of {len(state.tasks)} tasks were not up {within}: {names}", "start-timeout"
    if state.resizing:
        return "the job cannot continue with other numbers of tasks: some tasks did not exit", "resize-failed"
    return (failures[0].summary, failures[0].code) if failures else ("", "")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _warnings(state: JobState, logs: TaskLogs) -> tuple[str, ...]:
    warnings = []
    if state.evaluator_timed_out:
        seconds = f"{state.policy.timeouts.evaluator:g} s"
        warnings.append(
            f"the evaluator was stopped {seconds} after the training: the last checkpoint may have no score"
        )
    if state.alive:
        alive = ", ".join(str(task) for task in state.alive)
        warnings.append(f"not exited after SIGKILL, because of an uninterruptible wait in the kernel: {alive}")
    if logs.problem:
        warnings.append(logs.problem)
    return tuple(warnings)
