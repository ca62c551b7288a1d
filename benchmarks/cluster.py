"""Starts a program as every task of a fresh cluster on this machine, and hands back what it measured."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.workload import Workload
from tfdist_cli.plan import MALLOC

ROOT = Path(__file__).resolve().parent.parent
LEAVING_SECONDS = 30.0
"""How long mirrored workers may take to end after the reporting one."""
CLUSTER_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "OMP_NUM_THREADS": "1"}
"""What tfdist's own plan gives a task where as many tasks compute as there are cores."""


class RunFailed(Exception):
    """A task ended that should not have, or no result came in time."""


@dataclass(frozen=True)
class Task:
    """A started task."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Timing:
    """What a program measured.

    Args:
        steps_per_second: over the timed epochs.
        logs: the last epoch's loss and metrics.
    """

    steps_per_second: float
    logs: dict[str, float]


def run(
    program: str, roles: Mapping[str, int], workload: Workload, *, python: str = sys.executable, timeout: float = 300.0
) -> Timing:
    """Runs a program once in a cluster of its own.

    Args:
        program: the module that every task runs.
        roles: tasks of each role; none is one process with TensorFlow's own choice of threads.
        workload: what it trains.
        python: the interpreter that runs it.
        timeout: seconds for all of it.

    Raises:
        RunFailed: with the end of the log of the task at fault.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder, ExitStack() as stack:
        result = Path(folder, "result.json")
        tasks = []
        for name, variables in _environments(roles).items():
            environ = base_environment() | variables | replace(workload, result=str(result)).as_environment()
            if roles and program == OURS:
                environ["GLIBC_TUNABLES"] = MALLOC
            tasks.append(_start(name, [python, "-m", program], environ, Path(folder)))
            stack.callback(_end, tasks[-1].process)
        _wait(tasks, serving="ps" in roles, deadline=time.monotonic() + timeout)
        return Timing(**json.loads(result.read_text(encoding="utf-8")))


OURS = "benchmarks.programs.tfdist_fit"
"""What runs as tfdist's plan has it, beside the threads, which all clusters have alike."""


def base_environment() -> dict[str, str]:
    """This process's environment without what would change a run: proxies, GPUs, threads, another cluster."""
    dropped = {"TF_CONFIG", "TFDIST_STRATEGY", "TFDIST_RUN_DIR", *CLUSTER_THREADS}
    kept = {name: value for name, value in os.environ.items() if name not in dropped and "proxy" not in name.lower()}
    return kept | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def _environments(roles: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Each task's own variables; the one that reports comes first."""
    if not roles:
        return {"single": {}}
    addresses = iter([f"127.0.0.1:{port}" for port in free_ports(sum(roles.values()))])
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in roles.items()}
    return {
        f"{role}:{index}": CLUSTER_THREADS
        | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}
        for role, count in roles.items()
        for index in range(count)
    }


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
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
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Task(name, process, log)


def _wait(tasks: list[Task], *, serving: bool, deadline: float) -> None:
    """Until the first task has ended, and the others too where they don't just serve it."""
    first, *others = tasks
    while first.process.poll() is None:
        _check(tasks, deadline)
        time.sleep(0.05)
    deadline = min(deadline, time.monotonic() + LEAVING_SECONDS)
    while not serving and any(task.process.poll() is None for task in others):
        _check(tasks, deadline)
        time.sleep(0.05)
    _check(tasks, deadline + 1)


def _check(tasks: list[Task], deadline: float) -> None:
    for task in tasks:
        if task.process.poll():
            raise RunFailed(f"{task.name} ended with {task.process.returncode}:\n{_tail(task.log)}")
    if time.monotonic() > deadline:
        raise RunFailed(f"no result in time; {tasks[0].name} said:\n{_tail(tasks[0].log)}")


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a task's process group; a server has nothing to save."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
