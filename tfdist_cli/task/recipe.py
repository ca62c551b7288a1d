"""A recipe in the task of this process: trains its model, or evaluates its checkpoints."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import ResultNotSaved, TfdistError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.export_formats import EXPORT_FORMATS, VERSIONS, require_export_libraries
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.spec.sections.recipe import Export, Recipe
from tfdist_cli.task.data import RecipeData
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.train.checkpoint.export import export, upload_export
from tfdist_cli.train.checkpoint.model_files import require_quantization
from tfdist_cli.train.checkpoint.scores import CheckpointScores
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.cluster.rendezvous import wait_until_exited
from tfdist_cli.train.optimizers.apply import innermost
from tfdist_cli.train.tf_compat.keras_optimizer import iterations
from tfdist_cli.train.trainer.checks import check_evaluator
from tfdist_cli.train.trainer.config.checkpoints import Checkpoints
from tfdist_cli.train.trainer.config.training_arguments import TrainingArguments
from tfdist_cli.train.trainer.config.validation import Validation
from tfdist_cli.train.trainer.evaluator import run_evaluator
from tfdist_cli.train.trainer.fit import train
from tfdist_cli.train.trainer.reporting import log
from tfdist_cli.train.variables.placement import PlacementRules

CHECKPOINTS = "checkpoints"
EXPORT = "export"
BEST = "best"
"""The folder in that of exports for the best checkpoint."""


def run_recipe(context: ClusterContext, recipe: Recipe) -> None:
    """Trains the recipe's model; on an evaluator, evaluates its checkpoints.

    Raises:
        UsageError: the recipe does not fit the task.
        TrainingError: the data, the model or a checkpoint is at fault.
        ResultNotSaved: the training is complete, but its last checkpoint or its export could not be written.
    """
    evaluates = context.environment.task.traits.evaluates
    if recipe.export and (context.environment.is_chief or (evaluates and recipe.export.best)):
        _check_export(recipe.export)
    module = RecipeModule.load(recipe)
    if recipe.export:
        module.signatures(recipe.export)  # before the training: a missing function is an error
    keras.utils.set_random_seed(recipe.train.seed)
    rules = PlacementRules(recipe.placement, recipe.shard, recipe.stages, recipe.place, recipe.balance)
    with context.scope(rules):
        model = module.model()
    run_dir = context.environment.run_dir or Path.cwd()
    checkpoints = checkpoints_of_run(recipe, run_dir)
    data = RecipeData(recipe, module, model)
    if evaluates:
        best = _BestExport(recipe.export, module, model, run_dir) if recipe.export and recipe.export.best else None
        _evaluate_checkpoints(context, model, data.validation, checkpoints, _scores(recipe), best)
        return
    environment = context.environment
    arguments = training_arguments(recipe, module, checkpoints)
    arguments = replace(arguments, phases=environment.phases, builds_first=environment.builds_first)
    validates = recipe.evaluate is not None and recipe.evaluate.every_epochs is not None
    config = arguments.configure(context, data.source, data.validation if validates else None)
    not_saved: list[ResultNotSaved] = []
    try:
        train(context, model, config)
    except ResultNotSaved as error:
        not_saved.append(error)  # the model is trained, and the export may be on another disk
    if recipe.export and context.environment.is_chief:
        emit("state", state="saving")
        not_saved += _export(recipe.export, module, model, run_dir / EXPORT, _updates(model))
    _check_saved(not_saved)


def _updates(model: Any) -> int:
    """Returns how many updates a model has had; of mirrored workers, the counter is a variable of each."""
    return int(tf.convert_to_tensor(iterations(innermost(model.optimizer)).value))


def _check_saved(errors: list[ResultNotSaved]) -> None:
    """Raises one error for several."""
    if errors:
        first = errors[0]
        message = "; ".join(error.message for error in errors)
        raise ResultNotSaved(message, code=first.code, hint=first.hint) from first


def _scores(recipe: Recipe) -> CheckpointScores | None:
    """Returns what the evaluator compares checkpoints by; None if nothing depends on it."""
    spec = recipe.evaluate
    if spec is None or not (spec.patience or (recipe.export and recipe.export.best)):
        return None
    return CheckpointScores(spec.monitor, maximizes=spec.maximizes, patience=spec.patience)


class _BestExport:
    """Exports the best checkpoint so far, on the evaluator.

    Args:
        spec: what to write.
        module: the recipe's module.
        model: has the weights of the checkpoint.
        run_dir: the run's directory.

    Attributes:
        errors: the formats of the last export that could not be written.
    """

    def __init__(self, spec: Export, module: RecipeModule, model: Any, run_dir: Path) -> None:
        upload = spec.upload and spec.upload / BEST
        self._spec, self._module = spec.model_copy(update={"upload": upload}), module
        self._model, self._folder = model, run_dir / EXPORT / BEST
        self.errors: list[ResultNotSaved] = []

    def __call__(self, step: int) -> None:
        """Exports the model; what cannot be written is an error only if no better checkpoint follows."""
        self.errors = _export(self._spec, self._module, self._model, self._folder, step)
        for error in self.errors:
            log.warning("the best checkpoint is not exported: %s", error.message)


def _check_export(spec: Export) -> None:
    """Checks before the training that its result can be exported.

    Raises:
        UsageError: a library is missing, or too old.
    """
    require_export_libraries(spec.formats)
    if spec.quantize:
        require_quantization()


def _export(spec: Export, module: RecipeModule, model: Any, folder: Path, step: int) -> list[ResultNotSaved]:
    """Writes the exports of a trained model.

    Args:
        spec: what to write.
        module: the recipe's module.
        model: the model.
        folder: the folder for the exports.
        step: its updates.

    Returns:
        The errors of the formats that could not be written.
    """
    with suppress(OSError):  # `export` reports what is wrong
        # The user may have removed the run's directory.
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths: list[Location] = []
    errors: list[ResultNotSaved] = []
    for name in spec.formats:
        version = step if spec.versions and name == "saved_model" else None
        file_name = EXPORT_FORMATS[name].file_name if version is None else VERSIONS
        try:
            written = export(
                model,
                folder / file_name,
                format=name,
                rebuild=module.model,
                version=version,
                quantize=spec.quantize,
                signatures=module.signatures(spec) if name == "saved_model" else None,
            )
            paths.append(written)
            if spec.upload:
                url = spec.upload / file_name if version is None else spec.upload / file_name / str(version)
                upload_export(Path(written), url, name)
                paths.append(url)
        except ResultNotSaved as error:
            errors.append(error)
    if paths:
        log.info("exported to %s", ", ".join(map(str, paths)))
        emit("exported", paths=[str(path) for path in paths])
    return errors


def training_arguments(recipe: Recipe, module: RecipeModule, checkpoints: Checkpoints | None) -> TrainingArguments:
    """Returns the arguments of a recipe's training."""
    spec = recipe.train
    return TrainingArguments(
        epochs=spec.epochs,
        steps_per_epoch=None if spec.steps_per_epoch == "auto" else spec.steps_per_epoch,
        max_steps=spec.max_steps,
        steps_per_execution=None if spec.steps_per_execution == "auto" else spec.steps_per_execution,
        share=spec.share,
        repeat=spec.repeat,
        callbacks=module.callbacks(),
        checkpoints=checkpoints,
        updates=recipe.updates,
        learning_rate=recipe.learning_rate,
        wire=recipe.wire,
        embeddings=recipe.embeddings,
        jit=spec.jit,
        micro_batches=recipe.micro_batches,
        initial_epoch=spec.initial_epoch,
        evaluator_stops=bool(recipe.evaluate and recipe.evaluate.patience),
    )


def checkpoints_of_run(recipe: Recipe, run_dir: Path) -> Checkpoints | None:
    """Returns where and when a run saves checkpoints; None if it saves none."""
    spec = recipe.checkpoint
    if spec is None:
        return None
    return Checkpoints(
        spec.dir or run_dir / CHECKPOINTS,
        spec.every_steps,
        spec.every_seconds,
        spec.keep,
        spec.asynchronous,
        spec.full_every,
        spec.push_tables,
    )


def _evaluate_checkpoints(
    context: ClusterContext,
    model: Any,
    validation: Validation | None,
    checkpoints: Checkpoints | None,
    scores: CheckpointScores | None,
    best: _BestExport | None,
) -> None:
    data, folder = check_evaluator(validation, checkpoints.config(reads=True).folder if checkpoints else None)
    environment, training_ended = context.environment, threading.Event()
    failures: list[TfdistError] = []

    def watch_chief() -> None:
        try:
            wait_until_exited(environment.task, environment.addresses[environment.chief], environment.start_timeout)
        except TfdistError as error:
            failures.append(error)
        training_ended.set()

    if environment.addresses:
        threading.Thread(target=watch_chief, name="chief-watch", daemon=True).start()
    export = best or (lambda _step: None)
    run_evaluator(model, data, folder, environment.run_dir, training_ended=training_ended, scores=scores, export=export)
    for failure in failures:
        raise failure
    _check_saved(best.errors if best else [])
