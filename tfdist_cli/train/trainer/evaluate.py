"""`evaluate`: Keras's `Model.evaluate` on the cluster that this process is in, and the hooks of its callbacks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, get_args

import keras

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.cluster.join import ClusterContext, join
from tfdist_cli.train.data.comparison import check_same_arrays
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.shard import Shard, checked
from tfdist_cli.train.engine.base import Engine, Rules
from tfdist_cli.train.engine.reuse import LastTraining, TrainingTraits, take_last_training, type_of
from tfdist_cli.train.engine.select import agree, select_engine
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.model_checks import check_compiled, check_is_traced
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.keras_model import listed_logs
from tfdist_cli.train.trainer.arguments import as_callbacks, check_choice, check_counts
from tfdist_cli.train.trainer.batch_callbacks import BatchGroup, CallbackNeeds, chief_requests
from tfdist_cli.train.trainer.checks import (
    all_tasks_used,
    check_is_no_evaluator,
    check_validation,
    data_errors_explained,
)
from tfdist_cli.train.trainer.config.training import Verbose
from tfdist_cli.train.trainer.config.validation import Validation
from tfdist_cli.train.trainer.reporting import REPORT_SECONDS, enable_logging
from tfdist_cli.train.trainer.sigterm import Terminated, termination_requested

_LOG_SECONDS = 10.0
"""Seconds between two log lines of an evaluation."""
log = logging.getLogger("tfdist")


def evaluate(  # noqa: PLR0913, PLR0917 the arguments are Keras's own, in Keras's order
    model: keras.Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Verbose = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = True,
) -> Any:
    """Evaluates a compiled Keras 3 model on the cluster that this process is in, or in this process alone.

    The data is divided among the workers; each example is evaluated once. Call it on every task, as `tfdist.fit`.

    Args:
        model: a compiled `keras.Model`, built under `tfdist.scope()`.
        x: the data, as for `tfdist.fit`.
        y: the targets of arrays.
        batch_size: examples in a worker's batch if the data is arrays; by default 32, or what divides them into `steps`
            batches.
        verbose: what callbacks read in `self.params`; nothing is printed.
        sample_weight: the weights of arrays' examples.
        steps: batches to evaluate, of all workers together; by default all of them.
        callbacks: Keras callbacks, whose test hooks run on the chief: a list, or one.
        return_dict: whether the values have names; otherwise they are a list, or a single value, as by default in
            Keras.

    Returns:
        The loss and the metrics, as `keras.Model.evaluate` does: floats, or arrays if a metric has several values. The
        same on every task.

    Raises:
        UsageError: an argument is invalid, this task is an evaluator, which evaluates checkpoints, or a callback of
            mirrored workers calls it.
        TrainingError: the data or the model is at fault.
    """
    check_counts(1, batch_size=batch_size, steps=steps)
    check_choice(get_args(Verbose), verbose=verbose)
    check_choice((True, False), return_dict=return_dict)
    listed = as_callbacks(callbacks)
    enable_logging()
    context = join()
    check_is_no_evaluator(context, "call tfdist.evaluate after tfdist.fit")
    function = Inputs.of(x, y, sample_weight).dataset_function(
        batch_size, batches=steps, shuffle=False, by_chief=context.environment.traits.has_ps
    )
    check_validation(context, Validation(function, steps))
    check_compiled(model)
    check_is_traced(model)
    spec = checked(function, Shard()).element_spec
    with all_tasks_used(context, "tfdist.evaluate"):
        with context.strategy.scope():
            training = _training(context, model, spec)
        engine, step = training.engine, training.step
        check_same_arrays({"data to evaluate": function}, engine.total, is_chief=engine.is_chief)
        engine.share_variables()  # a program may have loaded its weights on one task alone
        emit("state", state="evaluating")
        needs = CallbackNeeds.of_chief(engine, listed)
        own = listed if engine.is_chief else []
        called = keras.callbacks.CallbackList(own, model=model, verbose=verbose, epochs=1, steps=steps)
        with data_errors_explained(model):
            logs = Evaluation(engine, step, called, needs, model.steps_per_execution).run(Validation(function, steps))
        if needs.callbacks:
            engine.share_changes()
        training.keep()
        if return_dict:
            return logs
        return listed_logs(model, logs)


def _training(context: ClusterContext, model: keras.Model, spec: Any) -> LastTraining:
    """Returns the engine and the step to evaluate with: those of the model's last training, or new ones."""
    last = take_last_training(model)
    if agree(context, last is not None and last.is_of(model, context.strategy)) and last:
        last.engine.begin_again()
        return last
    step = ModelStep(model)
    step.build(spec)
    traits = TrainingTraits(type_of(spec), Rules(), "split")
    return LastTraining.of(select_engine(context, step, spec, traits.rules), step, traits, context.strategy)


class Watch:
    """`engine.EvaluationWatch` of an evaluation: reports its progress on the chief, and ends it on SIGTERM.

    Args:
        steps: batches to evaluate; None if that is not known.
        reports: whether this task reports.
    """

    def __init__(self, steps: int | None, *, reports: bool) -> None:
        self._steps, self._reports = steps, reports
        self._begun = self._sent = self._logged = time.monotonic()

    def wanted(self) -> bool:
        """Whether this task received SIGTERM."""
        return termination_requested()

    def between(self, batches: int, votes: int) -> None:
        """See `engine.EvaluationWatch`.

        Raises:
            Terminated: a task received SIGTERM.
        """
        if votes:
            raise Terminated(f"SIGTERM received: evaluation ended after {batches} batches", code="terminated")
        now = time.monotonic()
        if not self._reports or now < self._sent + REPORT_SECONDS:
            return
        self._sent = now
        emit("evaluated", batches=batches, total=self._steps)
        if now >= self._logged + _LOG_SECONDS:
            self._logged = now
            total = "" if self._steps is None else f" of {self._steps}"
            log.info("evaluating: %d%s batches after %.0f s", batches, total, now - self._begun)


@dataclass(frozen=True)
class Evaluation:
    """Evaluates data, and calls the test hooks of callbacks. All tasks that run the engine's loop use it alike.

    Args:
        engine: evaluates the batches.
        step: the model's step, built.
        callbacks: this task's callbacks: none on other tasks than the chief.
        needs: what the chief's callbacks need of all tasks.
        group_size: the batches between two calls of batch hooks.
    """

    engine: Engine
    step: ModelStep
    callbacks: keras.callbacks.CallbackList
    needs: CallbackNeeds
    group_size: int = 1

    def run(self, validation: Validation) -> dict[str, Any]:
        """Returns the metrics by name.

        Raises:
            Terminated: a task received SIGTERM during a training. The model's state is as before.
        """
        self.step.model.stop_evaluating = False
        self.callbacks.on_test_begin()
        if self.needs.callbacks:
            self.engine.share_changes()
        totals = self._batch_by_batch(validation) if self.needs.each_test_batch else self._at_once(validation)
        logs = written(self.engine, totals)
        self.callbacks.on_test_end(logs)
        return logs

    def _at_once(self, validation: Validation) -> MetricTotals:
        return self.engine.evaluate(validation.data, steps=validation.steps, watch=self._watch(validation))

    def _watch(self, validation: Validation) -> Watch:
        return Watch(validation.steps, reports=self.engine.is_chief)

    def _batch_by_batch(self, validation: Validation) -> MetricTotals:
        """Evaluates batch by batch, and calls the batch hooks. A callback may end the evaluation."""
        totals, done = MetricTotals(self.step, training=False), 0
        write(self.engine, totals)
        group = BatchGroup(self.callbacks.on_test_batch_begin, self.callbacks.on_test_batch_end, self.group_size)
        for evaluate_batch in self.engine.test_steps(
            validation.data, steps=validation.steps, watch=self._watch(validation)
        ):
            if group.begin(done):
                self.engine.share_changes()
            totals.add(evaluate_batch())
            done += 1
            if group.is_full(done - 1):
                group.end(done - 1, written_for_callbacks(self.engine, totals))
                if chief_requests(self.engine, self.step.model.stop_evaluating):
                    break
        if group.begun:
            group.end(done - 1, written_for_callbacks(self.engine, totals), data_ended=True)
        return totals


def write(engine: Engine, totals: MetricTotals) -> None:
    """Assigns totals to the metric variables, where callbacks and the program may read them."""
    with engine.scope():
        totals.write()


def written(engine: Engine, totals: MetricTotals) -> dict[str, Any]:
    """Does the same, and returns the results of the metrics by name."""
    write(engine, totals)
    return totals.logs()


def written_for_callbacks(engine: Engine, totals: MetricTotals) -> dict[str, Any]:
    """Does the same only where there are callbacks: on the chief."""
    if engine.is_chief:
        write(engine, totals)
    return totals.logs()
