"""The interface between the training loop and engines; callbacks, metrics and checkpoints do not know the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.train.data.shard import DatasetFunction, Shard
from tfdist_cli.train.model.metrics import MetricTotals

Sharing = Share | Literal["coordinator"]
"""What each worker sees of the data; `coordinator`: what the chief reads for it, since no other task can."""

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Rules:
    """How gradients become updates.

    Args:
        updates: when gradients are applied, on parameter servers.
        learning_rate: how the optimizer's learning rate is scaled.
        wire: the type in which parameters and gradients cross the network.
        embeddings: which tables are read and updated row by row; None for none.
        jit: whether XLA compiles the forward and backward pass.
        phases: whether the phases of each step are measured, which takes some time.
        optimized: whether executions take the fast path; see `fallback.py`.
        micro_batches: the parts of a batch that pass through the stages of a model one after the other.
        builds_first: whether the functions of the long run are built before the first steps, not after some.
    """

    updates: Updates = field(default_factory=Updates)
    learning_rate: LearningRate = field(default_factory=LearningRate)
    wire: WireType = "float32"
    embeddings: EmbeddingRule | None = field(default_factory=EmbeddingRule)
    jit: Jit = False
    phases: bool = False
    optimized: bool = True
    micro_batches: int = 1
    builds_first: bool = False


DEFAULT_RULES = Rules()
"""Asynchronous updates with the optimizer's own learning rate; nothing is rounded."""


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did in an execution.

    Args:
        loss: the sum of the losses of its batches.
        batches: the number of these batches.
        staleness: for each of its updates how many other updates were applied since it read the parameters.
        dropped: how many of its gradients came too late for an update.
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
        metrics: the sums of the metrics, as `MetricTotals.pack` packs them.
        steps: steps taken by each worker, `{"worker:0": n}`.
        examples: examples consumed by each worker.
        votes: how many tasks asked for a pause when it began.
        reports: what each worker did, if workers differ.
        gap: the most steps that a worker has been ahead of the slowest so far, if this is bounded.
        phases: for each task that trains its seconds and bytes, in the order of `COLUMNS`, if they are measured.
        ended: when it ended, by `time.monotonic`. The executions of an attempt are yielded together, after its end.
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
    ended: float = field(default_factory=time.monotonic, compare=False)

    def renamed(self, names: Sequence[str]) -> Execution:
        """Returns it with the workers' names in place of their places among all workers, `worker:0` and so on."""
        others = {f"worker:{place}": name for place, name in enumerate(names)}

        def rename(of: Mapping[str, _Value]) -> dict[str, _Value]:
            return {others.get(name, name): value for name, value in of.items()}

        return replace(
            self,
            steps=rename(self.steps),
            examples=rename(self.examples),
            reports=rename(self.reports),
            phases=rename(self.phases),
        )


class WorkersLost(Exception):
    """The process is to end, and an update waits for workers that are lost.

    Args:
        workers: their names.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        super().__init__(" and ".join(workers))


class Pause(Protocol):
    """Stops the loops of one or more tasks between two executions, all of them after the same execution."""

    def wanted(self) -> bool:
        """Whether this task asks for a pause; the other tasks learn it from the next execution's votes."""

    def agreed(self) -> bool:
        """Whether all tasks know of it: no further execution is started."""

    def ends(self) -> bool:
        """Whether this process ends after the pause, so that nothing has to wait for workers that are lost."""


class EvaluationWatch(Protocol):
    """Is asked between two executions of an evaluation whether it goes on."""

    def wanted(self) -> bool:
        """Whether this task asks to end the evaluation."""

    def between(self, batches: int, votes: int) -> None:
        """Called on all tasks that run the loop, at the same point; ends the evaluation if it raises an error.

        Args:
            batches: how many all tasks together have evaluated.
            votes: how many tasks ask to end the evaluation.
        """


class Engine(Protocol):
    """Runs the steps of one model on one cluster.

    Attributes:
        is_chief: whether this process reports, saves and runs callbacks.
        synchronous: whether all workers take each step together.
        max_steps_per_execution: the largest number of steps that `auto` chooses.
    """

    is_chief: bool
    synchronous: bool
    max_steps_per_execution: int

    @property
    def one_by_one(self) -> bool:
        """Whether, for callbacks that act on batches, executions are run one by one.

        Several asynchronous workers would wait for each other.
        """

    @property
    def workers(self) -> int:
        """How many workers there are; it may change between two executions."""

    @property
    def sharers(self) -> int:
        """How many batches of the data are trained on at the same time: one by each worker, or replica."""

    @property
    def is_current(self) -> bool:
        """Whether it can be used for another training: its workers are those of the cluster."""

    def begin_again(self) -> None:
        """Another training or evaluation begins, after an earlier one has ended."""

    def scope(self) -> AbstractContextManager[Any]:
        """The strategy's scope; engines enter it themselves. Callbacks run outside of it: they may create variables."""

    def open(self, data: DatasetFunction, *, share: Sharing, step: int, batches: int) -> None:
        """Opens the data on each worker.

        Args:
            data: a shard → its batches.
            share: whether the workers divide the data (`split`), each sees all of it (`copy`), or each receives the
                batches that are ready next (`service`), or that the chief has read (`coordinator`).
            step: the global step that the training starts at.
            batches: how many batches all workers together have consumed by then; the data continues after them.
        """

    def resume_workers(self, taken: Mapping[str, int]) -> None:
        """Continues to count the steps of each worker, before the first one.

        Args:
            taken: what `worker_steps` was when the checkpoint was saved; empty without one.
        """

    @property
    def worker_steps(self) -> dict[str, int]:
        """The steps by which equal shares of the workers are computed; empty if workers have no shares."""

    def begin_epoch(self) -> None:
        """Divides the data anew at the start of an epoch if workers have joined or left. No step is in flight."""

    def begin_pass(self) -> None:
        """Opens another pass over data whose length was found out; no step is in flight. All tasks have to call it."""

    def change_workers(self, step: int) -> bool:
        """Takes workers that have joined, and lets go of those that leave; no step is in flight.

        Args:
            step: global steps done.

        Returns:
            Whether another number of workers takes each step together now.
        """

    def close(self) -> None:
        """The training has ended, in whatever way: the data is closed, and no worker joins or leaves any more.

        Another training of the model may open its data then, see `reuse.py`.
        """

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """Trains `steps` steps, or fewer if a pause is asked for, and yields them when they are done.

        When it ends, no step is in flight: the variables hold exactly the steps that were yielded. It may also end
        early for `change_workers`.

        Args:
            steps: how many steps; of all workers together if they are asynchronous.
            first: the global number of the first one.
            size: steps in an execution.
            adapts: whether an execution may have fewer steps: where they take long, or to start sooner.
            pause: tells, before each execution, whether no more are started.
        """

    def operations(self) -> int:
        """The number of operations in a step of the model, which determines how long it takes to compile."""

    def evaluate(self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch) -> MetricTotals:
        """Scores the data, each batch once.

        Args:
            data: a shard → its batches.
            steps: batches of all shards together; None for all there are.
            watch: called between two executions; an error that it raises ends the evaluation on all tasks.
        """

    def test_steps(
        self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch
    ) -> Iterator[Callable[[], np.ndarray]]:
        """Scores the data batch by batch, for callbacks that act on validation batches.

        Yields a function for each batch, or for one batch of each task if they step together. The function scores the
        batch, unless it has been scored already, and returns the metrics as `MetricTotals.pack` packs them. All tasks
        that run the loop have to call it before they request the next one.
        """

    def count(self, data: DatasetFunction, shards: Sequence[Shard]) -> np.ndarray:
        """Counts the elements of each shard, where it is read. All tasks that run the loop have to call it.

        Args:
            data: a shard → its elements.
            shards: one for each worker, or a single one that all of them read.

        Returns:
            The number of elements of each shard, float64, shape (len(shards),).
        """

    def least(self, value: int) -> int:
        """The smallest `value` of all tasks that run the loop. All of them have to call it."""

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of `values`, float64, over the tasks that run the loop. All of them have to call it."""

    def share_variables(self) -> None:
        """Copies the chief's variables to every task that runs the loop, where they differ. All have to call it."""

    def share_changes(self) -> None:
        """Copies the variables that callbacks, on the chief, have assigned since the last call, like `share_variables`.

        All tasks that run the loop have to call it.
        """

    def read_updates(self) -> None:
        """Lets variables have the updates that a run has made so far, at the latest when they are used.

        All tasks that run the loop have to call it.
        """

    def settle(self, step: int) -> None:
        """Assigns the counters that are kept outside of variables to their variables, as of global step `step`."""
