"""Plans a cluster: every task becomes a value with its address, command and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.join_address import join_address
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.resources import Resources, allocate, machine_of
from tfdist_cli.plan.task_environment import TaskEnvironments, planned_environment
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
    """One task, with all that a launcher needs to start it.

    Args:
        task: the task.
        address: the address that its server listens on. Port 0 is replaced by a free port when the task starts.
        argv: the command.
        env: environment variables, in addition to those of the launcher.
        resources: its share of the machine.
        secrets: further environment variables, each with the source of its value.
    """

    task: TaskId
    address: Address
    argv: tuple[str, ...]
    env: Mapping[str, str]
    resources: Resources
    secrets: Mapping[str, SecretSpec] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the task in plain JSON types."""
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
    """A cluster that is ready to start.

    Args:
        cluster: the resolved cluster.
        recipe: the resolved recipe; None when the tasks run a user's command.
        run_dir: the run's directory.
        tasks: chief, workers, ps, evaluator, data dispatcher, data workers, in this order.
        spare_ports: the ports on which no task listens at the start, but perhaps later: of tasks that may join, and the
            one on which the chief takes them.
    """

    cluster: Cluster
    recipe: Recipe | None
    run_dir: Path
    tasks: tuple[PlannedTask, ...]
    spare_ports: tuple[int, ...] = ()

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
        """Returns the plan in plain JSON types, as `tfdist plan --json` prints it and the run directory keeps it."""
        return {
            "name": self.name,
            "strategy": self.strategy,
            "run_dir": str(self.run_dir),
            "tasks": [planned.as_json() for planned in self.tasks],
        }


def fixed_addresses(cluster: Cluster) -> dict[TaskId, Address]:
    """Returns an address for each possible task: the one in the file, or a port of this machine from 2222 on.

    Every process computes the same addresses.

    Raises:
        UsageError: the launcher chooses a host for a task. Its address is not known before.
    """
    addresses = {task: cluster.address(task) for task in cluster.possible_tasks}
    if cluster.launcher_traits.uses_hosts:
        for task in (task for task, address in addresses.items() if not address.port):
            raise UsageError(
                f"{task} has no address: `tfdist launch` chooses one of the hosts for it",
                code="address-not-known",
                hint=f"give it one, 'roles: {{{task.role}: {{hosts: [HOST:2222]}}}}', or use 'launcher: local'",
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
    """Plans all tasks of a cluster.

    Args:
        cluster: the cluster.
        recipe: the recipe that the tasks train; None with a `command`.
        addresses: the address of every task, and of those that may join.
        run_dir: the run's directory, which contains the resolved cluster and recipe.
        machine: the resources of this machine.
        machines: the resources of other machines, by the hosts of their addresses.
        command: a user's program that each task runs instead of the recipe.
    """
    resources = allocate(cluster, {task: addresses[task] for task in cluster.tasks}, machine, machines)
    environments = TaskEnvironments(cluster, addresses)
    tasks = []
    for task in cluster.tasks:
        there = machine_of(cluster, addresses[task], machine, machines)
        env = environments.planned(task, resources[task], run_dir, there)
        argv = command or _role_argv(task, run_dir)
        tasks.append(PlannedTask(task, addresses[task], argv, env, resources[task], cluster.role(task).secrets))
    return Plan(cluster, recipe, run_dir, tuple(tasks), _spare_ports(cluster, addresses))


def _spare_ports(cluster: Cluster, addresses: Mapping[TaskId, Address]) -> tuple[int, ...]:
    own = set(cluster.tasks)
    spare = [address for task, address in addresses.items() if task.traits.listens and task not in own]
    control = join_address(cluster, addresses)
    return tuple(address.port for address in (*spare, *([control] if control else [])) if address.port)


def plan_task(
    cluster: Cluster,
    task: TaskId,
    addresses: Mapping[TaskId, Address],
    resources: Resources,
    run_dir: Path,
    machine: Machine,
    argv: tuple[str, ...] = (),
) -> PlannedTask:
    """Plans one task. The arguments are those of `make_plan` and `planned_environment`."""
    env = planned_environment(cluster, task, addresses, resources, run_dir, machine)
    return PlannedTask(task, addresses[task], argv, env, resources, cluster.role(task).secrets)


def _role_argv(task: TaskId, run_dir: Path) -> tuple[str, ...]:
    role = (sys.executable, "-m", "tfdist_cli", "role", "--task", str(task))
    return (*role, "--cluster", str(run_dir / CLUSTER_FILE), "--planned")
