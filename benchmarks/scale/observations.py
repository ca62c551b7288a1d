"""Measures trainings and launches on this machine, and derives the costs of the model from them."""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.cluster import ROOT, RunFailed, base_environment
from benchmarks.scale.model import Costs
from benchmarks.waits import Case, measure
from tfdist_cli.protocol.run_files import read_lines

FITTED = tuple(map(Case.parse, ("ps:2:100", "ps:8:100", "ps:8:200:2", "ps:8:200:4", "ps:16:1000")))
"""Trainings from which the costs are derived."""
VALIDATED = (*(Case("ps", workers, 500) for workers in (2, 4, 8, 16, 32, 64)), Case("ps", 32, 100), Case("ps", 64, 100))
"""Trainings that the model has not seen, and predicts. The last two need most of 2 cores, and all of them."""
APART = tuple(f"roles.{role}.env.TFDIST_SHARE_MEMORY='0'" for role in ("ps", "worker"))
"""Settings with which tasks exchange what they would exchange between hosts."""
RECORD = r"\036{\"kind\":\"beat\",\"computed\":1.0}\n"
_START = 120.0


@dataclass(frozen=True)
class Observation:
    """What a training cost.

    Args:
        workers: the number of workers.
        ps: the number of ps.
        wait: milliseconds that each step waits.
        rate: steps per second of all workers together.
        chief: processor milliseconds per second of the chief.
        servers: those of all ps together.
        computing: those of all workers together.
        launcher: those of the launcher.
        others: the part of the machine that other processes used.
    """

    workers: int
    ps: int
    wait: float
    rate: float
    chief: float
    servers: float
    computing: float
    launcher: float
    others: float


def observe(case: Case, seconds: float) -> Observation:
    """Trains, and measures.

    Raises:
        RunFailed: the training failed.
    """
    result = measure(case, APART, seconds, ROOT)
    spent = {role: cost * result.rate for role, cost in result.cost.items()}
    return Observation(
        case.workers,
        case.ps,
        case.wait,
        result.rate,
        spent["chief"],
        spent["ps"],
        spent["worker"],
        spent["launcher"],
        result.others,
    )


def fit(observations: Sequence[Observation]) -> Costs:
    """The costs that explain the observations best."""
    chief, chief_idle = _fit([((o.rate, o.workers), o.chief) for o in observations])
    ps, per_server, ps_idle = _fit([((o.rate, o.rate * o.ps, o.ps), o.servers) for o in observations])
    worker, per_ps, idle = _fit([((o.rate, o.rate * o.ps, o.workers), o.computing) for o in observations])
    (launcher,) = _fit([((1 + o.ps + o.workers,), o.launcher) for o in observations])
    return Costs(chief, ps, per_server, worker, per_ps, chief_idle, ps_idle, idle, launcher)


def _fit(rows: Iterable[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Factors, none negative, with the smallest sum of squared relative errors."""
    import numpy as np  # noqa: PLC0415 the predictions and the simulation work without it

    weighted = [([each / value for each in factors], 1.0) for factors, value in rows if value]
    left, right = np.array([row for row, _ in weighted]), np.array([value for _, value in weighted])
    used = list(range(left.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(left[:, used], right, rcond=None)
        if not used or min(found) >= 0:
            break
        used.pop(int(np.argmin(found)))
    factors = [0.0] * left.shape[1]
    for position, factor in zip(used, found, strict=True):
        factors[position] = float(factor)
    return tuple(factors)


def read(path: Path) -> list[Observation]:
    """Reads saved observations."""
    return [Observation(**line) for line in read_lines(path)] if path.exists() else []


def save(path: Path, observation: Observation) -> None:
    """Appends an observation to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(observation))}\n")


@dataclass(frozen=True)
class LauncherCosts:
    """What a launch of tasks that send records costs the launcher.

    Args:
        tasks: the number of tasks.
        records: records per second of all tasks together.
        start_seconds: seconds until all tasks had started.
        start_ms: processor milliseconds of the launcher for each task until then.
        idle_ms: processor milliseconds of the launcher per second afterwards.
        end_seconds: seconds from SIGTERM to the exit of the launcher.
        memory_kb: kilobytes of the launcher's memory for each task, beyond those of a launch of one task.
    """

    tasks: int
    records: float
    start_seconds: float
    start_ms: float
    idle_ms: float
    end_seconds: float
    memory_kb: float


def observe_launcher(tasks: int, period: float, seconds: float) -> LauncherCosts:
    """Launches tasks that send a heartbeat every `period` seconds and sleep; infinite for none.

    Raises:
        RunFailed: they do not start.
    """
    base, *_ = _launch(1, math.inf, 1.0)
    memory, begun, cpu, idle, ended = _launch(tasks, period, seconds)
    return LauncherCosts(
        tasks, tasks / period, begun, 1000 * cpu / tasks, 1000 * idle, ended, (memory - base) / max(1, tasks - 1) / 1024
    )


def _launch(tasks: int, period: float, seconds: float) -> tuple[float, float, float, float, float]:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as name:
        folder = Path(name)
        text = f"strategy: multi_worker_mirrored\nroles: {{worker: {{replicas: {tasks}}}}}\n"
        (folder / "cluster.yaml").write_text(text, encoding="utf-8")
        program = f'while :; do printf "{RECORD}" >&2; sleep {period}; done' if period < math.inf else "sleep 1000"
        argv = [sys.executable, "-m", "tfdist_cli", "launch", str(folder / "cluster.yaml")]
        argv += ["--run-dir", str(folder / "run"), "--shutdown-timeout", "5", "--", *shlex.split("sh -c"), program]
        with (folder / "log").open("wb") as log:
            begun = time.monotonic()
            launch = subprocess.Popen(argv, cwd=ROOT, env=base_environment(), stdout=log, stderr=log)
        try:
            _await_started(folder, tasks, launch, begun + _START)
            started = time.monotonic() - begun
            process = psutil.Process(launch.pid)
            cpu, since = _computed(process), time.monotonic()
            time.sleep(seconds)  # what is measured is a time in which nothing else happens
            idle = (_computed(process) - cpu) / (time.monotonic() - since)
            memory = float(process.memory_info().rss)
        finally:
            stopped = time.monotonic()
            launch.send_signal(signal.SIGTERM)
            launch.wait()
        return memory, started, cpu, idle, time.monotonic() - stopped


def _await_started(folder: Path, tasks: int, launch: subprocess.Popen[bytes], deadline: float) -> None:
    events = folder / "run" / "events.jsonl"
    while not events.exists() or events.read_bytes().count(b'"started"') < tasks:
        if launch.poll() is not None or time.monotonic() > deadline:
            raise RunFailed(f"not all tasks have started:\n{(folder / 'log').read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.05)  # nothing announces it


def _computed(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
