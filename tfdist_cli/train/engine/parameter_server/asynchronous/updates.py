"""Asynchronous updates: each worker's gradients are applied when they arrive, without waiting for other workers.

A worker's execution pulls the parameters from the ps, computes gradients, and has them applied where the variables are.
What has to be exact does not pass through shared variables: metrics are returned by the execution and summed on the
chief, `iterations` is an atomic addition, and seeds follow from the step's number.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Execution, Pause, WorkerReport
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.asynchronous.executions import ExecutionReport
from tfdist_cli.train.engine.parameter_server.asynchronous.schedule import Lane, Schedule, Scheduled, equal_shares
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import (
    SharedExecutions,
    is_ended,
    new_executions,
)
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext, raise_cause
from tfdist_cli.train.engine.parameter_server.worker_functions import Messages, Threads, running
from tfdist_cli.train.optimizers.apply import innermost, leaf_optimizers
from tfdist_cli.train.tf_compat.coordinator import error_of, is_aborted, run_for_result, schedule_concrete

_RETRY_SECONDS = 0.05
_CAUSE_SECONDS = 2.0
"""How long to wait for the error that others were cancelled for."""
log = logging.getLogger("tfdist")


class AwaitedWorkers:
    """Logs once for each loss of a worker that all others have taken their steps, and wait for it."""

    def __init__(self) -> None:
        self._logged: set[int] = set()

    def note(self, lost: Collection[int]) -> None:
        """The others wait for these workers, given by their indices."""
        names = ", ".join(f"worker:{index}" for index in sorted(set(lost) - self._logged))
        self._logged |= set(lost)
        if names:
            log.info("all others have taken their steps, and wait for %s, which is lost (worker_steps: equal)", names)

    def returned(self, worker: Any) -> None:
        """One of TensorFlow's workers has taken steps of its own; or any worker has, if it is None."""
        if worker is not None:
            self._logged.discard(worker.worker_index)


class AsynchronousUpdates:
    """Schedules executions of a few steps: on the worker that is free next, or on each worker as many.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None:
        self._context = context
        self._updates = context.rules.updates
        self._pace = Pacing(len(context.workers))
        self._executions = new_executions(context)
        self._forms: set[tuple[int, bool]] = set()
        """Of executions so far: their steps, and whether they are unrolled; loops count as one form."""
        self._awaited = AwaitedWorkers()
        self._messages: Messages[Exception] | None = None
        """The errors of the ps in a run of workers that share memory with them; None before they wait for its end."""
        self._run_context = ExitStack()
        self._is_aborted = False
        self._reads_when_used = False
        """Whether variables get what workers have made of them when they are used in this run."""

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
        with ExitStack() as self._run_context:
            self._run_context.callback(self._end_serving)
            yield from self._run(iterators, steps, first, size, pause, adapts=adapts)

    def _run(
        self, iterators: Any, steps: int, first: int, size: int, pause: Pause, *, adapts: bool
    ) -> Iterator[Execution]:
        self._begin()
        seeds, done, votes = self._context.seeds, 0, 0
        lanes = self._lanes(iterators, steps)
        unrolls = partial(self._executions.is_ready, iterators=iterators)
        schedule = Schedule(self._pace, self._updates.steps_per_round, lanes, first + seeds.passed_over, unrolls)
        used, pauses, gives_up = schedule.next_number, False, partial(self._gives_up, pause)
        while True:
            pauses = pauses or pause.wanted() or pause.agreed()
            if pauses:
                self._executions.stop()
                schedule.drop_waiting()
            else:
                self._take_workers(iterators, schedule)
            while not pauses and schedule.may_add:
                schedule.add(size, adapts=adapts, loops=self._loops)
            if not schedule.in_flight and (pauses or not schedule.left):
                break
            with self._executions.compiled.training_waits(lambda: pause.wanted() or pause.agreed()):
                scheduled = schedule.next_done()
            fetched: Any = scheduled and self._raising_cause(schedule, partial(_fetched, scheduled.remote, gives_up))
            if scheduled is None or fetched is None:
                if gives_up():
                    break  # no worker returns what is in flight: the parameters are on the ps
                self._recover(scheduled, schedule)
                continue
            self._awaited.returned(scheduled.worker)
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

    def share_changes(self) -> None:
        """See `Engine.share_changes`: within a run, workers may have variables in memory that they share."""
        if self._messages is not None and isinstance(self._executions, SharedExecutions):
            self._raising_cause(None, self._executions.shared.share_changes)

    def read_updates(self) -> None:
        """See `Engine.read_updates`."""
        if self._messages is None or not isinstance(self._executions, SharedExecutions):
            return
        if not self._reads_when_used:
            self._reads_when_used = True
            self._run_context.enter_context(self._executions.shared.read_when_used())
        self._executions.shared.outdate()

    def close(self) -> None:
        """See `UpdateRule.close`."""
        self._executions.compiled.close()

    def _begin(self) -> None:
        """Begins a run. The shared memory of a run that was aborted is not used again."""
        if self._is_aborted or not self._executions.suit(self._context.workers):
            self._executions.compiled.close()
            with self._context.coordinator.strategy.scope():
                self._executions = new_executions(self._context)
            self._is_aborted = False
        self._executions.compiled.reopen()
        self._raising_cause(None, self._executions.begin)

    def _serve(self) -> None:
        """Lets the ps wait for the end of a run, if they share memory with workers, once it has begun."""
        executions, scope = self._executions, self._context.coordinator.strategy.scope
        if not isinstance(executions, SharedExecutions) or self._messages is not None:
            return
        shared = executions.shared

        def abort(threads: Threads) -> None:
            self._is_aborted = True
            shared.abort(threads)

        self._messages = queue.SimpleQueue()
        try:
            with scope():
                functions = shared.start()
        except Exception:
            self._is_aborted = True
            shared.close()
            raise
        serving = running(functions, self._messages, scope=scope, end=shared.end, abort=abort)
        self._run_context.enter_context(serving)

    def _end_serving(self) -> None:
        self._messages, self._reads_when_used = None, False

    def _lanes(self, iterators: Any, steps: int, schedule: Schedule | None = None) -> list[Lane]:
        """Divides steps among the workers of now.

        Args:
            iterators: each worker's data.
            steps: how many steps.
            schedule: what is in flight counts as taken.
        """
        workers = self._context.workers
        if self._updates.worker_steps == "dynamic":
            return [Lane(partial(self._schedule, iterators), steps, len(workers))]
        taken = [workers.taken(each) + (schedule.steps_in_flight(each) if schedule else 0) for each in workers]
        shares = equal_shares(taken, steps)
        return [
            Lane(partial(self._run_on, worker, iterators), share, worker=worker)
            for worker, share in zip(workers, shares, strict=True)
        ]

    def _take_workers(self, iterators: Any, schedule: Schedule) -> None:
        """Takes workers that have joined, and lets go of those that leave.

        TensorFlow compiles a function on each worker when it first runs there, which takes as long as many executions.
        So a new worker begins with executions of its own, one of each form that is in use.
        """
        workers = self._context.workers
        if not workers.change or not self._executions.suit(workers):
            return  # one that shares no memory takes part from the next run on
        dynamic = self._updates.worker_steps == "dynamic"
        for worker in workers.take_changes():
            own = partial(self._run_on, worker, iterators)
            for count, unrolled in sorted(self._forms) if dynamic else []:
                schedule.add_first(own, count, unrolled=unrolled)
            workers.admit(worker)
        self._pace.resize(len(workers))
        schedule.divide(self._lanes(iterators, schedule.left, schedule))

    def _gives_up(self, pause: Pause) -> bool:
        """Whether the process is to end, and no worker is left to finish what is in flight."""
        return pause.ends() and self._context.workers.all_lost

    def _recover(self, scheduled: Scheduled | None, schedule: Schedule) -> None:
        """After an execution's worker was lost: it runs the execution again when it is back, if the steps are its own.

        None if no execution is done.

        In a dynamic run, only the executions of a worker that has just joined come here, see `_take_workers`.
        """
        if scheduled is None:
            self._awaited.note(schedule.awaited)
        elif any(worker is scheduled.worker for worker in self._context.workers):
            schedule.keep(scheduled)
        else:
            schedule.add_again(scheduled)

    @property
    def _loops(self) -> bool:
        """Whether executions may be loops: the standard path does without."""
        return self._context.rules.optimized

    def _schedule(self, iterators: Any, number: int, count: int, *, unrolled: bool) -> Any:
        self._forms.add((count if unrolled else self._updates.steps_per_round, unrolled))
        function, args = self._call(iterators, number, count, unrolled=unrolled)
        coordinator, concrete = self._context.coordinator, self._executions.concrete
        scheduled = self._raising_cause(None, lambda: schedule_concrete(coordinator, concrete.of(function, args), args))
        self._serve()
        return scheduled

    def _run_on(self, worker: Any, iterators: Any, number: int, count: int, *, unrolled: bool) -> Any:
        function, args = self._call(iterators, number, count, unrolled=unrolled)
        remote = run_for_result(worker, self._executions.concrete.of(function, args), args)
        self._serve()
        return remote

    def _call(self, iterators: Any, number: int, count: int, *, unrolled: bool) -> tuple[Any, tuple[Any, ...]]:
        function = self._executions.unrolled(count) if unrolled else self._executions.loop
        numbers = tf.constant(self._context.seeds.numbers(number), tf.int64)
        return function, (iterators, numbers, *([] if unrolled else [tf.constant(count, tf.int64)]))

    def _raising_cause(self, schedule: Schedule | None, call: Callable[[], Any]) -> Any:
        """Calls a function; if an execution has failed, raises its error, not the cancellation of the others."""
        try:
            return call()
        except tf.errors.CancelledError as error:
            self._raise_failure_of_ps(error)
            self._context.coordinator.join()  # raises the error that the others were cancelled for
            raise_cause(_cause(schedule, error) if schedule else error)
        except Exception as error:  # noqa: BLE001 it is raised again, or its cause
            self._raise_failure_of_ps(error)
            raise_cause(error)

    def _raise_failure_of_ps(self, error: Exception) -> None:
        """Raises the error of a ps that is lost, if a worker's error follows from it.

        The functions of the other ps are cancelled then, which may be reported first.
        """
        cancelled = isinstance(getattr(error, "original_exception", None) or error, tf.errors.CancelledError)
        if self._messages is None or not (cancelled or is_ended(error)):
            return
        found: list[Exception] = []
        while all(isinstance(each, tf.errors.CancelledError) for each in found):
            try:
                found.append(self._messages.get(timeout=_CAUSE_SECONDS))
            except queue.Empty:
                break
        if found:
            raise_cause(found[-1])


def _cause(schedule: Schedule, cancelled: Exception) -> Exception:
    """Returns the error of one worker's own execution that the others were cancelled for."""
    pause, end = threading.Event(), time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < end:
        for error in schedule.failures():
            if not isinstance(error, tf.errors.CancelledError):
                return error
        pause.wait(_RETRY_SECONDS)  # the cause may be reported after the cancellation
    return cancelled


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


def _fetched(remote: Any, gives_up: Callable[[], bool] = lambda: False) -> Any:
    """Returns the result of an execution; None if its worker was lost, and no other one runs it.

    The result is copied to the chief as soon as the execution is done. If its worker fails just then, the result is
    lost, and TensorFlow gives an execution of any worker to another one, whose result is fetched instead. An execution
    that fails just while its result is fetched returns None first, and raises its error after that.

    Args:
        remote: the execution.
        gives_up: whether no worker is left to run it.
    """
    pause = threading.Event()
    while not (is_aborted(remote) or gives_up()):
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
