"""What came of a job: the first failure is the headline, and what failed after it a consequence."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.run.snapshot import RunSnapshot, numbers
from tfdist_cli.launch.supervisor.state import JobState, Loss, Resize, Status, TaskState
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.task_id import TaskId

_NO_NETWORK = re.compile(
    r"name resolution|name or service not known|(could not|couldn't|failed to) resolve|network is unreachable"
    r"|getaddrinfo",
    re.IGNORECASE,
)
"""What libraries say where there is no network but the loopback one."""
_NEEDS_HOST = "the tasks' network is their own and reaches no other host: a recipe that needs one has 'network: host'"


@dataclass(frozen=True)
class Failure:
    """One task that failed.

    Args:
        task: which task.
        seconds: when, from the start of the run.
        what: how it ended, such as `exit code 3`.
        message: what it raised, `ValueError: …`; empty when it didn't say.
        hint: what to do about it.
        traceback: where it was raised in the user's code.
        lines: the last lines of its output.
        log: the file with all of its standard error.
        not_restarted_because: why it was not started again, where restarts were allowed.
    """

    task: TaskId
    seconds: float
    what: str
    message: str
    hint: str
    traceback: str
    lines: tuple[str, ...]
    log: Path
    not_restarted_because: str = ""

    @property
    def sentence(self) -> str:
        """All of it in a sentence."""
        said = f": {self.message}" if self.message else ""
        return f"{self.task} failed after {self.seconds:.1f} s, {self.what}{said}"


@dataclass(frozen=True)
class TaskEnd:
    """How one task ended.

    Args:
        task: which task.
        status: done, failed or stopped; done is also who served until the others were done.
        what: in words.
        code: its exit code, or -n for signal n; None if it is still there.
        seconds: when, from the start of the run.
        restarts: how often it was started again.
    """

    task: TaskId
    status: Status
    what: str
    code: int | None
    seconds: float | None
    restarts: int = 0


@dataclass(frozen=True)
class Report:
    """What came of a job.

    Args:
        exit_code: what the launch returns.
        headline: what ended it, if anything but the end of the training did.
        failures: the tasks that failed, in order; the first is the headline's.
        tasks: how each task ended.
        seconds: how long it took.
        result: the chief's `result` record.
        evaluation: the evaluator's last scores, with their step.
        checkpoints: path and step, oldest first.
        exports: what was written of the model.
        warnings: what else a user should know.
        losses: the tasks that were lost and brought about a restart, oldest first.
        attempts: how often all tasks were started.
        resizes: the other numbers of tasks that were asked for meanwhile, oldest first.
        signum: the signal to the launcher that ended it.
    """

    exit_code: int
    headline: str
    failures: tuple[Failure, ...]
    tasks: tuple[TaskEnd, ...]
    seconds: float
    result: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    exports: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    attempts: int = 1
    resizes: tuple[Resize, ...] = ()
    signum: int | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics of the training."""
        return numbers(self.result.get("metrics"))

    def warned(self, warning: str) -> Report:
        """The report with one more thing that a user should know."""
        return replace(self, warnings=(*self.warnings, warning))

    def as_json(self) -> dict[str, Any]:
        """The report in plain JSON types, as result.json has it."""
        return {
            "exit_code": self.exit_code,
            "headline": self.headline or None,
            "signal": signal_name(self.signum) if self.signum else None,
            "consequences": [failure.sentence for failure in self.failures[1:]],
            "not_restarted_because": self.failures[0].not_restarted_because or None if self.failures else None,
            "attempts": self.attempts,
            "losses": [
                {
                    "task": str(loss.task),
                    "attempt": loss.attempt,
                    "seconds": _rounded(loss.ended.failed_at),
                    "cause": cause_of(loss),
                    "restarts": "task" if loss.alone else "job",
                    "step": loss.step,
                    "follows": str(loss.follows) if loss.follows else None,
                }
                for loss in self.losses
            ],
            "resizes": [_as_json(resize) for resize in self.resizes],
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            "step": self.result.get("step"),
            "examples": self.result.get("examples"),
            "training_seconds": self.result.get("seconds"),
            "metrics": self.metrics,
            "evaluation": {key: value for key, value in self.evaluation.items() if key != "kind"} or None,
            "checkpoints": [{"path": path, "step": step} for path, step in self.checkpoints.items()],
            "exports": list(self.exports),
            "tasks": [
                {
                    "task": str(end.task),
                    "status": end.status.value,
                    "code": end.code,
                    "seconds": _rounded(end.seconds),
                    "restarts": end.restarts,
                }
                for end in self.tasks
            ],
        }


def _as_json(resize: Resize) -> dict[str, Any]:
    return {
        "replicas": {role: list(counts) for role, counts in resize.wanted.replicas.items()},
        "attempt": resize.attempt,
        "seconds": _rounded(resize.asked_at),
        "step": resize.step,
        "resumed": resize.resumed,
        "trained": _rounded(resize.trained_at),
    }


def make_report(state: JobState, chronicle: RunSnapshot, logs: TaskLogs, seconds: float) -> Report:
    """Puts together what came of a job that has ended.

    Args:
        state: its final state.
        chronicle: what its tasks told.
        logs: where their output is.
        seconds: how long it took.
    """
    names = state.late or state.failures
    failures = tuple(make_failure(task, state, chronicle, logs) for task in names)
    ends = tuple(
        TaskEnd(task, each.status, describe_end(each), each.code, each.ended_at, each.restarts)
        for task, each in state.tasks.items()
    )
    return Report(
        state.exit_code,
        _headline(state, failures),
        failures,
        ends,
        seconds,
        chronicle.result,
        chronicle.evaluation,
        chronicle.checkpoints,
        tuple(chronicle.exports),
        (*chronicle.warnings, *_warnings(state, logs)),
        state.losses,
        state.attempt,
        state.resizes,
        state.signum,
    )


def describe_end(task: TaskState) -> str:
    """How a task ended, in words."""
    if task.code is None:
        return "still there" if task.told else "running"
    if task.stalled:
        return f"{task.stalled}, so that it was killed"
    if task.cause:
        return task.cause
    if task.told and (task.status is Status.STOPPED or (task.status is Status.DONE and task.code)):
        return _as_told(task)
    if task.code and task.obeyed:
        return "ended by the launcher after its error"
    early = ", before the training was done" if task.code == 0 and task.status is Status.FAILED else ""
    return f"{_code(task)}{early}"


def _as_told(task: TaskState) -> str:
    if task.status is Status.DONE:
        return "done"
    if not task.obeyed:
        return f"ended by the launcher, {_code(task)}"
    return "killed by the launcher: it did not end when told to" if task.was_killed else "ended by the launcher"


def cause_of(loss: Loss) -> str:
    """What a task was lost of."""
    error = loss.ended.error.partition("\n")[0]
    of = f", which came of the loss of {loss.follows} before" if loss.follows else ""
    return describe_end(loss.ended) + (f": {error}" if error else "") + of


def described(replicas: Mapping[Role, Sequence[int]]) -> str:
    """`worker 1 → 3, ps 1 → 2`."""
    return ", ".join(f"{role} {before} → {after}" for role, (before, after) in replicas.items())


def _code(task: TaskState) -> str:
    code = task.code or 0
    if not task.was_killed:
        return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    which = "killed by SIGKILL" if code < 0 else f"exit code {code} (SIGKILL)"
    return which + _BY_THE_KERNEL[task.oom_killed]


_BY_THE_KERNEL = {
    True: ", by the kernel for want of memory",
    False: ", not by the kernel for want of memory",
    None: ", which may be for want of memory",
}


def signal_name(number: int) -> str:
    """`SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def make_failure(name: TaskId, state: JobState, chronicle: RunSnapshot, logs: TaskLogs) -> Failure:
    """What is known of a task that has failed."""
    task, news = state.tasks[name], chronicle.of(name)
    error = news.error or {}
    traceback = str(error.get("traceback") or "")
    if traceback and not traceback.startswith("Traceback"):
        traceback = f"…\n{traceback.partition(chr(10))[2]}"  # a record has room for its end
    message = str(error.get("message", ""))
    if traceback:
        message = message.partition("\n")[0]  # the traceback ends with all of it
    kind = str(error.get("type", ""))
    lines = (*news.lines, *([news.unfinished] if news.unfinished else []))
    if name in state.late:
        what, seconds = "it did not come up", state.rules.timeouts.start
    else:
        what, seconds = describe_end(task), task.failed_at
    oom_killed = _is_oom_killed(task, kind, message, lines)
    cut_off = chronicle.private and any(_NO_NETWORK.search(text) for text in (message, traceback, *lines))
    return Failure(
        name,
        seconds,
        what,
        ": ".join(part for part in (kind, message) if part),
        str(error.get("hint") or "") or (_NEEDS_HOST if cut_off else _MORE_MEMORY if oom_killed else ""),
        traceback,
        lines,
        logs.of(name),
        task.not_restarted_because,
    )


def _is_oom_killed(task: TaskState, kind: str, message: str, lines: tuple[str, ...]) -> bool:
    """Whether it was memory that a task lacked; a full disk is a `ResourceExhaustedError` of TensorFlow's too."""
    if task.oom_killed or kind == "MemoryError":
        return True
    if kind == "ResourceExhaustedError":
        return "oom" in message.lower() or "allocat" in message.lower()
    return not kind and any("std::bad_alloc" in line or _MEMORY_ERROR.match(line) for line in lines)


_MEMORY_ERROR = re.compile(r"(\w+\.)*_?(Array)?MemoryError\b")  # of Python itself, and of NumPy
_MORE_MEMORY = (
    "it ran out of memory: let each task hold less (a smaller batch_size, tables on more ps), run fewer tasks on this "
    "machine, or find one with more memory"
)


def _headline(state: JobState, failures: tuple[Failure, ...]) -> str:
    if state.signum is not None:
        return f"ended by {signal_name(state.signum)}"
    if state.late:
        seconds = f"{state.rules.timeouts.start:g} s"
        names = ", ".join(str(task) for task in state.late[:10]) + (" …" if len(state.late) > 10 else "")
        return f"{len(state.late)} of {len(state.tasks)} tasks did not come up within {seconds}: {names}"
    if state.resizing:
        return "the job could not go on with other numbers of tasks: not all of those before could be ended"
    return failures[0].sentence if failures else ""


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _warnings(state: JobState, logs: TaskLogs) -> tuple[str, ...]:
    warnings = []
    if state.unscored:
        seconds = f"{state.rules.timeouts.evaluator:g} s"
        warnings.append(f"the evaluator was ended {seconds} after the training: the last checkpoint may have no score")
    if state.alive:
        left = ", ".join(str(task) for task in state.alive)
        warnings.append(f"still there after SIGKILL, in a wait that the kernel does not interrupt: {left}")
    if logs.problem:
        warnings.append(logs.problem)
    return tuple(warnings)
