"""The forward pass over a group of batches, as one `tf.function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.assignments import Assignments, seeded_draws_only
from tfdist_cli.train.model.compute_device import DeviceScope
from tfdist_cli.train.model.embeddings import RowReads, rows_read_from_tables
from tfdist_cli.train.model.train_step import Tensors, values
from tfdist_cli.train.tf_compat.functions import functions_inlined

_Variables = list[tuple[keras.Variable, tf.Tensor]]
Leaves = list[list[np.ndarray]]
"""The predictions of some examples: for each output one array, or, if batches may have different shapes, one of each
batch."""


class _Scope(Assignments):
    """The scope of a forward pass, which knows what read a table completely.

    Args:
        values: the variables but for tables, each with its value.
        tables: the tables of which lookups read rows.
    """

    def __init__(self, values: _Variables, tables: RowReads) -> None:
        super().__init__(values)
        self.read_completely: set[int] = set()
        """The `id`s of tables of which something else than a lookup reads the value."""
        self._tables = tables.variables

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See `keras.StatelessScope`."""
        self.read_completely |= self._tables & {id(variable)}
        return super().get_current_value(variable)


class PredictionFunction:
    """Predicts groups of batches.

    Args:
        model: the model, built.
        input_spec: the `tf.TypeSpec`s of a batch's inputs.
        tables_bytes: `Embedding` tables of at least so many bytes are read row by row, if only lookups read them; None
            for none.
        device_scope: the device scope in which the model is computed.
        read: reads each of some variables once.
    """

    def __init__(
        self,
        model: keras.Model,
        input_spec: Any,
        tables_bytes: int | None = None,
        device_scope: DeviceScope = nullcontext,
        read: Callable[[Sequence[keras.Variable]], Tensors] = values,
    ) -> None:
        self._model, self._read = model, read
        self._input_spec = input_spec
        self._device_scope = device_scope
        self._tables = rows_read_from_tables(model, tables_bytes)
        self._read_completely: set[int] = set()
        self.outputs = self._traced_outputs()
        """The outputs, as `tf.TensorSpec`s in the structure that the model returns."""

    @cached_property
    def compiled(self) -> Any:
        """A `tf.function` that predicts the next batches.

        Its arguments are an iterator, and the most batches to read, int64, shape (). Its results are the number of
        batches that were read, int64, shape (), and what `leaves` takes.
        """
        specs = self._stored

        signature = [tf.data.IteratorSpec(self._input_spec), tf.TensorSpec([], tf.int64)]

        @tf.function(autograph=False, input_signature=signature)
        def predict(iterator: Any, most: tf.Tensor) -> list[tf.Tensor]:
            predict_batch = self._reading_once()

            def body(optional: Any, done: tf.Tensor, *arrays: Any) -> list[Any]:
                predicted = self._to_store(predict_batch(optional.get_value()))
                written = [
                    each.write(tf.cast(done, tf.int32), one) for each, one in zip(arrays, predicted, strict=True)
                ]
                following = tf.cond(
                    done + 1 < most,
                    iterator.get_next_as_optional,
                    lambda: tf.experimental.Optional.empty(self._input_spec),
                )
                return [following, done + 1, *written]

            arrays = [
                tf.TensorArray(spec.dtype, size=0, dynamic_size=True, infer_shape=False, element_shape=spec.shape)
                for spec in specs
            ]
            start = [iterator.get_next_as_optional(), tf.zeros([], tf.int64), *arrays]
            _, done, *arrays = tf.while_loop(
                lambda optional, *_: optional.has_value(), body, start, parallel_iterations=1
            )
            return [done, *(_joined(each, spec, done) for each, spec in zip(arrays, specs, strict=True))]

        return predict

    @property
    def types(self) -> list[tf.DType]:
        """The types of what `leaves` takes."""
        return [spec.dtype for spec in self._stored]

    def leaves(self, stored: Sequence[np.ndarray]) -> Leaves:
        """Returns the predictions of a group of batches.

        Args:
            stored: the results of `compiled`, but for the number of batches.
        """
        rest = iter(stored)
        return [
            _divided(values, next(rest)) if _varies(spec) else [values]
            for spec, values in zip(tf.nest.flatten(self.outputs), rest, strict=False)
        ]

    @property
    def _stored(self) -> list[tf.TensorSpec]:
        """What the function stores of all batches: each output; of one whose shape may vary, its values and shapes."""
        stored = []
        for spec in tf.nest.flatten(self.outputs):
            shapes = tf.TensorSpec([None, spec.shape.rank], tf.int64)
            stored += [tf.TensorSpec([None], spec.dtype), shapes] if _varies(spec) else [spec]
        return stored

    def _to_store(self, predicted: Any) -> list[tf.Tensor]:
        """Returns what is stored of one batch."""
        stored = []
        for spec, each in zip(tf.nest.flatten(self.outputs), tf.nest.flatten(predicted), strict=True):
            shape = tf.shape(each, out_type=tf.int64)[None]
            stored += [tf.reshape(each, [-1]), shape] if _varies(spec) else [each]
        return stored

    def _traced_outputs(self) -> Any:
        """Traces one batch.

        Raises:
            TrainingError: an output has no examples, or the model assigns variables.
        """

        @tf.function(autograph=False)
        def once(batch: Any) -> Any:
            return self._reading_once()(batch)

        outputs = once.get_concrete_function(self._input_spec).structured_outputs
        self._tables = self._tables.without(self._read_completely)
        for each in tf.nest.flatten(outputs):
            if not isinstance(each, tf.Tensor) or each.shape.rank == 0:
                raise TrainingError(
                    f"the model {self._model.name!r} predicts {each}, which is not an array of examples",
                    code="prediction-not-an-array",
                    hint="return dense tensors whose first dimension is that of the batch",
                )
        return tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), outputs)

    def _reading_once(self) -> Callable[[Any], Any]:
        """Returns a function that predicts a batch. The variables are read here, but for tables."""
        tables = self._tables
        variables = [each for each in self._model.variables if id(each) not in tables.variables]
        held: _Variables = list(zip(variables, self._read(variables), strict=True))

        def predict_batch(batch: Any) -> Any:
            with ExitStack() as contexts:
                for context in (self._device_scope(), tables.replaced(), seeded_draws_only(), functions_inlined()):
                    contexts.enter_context(context)
                scope = contexts.enter_context(_Scope(held, tables))
                predicted = self._model.predict_step((batch,))
            self._read_completely |= scope.read_completely
            if scope.assigns:
                raise TrainingError(
                    f"the model {self._model.name!r} assigns variables while it predicts",
                    code="prediction-assigns",
                    hint="call model.predict in one task, which keeps what the model assigns",
                )
            return predicted

        return predict_batch


def _varies(spec: tf.TensorSpec) -> bool:
    """Whether batches of an output may differ in another dimension than the first one."""
    return not spec.shape[1:].is_fully_defined()


def _divided(values: np.ndarray, shapes: np.ndarray) -> list[np.ndarray]:
    """Returns the output of each batch from the values and the shapes of all."""
    pieces = np.split(values, np.cumsum(shapes.prod(axis=1))[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray | tf.RaggedTensor:
    """Concatenates predictions as Keras does: to a ragged tensor if they differ in another dimension than the first."""
    shapes = np.array([array.shape[1:] for array in arrays])
    varying = np.flatnonzero((shapes != shapes[0]).any(axis=0))
    if not varying.size:
        return np.concatenate(arrays)
    ragged_rank = int(varying[-1]) + 1
    return tf.concat([tf.RaggedTensor.from_tensor(array, ragged_rank=ragged_rank) for array in arrays], axis=0)


def _joined(array: tf.TensorArray, spec: tf.TensorSpec, batches: tf.Tensor) -> tf.Tensor:
    """Concatenates the predictions of all batches."""
    empty = tf.zeros([size or 0 for size in spec.shape], spec.dtype)
    return tf.ensure_shape(tf.cond(batches > 0, array.concat, lambda: empty), spec.shape)
