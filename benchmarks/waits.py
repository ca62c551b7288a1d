"""`python -m benchmarks.waits`: steps that wait without using the processor, as for an accelerator.

With many workers on few cores, such steps show what everything but the computation costs: efficiency is the part of
the workers' time that is waiting. `tfdist launch` starts the tasks, and /proc has their processor time.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.cluster import ROOT, RunFailed, base_environment
from benchmarks.command import end_on_sigterm, interleaved, publish
from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.machine import Usage
from tfdist_cli.protocol.run_files import read_lines

PROGRAM = Path(__file__).parent / "programs" / "waiting.py"
CLUSTER = """
strategy: {strategy}
roles: {{{roles}}}
recipe: recipe.yaml
"""
RECIPE = """
module: {module}
params: {{wait: {wait}, batch: {batch}}}
train: {{batch_size: {batch}, epochs: 1000000, steps_per_epoch: 1000000, share: copy}}
evaluate: null
"""
BATCH = 8
"""A worker's batch."""
_START, _SETTLE, _END = 180.0, 5.0, 30.0
"""Seconds that a cluster may take to its first report, that it then trains unmeasured, and that it may take to end."""


class Training(Protocol):
    """What `launched` trains."""

    @property
    def wait(self) -> float | list[float]:
        """Milliseconds that a step waits; or a number for each worker."""

    def cluster(self) -> str:
        """Returns the cluster file."""


@dataclass(frozen=True)
class Case:
    """A cluster whose steps wait.

    Args:
        placement: `ps` or `mirrored`.
        workers: the number of workers.
        wait: milliseconds that a step waits.
        ps: the number of ps.
    """

    placement: str
    workers: int
    wait: float
    ps: int = 1

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads `ps:16:107`, `ps:16:107:2` for 2 ps, or `mirrored:8:107`.

        Raises:
            ValueError: it is none of these.
        """
        placement, workers, wait, *ps = text.split(":")
        if placement not in ("ps", "mirrored") or len(ps) > (placement == "ps"):
            raise ValueError(text)
        return cls(placement, int(workers), float(wait), *map(int, ps))

    @property
    def title(self) -> str:
        """Its name in the table."""
        tasks = f"chief, {self.ps} ps, {self.workers} workers" if self.placement == "ps" else f"{self.workers} workers"
        return f"{self.placement}, {tasks}, {self.wait:g} ms"

    def cluster(self) -> str:
        """Returns its cluster file."""
        workers = f"worker: {{replicas: {self.workers}}}"
        if self.placement == "mirrored":
            return CLUSTER.format(strategy="multi_worker_mirrored", roles=workers)
        return CLUSTER.format(strategy="parameter_server", roles=f"chief: {{}}, ps: {{replicas: {self.ps}}}, {workers}")


FIGURES = [Case("ps", 16, 107), Case("mirrored", 8, 107), Case("ps", 16, 100)]
"""Those whose results are published."""


@dataclass(frozen=True)
class Result:
    """What a training did within some time.

    Args:
        rate: worker steps per second, of all workers together.
        efficiency: the part of the workers' time that was waiting.
        cost: processor milliseconds per worker step, of all tasks of a role together.
        busiest: the cores that the busiest task of each role used.
        cores: the part of the machine that all tasks used.
        others: the part that other processes used.
    """

    rate: float
    efficiency: float
    cost: Mapping[str, float]
    busiest: Mapping[str, float]
    cores: float
    others: float


def rate_of(reports: Sequence[tuple[float, float]]) -> float:
    """Returns the steps per second of a line through all reports.

    Workers report several steps at a time: the first and the last report alone would be up to that many steps off.

    Args:
        reports: seconds, and steps until then.

    Raises:
        RunFailed: there are fewer than three.
    """
    if len(reports) < 3:
        raise RunFailed(f"{len(reports)} reports: more --seconds are needed")
    return statistics.linear_regression(*zip(*reports, strict=True)).slope


def result_of(case: Case, rate: float, used: Mapping[str, float], seconds: float, others: float) -> Result:
    """Returns the figures of a training.

    Args:
        case: what was trained.
        rate: worker steps per second.
        used: processor seconds of each task within `seconds`.
        seconds: how long it was measured.
        others: the part of the machine that other processes used.
    """
    cost: dict[str, float] = {}
    busiest: dict[str, float] = {}
    for name, spent in used.items():
        role = name.partition(":")[0]
        cost[role] = cost.get(role, 0.0) + 1000 * spent / seconds / rate
        busiest[role] = max(busiest.get(role, 0.0), spent / seconds)
    cores = sum(used.values()) / seconds / (os.cpu_count() or 1)
    return Result(rate, rate * case.wait / 1000 / case.workers, cost, busiest, cores, others)


def measure(case: Case, settings: Sequence[str], seconds: float, checkout: Path) -> Result:
    """Trains, and measures when the training has gone on for some seconds.

    Args:
        case: what is trained.
        settings: `--set` options of `tfdist launch`.
        seconds: how long to measure.
        checkout: the checkout whose `tfdist_cli` trains.

    Raises:
        RunFailed: the training failed, or did not begin in time.
    """
    with launched(case.cluster(), recipe_of(case), PROGRAM, settings=settings, checkout=checkout) as run:
        begun = run.await_settled()
        before, usage = run.used(), Usage.now()
        run.await_report(begun + seconds, 3 * seconds)
        after, elapsed = run.used(), time.monotonic() - usage.moment
        spent = {name: after[name] - before[name] for name in before}
        own = sum(spent.values()) / elapsed / (os.cpu_count() or 1)
        others = max(0.0, usage.others() - own)
        reports = [each for each in run.reports() if each[0] >= begun]
    workers = case.workers if case.placement == "mirrored" else 1
    return result_of(case, workers * rate_of(reports), spent, elapsed, others)


def recipe_of(case: Training) -> str:
    """Returns the recipe of steps that wait."""
    return RECIPE.format(module=PROGRAM.stem, wait=case.wait, batch=BATCH)


@dataclass(frozen=True)
class Run:
    """A training that has been launched.

    Args:
        launch: the process of `tfdist launch`.
        folder: its run directory.
        log: its output.
    """

    launch: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def reports(self) -> list[tuple[float, float]]:
        """Returns seconds since the training began, and the global step, for each report."""
        return [(line["seconds"], line["step"]) for line in read_lines(self.folder / "metrics.jsonl")]

    def await_report(self, after: float, timeout: float) -> float:
        """Waits for a report `after` seconds of training or later, and returns its seconds.

        Raises:
            RunFailed: the training ended, or `timeout` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while not (later := [seconds for seconds, _ in self.reports() if seconds >= after]):
            if self.launch.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"no report after {after:.0f} s:\n{self.log.read_text(encoding='utf-8')[-4000:]}")
            time.sleep(0.05)
        return later[0]

    def await_settled(self) -> float:
        """Waits until the training has gone on for some time, and returns the seconds since it began."""
        return self.await_report(self.await_report(0.0, _START) + _SETTLE, 10 * _SETTLE)

    def used(self) -> dict[str, float]:
        """Returns the processor seconds so far of each task and of the launcher."""
        events = read_lines(self.folder / "events.jsonl")
        pids = {event["task"]: event["pid"] for event in events if event.get("event") == "started"}
        pids["launcher"] = self.launch.pid
        times = {task: psutil.Process(pid).cpu_times() for task, pid in pids.items()}
        return {task: spent.user + spent.system for task, spent in times.items()}


@contextmanager
def launched(
    cluster: str, recipe: str, program: Path, *, settings: Sequence[str] = (), checkout: Path = ROOT
) -> Iterator[Run]:
    """Launches a training; it is stopped at the end.

    Args:
        cluster: the cluster file's text.
        recipe: the recipe's.
        program: the recipe's module.
        settings: `--set` options.
        checkout: the checkout whose `tfdist_cli` trains.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(cluster, encoding="utf-8")
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        (folder / program.name).symlink_to(program)
        options = ["--run-dir", str(folder / "run"), "--shutdown-timeout", "5"]
        options += [option for setting in settings for option in ("--set", setting)]
        with (folder / "log").open("wb") as output:
            launch = subprocess.Popen(
                [sys.executable, "-m", "tfdist_cli", "launch", str(folder / "cluster.yaml"), *options],
                cwd=checkout,
                env=base_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Run(launch, folder / "run", folder / "log")
        finally:
            launch.send_signal(signal.SIGTERM)
            try:
                launch.wait(timeout=_END)
            except subprocess.TimeoutExpired:
                launch.send_signal(signal.SIGTERM)  # the second one ends all tasks at once
                launch.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each case in each round, and prints a table."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    results = interleaved(
        arguments.cases or FIGURES,
        arguments.rounds,
        lambda case: measure(case, arguments.settings, arguments.seconds, arguments.checkout),
        lambda case, result: f"{case.title}: {_shown([result])}",
    )
    publish("benchmarks.waits", argv, table(results))


def table(results: Mapping[Case, Sequence[Result]]) -> str:
    """Returns the results as a Markdown table."""
    rows = [f"| {' | '.join(['steps', *_COLUMNS])} |", f"|{'---|' * (len(_COLUMNS) + 1)}"]
    rows += [f"| {case.title} | {_shown(each)} |" for case, each in results.items()]
    return "\n".join(rows)


_COLUMNS = (
    "steps/s of all workers",
    "efficiency",
    "processor ms a step: all tasks of a role",
    "cores of the busiest task",
    "machine used by the tasks",
    "by others",
)


def _shown(results: Sequence[Result]) -> str:
    """Returns the cells of a row: medians, and the range of the efficiency."""
    efficiency = Spread.of([result.efficiency for result in results])
    cells = [
        f"{statistics.median(result.rate for result in results):.1f}",
        efficiency.shown(2),
        _by_role([result.cost for result in results]),
        _by_role([result.busiest for result in results]),
        f"{statistics.median(result.cores for result in results):.0%}",
        f"{max(result.others for result in results):.0%}",
    ]
    return " | ".join(cells)


def _by_role(values: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(f"{role} {statistics.median(each[role] for each in values):.2f}" for role in values[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        type=Case.parse,
        metavar="CASE",
        help="PLACEMENT:WORKERS:MILLISECONDS, as in ps:16:107, ps:16:107:2 (2 ps), mirrored:8:107 (default: these "
        "and ps:16:100)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="trainings of each case, in turns (default: 1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure each (default: 20)")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="passed to tfdist launch"
    )
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="measure tfdist from this checkout (default: this one)"
    )
    return parser


if __name__ == "__main__":
    main()
