"""Updates with a quorum: the chief decides which workers' gradients make an update, and which worker may go on.

Each worker runs one function for as long as the training goes on. Before each step it waits for an assignment of the
chief, the step's number, which it gets as soon as the policy allows it (`policy.py`). It computes a gradient,
stores it on the ps under a key, and reports the key to the chief. When there are enough gradients for the next update,
the chief orders it: another function, which runs all the time, too, has the ps apply the mean of the gradients under
these keys. The order contains the assignments for the workers that wait for this update, and each ps sends them when it
has made its part of it (`queues.py`). A worker's gradient is applied on all ps or on none: if a worker fails
before its report, nothing of it is applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.engine.pacing import ArrivalPacing
from tfdist_cli.train.engine.parameter_server.accumulator import Accumulator
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.messages import (
    FunctionEnded,
    FunctionStarted,
    GradientStored,
    Report,
    ReportKind,
    StepReport,
    UpdateApplied,
    pack_report,
    unpack_report,
)
from tfdist_cli.train.engine.parameter_server.quorum.functions import QuorumFunctions
from tfdist_cli.train.engine.parameter_server.quorum.policy import (
    NO_MORE_STEPS,
    Assignment,
    Gradient,
    QuorumPolicy,
)
from tfdist_cli.train.engine.parameter_server.quorum.queues import QuorumQueues
from tfdist_cli.train.engine.parameter_server.worker_functions import (
    NO_FUNCTION,
    Messages,
    Threads,
    WorkerFunctions,
    receiving,
    run_all,
    running,
)
from tfdist_cli.train.engine.step_timer import UpdatesInWaits
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit


@dataclass
class _Run:
    """One run of the engine.

    Args:
        queues: the training's.
        policy: decides about updates and assignments.
        functions: the workers'.
        sums: of the steps since the last execution.
        reports: of the steps whose gradients wait for an update, by key.
        waits: the updates in the workers' waits.
    """

    queues: QuorumQueues
    policy: QuorumPolicy
    functions: WorkerFunctions
    sums: Accumulator
    reports: dict[int, StepReport] = field(default_factory=dict)
    waits: UpdatesInWaits = field(default_factory=UpdatesInWaits)

    def assignments(self) -> list[Assignment]:
        """Returns the assignments for workers that may go on now."""
        assignments = list(self.policy.assign())
        for assignment in assignments:
            self.waits.end_wait(assignment.worker)
        return assignments

    def order_update(self, gradients: list[Gradient], *, several: bool) -> None:
        """Orders an update, and the assignments that follow it."""
        self.waits.update_ordered()
        reports = [self.reports.pop(gradient.key) for gradient in gradients]
        state = np.mean([report.state for report in reports], axis=0)
        keys = [gradient.key for gradient in gradients]
        self.queues.order_update(keys, state, self.assignments(), several=several)
        self.sums.update(reports, [gradient.staleness for gradient in gradients])


class QuorumUpdates:
    """Assigns steps and orders updates as `QuorumPolicy` decides.

    Args:
        context: the model on its cluster.
        before: the updates of another number of workers.

    Attributes:
        functions: what workers, ps and chief run.
        pace: decides how many updates follow each other for sure.
    """

    def __init__(self, context: ParameterServerContext, before: QuorumUpdates | None = None) -> None:
        self._context = context
        self.functions: QuorumFunctions = QuorumFunctions(context, before.functions if before else None)
        self.pace: ArrivalPacing = before.pace if before else ArrivalPacing()
        self._queues: QuorumQueues | None = None
        """None before the first run, and after one that was aborted, or lost a worker."""
        self._left: list[QuorumQueues] = []
        """Queues of earlier runs that functions on lost workers may still use."""

    def rehearse(self, workers: Sequence[Any], iterators: Any, size: int) -> None:
        """Compiles the functions of a run on workers that may still take part in another one: it has no steps.

        Args:
            workers: so many as these updates are made for.
            iterators: their data.
            size: steps in an execution.
        """
        queues, self._queues = self._queues or self._new_queues(), None  # not used if this fails
        queues.assign(Assignment(worker, NO_MORE_STEPS, several=False) for worker in range(len(workers)))
        queues.end()
        rehearsals = [
            self._context.rehearsal(
                worker,
                self.functions.work(size),
                (iterators, self._numbers(place, NO_FUNCTION), queues.of(place)),
            )
            for place, worker in enumerate(workers)
        ]

        def serve(function: Any) -> None:
            with self._context.coordinator.strategy.scope():
                function(queues.handles)

        served = [partial(serve, self.functions.updates(size)), partial(serve, self.functions.assignments)]
        run_all([*rehearsals, *served])
        queues.reports.dequeue_many(queues.reports.size())
        self._queues = queues

    def run(self, iterators: Any, steps: int, *, first: int, size: int, pause: Pause) -> Iterator[Execution]:
        """See `UpdateRule.run`; it pauses as soon as all steps that were assigned or promised are done."""
        context, workers = self._context, self._context.worker_count
        staleness = context.rules.updates.staleness or 0
        queues = self._queues = self._queues or self._new_queues()
        run = _Run(
            queues,
            QuorumPolicy(workers, context.batches_per_update, staleness, first, first + steps),
            WorkerFunctions(workers, partial(self._start, queues, iterators, size)),
            Accumulator(first, following=self._context.totals.following),
        )
        self.pace.begin()
        with self._receiving(queues) as messages, self._serving(queues, messages, size):
            while run.policy.done < run.policy.end or run.functions.any_running:
                message = run.functions.next_message(messages)
                if message is None:
                    context.workers.end_if_lost(pause)
                    continue
                self._receive(message, run)
                run.policy.several = self.pace.size(size)
                yield from self._updates(run, size, pause)
            if run.sums.losses or run.sums.dropped:
                yield run.sums.execution(int(pause.wanted()), run.policy.largest_gap)
            if run.functions.any_left:  # otherwise an evaluation on a worker that is back would wait behind it
                queues.dismiss(size + 1)
                self._left.append(queues)
                self._queues = None
        for gradient in run.policy.left_over():
            self._discard(gradient.key)

    def _updates(self, run: _Run, size: int, pause: Pause) -> list[Execution]:
        """Orders all updates that are complete and sends assignments; returns the executions that are complete."""
        executions = []
        while gradients := run.policy.complete():
            if pause.agreed():
                run.policy.wind_up()
            several = run.policy.updated()
            run.order_update(gradients, several=several)
            self.pace.done(1)
            if len(run.sums.losses) == size or pause.wanted():
                executions.append(run.sums.execution(int(pause.wanted()), run.policy.largest_gap))
                run.sums = Accumulator(run.policy.done, following=self._context.totals.following)
        if assignments := run.assignments():
            run.queues.assign(assignments)
        return executions

    def _new_queues(self) -> QuorumQueues:
        functions, context = self.functions, self._context
        workers, aggregate = context.worker_count, context.batches_per_update
        return QuorumQueues(functions.devices, workers, aggregate, functions.layout.state, functions.layout.size)

    def _start(self, queues: QuorumQueues, iterators: Any, size: int, worker: int, serial: int) -> Any:
        """Starts a worker's function."""
        args = iterators, self._numbers(worker, serial), queues.of(worker)
        return self._context.run_on_worker(self._context.workers[worker], self.functions.work(size), args)

    def _numbers(self, worker: int, serial: int) -> tf.Tensor:
        return tf.constant([worker, serial, *self._context.counts], tf.int64)

    def _receiving(self, queues: QuorumQueues) -> AbstractContextManager[Messages[Report]]:
        layout, reports = self.functions.layout, queues.reports

        def receive() -> Report | None:
            head, body = (part.numpy() for part in reports.dequeue())
            return unpack_report(head, body, layout)

        stop = [pack_report(ReportKind.STOP_LISTENING), layout.without_counts([])]
        return receiving(receive, lambda: reports.enqueue(stop))

    def _serving(self, queues: QuorumQueues, messages: Messages[Report], size: int) -> AbstractContextManager[None]:
        """Runs the functions that apply updates and send assignments.

        The queues of a run that is aborted are not used again: workers may still take up to `size` assignments.
        """

        def apply_updates() -> None:
            try:
                self.functions.updates(size)(queues.handles)
            except Exception as error:  # noqa: BLE001 it is raised where the training runs
                messages.put(error)  # before the other function fails because of it
                with contextlib.suppress(tf.errors.OpError):  # nothing waits on a ps that is lost
                    queues.close_applied()

        def send_assignments() -> None:
            self.functions.assignments(queues.handles)

        def abort(threads: Threads) -> None:
            end_at_exit(queues.close_updates, threads["updates"])
            self._queues = None  # a ps may be lost: others are made when they are needed
            queues.abort(size + 1)
            threads["assignments"].join(GRACE_SECONDS)  # it may hang if a ps has failed

        return running(
            {"updates": apply_updates, "assignments": send_assignments},
            messages,
            scope=self._context.coordinator.strategy.scope,
            end=queues.end,
            abort=abort,
        )

    def _receive(self, message: Report, run: _Run) -> None:
        match message:
            case UpdateApplied(phases):
                run.waits.update_applied(phases)
            case FunctionStarted(worker, serial):
                if run.functions.is_running(serial):
                    run.policy.start(worker)
                else:  # of an earlier run, started again when its worker was restarted
                    run.queues.assign([Assignment(worker, NO_MORE_STEPS, several=False)])
            case FunctionEnded(serial):
                run.functions.ended(serial)
            case GradientStored(step, key, report):
                run.waits.add(report.worker, report.phases, run.sums.phases)
                run.waits.start_wait(report.worker)
                if run.policy.submit(report.worker, step, key):
                    run.reports[key] = report
                else:
                    run.sums.drop(report)
                    self._discard(key)

    def _discard(self, key: int) -> None:
        """Drops a stored gradient that no update will take."""
        with self._context.coordinator.strategy.scope():
            self.functions.discard(tf.constant(key, tf.int64))
