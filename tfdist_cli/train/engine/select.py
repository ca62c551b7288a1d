"""Selects the engine that trains a model on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.spec.strategies import EngineName
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.engine.base import Engine, Rules
from tfdist_cli.train.engine.mirrored.collectives import Collectives, Membership
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.engine.model_parallel.engine import ModelParallelEngine
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.variables.stages import Stages

log = logging.getLogger("tfdist")


def select_engine(joined: ClusterContext, step: ModelStep, element_spec: Any, rules: Rules) -> Engine:
    """Returns the engine of the strategy that this process has joined.

    Args:
        joined: this process in its cluster.
        step: the model's pure functions, built under the strategy's scope.
        element_spec: the `tf.TypeSpec`s of a worker's batch.
        rules: how gradients become updates.
    """
    environment = joined.environment
    if rules.micro_batches > 1 and not environment.traits.staged and environment.is_chief:
        log.info("micro_batches is ignored: it applies to model_parallel, not to %s", environment.strategy)
    return _ENGINES[environment.traits.engine](joined, step, element_spec, rules)


def _parameter_server(joined: ClusterContext, step: ModelStep, element_spec: Any, rules: Rules) -> Engine:
    membership = joined.joins.membership if joined.joins else None
    return ParameterServerEngine(step, joined.strategy, element_spec, rules, membership)


def _mirrored(joined: ClusterContext, step: ModelStep, element_spec: Any, rules: Rules) -> Engine:
    environment = joined.environment
    names = tuple(str(task) for task in environment.members)
    # Mirrored workers are synchronous, whatever is written; several of them can have batches of different sizes.
    followed = Updates(mode="sync", batch=rules.updates.batch if len(names) > 1 else Updates().batch)
    if rules.updates not in (Updates(), followed) and environment.is_chief:
        log.info(
            "updates is ignored%s: it applies to parameter servers only, and the strategy is %s",
            " except for updates.batch" if len(names) > 1 else "",
            environment.strategy,
        )
    return MirroredEngine(step, joined.strategy, element_spec, _membership(joined), rules)


def _membership(joined: ClusterContext) -> Membership:
    environment = joined.environment
    names = tuple(str(task) for task in environment.members)
    index = environment.members.index(environment.task) if len(names) > 1 else 0
    return Membership(names, index, joined.all_reduce)


def agree(joined: ClusterContext, decision: bool) -> bool:
    """Returns whether all tasks that run the training loop have decided so. All of them have to call it.

    Args:
        joined: this process in its cluster.
        decision: this task's.
    """
    if _ENGINES[joined.environment.traits.engine] is not _mirrored:
        return decision  # only the chief runs the loop
    members = _membership(joined)
    votes = Collectives(joined.strategy, members).total(np.array([float(decision)]))
    return int(votes[0]) == len(members.tasks)


def _model_parallel(joined: ClusterContext, step: ModelStep, element_spec: Any, rules: Rules) -> Engine:
    return ModelParallelEngine(step, joined.strategy, cast("Stages", joined.stages), element_spec, rules)


_ENGINES: Mapping[EngineName, Callable[[ClusterContext, ModelStep, Any, Rules], Engine]] = {
    "parameter_server": _parameter_server,
    "mirrored": _mirrored,
    "model_parallel": _model_parallel,
}
