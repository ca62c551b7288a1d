"""Export of a model from a run's checkpoints, during the training or after it."""

from __future__ import annotations

import keras

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.export_formats import EXPORT_FORMATS, VERSIONS, require_export_libraries
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.spec.sections.recipe import Export, Recipe
from tfdist_cli.task.data import RecipeData
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.task.recipe import CHECKPOINTS, EXPORT
from tfdist_cli.train.checkpoint.bucket import open_checkpoints
from tfdist_cli.train.checkpoint.export import export
from tfdist_cli.train.checkpoint.files.state import DamagedCheckpoint, StoredCheckpoint
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.data.shard import Shard, checked
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.reporting import enable_logging, log


def export_checkpoint(
    recipe: Recipe, run_dir: Location, step: int | None, spec: Export, out: Location | None
) -> Location:
    """Exports the model of a checkpoint.

    Args:
        recipe: the recipe of the training.
        run_dir: the run's directory, or its address.
        step: the checkpoint's step; None for the newest undamaged one.
        spec: what to write, in one format.
        out: where to write it; None for the run's export folder.

    Returns:
        The path or the address written.

    Raises:
        UsageError: the checkpoint does not exist, or is damaged.
    """
    enable_logging()
    (form,) = spec.formats
    require_export_libraries([form])
    model_step, module, found = restored(recipe, run_dir, step)
    version = found if spec.versions else None
    path = out or run_dir / EXPORT / (EXPORT_FORMATS[form].file_name if version is None else VERSIONS)
    return export(
        model_step.model,
        path,
        format=form,
        rebuild=module.model,
        version=version,
        quantize=spec.quantize,
        signatures=module.signatures(spec),
    )


def checkpoints_of(recipe: Recipe, run_dir: Location) -> Location:
    """Returns the folder of a run's checkpoints."""
    spec = recipe.checkpoint
    return spec.dir if spec and spec.dir else run_dir / CHECKPOINTS


def restored(recipe: Recipe, run_dir: Location, step: int | None) -> tuple[ModelStep, RecipeModule, int]:
    """Returns the model of a checkpoint, the recipe's module, and the checkpoint's step.

    Args:
        recipe: the recipe of the training.
        run_dir: the run's directory, or its address.
        step: the checkpoint's step; None for the newest undamaged one.

    Raises:
        UsageError: the checkpoint does not exist, or is damaged.
    """
    folder = open_checkpoints(checkpoints_of(recipe, run_dir))
    checkpoint = _find(folder, step, saves=recipe.checkpoint is not None)
    module = RecipeModule.load(recipe)
    keras.utils.set_random_seed(recipe.train.seed)
    model_step = ModelStep(module.model())

    data = RecipeData(recipe, module, model_step.model)
    spec = checked(data.source.one_pass(), Shard()).element_spec
    model_step.build(spec)
    model_step.plan_updates(spec)  # its state is that of the checkpoint
    folder.restore(checkpoint, model_step, optimizer=False)
    return model_step, module, checkpoint.state.step


def _find(folder: CheckpointFolder, step: int | None, *, saves: bool) -> StoredCheckpoint:
    if step is not None:
        try:
            return folder.find(step)
        except DamagedCheckpoint as reason:
            steps = folder.steps()
            hint = f"the checkpoints in {folder.location} are of steps {', '.join(map(str, steps)) or 'none'}"
            if step in steps:
                raise UsageError(str(reason), code="checkpoint-damaged", hint=hint) from reason
            raise UsageError(f"no checkpoint of step {step} exists", code="checkpoint-not-found", hint=hint) from reason
    checkpoint, damaged = folder.newest()
    for number, reason_of_it in damaged.items():
        log.warning("checkpoint of step %d is damaged and is skipped: %s", number, reason_of_it)
    if checkpoint is not None:
        return checkpoint
    if damaged:
        raise UsageError(
            f"all checkpoints in {folder.location} are damaged",
            code="checkpoint-damaged",
            hint="launch the recipe again with another --run-dir",
        )
    if saves:
        raise UsageError(
            f"there are no checkpoints in {folder.location}: the run ended before its first one, or has not reached it",
            code="checkpoint-not-found",
            hint="if it has ended, launch it again with the same --run-dir, with more frequent checkpoints",
        )
    raise UsageError(
        f"there are no checkpoints in {folder.location}",
        code="checkpoint-not-found",
        hint="give the recipe 'checkpoint: {every_seconds: 60}' and launch it",
    )
