"""Training a recipe, or evaluating it, in the task that this process is."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import ResultNotSaved, TfdistError, TrainingError, UsageError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.sections.recipe import Export, Recipe, Share
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.train.checkpoint.export import export
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.cluster.data_service import DataService
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.cluster.rendezvous import outlast
from tfdist_cli.train.data.pipeline import DatasetFunction, Pipeline, Shard, Sharded
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.trainer.arguments import as_callbacks
from tfdist_cli.train.trainer.config import Saving, TrainingConfig, Validation
from tfdist_cli.train.trainer.evaluator import run_evaluator
from tfdist_cli.train.trainer.fit import full_pass, train
from tfdist_cli.train.trainer.reporting import log
from tfdist_cli.train.variables.placement import PlacementRules

CHECKPOINTS = "checkpoints"
EXPORT = "export"
EXPORT_NAMES = {"saved_model": "saved_model", "keras": "model.keras"}


def run_recipe(joined: ClusterContext, recipe: Recipe) -> None:
    """Trains the recipe's model; on an evaluator, scores its checkpoints.

    Raises:
        UsageError: the recipe doesn't fit the task.
        TrainingError: the data, the model or a checkpoint is at fault.
        ResultNotSaved: the model is trained, but its last checkpoint, or its export, could not be written.
    """
    module = RecipeModule.load(recipe)
    keras.utils.set_random_seed(recipe.train.seed)
    with joined.scope(PlacementRules(recipe.placement, recipe.shard)):
        model = module.model()
    run_dir = joined.environment.run_dir or Path.cwd()
    folder = _folder(recipe, run_dir)
    validation = _validation(recipe, module)
    if joined.environment.task.traits.evaluates:
        _evaluate(joined, model, validation, folder)
        return
    unsaved: list[ResultNotSaved] = []
    try:
        train(joined, model, _assignment(joined, recipe, module, validation, folder))
    except ResultNotSaved as error:
        unsaved.append(error)  # the model is there all the same, and the export's disk may be another one
    if recipe.export and joined.environment.is_chief:
        try:
            _export(recipe.export, module, model, run_dir / EXPORT)
        except ResultNotSaved as error:
            unsaved.append(error)
    if unsaved:
        raise ResultNotSaved("; ".join(error.message for error in unsaved), hint=unsaved[0].hint) from unsaved[0]


def _export(wanted: Export, module: RecipeModule, model: Any, folder: Path) -> None:
    emit("state", state="saving")
    with suppress(OSError):  # the export itself says what is wrong
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed the run's directory
    paths = [export(model, folder / EXPORT_NAMES[name], format=name, rebuild=module.model) for name in wanted.formats]
    log.info("exported to %s", ", ".join(str(path) for path in paths))
    emit("exported", paths=[str(path) for path in paths])


def _assignment(
    joined: ClusterContext,
    recipe: Recipe,
    module: RecipeModule,
    validation: Validation | None,
    folder: CheckpointFolder | None,
) -> TrainingConfig:
    wanted = recipe.train
    shuffle = None if wanted.shuffle == "auto" else wanted.shuffle
    pipeline = Pipeline(wanted.batch_size, shuffle, wanted.seed, wanted.repeat)
    phases = joined.environment.phases
    rules = Rules(recipe.updates, recipe.learning_rate, recipe.wire, recipe.embeddings, wanted.jit, phases)
    steps_per_epoch = wanted.steps_per_epoch
    if steps_per_epoch == "auto":
        steps_per_epoch = full_pass(joined, partial(_one_pass, module, wanted.batch_size), rules, wanted.share)
    kept = recipe.checkpoint
    return TrainingConfig(
        _batches(joined, module, pipeline, wanted.share),
        steps_per_epoch,
        share=wanted.share,
        epochs=wanted.epochs,
        max_steps=wanted.max_steps,
        steps_per_execution=None if wanted.steps_per_execution == "auto" else wanted.steps_per_execution,
        validation=validation if recipe.evaluate and recipe.evaluate.every_epochs else None,
        callbacks=as_callbacks(module.callbacks()),
        saving=Saving(folder, kept.every_steps, kept.every_seconds, kept.asynchronous) if folder and kept else None,
        rules=rules,
    )


def _batches(joined: ClusterContext, module: RecipeModule, pipeline: Pipeline, share: Share) -> DatasetFunction:
    if share == "service":
        service = DataService.of(joined.environment)
        return service.batches(partial(_examples, module, "train"), pipeline)
    return lambda shard: pipeline.batches(_examples(module, "train", shard), shard)


def _one_pass(module: RecipeModule, batch_size: int, shard: Shard) -> tf.data.Dataset:
    return _examples(module, "train", shard).batch(batch_size, drop_remainder=True)


def _examples(module: RecipeModule, split: str, shard: Shard) -> tf.data.Dataset:
    """A shard's examples.

    Raises:
        TrainingError: the recipe's module returns something else.
    """
    name = f"dataset(params, {split!r}, shard) in {module.module.__file__}"
    examples = Sharded(partial(module.dataset, split), name)(shard)
    if isinstance(examples, tf.data.Dataset):
        return examples
    raise TrainingError(
        f"{name} returned {type(examples).__name__}",
        hint="return a tf.data.Dataset of examples (x, y) or (x, y, sample_weight), for each split that is asked for",
    )


def _validation(recipe: Recipe, module: RecipeModule) -> Validation | None:
    wanted = recipe.evaluate
    if wanted is None:
        return None

    def batches(shard: Shard) -> tf.data.Dataset:
        examples = _examples(module, wanted.split, shard)
        return examples.batch(recipe.train.batch_size).prefetch(tf.data.AUTOTUNE)

    steps = None if wanted.steps == "auto" else wanted.steps
    return Validation(batches, steps, wanted.every_epochs or 1, wanted.split)


def _folder(recipe: Recipe, run_dir: Path) -> CheckpointFolder | None:
    if recipe.checkpoint is None:
        return None
    return CheckpointFolder(recipe.checkpoint.dir or run_dir / CHECKPOINTS, recipe.checkpoint.keep)


def _evaluate(
    joined: ClusterContext, model: Any, validation: Validation | None, folder: CheckpointFolder | None
) -> None:
    if validation is None or folder is None:
        raise UsageError(
            "an evaluator scores checkpoints, and the recipe has none"
            if validation
            else "an evaluator has nothing to score: the recipe's evaluate is null",
            hint="give the recipe 'checkpoint: {every_seconds: 60}' and 'evaluate: {}', or remove the evaluator role",
        )
    environment, gone = joined.environment, threading.Event()
    failures: list[TfdistError] = []

    def watch() -> None:
        try:
            outlast(environment.task, environment.addresses[environment.chief], environment.start_timeout)
        except TfdistError as error:
            failures.append(error)
        gone.set()

    if environment.addresses:
        threading.Thread(target=watch, name="chief-watch", daemon=True).start()
    run_evaluator(model, validation, folder, environment.run_dir, ended=gone)
    for failure in failures:
        raise failure
