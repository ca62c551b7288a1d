"""The data of a recipe: what `dataset(params, split, shard)` returns, as the batches that `fit` trains on.

Arrays and datasets of single examples become batches here. Everything else that Keras's `fit` takes comes in batches,
and is the same to a recipe and to `tfdist.fit`: a dataset of batches, a `PyDataset`, a generator or a DataLoader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.sections.recipe import Recipe, Train
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.train.cluster.data_service.reader import DataService
from tfdist_cli.train.data.inputs import Inputs, weighted
from tfdist_cli.train.data.length import with_length
from tfdist_cli.train.data.mismatch import check_batched_once, comes_in_batches
from tfdist_cli.train.data.pipeline import Pipeline
from tfdist_cli.train.data.python_data.sources import is_python_data
from tfdist_cli.train.data.shard import DatasetFunction, Shard
from tfdist_cli.train.data.sharding.dataset_function import Sharded
from tfdist_cli.train.trainer.config.training_arguments import DataSource
from tfdist_cli.train.trainer.config.validation import Validation
from tfdist_cli.train.trainer.fit import BatchSource

HELD_OUT = "validation"
"""The name of the part of the training data that `evaluate.validation_split` holds out."""


@dataclass(frozen=True)
class RecipeData:
    """The data of a recipe.

    Args:
        recipe: the recipe.
        module: its module.
        model: the model that trains on the data; None if it is not known.
    """

    recipe: Recipe
    module: RecipeModule
    model: keras.Model | None = None

    @cached_property
    def source(self) -> DataSource:
        """The data to train on.

        Raises:
            TrainingError: the recipe's module returns no data.
            UsageError: a key of the recipe does not go with the data.
        """
        train, weights = self.recipe.train, self.recipe.train.class_weight
        batches = self._batches("train", shuffle=train.shuffle != 0, class_weight=weights)
        if batches is not None:
            self._check_batch_size()
            return BatchSource(batches)
        shuffle = None if train.shuffle == "auto" else train.shuffle
        pipeline = Pipeline(train.batch_size, shuffle, train.seed)
        return ExampleSource(self._training_examples, pipeline, self.model, weights)

    @cached_property
    def validation(self) -> Validation | None:
        """What the model is evaluated on; None if it is not evaluated.

        Raises:
            TrainingError: the recipe's module returns no data.
            UsageError: the data cannot be split.
        """
        spec = self.recipe.evaluate
        if spec is None:
            return None
        steps = None if spec.steps == "auto" else spec.steps
        every = spec.every_epochs
        at = every if isinstance(every, list) else None
        often = every if isinstance(every, int) else 1
        name = HELD_OUT if spec.validation_split else spec.split
        return Validation(self._scored(spec.split), steps, often, name, at)

    def examples(self, split: str, shard: Shard) -> tf.data.Dataset:
        """Returns single examples of a split, whatever form the data has.

        Raises:
            TrainingError: the recipe's module returns no data.
        """
        batches = self._batches(split)
        return _examples(self.module, split, shard) if batches is None else batches(shard).unbatch()

    def drawn(self, shard: Shard) -> tf.data.Dataset:
        """Returns single examples of a worker's training data.

        Raises:
            TrainingError: the recipe's module returns no data.
        """
        source = self.source
        return source.examples(shard) if isinstance(source, ExampleSource) else source.one_pass()(shard).unbatch()

    def _batches(
        self, split: str, *, shuffle: bool = False, class_weight: Mapping[int, float] | None = None
    ) -> DatasetFunction | None:
        """Returns the data of a split that comes in batches; None if it is single examples."""
        data = self.module.dataset(split, Shard())
        if is_python_data(data):
            return Inputs.of(data, class_weight=class_weight).dataset_function(None, shuffle=shuffle)
        if isinstance(data, tf.data.Dataset) and comes_in_batches(self.model, data):
            function = Sharded(partial(self.module.dataset, split), _name(self.module, split))
            return weighted(function, class_weight)
        return None

    def _check_batch_size(self) -> None:
        size = self.recipe.train.batch_size
        if size != Train().batch_size:
            raise UsageError(
                f"train.batch_size is {size}, and {_name(self.module, 'train')} returns batches",
                code="batch-size-without-arrays",
                hint="remove train.batch_size, or return arrays or single examples, which tfdist batches",
            )

    @property
    def _fraction(self) -> float | None:
        return self.recipe.evaluate.validation_split if self.recipe.evaluate else None

    @cached_property
    def _parts(self) -> tuple[Inputs, Inputs]:
        """The arrays to train on, and those that are held out."""
        data = self.module.dataset("train", Shard())
        return Inputs.of(data, name=_name(self.module, "train")).split(self._fraction or 0.0)

    @property
    def _training_examples(self) -> DatasetFunction:
        if self._fraction:
            return partial(_shard_of, self._parts[0])
        return partial(_examples, self.module, "train")

    def _scored(self, split: str) -> DatasetFunction:
        batch = self.recipe.train.batch_size
        if self._fraction:
            examples: DatasetFunction = partial(_shard_of, self._parts[1])
        else:
            batches = self._batches(split)
            if batches is not None:
                return batches
            examples = partial(_examples, self.module, split)
        return lambda shard: examples(shard).batch(batch).prefetch(tf.data.AUTOTUNE)


@dataclass(frozen=True)
class ExampleSource:
    """`config.DataSource` of single examples: a function that maps a shard to them, and a pipeline that batches them.

    Args:
        examples: the function.
        pipeline: the pipeline; the training sets whether it repeats.
        model: the model that trains on them; None if it is not known.
        class_weight: the weight of each class.
        lengths: the examples of shards that were counted.
    """

    examples: DatasetFunction
    pipeline: Pipeline
    model: keras.Model | None = None
    class_weight: Mapping[int, float] | None = None
    lengths: Mapping[tuple[int, int], int] = field(default_factory=dict)
    has_batches = False

    def elements(self) -> DatasetFunction:
        """Returns the examples of one pass over the data."""
        return self.examples

    def with_lengths(self, lengths: Mapping[tuple[int, int], int]) -> ExampleSource:
        """Returns the data with the length of shards, by their index and count."""
        return replace(self, lengths=lengths)

    @property
    def _counted(self) -> DatasetFunction:
        if not self.lengths:
            return self.examples
        limited = with_length(self.examples, self.lengths)
        return lambda shard: limited(replace(shard, step=0))  # the pipeline skips what was read

    def one_pass(self) -> DatasetFunction:
        """Returns the full batches of one pass over the data."""

        def batches(shard: Shard) -> tf.data.Dataset:
            data = self._counted(shard).batch(self.pipeline.batch_size, drop_remainder=True)
            if self.model is not None:
                check_batched_once(self.model, data.element_spec)
            return data

        return weighted(batches, self.class_weight)

    def batches(self, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on."""
        pipeline = replace(self.pipeline, repeat=repeat)
        return weighted(lambda shard: pipeline.batches(self._counted(shard), shard), self.class_weight)

    def served_batches(self, service: DataService, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on, prepared by the cluster's data workers."""
        served = service.batches(self.examples, replace(self.pipeline, repeat=repeat), self.lengths)
        return weighted(served, self.class_weight)


def _name(module: RecipeModule, split: str) -> str:
    return f"dataset(params, {split!r}, shard) in {module.module.__file__}"


def _examples(module: RecipeModule, split: str, shard: Shard) -> tf.data.Dataset:
    """Returns a shard's examples.

    Raises:
        TrainingError: the recipe's module returns no data.
    """
    name = _name(module, split)
    examples = Sharded(partial(module.dataset, split), name, _examples_of_arrays)(shard)
    if isinstance(examples, tf.data.Dataset):
        return examples
    raise TrainingError(
        f"{name} returned {type(examples).__name__}, which is no data",
        code="not-a-dataset",
        hint="return arrays, a tf.data.Dataset of examples or batches, a keras.utils.PyDataset, a generator or a "
        "DataLoader for each split",
    )


def _examples_of_arrays(data: Any) -> tf.data.Dataset | None:
    arrays = Inputs.of(data).arrays
    return tf.data.Dataset.from_tensor_slices(arrays) if arrays else None


def _shard_of(data: Inputs, shard: Shard) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data.arrays).shard(shard.count, shard.index)
