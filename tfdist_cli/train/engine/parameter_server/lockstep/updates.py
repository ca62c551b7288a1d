"""Updates in lockstep: each one is the mean of one gradient of every worker.

Each worker runs one function for as long as the training goes on, and so do the ps (`functions.py`). A worker
waits on each ps for the token of its step, computes a gradient, stores it on the ps, and commits it on the first ps.
When all workers have committed, each ps applies the mean of the stored gradients and gives the next token
(`token_queues.py`). The chief orders updates in advance, several at a time, and receives a message when they are
applied. A worker's gradient is applied on all ps or on none: if a worker fails before its commit, nothing of it is
applied.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.engine.batch_sizes import BatchSizes
from tfdist_cli.train.engine.pacing import ArrivalPacing
from tfdist_cli.train.engine.parameter_server.accumulator import Accumulator
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.lockstep import worker_updates
from tfdist_cli.train.engine.parameter_server.lockstep.functions import LockstepFunctions
from tfdist_cli.train.engine.parameter_server.lockstep.shared_memory import SharedLockstepFunctions, suits
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN, Orders
from tfdist_cli.train.engine.parameter_server.lockstep.worker_updates import WorkerUpdateFunctions
from tfdist_cli.train.engine.parameter_server.messages import StepKind
from tfdist_cli.train.engine.parameter_server.worker_functions import (
    Messages,
    Threads,
    WorkerFunctions,
    receiving,
    run_all,
    running,
    try_briefly,
)
from tfdist_cli.train.engine.step_timer import wait_as_update
from tfdist_cli.train.tf_compat.coordinator import ConcreteFunctions, are_per_worker
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit

_ORDERS_IN_FLIGHT = 2
"""Orders that are not yet done, so that the ps need not wait for the chief."""
_runs = count(1)


class LockstepUpdates:
    """Orders updates and counts what they consist of.

    Args:
        context: the model on its cluster.
        before: the updates of another number of workers.

    Attributes:
        functions: what workers and ps run.
        pace: decides how many updates are ordered at once.
    """

    def __init__(self, context: ParameterServerContext, before: LockstepUpdates | None = None) -> None:
        self._context = context
        self._sizes = _batch_sizes(context)
        self.functions: LockstepFunctions = self._functions(before.functions if before else None)
        self.pace: ArrivalPacing = before.pace if before else ArrivalPacing()
        self._concrete = ConcreteFunctions(context.coordinator.strategy)
        self._queues: Orders | None = None
        """None before the first run, and after one that was aborted."""

    def _functions(self, before: LockstepFunctions | None) -> LockstepFunctions:
        if worker_updates.suits(self._context):
            return WorkerUpdateFunctions(self._context)
        if suits(self._context):
            same = before if isinstance(before, SharedLockstepFunctions) else None
            return SharedLockstepFunctions(self._context, before=same)
        before = before if type(before) is LockstepFunctions else None
        return LockstepFunctions(self._context, divides=self._sizes is not None, before=before)

    def rehearse(self, workers: Sequence[Any], iterators: Any, size: int) -> None:
        """Compiles the functions of a run on workers that may still take part in another one: it has no steps.

        Args:
            workers: so many as these updates are made for.
            iterators: their data.
            size: steps in an execution.
        """
        queues, self._queues = self._queues or self.functions.new_orders(), None  # not used if this fails
        sequence = next(_runs) * RUN
        scope = self._context.coordinator.strategy.scope
        with scope():
            queues.start(sequence)
        self._order(queues, StepKind.END)

        def apply_updates() -> None:
            with scope():
                self.functions.updates(size)(queues.handles, tf.constant(sequence, tf.int64))

        rehearsals = [
            self._context.rehearsal(
                worker,
                self.functions.work(size),
                self._arguments(place, queues, iterators, sequence),
            )
            for place, worker in enumerate(workers)
        ]
        run_all([apply_updates, *rehearsals])
        self._queues = queues

    def run(self, iterators: Any, steps: int, *, first: int, size: int, pause: Pause) -> Iterator[Execution]:
        """See `UpdateRule.run`; it pauses as soon as all ordered updates are applied."""
        context, workers = self._context, self._context.worker_count
        queues = self._queues = self._queues or self.functions.new_orders()
        sequence = next(_runs) * RUN + first * self.functions.sequences
        with context.coordinator.strategy.scope():
            self.functions.begin()
            queues.start(sequence)
        # It is traced before the functions of the ps, which depend on what workers send.
        function = self._concrete.of(self.functions.work(size), self._arguments(0, queues, iterators, sequence))
        start = partial(WorkerFunctions, workers, partial(self._start, function, queues, iterators, sequence))
        self.pace.begin()
        with self._receiving(queues) as messages, self._updating(queues, messages, size, sequence):
            functions = yield from self._executions(queues, start, messages, range(first, first + steps), size, pause)
        functions.join()
        with context.coordinator.strategy.scope():
            self.functions.clear()

    def _arguments(self, worker: int, queues: Orders, iterators: Any, sequence: int) -> tuple[Any, ...]:
        """The arguments of a worker's function, see `LockstepFunctions.work`."""
        own = worker, sequence, are_per_worker(iterators), *self._context.counts, *queues.numbers
        return iterators, tf.constant(own, tf.int64), queues.of(worker)

    def _executions(
        self,
        queues: Orders,
        start: Callable[[], WorkerFunctions],
        messages: Messages[np.ndarray],
        steps: range,
        size: int,
        pause: Pause,
    ) -> Generator[Execution, None, WorkerFunctions]:
        """Orders updates up to the last step, or to a pause, and yields them when they are applied.

        Args:
            queues: of the run.
            start: starts the functions of the workers; the ps begin while it does.
            messages: the reports.
            steps: the steps.
            size: steps in a chunk.
            pause: may end the run before.

        Returns:
            The functions.
        """
        functions: WorkerFunctions | None = None
        first, ordered, end = steps.start, steps.start, steps.stop
        in_flight, ended, seconds = 0, False, 0.0
        while True:
            while in_flight < _ORDERS_IN_FLIGHT and ordered < end:
                if pause.agreed():
                    end = ordered
                    break
                several = 1 < size == self.pace.size(size) <= end - ordered
                self._order(queues, StepKind.CHUNK if several else StepKind.SINGLE)
                ordered, in_flight = ordered + (size if several else 1), in_flight + 1
            if ordered == end and not ended:  # at once: the functions take as long to end as some updates
                self._order(queues, StepKind.END)
                ended = True
            functions = functions or start()
            if not in_flight:
                return functions
            reports = functions.next_message(messages)
            if reports is None:
                self._context.workers.end_if_lost(pause)
                continue
            sums = Accumulator(first, by_examples=self._sizes is not None, following=self._context.totals.following)
            seconds = self._count(reports, sums, seconds)
            first, in_flight = first + len(reports), in_flight - 1
            self.pace.done(len(reports))
            yield sums.execution(int(pause.wanted()), gap=0)

    def _order(self, queues: Orders, kind: StepKind) -> None:
        queues.order(kind, self._sizes.bounds if self._sizes else ())

    def _start(self, function: Any, queues: Orders, iterators: Any, sequence: int, worker: int, _: int) -> Any:
        """Starts a worker's function."""
        args = self._arguments(worker, queues, iterators, sequence)
        return self._context.run_on_worker(self._context.workers[worker], function, args)

    def _count(self, reports: np.ndarray, sums: Accumulator, seconds: float) -> float:
        """Counts a chunk of updates.

        Args:
            reports: packed step reports, and an update's seconds if measured: shape (updates, workers, numbers).
            sums: what they are added to.
            seconds: how long the update before took, which the workers waited for; 0 if it was not measured.

        Returns:
            The same of the last one.
        """
        layout = self.functions.layout
        losses, examples, metrics, phases = layout.split(reports)
        sums.updates_of_all(losses, examples, metrics)
        if self._sizes:
            for own, took in zip(examples.tolist(), reports[:, :, layout.size].tolist(), strict=True):
                self._sizes.observe([int(each) for each in own], took)
        if not layout.phases:
            return 0.0
        for update, own in zip(reports, phases, strict=True):
            for worker, spent in enumerate(own):
                task = f"worker:{worker}"
                sums.phases[task] = sums.phases.get(task, 0.0) + wait_as_update(spent, seconds)
            seconds = float(update[-1, -1])
        return seconds

    def _receiving(self, queues: Orders) -> AbstractContextManager[Messages[np.ndarray]]:
        def receive() -> np.ndarray | None:
            reports = queues.received()
            return reports if reports.size else None

        return receiving(receive, queues.stop)

    def _updating(
        self, queues: Orders, messages: Messages[np.ndarray], size: int, sequence: int
    ) -> AbstractContextManager[None]:
        """Runs the function that applies updates, until the `END` is ordered.

        A run that is aborted applies what was ordered, if the gradients for it arrive; its queues are not used again.
        """

        def apply_updates() -> None:
            self.functions.updates(size)(queues.handles, tf.constant(sequence, tf.int64))

        def abort(threads: Threads) -> None:
            self._order(queues, StepKind.END)
            threads["updates"].join(GRACE_SECONDS)
            self._queues = None
            try_briefly(partial(queues.abort, size * self.functions.sequences + 1))
            if threads["updates"].is_alive():
                end_at_exit(partial(try_briefly, queues.close_commits), threads["updates"])

        scope = self._context.coordinator.strategy.scope
        return running({"updates": apply_updates}, messages, scope=scope, abort=abort)


def _batch_sizes(context: ParameterServerContext) -> BatchSizes | None:
    """The workers' batches, if they are divided by their speeds."""
    batch = context.step.examples_per_batch
    return None if batch is None else BatchSizes(context.worker_count, batch)
