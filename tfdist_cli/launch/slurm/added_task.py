"""Where a task is in a running job that it has not been started with: it has a job of its own, or a place on a node.

The first task of a job writes the addresses of all to the run's directory. A task that is added finds them there. Its
own address is known to nobody before it starts: the chief learns it when the task asks to join.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slurm.task_environment import StepTask, first_port, number_of, visible_gpus
from tfdist_cli.plan.join_address import join_address
from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.strategies import may_join
from tfdist_cli.spec.task_id import TaskId

ADDRESSES_FILE = "slurm_addresses.json"
"""In the run's directory: the address of each task of the job that runs."""


def write_addresses(run_dir: Path, addresses: Mapping[TaskId, Address]) -> None:
    """Writes the addresses of a job's tasks, atomically.

    Raises:
        UsageError: the run's directory is not writable.
    """
    path = run_dir / ADDRESSES_FILE
    new = path.with_name(f".{path.name}.new")
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.write_text(json.dumps({str(task): str(address) for task, address in addresses.items()}) + "\n", "utf-8")
        new.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} is not writable on {socket.gethostname()}: {error.strerror}",
            code="run-dir-not-writable",
            hint="choose a run directory on a file system that all nodes share, with --run-dir",
        ) from error


def is_added(cluster: Cluster, task: TaskId, run_dir: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a task that the user names, and to which the file gives no address, is added to a run's job."""
    if "SLURM_JOB_ID" not in environ or cluster.role(task).hosts or not may_join(cluster.strategy, task.role):
        return False
    absent = bool(cluster.launcher_traits.jobs) and task not in cluster.tasks
    return absent or (run_dir / ADDRESSES_FILE).exists()


def find_added_task(cluster: Cluster, task: TaskId, run_dir: Path, environ: Mapping[str, str] = os.environ) -> StepTask:
    """Returns a task that is added to the job of a run.

    Raises:
        UsageError: the run has no job.
    """
    path = run_dir / ADDRESSES_FILE
    try:
        running = {TaskId.parse(name): Address.parse(text) for name, text in read_object(path).items()}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{task} finds no job to join: {path} cannot be read: {error}",
            code="slurm-job-not-found",
            hint="name the directory of a run whose job has started: --run-dir RUN, on a file system that all nodes "
            "share",
        ) from error
    control = join_address(cluster, running)  # with the address from which a task has left, as the chief computes it
    taken = {address.port for address in (*running.values(), *([control] if control else []))}
    first = first_port(number_of(environ, "SLURM_JOB_ID"), len(cluster.possible_tasks))
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    own = Address(host, next(_free_ports(first, taken)))
    absent = (Address(LOOPBACK, port) for port in count(1))
    others = {each: running.get(each) or next(absent) for each in cluster.listed_for(task) if each != task}
    cpus = number_of(environ, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in environ else None
    return StepTask(task, {**running, **others, task: own}, cpus, visible_gpus(environ), (task,), control)


def _free_ports(first: int, taken: Container[int]) -> Iterator[int]:
    """Yields the ports of this node, from the first one on, on which no process listens now."""
    for port in range(first, 65536):
        if port not in taken:
            with suppress(OSError):
                socket.create_server(("", port)).close()
                yield port
