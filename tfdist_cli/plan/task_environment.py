"""Decides every environment variable that tfdist sets for a task.

A plan contains the variables that are known before a task starts (`planned_environment`). The launcher adds those of
one start (`start_environment`) and the values of the secrets. The task changes none of them: `tfdist role --planned`
uses them as they are. Only paths are translated, where the task's machine has other names for the folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tfdist_cli.plan.join_address import join_address
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.resources import ALL_GPUS, Resources
from tfdist_cli.plan.tf_config import TfConfigs, tf_config_json
from tfdist_cli.protocol.environment import (
    COMMUNICATION,
    JOIN_ADDRESS,
    MAX_DATA_WORKERS,
    MAX_WORKERS,
    RUN_DIR,
    START_TIMEOUT,
    STRATEGY,
)
from tfdist_cli.protocol.masking import SECRETS
from tfdist_cli.protocol.records import ENABLED, LAUNCHER_PID, TASK_DIR
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.resources import GPU_MEMORY, GPUS
from tfdist_cli.spec.strategies import joins_cluster, serves
from tfdist_cli.spec.task_id import TaskId

MALLOC = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={32 * 2**20}:glibc.malloc.trim_threshold={256 * 2**20}"
"""Settings of malloc. With huge pages, rows of a large table are looked up twice as fast (from glibc 2.35 on; others
ignore them). Malloc keeps freed memory for the next step: the kernel would clear its pages again."""


def planned_environment(
    cluster: Cluster,
    task: TaskId,
    addresses: Mapping[TaskId, Address],
    resources: Resources,
    run_dir: Path,
    machine: Machine,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Returns the environment variables of a task that are known before it starts.

    The `env` of the role overrides all others, except for lists: the hosts without a proxy, and the settings of malloc.
    Those of `env` are appended.

    Args:
        cluster: the cluster.
        task: one of its tasks.
        addresses: the address of every task, and of those that may join.
        resources: the task's share of its machine.
        run_dir: the run's directory.
        machine: the machine that the task runs on.
        environ: the environment of the process that plans. The user's log level and settings of malloc apply to tasks.
    """
    return TaskEnvironments(cluster, addresses).planned(task, resources, run_dir, machine, environ)


class TaskEnvironments:
    """The planned environments of a cluster's tasks. What follows from the cluster alone is computed once.

    Args:
        cluster: the cluster.
        addresses: the address of every task, and of those that may join.
    """

    def __init__(self, cluster: Cluster, addresses: Mapping[TaskId, Address]) -> None:
        self._cluster = cluster
        self._addresses = addresses
        self._configs = TfConfigs({task: addresses[task] for task in cluster.tasks if task in addresses})
        self._of_joining = {**_of_joining(cluster, addresses), **_of_data_workers(cluster)}
        self._proxyless = _proxyless(cluster, addresses)

    def planned(
        self,
        task: TaskId,
        resources: Resources,
        run_dir: Path,
        machine: Machine,
        environ: Mapping[str, str] = os.environ,
    ) -> dict[str, str]:
        """Returns the environment of a task; see `planned_environment`."""
        cluster = self._cluster
        spec, traits = cluster.role(task), cluster.launcher_traits
        return {
            **({"HOME": "/tmp"} if traits.containers else {}),  # noqa: S108 the container's own
            "TF_CONFIG": self._tf_config(task),
            STRATEGY: cluster.strategy,
            **({COMMUNICATION: cluster.communication} if cluster.communication else {}),
            **self._of_joining,
            RUN_DIR: str(run_dir),
            **_of_resources(resources, renumbered=traits.containers),
            "TF_CPP_MIN_LOG_LEVEL": environ.get("TF_CPP_MIN_LOG_LEVEL", _log_level(cluster, task)),
            "PYTHONUNBUFFERED": "1",
            **({SECRETS: ",".join(spec.secrets)} if spec.secrets else {}),
            **spec.env,
            "GLIBC_TUNABLES": _joined(MALLOC, spec.env.get("GLIBC_TUNABLES", environ.get("GLIBC_TUNABLES")), ":"),
            **_without_proxy(self._proxyless, {**machine.no_proxy, **spec.env}),
        }

    def _tf_config(self, task: TaskId) -> str:
        """The `TF_CONFIG` of a task, which lists one that joins later only to itself."""
        if task.index < self._cluster.roles.count(task.role):
            return self._configs.text(task)
        return tf_config_json({each: self._addresses[each] for each in self._cluster.listed_for(task)}, task)


def start_environment(folder: Path, timeout: float, secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of one start of a task by this process.

    Args:
        folder: the folder of the task's logs and its error.json.
        timeout: seconds that the task waits for the other tasks to come up.
        secrets: the values of its role's secrets, and of the run's secret.
    """
    own = {ENABLED: "1", LAUNCHER_PID: str(os.getpid()), START_TIMEOUT: str(timeout), TASK_DIR: str(folder)}
    return {**own, **secrets}


def _of_joining(cluster: Cluster, addresses: Mapping[TaskId, Address]) -> dict[str, str]:
    """The variables of a cluster that workers may join while it trains."""
    address = join_address(cluster, addresses)
    if address is None:
        return {}
    most = sum(joins_cluster(cluster.strategy, task.role) for task in cluster.possible_tasks)
    return {JOIN_ADDRESS: str(address), MAX_WORKERS: str(most)}


def _of_data_workers(cluster: Cluster) -> dict[str, str]:
    """The variable of a cluster that data workers may join."""
    now, most = (sum(task.traits.prepares_data for task in tasks) for tasks in (cluster.tasks, cluster.possible_tasks))
    return {MAX_DATA_WORKERS: str(most)} if most > now else {}


def _of_resources(resources: Resources, *, renumbered: bool) -> dict[str, str]:
    """The variables that pass the task's resources to TensorFlow, OpenMP, CUDA and tfdist, as far as they are known."""
    env: dict[str, str] = {}
    if resources.intra_op_threads is not None:
        env |= {name: str(resources.intra_op_threads) for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")}
    if resources.inter_op_threads is not None:
        env["TF_NUM_INTEROP_THREADS"] = str(resources.inter_op_threads)
    gpus = resources.gpus
    if gpus != ALL_GPUS:
        ids = tuple(map(str, range(len(gpus)))) if renumbered else gpus
        env["CUDA_VISIBLE_DEVICES"] = ",".join(ids) or "-1"
    if gpus:
        env[GPUS] = "all" if gpus == ALL_GPUS else str(len(gpus))
    if resources.gpu_memory == "grow":
        env["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    elif resources.gpu_memory is not None:
        env[GPU_MEMORY] = str(resources.gpu_memory)
    return env


def _log_level(cluster: Cluster, task: TaskId) -> str:
    """Errors only for a task that serves: its failures reach the chief as errors, and its own log would repeat them."""
    return "3" if serves(cluster.strategy, task.role) else "2"


def _proxyless(cluster: Cluster, addresses: Mapping[TaskId, Address]) -> str:
    """The hosts of the connections between tasks."""
    hosts = {address.host for address in addresses.values()} | {"localhost", "127.0.0.1", "::1"}
    hosts.update(cluster.launcher_traits.dns_suffixes)
    return ",".join(sorted(hosts))


def _without_proxy(hosts: str, before: Mapping[str, str]) -> Mapping[str, str]:
    """Excludes the connections between tasks from proxies: gRPC would use a proxy even for loopback addresses.

    The user's downloads still use the proxies.
    """
    return {name: _joined(before.get(name), hosts, ",") for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy")}


def _joined(before: str | None, after: str | None, separator: str) -> str:
    return separator.join(part for part in (before, after) if part)
