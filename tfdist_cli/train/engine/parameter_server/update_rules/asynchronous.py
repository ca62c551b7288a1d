"""Asynchronous updates: each worker's gradients are applied when they arrive, without waiting for other workers.

A worker's execution pulls the parameters from the ps, computes gradients, and has them applied where the variables are.
What has to be exact does not pass through shared variables: metrics are returned by the execution and summed on the
chief, `iterations` is an atomic addition, and seeds follow from the step's number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Execution, Pause, WorkerReport
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext, raise_cause
from tfdist_cli.train.engine.parameter_server.worker_execution import ExecutionReport, WorkerExecutions
from tfdist_cli.train.optimizers.apply import innermost, leaf_optimizers
from tfdist_cli.train.tf_compat.coordinator import error_of, is_aborted, run_for_result, wait_for

_RETRY_SECONDS = 0.05
_POLL_SECONDS = 0.1
"""How often it is looked whether the training is to pause, and whether a later execution is done before the first."""


class AsynchronousUpdates:
    """Schedules executions of a few steps on the worker that is free next.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None:
        self._context = context
        self._updates = context.rules.updates
        self._pace = Pacing(len(context.workers))
        self._executions = WorkerExecutions(context)
        self._forms: set[tuple[int, bool]] = set()
        """Of executions so far: their steps, and whether they are unrolled; loops count as one form."""

    @classmethod
    def check(cls, updates: Updates, optimizer: keras.optimizers.Optimizer, workers: int) -> None:
        """See `UpdateRule.check`."""
        steps = max(inner.gradient_accumulation_steps or 0 for inner in leaf_optimizers(optimizer))
        if steps and workers > 1:
            raise TrainingError(
                f"gradient_accumulation_steps is {steps}, but asynchronous workers cannot accumulate together",
                code="accumulation-needs-synchronous-workers",
                hint="use larger batches, updates: {push_every: N}, or strategy: multi_worker_mirrored",
            )
        scales = optimizer is not innermost(optimizer) or optimizer.loss_scale_factor is not None
        if updates.delay_compensation and scales:
            raise TrainingError(
                "delay_compensation needs unscaled gradients, but the optimizer scales the loss (mixed_float16)",
                code="loss-scaling-unsupported",
                hint="use the mixed_bfloat16 policy, or remove delay_compensation or loss_scale_factor",
            )

    @classmethod
    def batches_per_update(cls, updates: Updates, workers: int) -> int:  # noqa: ARG003 whatever their number
        """See `UpdateRule.batches_per_update`."""
        return updates.push_every

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `UpdateRule.run`; if a pause is wanted, workers finish the steps that they are taking.

        A loop that is stopped has not used the numbers of all of its steps. Later steps get higher numbers, so that no
        two steps draw with the same one.
        """
        seeds, done, votes = self._context.seeds, 0, 0
        schedule = _Schedule(self._pace, self._updates.steps_per_round, steps, first + seeds.passed_over)
        used, pauses = schedule.next_number, False
        self._executions.allow()
        while True:
            pauses = pauses or pause.wanted() or pause.agreed()
            if pauses:
                self._executions.stop()
            else:
                self._take_workers(iterators, schedule)
            while not pauses and schedule.may_add:
                schedule.add(partial(self._schedule, iterators), size, adapts=adapts, loops=self._loops)
            if not schedule.in_flight:
                break
            if (scheduled := schedule.next_done()) is None:
                continue
            fetched = self._raising_cause(partial(_fetched, scheduled.remote))
            if fetched is None:  # a new worker's own, see `_take_workers`
                schedule.add_again(scheduled, partial(self._schedule, iterators))
                continue
            report = self._executions.report(fetched)
            if report.steps:
                self._pace.took(report.steps, report.seconds)
                used = max(used, scheduled.number + report.steps)
                votes += (vote := int(pause.wanted()))
                yield _execution(report, first + done, vote)
                done += report.steps
        seeds.passed_over = used - first - done
        if pauses and not votes:
            yield Execution(first + done, np.zeros(0), np.zeros(self._context.totals.size), {}, {}, int(pause.wanted()))

    def _take_workers(self, iterators: Any, schedule: _Schedule) -> None:
        """Takes workers that have joined, and lets go of those that leave.

        TensorFlow compiles a function on each worker when it first runs there, which takes as long as many executions.
        So a new worker begins with executions of its own, one of each form that is in use.
        """
        workers = self._context.workers
        for worker in workers.take_changes():
            own = partial(self._run_on, worker, iterators)
            for count, unrolled in sorted(self._forms):
                schedule.add_first(own, count, unrolled=unrolled)
            workers.admit(worker)
        self._pace.resize(len(workers))

    @property
    def _loops(self) -> bool:
        """Whether executions may be loops: the standard path does without."""
        return self._context.rules.optimized

    def _schedule(self, iterators: Any, number: int, count: int, *, unrolled: bool) -> Any:
        self._forms.add((count if unrolled else self._updates.steps_per_round, unrolled))
        function, args = self._call(iterators, number, count, unrolled=unrolled)
        return self._raising_cause(lambda: self._context.coordinator.schedule(function, args=args))

    def _run_on(self, worker: Any, iterators: Any, number: int, count: int, *, unrolled: bool) -> Any:
        function, args = self._call(iterators, number, count, unrolled=unrolled)
        with self._context.coordinator.strategy.scope():  # as where it was traced
            return run_for_result(worker, function, args)

    def _call(self, iterators: Any, number: int, count: int, *, unrolled: bool) -> tuple[Any, tuple[Any, ...]]:
        function = self._executions.unrolled(count) if unrolled else self._executions.loop
        numbers = [number] if unrolled else [number, count]
        return function, (iterators, *(tf.constant(each, tf.int64) for each in numbers))

    def _raising_cause(self, call: Callable[[], Any]) -> Any:
        """Calls a function; if an execution has failed, raises its error, not the cancellation of the others."""
        try:
            return call()
        except tf.errors.CancelledError:
            self._context.coordinator.join()  # raises the error that the others were cancelled for
            raise
        except Exception as error:  # noqa: BLE001 it is raised again, or its cause
            raise_cause(error)


@dataclass(frozen=True)
class _Scheduled:
    """An execution in flight.

    Args:
        number: of its first step.
        count: how many steps it is to take.
        unrolled: whether these are unrolled.
        remote: its `RemoteValue`.
    """

    number: int
    count: int
    unrolled: bool
    remote: Any


class _Schedule:
    """Divides the steps of a run into executions, and keeps those in flight.

    Args:
        pace: decides how many steps are scheduled at once.
        every: steps in a round, see `Updates.steps_per_round`.
        steps: how many steps there are.
        number: of the first one.
    """

    def __init__(self, pace: Pacing, every: int, steps: int, number: int) -> None:
        self._pace, self._every = pace, every
        self._left, self.next_number = steps, number
        self._shared = self._share = 0
        """The size that shares were computed for, and the steps of a share."""
        self.in_flight: list[_Scheduled] = []

    @property
    def may_add(self) -> bool:
        """Whether another execution may be in flight."""
        return self._left > 0 and len(self.in_flight) < self._pace.in_flight

    def add(self, schedule: Callable[..., Any], size: int, *, adapts: bool, loops: bool) -> None:
        """Schedules an execution.

        Args:
            schedule: the number of the first step, the number of steps, and whether they are unrolled → the remote
                value.
            size: steps in an execution.
            adapts: whether it may have fewer steps.
            loops: whether executions may be loops.
        """
        size = self._whole_rounds(size)
        count, unrolled = self._count(size, adapts=adapts, loops=loops)
        self._add(schedule, count, unrolled=unrolled)

    def add_first(self, schedule: Callable[..., Any], count: int, *, unrolled: bool) -> None:
        """Schedules an execution of a form that is in use, if there are steps for it."""
        if count <= self._left:
            self._add(schedule, count, unrolled=unrolled)

    def add_again(self, scheduled: _Scheduled, schedule: Callable[..., Any]) -> None:
        """Schedules an execution whose worker was lost."""
        remote = schedule(scheduled.number, scheduled.count, unrolled=scheduled.unrolled)
        self.in_flight.append(replace(scheduled, remote=remote))

    def _add(self, schedule: Callable[..., Any], count: int, *, unrolled: bool) -> None:
        remote = schedule(self.next_number, count, unrolled=unrolled)
        self.in_flight.append(_Scheduled(self.next_number, count, unrolled, remote))
        self._left, self.next_number = self._left - count, self.next_number + count

    def _count(self, size: int, *, adapts: bool, loops: bool) -> tuple[int, bool]:
        """Steps in the next execution, and whether they are unrolled: a loop takes whole rounds."""
        if self._left < self._every:
            return self._left, True
        if not loops:
            return self._every, True
        short = self._pace.unrolls(size) if adapts or self._pace.step_seconds is not None else True
        wanted = size if short or not adapts else self._whole_rounds(self._pace.loop_size(size))
        wanted = self._fair(wanted, keeps_size=short) if adapts else wanted
        count = wanted if self._left >= wanted else self._left - self._left % self._every
        return count, short and count == size

    def _fair(self, size: int, *, keeps_size: bool) -> int:
        """Up to `size` steps, so that all workers get as many: none waits at the end of a run for another's execution.

        Args:
            size: the most steps.
            keeps_size: whether only the last executions may have fewer.
        """
        workers = self._pace.workers
        if keeps_size and self._left > size * workers:
            return size
        if self._shared != size:
            executions = ceil(self._left / (size * workers)) * workers
            self._shared, self._share = size, self._whole_rounds(ceil(self._left / executions))
        return min(size, self._share)

    def _whole_rounds(self, steps: int) -> int:
        return steps + -steps % self._every

    def next_done(self) -> _Scheduled | None:
        """Takes one of the executions that are done; None if none is after a while.

        Those of a worker that is slow, or stopped for a while, do not delay those of the others.
        """
        wait_for(self.in_flight[0].remote, _POLL_SECONDS)
        for index, scheduled in enumerate(self.in_flight):
            if wait_for(scheduled.remote, 0):
                return self.in_flight.pop(index)
        return None


def _execution(report: ExecutionReport, first: int, votes: int) -> Execution:
    name, staleness = f"worker:{report.worker}", tuple(report.staleness.astype(int).tolist())
    return Execution(
        first,
        report.losses,
        report.metrics,
        {name: report.steps},
        {name: report.examples},
        votes,
        {name: WorkerReport(float(np.sum(report.losses)), report.steps, staleness)},
        phases={name: report.phases} if report.phases.size else {},
    )


def _fetched(remote: Any) -> Any:
    """Returns the result of an execution; None if its worker was lost, and no other one runs it.

    The result is copied to the chief as soon as the execution is done. If its worker fails just then, the result is
    lost, and TensorFlow gives an execution of any worker to another one, whose result is fetched instead. An execution
    that fails just while its result is fetched returns None first, and raises its error after that.
    """
    pause = threading.Event()
    while not is_aborted(remote):
        try:
            fetched = remote.fetch()
        except Exception as error:
            if not is_aborted(remote) and (error_of(remote) is not None or not isinstance(error, tf.errors.OpError)):
                raise  # the execution itself has failed
        else:
            if fetched is not None:
                return fetched
        pause.wait(_RETRY_SECONDS)  # TensorFlow has no event for an execution that has run again
    return None
