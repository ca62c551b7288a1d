"""Cluster and recipe → what is measured: the same training with several numbers of workers, and in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.resources import allocate
from tfdist_cli.protocol.phases import WATCH
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.strategies import STRATEGIES, computes_gradients

EPOCHS = 2
"""One to warm up, in which functions are traced, and the measured one. They are alike: the second traces none."""
_AUTO_EXECUTION = 20
"""Steps that `steps_per_execution: auto` takes at the most."""


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared.

    Args:
        cluster: its tasks.
        workers: how many of them compute gradients.
        alone: whether it is the one process beside the cluster.
    """

    cluster: Cluster
    workers: int
    alone: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.alone:
            return "one process"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}"


def variants_of(cluster: Cluster, recipe: Recipe, wanted: Sequence[int] = ()) -> list[Variant]:
    """A cluster with several numbers of workers, and one process without a cluster.

    Args:
        cluster: as the file has it.
        recipe: what it trains.
        wanted: numbers of workers; by default its own, 1, and the powers of 2 between.

    Raises:
        UsageError: the cluster cannot have so many, or the recipe's updates cannot do with so few.
    """
    cluster = cluster.model_copy(update={"roles": cluster.roles.model_copy(update={"evaluator": None})})
    own, least = _own(cluster), _least(cluster, recipe)
    counts = sorted(set(wanted))
    if not counts:
        counts = sorted({count for count in (*_powers_of_2(own), own) if count >= least} or {own})
    for count in counts:
        _check(cluster, count, least)
    variants = [Variant(_resized(cluster, count), count) for count in counts]
    baseline = _alone(cluster)
    return variants if cluster.strategy == baseline.strategy else [*variants, Variant(baseline, 1, alone=True)]


def workers_of(text: str) -> list[int]:
    """The numbers that `--workers 1,2,4` names.

    Raises:
        UsageError: it names something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--workers is {text!r}", hint="give numbers from 1 on with commas between, such as 1,2,4")
    return [int(part) for part in parts]


def measured_recipe(recipe: Recipe, variant: Variant, steps: int) -> Recipe:
    """The recipe with nothing in it but the training, twice as long as what is measured of it.

    Args:
        recipe: as the file has it.
        variant: what trains it.
        steps: steps of each worker to measure, as `whole` has them.
    """
    takes_turns = STRATEGIES[variant.cluster.strategy].coordinated and not recipe.updates.synchronous
    length = {"epochs": EPOCHS, "steps_per_epoch": steps * (variant.workers if takes_turns else 1)}
    train = recipe.train.model_copy(update={**length, "max_steps": None, "repeat": True})
    return recipe.model_copy(update={"train": train, "checkpoint": None, "evaluate": None, "export": None})


def whole(recipe: Recipe, steps: int) -> int:
    """So many steps or a few more: an execution that is cut short would be a function of its own, yet to be traced."""
    size = recipe.train.steps_per_execution
    size = _AUTO_EXECUTION if size == "auto" else size
    unit = math.lcm(size, size + -size % recipe.updates.steps_per_round)
    return steps + -steps % unit


def watched(cluster: Cluster) -> Cluster:
    """The cluster with tasks that take the time of each phase."""
    given: dict[str, RoleSpec | None] = {role: cluster.roles.of(role) for role in ROLES}
    roles = {role: spec.model_copy(update={"env": {**spec.env, WATCH: "1"}}) for role, spec in given.items() if spec}
    return cluster.model_copy(update={"roles": cluster.roles.model_copy(update=roles)})


def can_be_watched(cluster: Cluster) -> bool:
    """Whether the clock of a task says when something is done: a GPU takes work over long before it has done it."""
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    return not any(share.gpus for share in allocate(cluster, addresses, Machine.here()).values())


def _own(cluster: Cluster) -> int:
    return sum(cluster.roles.count(role) for role in ROLES if computes_gradients(cluster.strategy, role))


def _least(cluster: Cluster, recipe: Recipe) -> int:
    return recipe.updates.aggregate or 1 if STRATEGIES[cluster.strategy].coordinated else 1


def _powers_of_2(end: int) -> list[int]:
    return [2**power for power in range(end.bit_length()) if 2**power < end]


def _check(cluster: Cluster, count: int, least: int) -> None:
    if STRATEGIES[cluster.strategy].one_process and count > 1:
        raise UsageError(
            f"{count} workers cannot be measured: {cluster.strategy} trains in one process",
            hint="leave out --workers, or take strategy: parameter_server or multi_worker_mirrored",
        )
    if count < least:
        raise UsageError(
            f"{count} workers cannot be measured: updates.aggregate asks for the gradients of {least}",
            hint=f"measure at least {least} workers, or set updates.aggregate=null",
        )
    worker = cluster.roles.of("worker")
    hosts = worker.hosts if worker else None
    most = _own(cluster)
    if hosts and count > most:
        raise UsageError(
            f"{count} workers cannot be measured: roles.worker names {len(hosts)} hosts",
            hint=f"measure at most {most} workers, or name more hosts",
        )


def _resized(cluster: Cluster, count: int) -> Cluster:
    """The cluster with so many workers; of mirrored ones the chief is the first."""
    roles, traits = cluster.roles, STRATEGIES[cluster.strategy]
    if traits.one_process:
        return cluster
    chiefs = 0 if traits.coordinated else roles.count("chief")
    if count == chiefs:
        return _with(cluster, chief=None, worker=_sized(roles.of("chief"), 1))
    return _with(cluster, worker=_sized(roles.of("worker"), count - chiefs))


def _alone(cluster: Cluster) -> Cluster:
    """One process with what chief and workers are given, who share the recipe's code on parameter servers."""
    training = [role for role, traits in ROLES.items() if traits.trains]
    given = [spec for role in reversed(training) if (spec := cluster.roles.of(role))]
    env = {name: value for spec in given for name, value in spec.env.items()}
    secrets = {name: source for spec in given for name, source in spec.secrets.items()}
    chief = RoleSpec(env=env, secrets=secrets)
    return _with(cluster, chief=chief, worker=None, ps=None).model_copy(update={"strategy": "single"})


def _sized(spec: RoleSpec | None, count: int) -> RoleSpec:
    spec = spec or RoleSpec()
    if spec.hosts is None:
        return spec.model_copy(update={"replicas": count})
    return spec.model_copy(update={"hosts": spec.hosts[:count], "replicas": None})


def _with(cluster: Cluster, **roles: RoleSpec | None) -> Cluster:
    return cluster.model_copy(update={"roles": cluster.roles.model_copy(update=roles)})
