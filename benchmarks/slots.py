"""`python -m benchmarks.slots spark|ray`: trainings in Spark or Ray, beside the same ones with the local launcher.

Each round starts a standalone Spark of two workers, or a Ray cluster of two nodes: those of the tests. On it, and with
the local launcher, two mirrored workers train the digits twice. The first training goes on to its end. In the second
one, a checkpoint is awaited, and then an executor, a node, or a local worker is killed. When the training takes steps
again, the launcher gets SIGINT, as by Ctrl-C.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.cluster import ROOT, RunFailed, base_environment
from benchmarks.command import end_on_sigterm, log, publish
from benchmarks.elastic import moment_of
from tests.support.lab import ray, spark
from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.machine import Usage
from tfdist_cli.protocol.run_files import read_lines

CLUSTER: Mapping[str, Any] = {
    "name": "digits",
    "strategy": "multi_worker_mirrored",
    "roles": {"worker": {"replicas": 2}},
    "recipe": str(ROOT / "recipes" / "digits_mlp.yaml"),
}
LONG = {"train.epochs": 1_000_000, "evaluate": "null", "export": "null", "checkpoint.every_steps": 200}
_PATIENCE = 240.0
"""Seconds that anything may take."""
_POLL = 0.02
_SAMPLE = 2.0
"""Seconds over which it is measured what others use."""
_GONE = 20.0
"""Seconds in which the last process has to end after the launcher."""


class Engine(Protocol):
    """What runs the tasks."""

    @property
    def keys(self) -> Mapping[str, Any]:
        """The keys of the cluster file that choose it."""

    def kill(self, worker: int, /) -> None:
        """Kills what runs a worker: its process, if nothing else."""

    def slots(self) -> list[psutil.Process]:
        """Returns the processes of the slots, which are not the launcher's."""


class Local:
    """The local launcher."""

    keys: Mapping[str, Any] = {"launcher": "local"}

    def kill(self, worker: int, /) -> None:
        os.kill(worker, signal.SIGKILL)

    def slots(self) -> list[psutil.Process]:
        return []


class Spark:
    """A standalone Spark of two workers with two cores each.

    Args:
        stack: ends it.
    """

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-spark-")))
        self._lab = spark.Lab(folder, stack)
        self.keys: Mapping[str, Any] = {"launcher": "spark", "spark": {"master_url": self._lab.master}}

    def kill(self, _worker: int, /) -> None:
        """Kills an executor. Its host starts another one."""
        self._lab.executors()[0].kill()

    def slots(self) -> list[psutil.Process]:
        return list(self._lab.executors())


class Ray:
    """A Ray of two nodes with two cores each, and a head node without cores.

    Args:
        stack: ends it.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._lab = stack.enter_context(closing(ray.Lab()))
        for _ in range(2):
            self._lab.add_node()
        settings = {"address": self._lab.address, "placement": "spread"}
        self.keys: Mapping[str, Any] = {"launcher": "ray", "ray": settings}

    def kill(self, _worker: int, /) -> None:
        """Kills a node. The other one has cores enough for both workers."""
        self._lab.remove_node()

    def slots(self) -> list[psutil.Process]:
        return list(self._lab.slots())


ENGINES: Mapping[str, tuple[Callable[[ExitStack], Engine], Callable[[], str]]] = {
    "spark": (Spark, spark.missing),
    "ray": (Ray, ray.missing),
}
"""How each is started, and why it cannot be."""


@dataclass(frozen=True)
class Figures:
    """The figures of both trainings of a launcher.

    Args:
        first_step: seconds from the start of `tfdist launch` to the first report of steps.
        whole: seconds to its exit after 20 epochs.
        accuracy: that of the test data at the end.
        noticed: seconds from the kill until the launcher knows of it.
        restored: seconds from the kill until the checkpoint is restored.
        resumed: seconds from the kill to the next report of steps.
        ended: seconds from SIGINT to the exit of `tfdist launch`.
        before: processes of the launch and its slots at the time of SIGINT.
        last: seconds from SIGINT to the end of the last one of them.
        left: those that still run 20 s after the exit.
        others: the part of the machine that other programs used before.
    """

    first_step: float
    whole: float
    accuracy: float
    noticed: float
    restored: float
    resumed: float
    ended: float
    before: int
    last: float
    left: int
    others: float


@dataclass(frozen=True)
class Training:
    """A launch.

    Args:
        launch: the process of `tfdist launch`.
        folder: its current folder, with the run directory.
        begun: when it was started, in seconds since 1970.
    """

    launch: subprocess.Popen[bytes]
    folder: Path
    begun: float

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Returns the lines of the event log of a kind so far."""
        return [line for line in read_lines(self.folder / "run" / "events.jsonl") if line.get("event") == kind]

    def metrics(self, split: str = "train", after: float = 0.0) -> list[dict[str, Any]]:
        """Returns the reports about a split so far, from some time on, in seconds since 1970."""
        lines = read_lines(self.folder / "run" / "metrics.jsonl")
        return [line for line in lines if line["split"] == split and moment_of(line) > after]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Waits until a condition returns something, which no event announces, and returns it.

        Raises:
            RunFailed: the launch ended, or the time is over.
        """
        deadline = time.monotonic() + _PATIENCE
        while not (found := condition()):
            if self.launch.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"nothing after {_PATIENCE:.0f} s:\n{self._log()}")
            time.sleep(_POLL)
        return found

    def await_first_step(self) -> float:
        """Waits for the first report, and returns the seconds until then."""
        return moment_of(self.until(self.metrics)[0]) - self.begun

    def await_end(self, expected: int) -> float:
        """Waits until the launch exits, and returns when it has.

        Raises:
            RunFailed: it exited with another code.
        """
        if self.launch.wait(_PATIENCE) != expected:
            raise RunFailed(f"tfdist launch exited with code {self.launch.returncode}:\n{self._log()}")
        return time.time()

    def processes(self, engine: Engine) -> list[psutil.Process]:
        """Returns the processes of the launch and of the slots."""
        roots = [psutil.Process(self.launch.pid), *engine.slots()]
        return list({each for root in roots for each in (root, *root.children(recursive=True))})

    def _log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")[-4000:]


@contextmanager
def launched(engine: Engine, settings: Mapping[str, Any]) -> Iterator[Training]:
    """Launches the digits; what is left of the launch at the end is killed."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(json.dumps({**CLUSTER, **engine.keys}), encoding="utf-8")
        options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with (folder / "log").open("wb") as output:
            begun = time.time()
            launch = subprocess.Popen(
                [sys.executable, "-m", "tfdist_cli", "launch", "cluster.yaml", "--run-dir", "run", *options],
                cwd=folder,
                env=base_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Training(launch, folder, begun)
        finally:
            if launch.poll() is None:
                launch.kill()  # its tasks follow
                launch.wait()


def measure(engine: Engine) -> Figures:
    """Trains twice."""
    usage = Usage.now()
    time.sleep(_SAMPLE)
    others = usage.others()
    with launched(engine, {}) as training:
        first = training.await_first_step()
        whole = training.await_end(0) - training.begun
        accuracy = training.metrics("test")[-1]["values"]["accuracy"]
    with launched(engine, LONG) as training:
        training.until(lambda: training.events("checkpoint"))
        worker = training.events("started")[-1]["pid"]
        killed = time.time()
        engine.kill(worker)
        restored = moment_of(training.until(lambda: training.events("resumed"))[-1])
        resumed = moment_of(training.until(lambda: training.metrics(after=restored))[0])
        noticed = moment_of(training.events("exited")[0])
        running = training.processes(engine)
        interrupted = time.time()
        training.launch.send_signal(signal.SIGINT)
        ended = training.await_end(128 + signal.SIGINT)
        _, left = psutil.wait_procs(running, timeout=_GONE)
        last = time.time()
    since = noticed - killed, restored - killed, resumed - killed
    return Figures(
        first, whole, accuracy, *since, ended - interrupted, len(running), last - interrupted, len(left), others
    )


def table(results: Mapping[str, Sequence[Figures]]) -> str:
    """Returns the results of all launchers as a Markdown table: medians and ranges."""
    rows = [f"| {' | '.join(('launcher', *_COLUMNS))} |", f"|{'---|' * (len(_COLUMNS) + 1)}"]
    return "\n".join([*rows, *(f"| {name} | {_shown(each)} |" for name, each in results.items())])


_COLUMNS = (
    "first step, s",
    "20 epochs and exit, s",
    "test accuracy",
    "killed: noticed, s",
    "checkpoint restored, s",
    "next step, s",
    "Ctrl-C: exit, s",
    "last process ends, s",
    "processes before",
    "left",
    "machine used by others before",
)


def _shown(results: Sequence[Figures]) -> str:
    def of(name: str, digits: int) -> str:
        values = [getattr(each, name) for each in results]
        return Spread.of(values).shown(digits) if len(values) > 1 else f"{values[0]:.{digits}f}"

    seconds = ("noticed", "restored", "resumed", "ended", "last")
    cells = [of("first_step", 1), of("whole", 1), of("accuracy", 4), *(of(name, 1) for name in seconds)]
    cells += [f"{statistics.median(each.before for each in results):.0f}", str(max(each.left for each in results))]
    cells.append(f"{max(each.others for each in results):.0%}")
    return " | ".join(cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the engine and the local launcher in each round, every other one in reverse order; prints a table."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    start, missing = ENGINES[arguments.engine]
    if reason := missing():
        sys.exit(reason)
    results: dict[str, list[Figures]] = {arguments.engine: [], "local": []}
    for turn in range(arguments.rounds):
        for name in list(results)[:: -1 if turn % 2 else 1]:
            with ExitStack() as stack:
                results[name].append(measure(Local() if name == "local" else start(stack)))
            log(f"{name}: {results[name][-1]}")
    publish("benchmarks.slots", argv, table(results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=__doc__)
    parser.add_argument("engine", choices=ENGINES, help="what has the slots; it has to be installed")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each launcher, in turns (default: 3)")
    return parser


if __name__ == "__main__":
    main()
