"""Cluster + recipe → plan: every task as a plain value, with its address, command and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.resources import Machine, Resources, machine_of, share_out
from tfdist_cli.plan.task_environment import planned_environment
from tfdist_cli.spec.address import DEFAULT_PORT, Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.secret import SecretSpec
from tfdist_cli.spec.strategies import Strategy
from tfdist_cli.spec.task_id import TaskId

CLUSTER_FILE = "cluster.yaml"
RECIPE_FILE = "recipe.yaml"


@dataclass(frozen=True)
class PlannedTask:
    """One task as it is to be started.

    Args:
        task: its name.
        address: where its server listens; port 0 is a free port, chosen at the start.
        argv: the command.
        env: variables set on top of the launcher's own environment.
        resources: its share of the machine.
        secrets: variables that are set too, and where whoever starts the task finds their values.
    """

    task: TaskId
    address: Address
    argv: tuple[str, ...]
    env: Mapping[str, str]
    resources: Resources
    secrets: Mapping[str, SecretSpec] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The task in plain JSON types."""
        return {
            "task": str(self.task),
            "address": str(self.address),
            "argv": list(self.argv),
            "env": dict(self.env),
            "secrets": {name: spec.model_dump(exclude_none=True) for name, spec in self.secrets.items()},
            **self.resources.as_json(),
        }


@dataclass(frozen=True)
class Plan:
    """All that a launcher has to know.

    Args:
        cluster: the cluster, resolved.
        recipe: the recipe, resolved; None when the tasks run a user's command.
        run_dir: the run's directory.
        tasks: chief, workers, ps, evaluator, data dispatcher, data workers, in this order.
    """

    cluster: Cluster
    recipe: Recipe | None
    run_dir: Path
    tasks: tuple[PlannedTask, ...]

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.cluster.name

    @property
    def strategy(self) -> Strategy:
        """How the tasks train together."""
        return self.cluster.strategy

    def __getitem__(self, task: TaskId) -> PlannedTask:
        for planned in self.tasks:
            if planned.task == task:
                return planned
        raise KeyError(str(task))

    def as_json(self) -> dict[str, Any]:
        """The plan in plain JSON types: what `tfdist plan --json` prints and the run directory keeps."""
        return {
            "name": self.name,
            "strategy": self.strategy,
            "run_dir": str(self.run_dir),
            "tasks": [planned.as_json() for planned in self.tasks],
        }


def fixed_addresses(cluster: Cluster) -> dict[TaskId, Address]:
    """An address per task that every process computes alike: as written, else this machine's ports from 2222 on.

    Raises:
        UsageError: a task is to be on another host, where only a launch finds it a port.
    """
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    if cluster.launcher_traits.uses_hosts:
        for task in (task for task, address in addresses.items() if not address.port):
            raise UsageError(
                f"{task} has no address before `tfdist launch` puts it on one of the hosts",
                hint=f"give it one, 'roles: {{{task.role}: {{hosts: [HOST:2222]}}}}', or take 'launcher: local'",
            )
    taken = {address.port for address in addresses.values()}
    free = (port for port in range(DEFAULT_PORT, 65536) if port not in taken)
    return {task: address if address.port else Address(address.host, next(free)) for task, address in addresses.items()}


def make_plan(
    cluster: Cluster,
    recipe: Recipe | None,
    *,
    addresses: Mapping[TaskId, Address],
    run_dir: Path,
    machine: Machine,
    machines: Mapping[str, Machine] = MappingProxyType({}),
    command: tuple[str, ...] = (),
) -> Plan:
    """Says what each task is to run.

    Args:
        cluster: which tasks there are.
        recipe: what they train, unless `command` says it.
        addresses: every task's address.
        run_dir: the run's directory, which holds the resolved cluster and recipe.
        machine: this machine's cores and GPUs, to share out.
        machines: those of other machines, by the hosts of their addresses.
        command: a user's own program, run by each task instead of the recipe.
    """
    shares = share_out(cluster, addresses, machine, machines)
    tasks = []
    for task in cluster.tasks:
        there = machine_of(cluster, addresses[task], machine, machines)
        argv = command or _role_argv(task, run_dir)
        tasks.append(plan_task(cluster, task, addresses, shares[task], run_dir, there, argv))
    return Plan(cluster, recipe, run_dir, tuple(tasks))


def plan_task(
    cluster: Cluster,
    task: TaskId,
    addresses: Mapping[TaskId, Address],
    resources: Resources,
    run_dir: Path,
    machine: Machine,
    argv: tuple[str, ...] = (),
) -> PlannedTask:
    """One task, with all of its environment."""
    env = planned_environment(cluster, task, addresses, resources, run_dir, machine)
    return PlannedTask(task, addresses[task], argv, env, resources, cluster.role(task).secrets)


def _role_argv(task: TaskId, run_dir: Path) -> tuple[str, ...]:
    role = (sys.executable, "-m", "tfdist_cli", "role", "--task", str(task))
    return (*role, "--cluster", str(run_dir / CLUSTER_FILE), "--planned")
