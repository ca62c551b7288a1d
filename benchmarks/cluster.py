"""Runs a program as every task of a cluster on this machine. The cluster can be paused and resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.workload import Lap, Workload
from tfdist_cli.launch.local.affinity import bind
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.task_environment import MALLOC

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parent.parent
CLUSTER_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "OMP_NUM_THREADS": "1"}
"""What tfdist's plan gives a task if as many tasks compute as there are cores."""


class RunFailed(Exception):
    """A task exited, or an epoch did not end in time."""


@dataclass(frozen=True)
class Task:
    """A started task."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Cluster:
    """A program that trains on its own cluster.

    Args:
        program: the module that every task runs.
        roles: tasks of each role; none is one process with TensorFlow's own choice of threads.
        workload: what it trains. Every program has the malloc settings of tfdist's plan, and every task of a cluster
            its threads.
        bound: whether each worker stays on its own cores, as with tfdist's plan beside a ps.
        python: the interpreter that runs it.
        checkout: the checkout whose `tfdist_cli` it uses.
    """

    def __init__(
        self,
        program: str,
        roles: Mapping[str, int],
        workload: Workload,
        *,
        bound: bool = False,
        python: str = sys.executable,
        checkout: Path = ROOT,
    ) -> None:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-benchmark-")))
            (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
            (folder / "tfdist_cli").symlink_to(checkout / "tfdist_cli")
            self._record = folder / "record.jsonl"
            own = replace(workload, record=str(self._record)).as_environment()
            self._tasks = []
            for name, variables in _environments(roles).items():
                environ = base_environment() | variables | own | {"GLIBC_TUNABLES": MALLOC}
                self._tasks.append(_start(name, [python, "-m", program], environ, folder))
                stack.callback(_end, self._tasks[-1].process)
            for process, cores in _cores(self._tasks) if bound else ():
                bind(process.pid, cores)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stop(self) -> None:
        """Pauses all tasks until `go`."""
        self._signal(signal.SIGSTOP)

    def go(self) -> None:
        """Resumes the tasks."""
        self._signal(signal.SIGCONT)

    def laps(self) -> list[Lap]:
        """Returns the ends of epochs so far.

        Raises:
            RunFailed: a task exited. The message has the end of its log.
        """
        for task in self._tasks:
            if (code := task.process.poll()) is not None:
                raise RunFailed(f"{task.name} exited with code {code}:\n{_tail(task.log)}")
        written = self._record.read_text(encoding="utf-8") if self._record.exists() else ""
        return [Lap(**json.loads(line)) for line in written.splitlines(keepends=True) if line.endswith("\n")]

    def await_laps(self, count: int, timeout: float = 300.0) -> None:
        """Waits until `count` epochs have ended.

        Raises:
            RunFailed: a task exited, or `timeout` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while len(self.laps()) < count:
            if time.monotonic() > deadline:
                first = self._tasks[0]
                raise RunFailed(
                    f"{count} epochs have not ended in {timeout:.0f} s. The log of {first.name}:\n{_tail(first.log)}"
                )
            time.sleep(0.05)

    def _signal(self, which: signal.Signals) -> None:
        for task in self._tasks:
            os.killpg(task.process.pid, which)


def base_environment() -> dict[str, str]:
    """Returns this process's environment without what would change a run: proxies, GPUs, threads, `TF_CONFIG`."""
    dropped = {"TF_CONFIG", "TFDIST_STRATEGY", "TFDIST_RUN_DIR", *CLUSTER_THREADS}
    kept = {name: value for name, value in os.environ.items() if name not in dropped and "proxy" not in name.lower()}
    return kept | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def _environments(roles: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Returns each task's own variables; the task that reports is the first."""
    if not roles:
        return {"single": {}}
    addresses = iter([f"127.0.0.1:{port}" for port in free_ports(sum(roles.values()))])
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in roles.items()}
    strategy = {"TFDIST_STRATEGY": "model_parallel"} if "chief" in roles and "ps" not in roles else {}
    return {
        f"{role}:{index}": CLUSTER_THREADS
        | strategy
        | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}
        for role, count in roles.items()
        for index in range(count)
    }


def _cores(tasks: Sequence[Task]) -> Iterator[tuple[subprocess.Popen[bytes], tuple[int, ...]]]:
    """Yields the workers and their cores; none if there are fewer cores than workers, or one worker."""
    workers = [task.process for task in tasks if task.name.startswith("worker:")]
    cores = Machine.here().core_ids
    each = len(cores) // len(workers) if len(workers) > 1 else 0
    for index, process in enumerate(workers if each else ()):
        yield process, cores[index * each : (index + 1) * each]


def free_ports(count: int) -> list[int]:
    """Returns ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


def _start(name: str, argv: list[str], environ: dict[str, str], folder: Path) -> Task:
    log = folder / f"{name.replace(':', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Task(name, process, log)


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a task's process group; a server has nothing to save."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
