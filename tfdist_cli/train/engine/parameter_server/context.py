"""What every update rule on parameter servers works with."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.pipeline import ended_early
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.model.embeddings import EmbeddingTables
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep, Tensors
from tfdist_cli.train.optimizers.apply import apply
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import kernels_disabled
from tfdist_cli.train.tf_compat.coordinator import failure_of, is_dead
from tfdist_cli.train.variables.sharding import Gradient, assign

CHIEF_DEVICE = "/job:chief/replica:0/task:0/device:CPU:0"
_LOOK_SECONDS = 0.1
_NOT_SENT = "Unable to parse tensor proto"
"""What a task says that is given a dataset of another one's, which is no tensor that could be sent."""


@dataclass(frozen=True)
class ParameterServerContext:
    """A model on its cluster.

    Args:
        step: the model's pure functions.
        coordinator: TensorFlow's.
        workers: TensorFlow's workers, in order.
        rules: how gradients become updates.
        tables: the model's tables that are looked up.
        wire: the way between workers and ps.
        seeds: the model's seed counters.
        own: the places in the model's state of what a step makes itself: what it assigns, but for the seeds.
        totals: packs metrics.
        rate: what becomes of the learning rate.
        batches_per_update: how many batches of workers make one update.
    """

    step: ModelStep
    coordinator: Any
    workers: list[Any]
    rules: Rules
    tables: EmbeddingTables
    wire: Transport
    seeds: SeedCounters
    own: tuple[int, ...]
    totals: MetricTotals
    rate: RateScaling | None
    batches_per_update: int

    def apply(self, gradients: list[Gradient], present: list[bool]) -> tf.Tensor:
        """Updates the parameters; returns how many updates there were before this one.

        Args:
            gradients: one per parameter, by shards.
            present: which parameters have a part in the loss.
        """
        given = [gradient if there else None for gradient, there in zip(gradients, present, strict=True)]
        with nullcontext() if self.rules.optimized else kernels_disabled():
            return apply(self.step.model.optimizer, given, self.step.parameters, self.rate)

    def own_state(self, state: Sequence[Any]) -> list[Any]:
        """Of one thing for each state variable those of what a step makes itself."""
        return [state[place] for place in self.own]

    def assign_state(self, values: Tensors) -> None:
        """Writes what `own_state` gave into its variables."""
        for variable, value in zip(self.own_state(self.step.state), values, strict=True):
            assign(variable, value)

    def on_worker(self, worker: Any, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs a function on one worker, and again when the worker has been replaced while its result is kept."""
        return worker.create_resource(function, args=args)

    def outcome(self, remote: Any, work: Callable[[], Any]) -> Any:
        """What came of work that was begun on one worker; when that is lost before, another one begins it anew.

        Args:
            remote: the work as it was begun.
            work: the function to begin again. What it returns has to be on the chief, or it could be lost after it.
        """
        while True:
            try:
                fetched = remote.fetch()
            except tf.errors.CancelledError:
                if failure_of(remote) is not None:
                    raise  # the work itself was cancelled
                fetched = None
            if fetched is not None:
                return fetched
            remote = self.on_worker(self._one_that_lives(), work)

    def _one_that_lives(self) -> Any:
        pause = threading.Event()
        while True:
            for worker in self.workers:
                if not is_dead(worker):
                    return worker
            pause.wait(_LOOK_SECONDS)  # TensorFlow tells nobody when a worker has come back


def raise_cause(error: Exception) -> NoReturn:
    """Raises what a worker's execution failed of.

    Raises:
        TrainingError: its data has ended, or is the chief's own.
    """
    cause = getattr(error, "original_exception", None)
    if isinstance(error, tf.errors.OutOfRangeError):
        raise _ended_early(error) from error
    if isinstance(cause, tf.errors.OutOfRangeError):
        raise _ended_early(cause) from error
    if _NOT_SENT in str(cause or error):
        raise TrainingError(
            "the data function takes a dataset that was made outside of it, which no worker can read",
            hint="make the dataset within the function, or pass the dataset itself instead of a function",
        ) from error
    if isinstance(cause, Exception):
        raise cause from None
    raise error


def _ended_early(error: Exception) -> TrainingError:
    found = re.search(r"/job:worker/(?:replica:\d+/)?task:(\d+)", str(error))
    return ended_early(f"worker:{found[1]}'s data" if found else "the data")
