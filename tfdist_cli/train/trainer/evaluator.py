"""The evaluator: scores each checkpoint beside the training, the last one too, and then ends."""

from __future__ import annotations

import threading
from pathlib import Path

import keras
import tensorflow as tf

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.store import CheckpointFolder, Damaged, Found
from tfdist_cli.train.data.pipeline import Shard, check_ends, checked
from tfdist_cli.train.engine.mirrored.engine import Membership, MirroredEngine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.config import Validation
from tfdist_cli.train.trainer.metrics_file import MetricsFile
from tfdist_cli.train.trainer.reporting import EVALUATION_FILE, log, now, shown

_LOOK = 0.3


def run_evaluator(
    model: keras.Model,
    validation: Validation,
    folder: CheckpointFolder,
    run_dir: Path | None,
    *,
    ended: threading.Event | None = None,
) -> dict[str, float]:
    """Scores checkpoints as they appear until the final one is scored.

    Args:
        model: the compiled model, in this process alone.
        validation: what it is scored on.
        folder: where the checkpoints appear.
        run_dir: where evaluation.jsonl goes; None keeps no file.
        ended: set when the training has gone without a final checkpoint; what is there is still scored.

    Returns:
        The last checkpoint's scores.

    Raises:
        TrainingError: the data has no end.
    """
    if validation.steps is None:
        check_ends(validation.data)
    step = ModelStep(model)
    spec = checked(validation.data, Shard()).element_spec
    step.build(spec)
    engine = MirroredEngine(step, tf.distribute.get_strategy(), spec, Membership(("evaluator:0",)))
    scored: list[int] = []
    _mark(folder, scored)
    file = MetricsFile(run_dir / EVALUATION_FILE) if run_dir else None
    watch = _Watch(folder)
    gone = ended or threading.Event()
    scores: dict[str, float] = {}
    emit("state", state="waiting")
    while True:
        was_gone = gone.is_set()
        found = watch.next(scored)
        if found is None:
            if was_gone:
                return scores
            gone.wait(_LOOK)  # the folder may be on a network file system, which tells nobody of changes
            continue
        if found.state.step not in scored:
            emit("state", state="evaluating")
            try:
                folder.restore(found, step, optimizer=False)
            except tf.errors.OpError:
                if found.path.exists():
                    raise
                continue  # the training has removed it just now
            scores = engine.evaluate(validation.data, steps=validation.steps).logs()
            scored.append(found.state.step)
            _mark(folder, scored)
            _report(found, validation.name, scores, file)
            emit("state", state="waiting")
        if found.state.final:
            return scores


class _Watch:
    """Looks for checkpoints that the training, meanwhile, makes, replaces and removes."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._damaged: dict[int, str] = {}
        self._told: set[int] = set()

    def next(self, scored: list[int]) -> Found | None:
        """The oldest whole checkpoint without a score; else the newest one, if it has become final since its score."""
        steps = self._folder.steps()
        for number in steps:
            if number in scored and number != steps[-1]:
                continue
            try:
                found = self._folder.look(number) if number in scored else self._folder.find(number)
            except Damaged as reason:
                self._note(number, str(reason))
                continue
            if number not in scored or found.state.final:
                return found
        return None

    def _note(self, number: int, reason: str) -> None:
        """Names a damaged checkpoint when it is so twice: at first it may have been removed or replaced just then."""
        if self._damaged.get(number) == reason and number not in self._told:
            self._told.add(number)
            log.warning("checkpoint of step %d is damaged, and gets no score: %s", number, reason)
            emit("checkpoint_damaged", step=number, reason=reason)
        self._damaged[number] = reason


def _mark(folder: CheckpointFolder, scored: list[int]) -> None:
    try:
        folder.mark_scored(scored)
    except OSError as error:  # the scores count more than which checkpoints may go
        log.warning("which checkpoints have a score cannot be noted in %s: %s", folder.path, error.strerror)


def _report(found: Found, split: str, scores: dict[str, float], file: MetricsFile | None) -> None:
    line = {
        "time": now(),
        "split": split,
        "step": found.state.step,
        "epoch": found.state.epoch,
        "final": found.state.final,
        "values": scores,
    }
    if file:
        file.append(line)
    emit("evaluation", step=found.state.step, final=found.state.final, metrics=scores)
    log.info("checkpoint of step %d  %s", found.state.step, shown(scores))
