"""Predicts the parts of one process, and joins all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.path_scheme import Location, checked_location
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.data import RecipeData
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.task.prediction.inputs import READERS, Reading, read
from tfdist_cli.task.prediction.job import PredictionJob, Shard
from tfdist_cli.task.prediction.model import load
from tfdist_cli.task.prediction.outputs import Columns, Format, format_of, seal
from tfdist_cli.train.data.shard import ALL, checked
from tfdist_cli.train.tf_compat.data import in_random_order


def predict_parts(
    job: PredictionJob, recipe: Recipe, run: Location, shard: Shard, batch_size: int, done: Callable[[int], None]
) -> None:
    """Predicts the parts of one process that are not done.

    Args:
        job: the job.
        recipe: the run's recipe.
        run: the run's directory, or its address.
        shard: which parts are this process's.
        batch_size: examples that the model predicts at once.
        done: called with the number of examples of each part that it has done.
    """
    complete = job.done()
    reading = Reading(job.part_size, lambda part: shard.takes(part) and part not in complete, job.columns)
    from_file = Path(job.data).suffix in READERS
    parts = read(checked_location(job.data), reading, job.set_rows) if from_file else _split(job, recipe, reading)
    first = next(parts, None)
    if first is None:
        return
    model, written = load(job, recipe, run), format_of(job.output)
    for part, examples in chain([first], parts):
        columns = model.predict(model.bind(examples) if from_file else examples, batch_size)
        seal(job.path_of(part), partial(_write, written, columns))
        done(len(next(iter(columns.values()))))


def _write(written: Format, columns: Columns, path: Path) -> None:
    written.write(path, columns)


def _split(job: PredictionJob, recipe: Recipe, reading: Reading) -> Iterator[tuple[int, Any]]:
    """Yields the wanted parts of a split of the recipe's dataset.

    Raises:
        TrainingError: it is no dataset, never ends, or is shuffled: parts of several processes would not fit.
    """
    module = RecipeModule.load(recipe)
    examples = checked(partial(RecipeData(recipe, module).examples, job.data), ALL)
    endless = tf.get_static_value(examples.cardinality()) == tf.data.INFINITE_CARDINALITY
    if endless or in_random_order(examples):
        raise TrainingError(
            f"the split {job.data!r} {'never ends' if endless else 'is shuffled'}",
            code="prediction-data-shuffled",
            hint="return each example once and in one order for it: tfdist shuffles and repeats where it trains",
        )
    in_parts = isinstance(examples.element_spec, tuple)
    inputs = examples.map(lambda *each: keras.utils.unpack_x_y_sample_weight(each if in_parts else each[0])[0])
    count = 0
    for part, batch in enumerate(inputs.batch(job.part_size)):
        count += len(tf.nest.flatten(batch)[0])
        if reading.wanted(part):
            yield part, batch
    job.set_rows(count)


def join(job: PredictionJob) -> int:
    """Writes the output from all parts, and removes them.

    Returns:
        The number of parts.

    Raises:
        TrainingError: there are no examples.
    """
    parts = [job.path_of(part) for part in range(job.parts or 0)]
    if not parts:
        raise TrainingError(
            f"{job.data} has no examples", code="no-examples", hint="give --data a file or a split with examples"
        )
    seal(job.output, lambda path: format_of(job.output).join(path, parts))
    return len(parts)
