"""What the training loop asks of an engine; a callback, a metric or a checkpoint doesn't know which engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.train.data.pipeline import DatasetFunction
from tfdist_cli.train.model.metrics import MetricTotals


@dataclass(frozen=True)
class Rules:
    """How gradients become updates.

    Args:
        updates: when they are applied, on parameter servers.
        learning_rate: what becomes of the optimizer's.
        wire: the type in which parameters and gradients cross the network.
        embeddings: which tables are moved row by row; None for none.
        jit: whether XLA compiles the forward and backward pass.
        phases: whether the time of each phase of a step is taken, which costs some.
        optimized: whether executions take the fast path; see `fallback.py`.
    """

    updates: Updates = field(default_factory=Updates)
    learning_rate: LearningRate = field(default_factory=LearningRate)
    wire: WireType = "float32"
    embeddings: EmbeddingRule | None = field(default_factory=EmbeddingRule)
    jit: Jit = False
    phases: bool = False
    optimized: bool = True


DEFAULT_RULES = Rules()
"""Asynchronous updates, the optimizer's own learning rate, and everything as it is on the wire."""


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did in an execution.

    Args:
        loss: the sum of the losses of its batches.
        batches: how many these are.
        staleness: for each of its updates how many others the parameters had seen since it read them.
        dropped: gradients of its that came too late for an update.
    """

    loss: float
    batches: int
    staleness: tuple[int, ...] = ()
    dropped: int = 0


@dataclass(frozen=True)
class Execution:
    """Steps that are done.

    Args:
        first: the global number of the first of them.
        losses: the loss of each, shape (steps,).
        metrics: what they counted, as `MetricTotals.pack` packs it.
        steps: steps taken by each worker, `{"worker:0": n}`.
        examples: examples consumed by each worker.
        votes: how many tasks asked for a pause when it began.
        reports: what each worker did, where workers differ.
        gap: the most steps that a worker has been ahead of the slowest so far, where that is bounded.
        phases: for each task that trains its seconds and bytes, in the order of `COLUMNS`, where they are taken.
    """

    first: int
    losses: np.ndarray
    metrics: np.ndarray
    steps: dict[str, int]
    examples: dict[str, int]
    votes: int = 0
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)
    gap: int | None = None
    phases: Mapping[str, np.ndarray] = field(default_factory=dict)


class Pause(Protocol):
    """How a loop in one or more tasks comes to a stop between two executions, in all of them after the same one."""

    def wanted(self) -> bool:
        """Whether this task asks for a pause; the others learn of it with the next execution's votes."""

    def agreed(self) -> bool:
        """Whether all tasks know of it: no further execution is begun."""


class Engine(Protocol):
    """Runs the steps of one model on one cluster.

    Attributes:
        is_chief: whether this process reports, saves and runs callbacks.
        synchronous: whether all workers take each step together.
        one_by_one: whether, for callbacks that act on batches, executions are run one by one. Several workers that are
            asynchronous would wait for each other.
        workers: how many workers there are.
        sharers: how many of the data's batches are trained on side by side: one by each worker, or replica.
        max_steps_per_execution: what `auto` chooses at the most.
    """

    is_chief: bool
    synchronous: bool
    one_by_one: bool
    workers: int
    sharers: int
    max_steps_per_execution: int

    def scope(self) -> AbstractContextManager[Any]:
        """The strategy's scope; engines enter it themselves. Callbacks are not run in it: they may make variables."""

    def open(self, data: DatasetFunction, *, share: Share, step: int, batches: int) -> None:
        """Gets the data ready on each worker.

        Args:
            data: a shard → its batches.
            share: whether the workers divide the data (`split`), each sees all of it (`copy`), or each gets what is
                ready next (`service`).
            step: the global step the training starts at.
            batches: how many all workers together have taken by then; the data goes on after them.
        """

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """Trains `steps` steps, or fewer when a pause is asked for, and yields them as they are done.

        When it ends, no step is under way: the variables hold exactly the steps that were yielded.

        Args:
            steps: how many steps, of all workers together when they are asynchronous.
            first: the global number of the first one.
            size: steps in an execution.
            adapts: whether asynchronous workers may take fewer in one where steps take long.
            pause: asked and told about pauses, before more is begun.
        """

    def operations(self) -> int:
        """How many operations a step of the model has, which tells how long it takes to compile."""

    def evaluate(self, data: DatasetFunction, *, steps: int | None) -> MetricTotals:
        """Scores the data, each batch once.

        Args:
            data: a shard → its batches.
            steps: batches of all shards together; None for all there are.
        """

    def test_steps(self, data: DatasetFunction, *, steps: int | None) -> Iterator[Callable[[], np.ndarray]]:
        """The same, batch by batch, for callbacks that act on validation batches.

        Yields a function for each batch, or for one batch of each task where they step together. It scores the batch
        unless that has been done, and returns what was counted, as `MetricTotals.pack` packs it. All tasks that run the
        loop have to call it before they ask for the next one.
        """

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of `values`, float64, over the tasks that run the loop. All of them have to call it."""

    def share_variables(self) -> None:
        """Gives every task that runs the loop the chief's variables. All of them have to call it."""

    def share_changes(self) -> None:
        """The same of what callbacks, on the chief, have assigned since it was last shared.

        All of them have to call it.
        """

    def settle(self, step: int) -> None:
        """Brings what is counted outside of variables into them, as of global step `step`."""
