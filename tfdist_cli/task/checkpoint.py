"""Exporting from a run's checkpoints, after the training or beside it."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.task.recipe import CHECKPOINTS, EXPORT, EXPORT_NAMES
from tfdist_cli.train.checkpoint.export import export
from tfdist_cli.train.checkpoint.store import CheckpointFolder, Damaged, Found
from tfdist_cli.train.data.pipeline import Shard, checked
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.reporting import log, speak


def export_checkpoint(recipe: Recipe, run_dir: Path, step: int | None, form: str, out: Path | None) -> Path:
    """Writes the model of a checkpoint.

    Args:
        recipe: what was trained.
        run_dir: the run's directory.
        step: the checkpoint's step; None for the newest whole one.
        form: the format, see `train.export.export`.
        out: where to write; None for the run's export folder.

    Returns:
        The path written.

    Raises:
        UsageError: there is no such checkpoint.
    """
    speak()
    kept = recipe.checkpoint
    found = _find(CheckpointFolder(kept.dir if kept and kept.dir else run_dir / CHECKPOINTS), step)
    module = RecipeModule.load(recipe)
    keras.utils.set_random_seed(recipe.train.seed)
    built = ModelStep(module.model())

    def batches(shard: Shard) -> tf.data.Dataset:
        return module.dataset("train", shard).batch(recipe.train.batch_size)

    built.build(checked(batches, Shard()).element_spec)
    CheckpointFolder(found.path.parent).restore(found, built, optimizer=False)
    return export(built.model, out or run_dir / EXPORT / EXPORT_NAMES[form], format=form, rebuild=module.model)


def _find(folder: CheckpointFolder, step: int | None) -> Found:
    if step is not None:
        try:
            return folder.find(step)
        except Damaged as reason:
            steps = ", ".join(str(number) for number in folder.steps()) or "none"
            raise UsageError(str(reason), hint=f"the checkpoints in {folder.path} are of steps {steps}") from reason
    found, damaged = folder.newest()
    for step_of_it, why in damaged.items():
        log.warning("checkpoint of step %d is damaged, and left out: %s", step_of_it, why)
    if found is None:
        message = f"no checkpoint in {folder.path} is whole" if damaged else f"{folder.path} holds no checkpoint"
        raise UsageError(message, hint="give the recipe 'checkpoint: {every_seconds: 60}' and launch it")
    return found
