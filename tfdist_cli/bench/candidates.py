"""Settings that may make a training faster, and what each of them changes about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfdist_cli.bench.machine import ONEDNN, onednn_by_default
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.resources import allocate
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.strategies import STRATEGIES, computes_gradients

LOCAL_STEPS, PUSH_EVERY, STALENESS = 20, 4, 2
_ROUNDED = "parameters and gradients are rounded to 8 significant bits when they cross the network"


@dataclass(frozen=True)
class Candidate:
    """One change of the settings.

    Args:
        changes: the keys to change, as `--set` takes them.
        effect: what it changes about the training.
    """

    changes: tuple[str, ...]
    effect: str

    @property
    def name(self) -> str:
        """The changes in one line."""
        return " ".join(self.changes)

    @property
    def is_in_cluster(self) -> bool:
        """Whether the keys belong to the cluster file, and not to the recipe."""
        return self.changes[0].partition(".")[0] in Cluster.model_fields

    @property
    def yaml(self) -> str:
        """The lines to write into the file: `updates: {mode: bounded, staleness: 2}`."""
        tree: dict[str, Any] = {}
        for change in self.changes:
            path, _, value = change.partition("=")
            *above, last = path.split(".")
            node = tree
            for key in above:
                node = node.setdefault(key, {})
            node[last] = value
        return _flow(tree)


def candidates_of(cluster: Cluster, recipe: Recipe) -> list[Candidate]:
    """Returns the changes that may make a recipe faster on a cluster; none of what is set already."""
    traits = STRATEGIES[cluster.strategy]
    found: list[Candidate] = []
    if traits.has_ps:
        found += _of_synchronous(recipe) if recipe.updates.synchronous else _of_asynchronous(recipe)
        found += _more_ps(cluster)
    if not (traits.one_process or traits.staged) and recipe.wire == "float32":
        found.append(Candidate(("wire=bfloat16",), _ROUNDED))
    found += _threads(cluster)
    found += _onednn(cluster)
    if not (recipe.train.jit or traits.staged):
        effect = "XLA compiles the model: other rounding, and a longer start"
        found.append(Candidate(("train.jit=true",), effect))
    return found


def _of_asynchronous(recipe: Recipe) -> Iterator[Candidate]:
    updates = recipe.updates
    if updates.steps_per_round > 1:
        return
    if not updates.prefetch and not updates.delay_compensation:
        effect = f"a worker sees other workers' changes every {LOCAL_STEPS} steps only"
        yield Candidate((f"updates.local_steps={LOCAL_STEPS}",), effect)
    if not updates.prefetch:
        effect = f"each update is the mean of {PUSH_EVERY} batches: {PUSH_EVERY} times fewer updates"
        yield Candidate((f"updates.push_every={PUSH_EVERY}",), effect)
        yield Candidate(("updates.prefetch=true",), "a worker's parameters lack its own last update")


def _of_synchronous(recipe: Recipe) -> Iterator[Candidate]:
    updates = recipe.updates
    if updates.aggregate is None and updates.staleness is None:
        if updates.batch == "equal" and recipe.train.share == "split":
            effect = "slower workers take fewer examples; the result of an update is the same"
            yield Candidate(("updates.batch=proportional",), effect)
        if updates.batch == "equal":
            effect = f"gradients are up to {STALENESS} updates old"
            yield Candidate(("updates.mode=bounded", f"updates.staleness={STALENESS}"), effect)


def _more_ps(cluster: Cluster) -> Iterator[Candidate]:
    for role in ROLES:
        spec = cluster.roles.of(role)
        if ROLES[role].holds_variables and spec and spec.hosts is None:
            yield Candidate((f"roles.{role}.replicas={cluster.roles.count(role) + 1}",), "none")


def _threads(cluster: Cluster) -> Iterator[Candidate]:
    """All cores for each task that computes gradients, if it has fewer; and one core, if it has more."""
    machine = Machine.here()
    allocated = allocate(cluster, {task: cluster.address(task) for task in cluster.tasks}, machine)
    threads: dict[Role, int] = {}
    for task, resources in allocated.items():
        if computes_gradients(cluster.strategy, task.role) and resources.intra_op_threads:
            threads[task.role] = resources.intra_op_threads
    for count in (machine.cores, 1):
        changed = [role for role, now in threads.items() if now != count]
        if changed:
            yield Candidate(tuple(f"roles.{role}.threads.intra={count}" for role in changed), "none")


def _onednn(cluster: Cluster) -> Iterator[Candidate]:
    """The other library for products and convolutions than TensorFlow's default, unless one is chosen already.

    oneDNN makes large products faster and small ones slower. GPUs compute without it.
    """
    default = onednn_by_default()
    computing = {task.role for task in cluster.tasks if computes_gradients(cluster.strategy, task.role)}
    chosen = [spec.env for role in computing if (spec := cluster.roles.of(role)) and ONEDNN in spec.env]
    on_gpus = bool(Machine.here().gpus)
    if default is not None and not (chosen or on_gpus) and ONEDNN not in os.environ:
        other = "0" if default else "1"
        changes = [f"roles.{role}.env.{ONEDNN}='{other}'" for role in sorted(computing)]
        yield Candidate(tuple(changes), "other rounding")


def _flow(tree: dict[str, Any]) -> str:
    shown = {key: f"{{{_flow(value)}}}" if isinstance(value, dict) else value for key, value in tree.items()}
    return ", ".join(f"{key}: {value}" for key, value in shown.items())
