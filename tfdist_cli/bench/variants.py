"""The variants of a benchmark: the same training with several numbers of workers, and in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.resources import allocate
from tfdist_cli.protocol.phases import BUILD_FIRST, WATCH
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.strategies import STRATEGIES, computes_gradients

EPOCHS = 2
"""One warm-up epoch, in which functions are traced, and one measured epoch of the same length, which traces none."""
_AUTO_EXECUTION = 20
"""Maximum number of steps of `steps_per_execution: auto`."""


@dataclass(frozen=True)
class Variant:
    """One of the compared trainings.

    Args:
        cluster: its cluster.
        workers: number of workers that compute gradients.
        alone: whether it is the single-process baseline.
    """

    cluster: Cluster
    workers: int
    alone: bool = False

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.alone:
            return "one process"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}"


def variants_of(cluster: Cluster, recipe: Recipe, wanted: Sequence[int] = ()) -> list[Variant]:
    """Returns the cluster with several numbers of workers, and the single-process baseline.

    Args:
        cluster: the cluster of the file.
        recipe: the recipe.
        wanted: numbers of workers; by default 1, powers of 2, and the cluster's number.

    Raises:
        UsageError: the cluster cannot have that many workers, the recipe's updates need more, or its stages another
            number.
    """
    cluster = cluster.model_copy(update={"roles": cluster.roles.model_copy(update={"evaluator": None})})
    own, least = workers_in(cluster), _least(cluster, recipe)
    stages = recipe.stage_count(1) if STRATEGIES[cluster.strategy].staged else 1
    counts = sorted(set(wanted))
    if not counts:
        doubled = (count for count in _powers_of_2(own) if count >= least and count % stages == 0)
        counts = sorted({*doubled, own})
    for count in counts:
        _check(cluster, count, least)
        _check_stages(count, stages)
    variants = [Variant(_resized(cluster, count), count) for count in counts]
    baseline = _alone(cluster)
    return variants if cluster.strategy == baseline.strategy else [*variants, Variant(baseline, 1, alone=True)]


def workers_of(text: str) -> list[int]:
    """Parses the value of `--workers`, such as `1,2,4`.

    Raises:
        UsageError: it is no list of positive integers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(
            f"--workers is {text!r}",
            code="invalid-workers",
            hint="use positive integers, separated by commas, such as 1,2,4",
        )
    return [int(part) for part in parts]


def measured_recipe(recipe: Recipe, variant: Variant, steps: int) -> Recipe:
    """Returns the recipe without checkpoints, evaluation and export, with two epochs of the measured length.

    Args:
        recipe: the recipe of the file.
        variant: the variant that trains it.
        steps: measured steps of each worker, a multiple as returned by `whole_executions`.
    """
    divides_steps = STRATEGIES[variant.cluster.strategy].has_ps and not recipe.updates.synchronous
    length = {"epochs": EPOCHS, "steps_per_epoch": steps * (variant.workers if divides_steps else 1)}
    train = recipe.train.model_copy(update={**length, "max_steps": None, "repeat": True})
    return recipe.model_copy(update={"train": train, "checkpoint": None, "evaluate": None, "export": None})


def whole_executions(recipe: Recipe, steps: int) -> int:
    """Rounds steps up to whole executions: a shorter execution would need another function to be traced."""
    size = recipe.train.steps_per_execution
    size = _AUTO_EXECUTION if size == "auto" else size
    unit = math.lcm(size, size + -size % recipe.updates.steps_per_round)
    return steps + -steps % unit


def measured_cluster(cluster: Cluster) -> Cluster:
    """Returns the cluster with tasks whose training builds in the warm-up epoch what the measured one runs."""
    return _with_variable(cluster, BUILD_FIRST)


def with_phases(cluster: Cluster) -> Cluster:
    """Returns the cluster with tasks that measure the phases of a step."""
    return _with_variable(cluster, WATCH)


def can_measure_phases(cluster: Cluster) -> bool:
    """Whether phases can be measured by a task's clock.

    With a GPU they cannot, since it runs operations asynchronously; nor with stages, which compute at the same time.
    """
    if STRATEGIES[cluster.strategy].staged:
        return False
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    return not any(share.gpus for share in allocate(cluster, addresses, Machine.here()).values())


def workers_in(cluster: Cluster) -> int:
    """Returns how many tasks of a cluster compute gradients."""
    return sum(cluster.roles.count(role) for role in ROLES if computes_gradients(cluster.strategy, role))


def _least(cluster: Cluster, recipe: Recipe) -> int:
    return recipe.updates.aggregate or 1 if STRATEGIES[cluster.strategy].has_ps else 1


def _powers_of_2(end: int) -> list[int]:
    return [2**power for power in range(end.bit_length()) if 2**power < end]


def _check(cluster: Cluster, count: int, least: int) -> None:
    if STRATEGIES[cluster.strategy].one_process and count > 1:
        raise UsageError(
            f"cannot measure {count} workers: {cluster.strategy} trains in one process",
            code="too-many-workers",
            hint="remove --workers, or use strategy: parameter_server or multi_worker_mirrored",
        )
    if count < least:
        raise UsageError(
            f"cannot measure {count} workers: updates.aggregate requires gradients of {least}",
            code="too-few-workers",
            hint=f"measure at least {least} workers, or set updates.aggregate=null",
        )
    worker = cluster.roles.of("worker")
    hosts = worker.hosts if worker else None
    most = workers_in(cluster)
    if hosts and count > most:
        raise UsageError(
            f"cannot measure {count} workers: roles.worker names {len(hosts)} hosts",
            code="too-many-workers",
            hint=f"measure at most {most} workers, or add hosts",
        )


def _check_stages(count: int, stages: int) -> None:
    if count % stages:
        raise UsageError(
            f"cannot measure {count} workers, which have to be a multiple of the recipe's {stages} stages",
            code="stages-do-not-fit",
            hint=f"measure {stages} workers, or {2 * stages}; or remove stages and place from the recipe",
        )


def _resized(cluster: Cluster, count: int) -> Cluster:
    """Returns the cluster with another number of workers. A mirrored chief counts as a worker."""
    roles, traits = cluster.roles, STRATEGIES[cluster.strategy]
    if traits.one_process:
        return cluster
    chiefs = 0 if traits.coordinated else roles.count("chief")
    if count == chiefs:
        return _with(cluster, chief=None, worker=_sized(roles.of("chief"), 1))
    return _with(cluster, worker=_sized(roles.of("worker"), count - chiefs))


def _alone(cluster: Cluster) -> Cluster:
    """Returns the single-process cluster, with environment and secrets of the chief and the workers."""
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


def _with_variable(cluster: Cluster, name: str) -> Cluster:
    """Returns the cluster with tasks that have an environment variable, 1."""
    given: dict[str, RoleSpec | None] = {role: cluster.roles.of(role) for role in ROLES}
    roles = {role: spec.model_copy(update={"env": {**spec.env, name: "1"}}) for role, spec in given.items() if spec}
    return cluster.model_copy(update={"roles": cluster.roles.model_copy(update=roles)})


def _with(cluster: Cluster, **roles: RoleSpec | None) -> Cluster:
    return cluster.model_copy(update={"roles": cluster.roles.model_copy(update=roles)})
