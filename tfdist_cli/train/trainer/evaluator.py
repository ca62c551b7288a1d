"""The evaluator task: evaluates each checkpoint while training continues, and exits after the final one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.files.state import DamagedCheckpoint, StoredCheckpoint
from tfdist_cli.train.checkpoint.scores import CheckpointScores
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.data.length import check_ends
from tfdist_cli.train.data.shard import Shard, checked
from tfdist_cli.train.engine.mirrored.collectives import Membership
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.config.validation import Validation
from tfdist_cli.train.trainer.evaluate import Watch
from tfdist_cli.train.trainer.metrics_file import MetricsFile
from tfdist_cli.train.trainer.reporting import EVALUATION_FILE, flatten_metrics, format_metrics, log, utc_now


def run_evaluator(
    model: keras.Model,
    validation: Validation,
    folder: CheckpointFolder,
    run_dir: Path | None,
    *,
    training_ended: threading.Event | None = None,
    scores: CheckpointScores | None = None,
    export: Callable[[int], None] = lambda _step: None,
) -> dict[str, float]:
    """Evaluates checkpoints as they appear, until the final one is evaluated.

    Args:
        model: the compiled model, in this process alone.
        validation: the data to evaluate it on.
        folder: the folder where the checkpoints appear.
        run_dir: the folder of evaluation.jsonl; None for no file.
        training_ended: set when the training has ended, perhaps without a final checkpoint. The checkpoints that exist
            then are still evaluated.
        scores: compares the checkpoints, and tells when the training is to stop; None if nothing depends on it.
        export: exports the model of a checkpoint that is the best one so far, by its step.

    Returns:
        The last checkpoint's metrics.

    Raises:
        TrainingError: the data never ends.
    """
    if validation.steps is None:
        check_ends(validation.data)
    step = ModelStep(model)
    spec = checked(validation.data, Shard()).element_spec
    step.build(spec)
    engine = MirroredEngine(step, tf.distribute.get_strategy(), spec, Membership(("evaluator:0",)))
    evaluated: dict[int, Any] = {}
    """The files of each checkpoint that is evaluated, by its step."""
    if scores:
        scores.restore(folder.evaluated())
    _mark_evaluated(folder, evaluated, scores)
    file = MetricsFile(run_dir / EVALUATION_FILE) if run_dir else None
    queue = _CheckpointQueue(folder)
    ended = training_ended or threading.Event()
    metrics: dict[str, float] = {}
    emit("state", state="waiting")
    while True:
        had_ended = ended.is_set()  # before the folder is read: checkpoints written until then are found
        checkpoint = queue.next(evaluated)
        if checkpoint is None:
            if had_ended:
                return metrics
            ended.wait(folder.poll_seconds)
            continue
        number = checkpoint.state.step
        if evaluated.get(number) != checkpoint.state.files:
            emit("state", state="evaluating")
            if not _restore(folder, checkpoint, step):
                continue
            watch = Watch(validation.steps, reports=True)
            metrics = engine.evaluate(validation.data, steps=validation.steps, watch=watch).logs()
            if scores and _is_best(scores, number, metrics):
                export(number)
            evaluated[number] = checkpoint.state.files
            _mark_evaluated(folder, evaluated, scores)
            _report(checkpoint, validation.name, metrics, file)
            emit("state", state="waiting")
        if checkpoint.state.final:
            return metrics


def _restore(folder: CheckpointFolder, checkpoint: StoredCheckpoint, step: ModelStep) -> bool:
    """Restores the model of a checkpoint; returns whether the training has not just removed it."""
    try:
        folder.restore(checkpoint, step, optimizer=False)
    except tf.errors.OpError:
        if checkpoint.path.exists():
            raise
        return False
    return True


def _is_best(scores: CheckpointScores, step: int, metrics: dict[str, float]) -> bool:
    """Adds the metrics of a checkpoint; returns whether no other one is as good."""
    best = scores.add(step, flatten_metrics(metrics))
    if best:
        log.info("the checkpoint of step %d has the best %s so far, %.6g", step, scores.monitor, scores.best_value)
    return best


class _CheckpointQueue:
    """The checkpoints to evaluate, oldest first. Meanwhile the training adds, replaces and removes checkpoints."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._damaged: dict[int, str] = {}
        self._reported: set[int] = set()

    def next(self, evaluated: Mapping[int, Any]) -> StoredCheckpoint | None:
        """Returns the oldest checkpoint to evaluate; else the newest one if it has become final since its evaluation.

        The last weights of a training may be others than those of a checkpoint of the same step: callbacks, and
        averages, may have changed them at its end.

        Args:
            evaluated: the files of the checkpoints that are evaluated, by their steps.
        """
        steps = self._folder.steps()
        for number in steps:
            if number in evaluated and number != steps[-1]:
                continue
            try:
                checkpoint = self._folder.peek(number) if number in evaluated else self._folder.find(number)
                if checkpoint.state.final and checkpoint.state.files != evaluated.get(number, checkpoint.state.files):
                    checkpoint = self._folder.find(number)
            except DamagedCheckpoint as reason:
                self._note_damaged(number, str(reason))
                continue
            if number not in evaluated or checkpoint.state.final:
                return checkpoint
        return None

    def _note_damaged(self, number: int, reason: str) -> None:
        """Reports a checkpoint found damaged twice: the first time the training may be removing or replacing it."""
        if self._damaged.get(number) == reason and number not in self._reported:
            self._reported.add(number)
            log.warning("checkpoint of step %d is damaged and cannot be evaluated: %s", number, reason)
            emit("checkpoint_damaged", step=number, reason=reason)
        self._damaged[number] = reason


def _mark_evaluated(folder: CheckpointFolder, evaluated: Iterable[int], scores: CheckpointScores | None) -> None:
    try:
        folder.mark_evaluated(list(evaluated), scores.packed() if scores else None)
    except OSError as error:  # a training that does not see the mark keeps checkpoints longer, nothing worse
        log.warning("the list of evaluated checkpoints cannot be written to %s: %s", folder.location, error.strerror)


def _report(checkpoint: StoredCheckpoint, split: str, metrics: dict[str, Any], file: MetricsFile | None) -> None:
    state, metrics = checkpoint.state, flatten_metrics(metrics)
    line = {
        "time": utc_now(),
        "split": split,
        "step": state.step,
        "epoch": state.epoch,
        "final": state.final,
        "values": metrics,
    }
    if file:
        file.append(line)
    emit("evaluation", step=state.step, final=state.final, metrics=metrics)
    log.info("checkpoint of step %d  %s", state.step, format_metrics(metrics))
