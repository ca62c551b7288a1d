"""The protocol of update rules, and how the rule of an update mode is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

import keras

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import UPDATE_MODES, Updates
from tfdist_cli.train.engine.base import Execution, Pause, Rules
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.model.train_step import ModelStep


class UpdateRule(Protocol):
    """Decides when the gradients of workers are applied to the variables on the ps.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None: ...

    @classmethod
    def check(cls, updates: Updates, optimizer: keras.optimizers.Optimizer, workers: int) -> None:
        """Checks that the rule can train with an optimizer and a number of workers.

        Raises:
            TrainingError: it cannot.
        """

    @classmethod
    def batches_per_update(cls, updates: Updates, workers: int) -> int:
        """Returns how many batches of workers make one update."""

    def resized(self, context: ParameterServerContext) -> UpdateRule:
        """Returns the rule for another number of workers. Asynchronous rules take workers as they come, and have none.

        Args:
            context: that of this rule, but for what changes with the number of workers.
        """

    def rehearse(self, workers: Sequence[Any], iterators: Any, size: int) -> None:
        """Compiles the functions of a run, while another rule's run goes on with these workers or some of them.

        Args:
            workers: so many as the rule is made for.
            iterators: each worker's data.
            size: steps in an execution.

        Raises:
            Exception: a task has failed meanwhile.
        """

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """Trains, see `Engine.run`.

        Args:
            iterators: each worker's data.
            steps: how many steps, see `UpdateMode.synchronous`.
            first: the global number of the first one.
            size: steps in an execution.
            adapts: whether an execution may have fewer steps if steps take long.
            pause: tells when no more steps are started.
        """

    def share_changes(self) -> None:
        """See `Engine.share_changes`; it may be called within a run."""

    def read_updates(self) -> None:
        """See `Engine.read_updates`; it is called within a run."""

    def close(self) -> None:
        """Ends what goes on beside runs."""


def check_updates_within(step: ModelStep, element_spec: Any, rules: Rules) -> None:
    """Checks that the rules can train a model whose step makes its updates itself, see `ModelStep.updates_within`.

    In lockstep, all workers make each of its updates together. By itself, a worker makes them one after the other.
    Other rules drop gradients, or compute them with parameters that lack an earlier update of the same step.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        rules: the rules.

    Raises:
        TrainingError: they cannot.
    """
    if step.recurrent_state:
        raise TrainingError(
            f"{type(step.model).__name__} has a recurrent layer with stateful=True, and workers of parameter servers "
            "keep no state from one batch to the next",
            code="stateful-layer",
            hint="use strategy: multi_worker_mirrored, or whole sequences in one example",
        )
    step.plan_updates(element_spec)
    updates, name = rules.updates, type(step.model).__name__
    lockstep = updates.synchronous and not updates.staleness and updates.aggregate is None
    alone = not (updates.synchronous or updates.steps_per_round > 1 or updates.prefetch or updates.delay_compensation)
    if step.updates_within and step.assigns_parameters:
        if not lockstep:
            raise TrainingError(
                f"a train step of {name} assigns weights that the optimizer trains: what one asynchronous worker "
                "assigns would overwrite the updates of the others",
                code="assigns-trainable-variable",
                hint="use updates: {mode: sync} without aggregate, or strategy: multi_worker_mirrored",
            )
        if rules.wire != "float32":
            raise TrainingError(
                f"a train step of {name} computes new values of weights, which wire: {rules.wire} would round in each "
                "step",
                code="wire-rounds-weights",
                hint="use wire: float32",
            )
    elif step.updates_within and not (lockstep or alone):
        raise TrainingError(
            f"train_step() of {name} makes several updates, or reads variables after its update, and this update rule "
            "has no meaning for it",
            code="several-updates-in-a-step",
            hint="use updates: {mode: sync} without aggregate, {mode: async} without push_every, local_steps, "
            "prefetch and delay_compensation, or strategy: multi_worker_mirrored",
        )


def rule_of(updates: Updates) -> type[UpdateRule]:
    """Returns the class that implements an update mode, see `UPDATE_MODES`."""
    module, _, name = UPDATE_MODES[updates.mode].implementation.partition(":")
    rule: type[UpdateRule] = getattr(import_module(module), name)
    return rule
