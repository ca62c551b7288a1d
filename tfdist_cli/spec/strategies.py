"""The strategies, one row each, and what depends on both a task's strategy and its role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tfdist_cli.spec.roles import ROLES, Role

Strategy = Literal["parameter_server", "multi_worker_mirrored", "model_parallel", "mirrored", "single"]
Communication = Literal["auto", "ring", "nccl"]
EngineName = Literal["parameter_server", "mirrored", "model_parallel"]
CoreUse = Literal["gradients", "updates", "data", ""]


@dataclass(frozen=True)
class StrategyTraits:
    """How tasks train together.

    Args:
        summary: how the tasks train, for the reference of the cluster file.
        engine: which engine trains.
        coordinated: a chief drives the workers, which only run a server.
        staged: each worker holds and computes a part of the model's layers; the chief reads the data.
        together: all tasks that train compute each step together, with equal rights.
        one_process: a single task trains.
        current_scope: trains under the current `tf.distribute` strategy, and makes none.
        required: the roles that a cluster has to have, each with what for.
    """

    summary: str
    engine: EngineName
    coordinated: bool = False
    staged: bool = False
    together: bool = False
    one_process: bool = False
    current_scope: bool = False
    required: Mapping[Role, str] = field(default_factory=dict)

    @property
    def has_ps(self) -> bool:
        """Whether ps hold the variables, and workers read the data."""
        return any(ROLES[role].holds_variables for role in self.required)


STRATEGIES: Mapping[Strategy, StrategyTraits] = {
    "parameter_server": StrategyTraits(
        "workers compute gradients and send them to ps, which hold the variables",
        engine="parameter_server",
        coordinated=True,
        required={"chief": "drive the workers", "ps": "hold the variables", "worker": "compute gradients"},
    ),
    "multi_worker_mirrored": StrategyTraits(
        "each task holds all variables, and all tasks sum their gradients in each step",
        engine="mirrored",
        together=True,
        required={"worker": "compute gradients"},
    ),
    "model_parallel": StrategyTraits(
        "each worker holds some layers of the model, and the chief sends each batch through them",
        engine="model_parallel",
        coordinated=True,
        staged=True,
        required={"chief": "drive the workers", "worker": "hold the layers"},
    ),
    "mirrored": StrategyTraits("one process on all its GPUs", engine="mirrored", one_process=True),
    "single": StrategyTraits("one process on one device", engine="mirrored", one_process=True, current_scope=True),
}
"""Every strategy."""


def infer_strategy(roles: Iterable[Role]) -> Strategy:
    """The strategy of tasks with these roles, where nothing else names it."""
    traits = [ROLES[role] for role in roles]
    if any(role.holds_variables for role in traits):
        return "parameter_server"
    return "multi_worker_mirrored" if sum(role.trains for role in traits) > 1 else "single"


def decides(strategy: Strategy, role: Role) -> bool:
    """Whether the training is done only when the task has exited with code 0."""
    traits = ROLES[role]
    return traits.trains and (traits.drives or not STRATEGIES[strategy].coordinated)


def serves(strategy: Strategy, role: Role) -> bool:
    """Whether the task only runs a server, until the chief exits."""
    traits = ROLES[role]
    coordinated = STRATEGIES[strategy].coordinated and traits.in_tf_cluster and not traits.drives
    return traits.auxiliary or coordinated


def computes_gradients(strategy: Strategy, role: Role) -> bool:
    """Whether the task computes gradients, which is what GPUs are for."""
    traits = ROLES[role]
    return traits.trains and not (traits.drives and STRATEGIES[strategy].coordinated)


def core_use(strategy: Strategy, role: Role) -> CoreUse:
    """What the task does with its cores; empty when it computes next to nothing.

    Tasks with the same use share the cores of a machine.
    """
    if computes_gradients(strategy, role):
        return "gradients"
    if ROLES[role].holds_variables:
        return "updates"
    return "data" if ROLES[role].prepares_data else ""


def holds_variables(strategy: Strategy, role: Role) -> bool:
    """Whether variables are lost with the task."""
    staged = STRATEGIES[strategy].staged and computes_gradients(strategy, role)
    return ROLES[role].holds_variables or staged


def is_replaceable(strategy: Strategy, role: Role) -> bool:
    """Whether the training can go on without the task, and admit another one in its place."""
    return ROLES[role].optional or joins_cluster(strategy, role)


def joins_cluster(strategy: Strategy, role: Role) -> bool:
    """Whether the task may join TensorFlow's cluster while it trains, and leave it: the chief must know of both."""
    return computes_gradients(strategy, role) and STRATEGIES[strategy].has_ps


def may_join(strategy: Strategy, role: Role) -> bool:
    """Whether another task of the role may start while the others train."""
    return ROLES[role].joins or is_replaceable(strategy, role)


def may_leave(strategy: Strategy, role: Role) -> bool:
    """Whether a task of the role may end while the others train.

    A data worker has to know that its examples have been read. That is so if a single task reads, the chief.
    """
    return is_replaceable(strategy, role) or (ROLES[role].joins and STRATEGIES[strategy].has_ps)
