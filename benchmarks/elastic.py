"""`python -m benchmarks.elastic`: workers join a training and leave it, or tasks are stopped: what the others notice.

With `--start`: the longest pause of a worker in the first seconds of a training, when functions are compiled.
With `--checkpoint`: how long a training takes no step when its ps or mirrored workers change through a checkpoint. With
`--data`: what the worker notices when data workers join and leave.

Each worker appends the time of each of its steps to a file (`programs/elastic.py`). Steps wait without using the
processor, so that a gap between two of them is a pause, and no lack of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster import ROOT, RunFailed, base_environment
from benchmarks.command import end_on_sigterm, log, publish
from benchmarks.waits import Run, launched
from benchmarks.workload import FOREVER
from tfdist_cli.bench.machine import Usage
from tfdist_cli.protocol.run_files import read_lines
from tfdist_cli.spec.roles import Role

PROGRAM = Path(__file__).parent / "programs" / "elastic.py"
CLUSTER = """
strategy: parameter_server
roles: {{chief: {{}}, ps: {{}}, worker: {{replicas: {fewest}, max: {most}}}}}
recipe: recipe.yaml
"""
RECIPE = """
module: {module}
params: {{wait: {wait}, layers: {layers}, stamps: {stamps}}}
train: {{batch_size: 16, epochs: 1000000, steps_per_epoch: {steps}, share: copy}}
updates: {updates}
evaluate: null
"""
SERVED = """
strategy: parameter_server
roles: {{chief: {{}}, ps: {{}}, worker: {{}}, data_dispatcher: {{}}, data_worker: {{replicas: {fewest}, max: {most}}}}}
recipe: recipe.yaml
"""
EXAMPLES = 6_000
"""Examples of a pass that data workers prepare, about 8 s."""
MODES: Mapping[str, Mapping[str, Any]] = {
    "async": {},
    "sync": {"mode": "sync"},
    "aggregate": {"mode": "sync", "aggregate": 1},
    "bounded": {"mode": "bounded", "staleness": 2},
}
RESIZES: Mapping[str, tuple[Role, str]] = {
    "ps": ("ps", "{{chief: {{}}, ps: {{replicas: {fewest}}}, worker: {{replicas: 2}}}}\nstrategy: parameter_server"),
    "mirrored": ("worker", "{{worker: {{replicas: {fewest}}}}}\nstrategy: multi_worker_mirrored"),
}
"""What changes through a checkpoint: the role, and the cluster's roles and strategy."""
_START, _CHANGE = 180.0, 90.0
"""Seconds that a cluster may take to its first steps, and a change of its workers to its end."""
_SETTLE, _QUIET, _AFTER = 4.0, 5.0, 2.0
"""Seconds of training before anything is measured, of the usual steps, and after a change."""
_BEGINNING = 20.0
"""Seconds in which `--start` looks for pauses."""
_FULL = 0.9
"""The part of the usual rate that is full speed."""
_WINDOW, _RECOVERY = 1.0, 10.0
"""Seconds over which a rate is counted, and after a stall."""

Stamps = Mapping[int, Sequence[float]]
"""The times of each worker's steps, in seconds since 1970."""


@dataclass(frozen=True)
class Gap:
    """The longest time between two steps of a worker.

    Args:
        longest: seconds.
        usual: the median.
    """

    longest: float
    usual: float

    @classmethod
    def of(cls, times: Sequence[float], begin: float, end: float) -> Gap:
        """Measures the steps within some time.

        Raises:
            RunFailed: there are too few.
        """
        gaps = [after - before for before, after in pairwise(times) if begin <= after and before <= end]
        if len(gaps) < 2:
            raise RunFailed(f"{len(gaps)} gaps between steps in {end - begin:.1f} s")
        return cls(max(gaps), statistics.median(gaps))

    @property
    def beyond(self) -> float:
        """Seconds by which the longest is longer than usual."""
        return self.longest - self.usual


@dataclass(frozen=True)
class Change:
    """What a change of the workers cost.

    Args:
        took: seconds from the request to the first step of each worker that joins, or until each one has left.
        pause: the longest pause of a worker that stays.
    """

    took: Sequence[float]
    pause: float


@dataclass(frozen=True)
class Result:
    """What joining and leaving cost in one training.

    Args:
        join: workers join.
        leave: they leave.
        quiet: the longest pause while nothing changes.
        others: the part of the machine that other programs used.
    """

    join: Change
    leave: Change
    quiet: float
    others: float


class Training:
    """A training whose workers write down their steps.

    Args:
        run: the launch.
        stamps: the file that they write.
    """

    def __init__(self, run: Run, stamps: Path) -> None:
        self._run, self._stamps = run, stamps

    def stamps(self) -> dict[int, list[float]]:
        """Returns the steps so far, in the order of their times."""
        found: dict[int, list[float]] = {}
        *lines, _ = self._stamps.read_text(encoding="utf-8").split("\n") if self._stamps.exists() else [""]
        for line in lines:
            worker, moment = line.split()
            found.setdefault(int(worker), []).append(float(moment))
        return {worker: sorted(times) for worker, times in found.items()}

    def until(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Waits until a condition returns something, which no event announces, and returns it.

        Raises:
            RunFailed: the training ended, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if self._run.launch.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"nothing after {seconds:.0f} s:\n{self._run.log.read_text(encoding='utf-8')[-4000:]}")
            time.sleep(0.05)
        return found

    def await_steps(self, workers: int) -> float:
        """Waits until so many workers step; returns when the last of them began."""
        stamps: dict[int, list[float]] = self.until(lambda: len(found := self.stamps()) >= workers and found, _START)
        return max(times[0] for times in stamps.values())

    def go_on_until(self, moment: float, workers: int = 1) -> float:
        """Lets the first workers train until a time, in seconds since 1970, and returns it."""
        self.until(lambda: all(self.stamps()[worker][-1] >= moment for worker in range(workers)), _CHANGE)
        return moment

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Returns the lines of the event log so far, or those of a kind."""
        return [line for line in read_lines(self._run.folder / "events.jsonl") if kind in ("", line.get("event"))]

    def scale(self, number: int, role: Role = "worker") -> tuple[float, float]:
        """Changes the number of a role's tasks; returns when the launcher accepted that, and when it was done.

        Raises:
            RunFailed: it was refused, or failed.
        """
        command = [sys.executable, "-m", "tfdist_cli", "scale", str(self._run.folder), f"{role}={number}"]
        asked = subprocess.run(
            command, cwd=ROOT, env=base_environment(), capture_output=True, text=True, check=False, timeout=_CHANGE
        )
        if asked.returncode:
            raise RunFailed(f"tfdist scale exited with {asked.returncode}: {asked.stderr}")
        return moment_of(self.events("scale")[-1]), moment_of(self.events("scaled")[-1])

    def used(self) -> dict[int, float]:
        """Returns the processor seconds so far of the processes that run."""
        used = {}
        for pid in self.pids():
            with suppress(psutil.Error):  # it has left
                spent = psutil.Process(pid).cpu_times()
                used[pid] = spent.user + spent.system
        return used

    def used_since(self, before: Mapping[int, float], moment: float) -> float:
        """Returns the part of the machine that they have used since some time."""
        spent = sum(seconds - before.get(pid, 0.0) for pid, seconds in self.used().items())
        return spent / (time.monotonic() - moment) / (os.cpu_count() or 1)

    def stop(self) -> None:
        """Ends the training in order."""
        self._run.launch.send_signal(signal.SIGTERM)
        self._run.launch.wait(_CHANGE)

    def pids(self, role: str = "") -> list[int]:
        """Returns the processes of a role's tasks, or of all of them and the launcher."""
        pids = {event["task"]: event["pid"] for event in self.events("started")}
        if not role:
            return [*pids.values(), self._run.launch.pid]
        return [pid for task, pid in pids.items() if task.partition(":")[0] == role]


def moment_of(event: Mapping[str, Any]) -> float:
    """Returns the time of a line of the event log, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()


def pause_of(stamps: Stamps, stay: range, begin: float, end: float) -> float:
    """Returns the longest pause of the workers that stay, beyond what is usual for them."""
    return max(Gap.of(stamps[worker], begin, end).beyond for worker in stay)


def measure_changes(training: Training, fewest: int, most: int) -> Result:
    """Lets workers join, and leave."""
    stay = range(fewest)
    quiet = training.go_on_until(training.await_steps(fewest) + _SETTLE + _QUIET, fewest)
    usage, used = Usage.now(), training.used()
    asked, done = training.scale(most)
    joined = training.go_on_until(done + _AFTER, most)
    others = max(0.0, usage.others() - training.used_since(used, usage.moment))  # while all are there
    asked_back, done = training.scale(fewest)
    left = training.go_on_until(done + _AFTER, fewest)
    stamps = training.stamps()
    gone = [moment_of(event) for event in training.events("left")]
    training.stop()
    return Result(
        Change([stamps[worker][0] - asked for worker in range(fewest, most)], pause_of(stamps, stay, asked, joined)),
        Change([moment - asked_back for moment in gone], pause_of(stamps, stay, asked_back, left)),
        pause_of(stamps, stay, quiet - _QUIET, quiet),
        others,
    )


def beginning_of(stamps: Stamps, begin: float, end: float) -> tuple[float, int]:
    """Returns the longest time between two steps of a worker, and the number of steps of all, within some time."""
    longest = max(Gap.of(times, begin, end).longest for times in stamps.values())
    return longest, sum(begin <= moment < end for times in stamps.values() for moment in times)


def measure_start(training: Training, workers: int) -> tuple[float, int]:
    """Returns the same of the first seconds of a training."""
    begin = training.await_steps(workers)
    end = training.go_on_until(begin + _BEGINNING, workers)
    stamps = training.stamps()
    training.stop()
    return beginning_of(stamps, begin, end)


def measure_data_workers(training: Training, fewest: int, most: int) -> Result:
    """Lets data workers join, and leave."""
    stay = range(1)
    quiet = training.go_on_until(training.await_steps(1) + _SETTLE + 2 * _QUIET)
    usage, used = Usage.now(), training.used()
    asked, done = training.scale(most, "data_worker")
    joined = training.go_on_until(done + _AFTER)
    others = max(0.0, usage.others() - training.used_since(used, usage.moment))
    asked_back, done = training.scale(fewest, "data_worker")
    left = training.go_on_until(done + _AFTER)
    stamps, states = training.stamps(), training.events("state")
    serving = [moment_of(event) for event in states if event["state"] == "serving" and moment_of(event) > asked]
    gone = [moment_of(event) for event in training.events("exited")]
    training.stop()
    return Result(
        Change([moment - asked for moment in serving], pause_of(stamps, stay, asked, joined)),
        Change([moment - asked_back for moment in gone], pause_of(stamps, stay, asked_back, left)),
        pause_of(stamps, stay, quiet - 2 * _QUIET, quiet),
        others,
    )


@dataclass(frozen=True)
class Resize:
    """What a change through a checkpoint cost.

    Args:
        finish: seconds from the accepted request to the last step before it.
        save: seconds from that step until all tasks have exited.
        start: seconds from there until the checkpoint is restored: start, connections, the model's construction.
        first: seconds from there to the first step: tracing and optimizing the functions.
        repeated: steps that were taken and are not in the checkpoint.
    """

    finish: float
    save: float
    start: float
    first: float
    repeated: int

    @property
    def pause(self) -> float:
        """Seconds without a step."""
        return self.save + self.start + self.first


def resize_of(times: Sequence[float], asked: float, events: Sequence[Mapping[str, Any]], *, together: int) -> Resize:
    """Measures a change by the longest time without a step after the request.

    Args:
        times: of the steps of all workers, from the training's start, in order.
        asked: when the request was accepted.
        events: the lines of the event log.
        together: workers whose steps were one global step before the change.

    Raises:
        RunFailed: there is no step after the request.
    """
    around = times[max(bisect_left(times, asked) - 1, 0) :]
    if len(around) < 2:
        raise RunFailed("no step after the request")
    last, first = max(pairwise(around), key=lambda pair: pair[1] - pair[0])
    later = [event for event in events if moment_of(event) >= asked]
    ended = next(moment_of(event) for event in later if event["event"] == "phase" and event["phase"] == "paused")
    resumed = next(event for event in later if event["event"] == "resumed")
    restored = moment_of(resumed)
    since = next((moment_of(event) for event in reversed(events) if _resumes_before(event, asked)), 0.0)
    begun = max((int(event["step"]) for event in events if _resumes_before(event, asked)), default=0)
    taken = bisect_right(times, last) - bisect_left(times, since)
    repeated = taken // together + begun - int(resumed["step"])
    return Resize(last - asked, ended - last, restored - ended, first - restored, repeated)


def _resumes_before(event: Mapping[str, Any], moment: float) -> bool:
    return event["event"] == "resumed" and moment_of(event) < moment


def measure_resizes(training: Training, kind: str, fewest: int, most: int) -> dict[str, Resize]:
    """Changes the number of ps or of mirrored workers through a checkpoint, and back."""
    role, _ = RESIZES[kind]
    workers, resizes = {"ps": (2, 2), "mirrored": (fewest, most)}[kind], {}
    training.go_on_until(training.await_steps(workers[0]) + _SETTLE)
    for before, after, together in ((fewest, most, workers[0]), (most, fewest, workers[1])):
        asked, done = training.scale(after, role)
        training.go_on_until(done + _AFTER)
        times = sorted(moment for own in training.stamps().values() for moment in own)
        events = training.events()
        resizes[f"{before} → {after}"] = resize_of(times, asked, events, together=together if kind == "mirrored" else 1)
    training.stop()
    return resizes


@dataclass(frozen=True)
class Stall:
    """What stopped tasks cost.

    Args:
        recovery: seconds from SIGCONT until the steps of all workers have their usual rate again.
        missed: seconds of usual steps that were not taken after SIGCONT.
    """

    recovery: float
    missed: float


def recovery_of(times: Sequence[float], usual: float, continued: float) -> Stall:
    """Measures how fast steps are again.

    Args:
        times: of the steps of all workers.
        usual: steps per second before.
        continued: when the tasks were continued.

    Raises:
        RunFailed: they do not reach the usual rate.
    """
    later = [moment for moment in times if moment >= continued]
    missed = _RECOVERY - sum(moment < continued + _RECOVERY for moment in later) / usual
    for begin in [continued, *later]:
        if begin > continued + _RECOVERY:
            break
        if bisect_left(later, begin + _WINDOW) - bisect_left(later, begin) >= _FULL * usual * _WINDOW:
            return Stall(begin - continued, missed)
    raise RunFailed(f"the rate stayed below {_FULL:.0%} of {usual:.0f} steps/s for {_RECOVERY:.0f} s")


def measure_stalls(training: Training, workers: int, seconds: float) -> dict[str, Stall]:
    """Stops a worker, the chief and all tasks with SIGSTOP, one after the other, and continues them."""
    training.go_on_until(training.await_steps(workers) + _SETTLE + _QUIET)
    stalls = {}
    for name, pids in {
        "a worker": training.pids("worker")[:1],
        "the chief": training.pids("chief"),
        "all tasks": training.pids(),
    }.items():
        stopped = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        continued = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        training.go_on_until(continued + _RECOVERY + _WINDOW)
        times = sorted(moment for own in training.stamps().values() for moment in own)
        usual = sum(stopped - _QUIET <= moment < stopped for moment in times) / _QUIET
        stalls[name] = recovery_of(times, usual, continued)
    return stalls


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each mode in each round, and prints a table."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    rows = []
    for _ in range(arguments.rounds):
        for mode in arguments.modes or (RESIZES if arguments.checkpoint else ["async"] if arguments.data else MODES):
            rows += _measure(mode, arguments)
            log(rows[-1])
    columns = _columns(arguments)
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    publish("benchmarks.elastic", argv, "\n".join([*head, *rows]))


_CHANGE_COLUMNS = (
    "updates",
    "first step of each worker that joins, s",
    "each one has left, s",
    "longest pause of the others: join, s",
    "leave, s",
    "nothing, s",
    "machine used by others",
)
_RESIZE_COLUMNS = (
    "what changes",
    "tasks",
    "no step, s",
    "save and exit, s",
    "start, build and restore, s",
    "trace to the first step, s",
    "steps repeated",
    "machine used by others before",
)
_START_COLUMNS = ("updates", f"longest pause in the first {_BEGINNING:.0f} s, s", "steps in these")
_STALL_COLUMNS = ("updates", "stopped", "full speed after, s", "steps missed, in s")


def _columns(arguments: argparse.Namespace) -> Sequence[str]:
    """Returns the heads of the table."""
    if arguments.start:
        return _START_COLUMNS
    if arguments.stall:
        return _STALL_COLUMNS
    return _RESIZE_COLUMNS if arguments.checkpoint else _CHANGE_COLUMNS


def _measure(mode: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the rows of a training."""
    with tempfile.TemporaryDirectory(prefix="tfdist-stamps-") as folder:
        stamps = Path(folder, "stamps")
        if arguments.checkpoint:
            return _measure_resizes(mode, arguments, stamps)
        cluster = CLUSTER.format(
            fewest=arguments.fewest if not arguments.stall else arguments.most,
            most=arguments.most,
        )
        recipe = RECIPE.format(
            module=PROGRAM.stem,
            wait=arguments.wait,
            layers=arguments.layers,
            stamps=stamps,
            steps=arguments.steps_per_epoch,
            updates=json.dumps(MODES[mode]),
        )
        if arguments.data:
            cluster = SERVED.format(fewest=arguments.fewest, most=arguments.most)
            recipe = recipe.replace("share: copy", "share: service").replace(
                "params: {", f"params: {{examples: {EXAMPLES}, "
            )
        with launched(cluster, recipe, PROGRAM, checkout=arguments.checkout) as run:
            training = Training(run, stamps)
            if arguments.start:
                longest, steps = measure_start(training, arguments.fewest)
                return [f"| {mode} | {longest:.2f} | {steps} |"]
            if arguments.data:
                return [_row("data workers", measure_data_workers(training, arguments.fewest, arguments.most))]
            if arguments.stall:
                stalls = measure_stalls(training, arguments.most, arguments.stall)
                return [
                    f"| {mode} | {name} | {stall.recovery:.2f} | {stall.missed:.2f} |" for name, stall in stalls.items()
                ]
            return [_row(mode, measure_changes(training, arguments.fewest, arguments.most))]


def _measure_resizes(kind: str, arguments: argparse.Namespace, stamps: Path) -> list[str]:
    """Returns the rows of a training that changes through checkpoints."""
    _, roles = RESIZES[kind]
    cluster = f"roles: {roles.format(fewest=arguments.fewest)}\nrecipe: recipe.yaml\n"
    recipe = RECIPE.format(
        module=PROGRAM.stem, wait=arguments.wait, layers=arguments.layers, stamps=stamps, steps=FOREVER, updates="{}"
    )
    usage = Usage.now()
    time.sleep(1)  # to see what others use
    others = usage.others()
    with launched(
        cluster, f"{recipe}checkpoint: {{every_seconds: 600}}\n", PROGRAM, checkout=arguments.checkout
    ) as run:
        resizes = measure_resizes(Training(run, stamps), kind, arguments.fewest, arguments.most)
    return [
        f"| {kind} | {tasks} | {each.pause:.1f} | {each.save:.1f} | {each.start:.1f} | {each.first:.1f} "
        f"| {each.repeated} | {others:.0%} |"
        for tasks, each in resizes.items()
    ]


def _row(mode: str, result: Result) -> str:
    join, leave = result.join, result.leave
    cells = [
        mode,
        ", ".join(f"{each:.1f}" for each in join.took),
        ", ".join(f"{each:.2f}" for each in leave.took),
        f"{join.pause:.2f}",
        f"{leave.pause:.2f}",
        f"{result.quiet:.2f}",
        f"{result.others:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument(
        "modes",
        nargs="*",
        metavar="MODE",
        help=f"{', '.join(MODES)}; with --checkpoint {', '.join(RESIZES)} (default: all)",
    )
    parser.add_argument("--fewest", type=int, default=1, help="workers at the start and at the end (default: 1)")
    parser.add_argument("--most", type=int, default=3, help="workers in between (default: 3)")
    parser.add_argument("--rounds", type=int, default=1, help="trainings of each mode, in turns (default: 1)")
    parser.add_argument("--wait", type=float, default=20.0, help="milliseconds that a step waits (default: 20)")
    parser.add_argument("--layers", type=int, default=4, help="dense layers of the model (default: 4)")
    parser.add_argument("--start", action="store_true", help="measure the longest pause at the start instead")
    parser.add_argument(
        "--steps-per-epoch", type=int, default=FOREVER, help="steps in an epoch (default: one epoch without end)"
    )
    parser.add_argument(
        "--stall", type=float, metavar="SECONDS", help="stop tasks with SIGSTOP instead, for so many seconds"
    )
    parser.add_argument(
        "--checkpoint", action="store_true", help="change ps and mirrored workers instead, through a checkpoint"
    )
    parser.add_argument("--data", action="store_true", help="change data workers instead, beside one worker")
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="measure tfdist from this checkout (default: this one)"
    )
    return parser


if __name__ == "__main__":
    main()
