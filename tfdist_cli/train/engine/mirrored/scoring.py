"""Evaluation: each task scores its own shard of the data, and the counts of all tasks are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.engine.base import EvaluationWatch
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.model.evaluation import ParameterReader, Scorer
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.variables.replicas import AssignedVariables


class Scoring:
    """Scores data.

    Args:
        step: the model's pure functions.
        totals: packs the metrics.
        seeds: the model's seed counters.
        collectives: the sums over all replicas.
        scope: the strategy's scope.
        assigned: the variables that user code assigns.
    """

    def __init__(
        self,
        step: ModelStep,
        totals: MetricTotals,
        seeds: SeedCounters,
        collectives: Collectives,
        scope: Callable[[], AbstractContextManager[Any]],
        assigned: AssignedVariables,
    ) -> None:
        self._step, self._totals, self._seeds = step, totals, seeds
        self._collectives, self._scope, self._assigned = collectives, scope, assigned
        self._scorers: dict[str, Scorer] = {}
        """By the `tf.TypeSpec`s of their batches."""
        self._make_reader: Callable[[], ParameterReader] | None = None

    def read_by(self, make_reader: Callable[[], ParameterReader]) -> None:
        """Changes how functions read parameters.

        Args:
            make_reader: see `evaluation_function`.
        """
        self._make_reader = make_reader
        self._scorers.clear()

    def evaluate(self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch) -> MetricTotals:
        """See `Engine.evaluate`; a task whose shard has ended waits for the others."""
        dataset, limit = self._shard_of(data, steps)
        with self._scope():
            scorer = self._scorer_of(dataset)
            counts = scorer.first_counts()
            iterator, complete, counted = iter(dataset), False, np.zeros(0)
        while True:
            if not complete:
                with self._scope():
                    ended, packed, *counts = scorer.evaluate(
                        iterator, tf.constant(limit, tf.int64), self._shard, counts
                    )
                complete, counted = bool(ended), packed.numpy()
            own = np.array([not complete, watch.wanted(), int(counts[0])], np.float64)
            going_on, votes, batches = (int(total) for total in self._collectives.total(own))
            if not going_on:
                break
            watch.between(batches, votes)
        totals = MetricTotals(self._step, training=False)
        totals.add(self._summed(scorer, counted))
        return totals

    def test_steps(
        self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch
    ) -> Iterator[Callable[[], np.ndarray]]:
        """See `Engine.test_steps`; a task that has no batch left adds zeros to the sums of the others."""
        dataset, left = self._shard_of(data, steps)
        iterator = iter(dataset)
        with self._scope():
            scorer = self._scorer_of(dataset)
            restore = scorer.state.snapshot()
        done = 0
        while True:
            batch = iterator.get_next_as_optional() if left else None
            own = batch.get_value() if batch is not None and batch.has_value() else None
            more, votes = self._collectives.total(np.array([own is not None, watch.wanted()], np.float64))
            if not more:
                return
            with self._undone_if_ended(restore):
                watch.between(done, int(votes))
            yield partial(self._counted, scorer, own)
            left -= 1
            done += int(more)

    @contextmanager
    def _undone_if_ended(self, restore: Callable[[], None]) -> Iterator[None]:
        """Restores the state if the evaluation is ended: it will begin again."""
        try:
            yield
        except Exception:
            with self._scope(), self._assigned.paused():
                restore()
            raise

    def _shard_of(self, data: DatasetFunction, steps: int | None) -> tuple[tf.data.Dataset, int]:
        """This task's shard of the data, and its number of batches; -1 for all."""
        index, count = self._collectives.index, self._collectives.workers
        limit = -1 if steps is None else steps // count + (index < steps % count)
        return checked(data, Shard(index, count, index)), limit

    @property
    def _shard(self) -> tf.Tensor:
        return tf.constant([self._collectives.index, self._collectives.workers], tf.int64)

    def _scorer_of(self, dataset: tf.data.Dataset) -> Scorer:
        spec = dataset.element_spec
        if repr(spec) not in self._scorers:
            self._scorers[repr(spec)] = Scorer(self._step, self._totals, spec, self._seeds, self._make_reader)
        return self._scorers[repr(spec)]

    def _counted(self, scorer: Scorer, batch: Any) -> np.ndarray:
        """The sum over all tasks of what was counted in one batch of each; this task's batch may be None."""
        counted = np.zeros(self._totals.size + scorer.state.size)
        if batch is not None:
            with self._scope():
                counted = scorer.evaluate_batch(batch, self._shard).numpy()
        return self._summed(scorer, counted)

    def _summed(self, scorer: Scorer, counted: np.ndarray) -> np.ndarray:
        """The sum over all tasks of what was counted; applies the changes that they have made to the state."""
        own = counted[self._totals.size :]
        counted, changed = np.split(self._collectives.total(counted), [self._totals.size])
        with self._scope(), self._assigned.paused():
            scorer.state.apply(changed, own)
        return counted
