"""Embedding tables of which a step needs only the rows that its batch names.

Keras's `Embedding` takes the whole table as a tensor, which on parameter servers would cross the network in every step.
Here the numbers that a batch looks up are found first, from the batch alone; their rows are fetched, each once; and the
layer is given these rows in place of the table. The gradient is one of these rows, and so is the update.

A table qualifies when nothing but `Embedding` layers read it and what they look up follows from the batch. Both are
read off the model's graph. A table that is also used in another way, tied to the output layer for instance or
regularized, is fetched whole, as any other variable.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.step_trace import reached_from, unknown
from tfdist_cli.train.model.train_step import Given, ModelStep, Tensors
from tfdist_cli.train.variables.sharding import parts
from tfdist_cli.train.variables.weight_tensors import Weight

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Table:
    """A table that is looked up.

    Args:
        place: its number among the model's parameters.
        variable: it.
    """

    place: int
    variable: keras.Variable

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return int(self.variable.shape[0])


@dataclass(frozen=True)
class Lookup:
    """What some batches look up.

    Args:
        rows: for each shard of each table the numbers of its rows, counted from its first one, each once, int32,
            shape (n,).
        positions: for each batch and call of an `Embedding` layer, where each number stands among its table's `rows`,
            those of one shard behind those of the one before, int32, shape (numbers,).
    """

    rows: list[tf.Tensor]
    positions: list[list[tf.Tensor]]


@dataclass(frozen=True)
class _Calls:
    """What a forward pass looks up, in the order of its calls.

    Args:
        tables: the table of each call, by its number in `EmbeddingTables.tables`.
        numbers: a batch's tensors → the numbers that each call looks up, flat.
    """

    tables: list[int]
    numbers: Callable[..., list[tf.Tensor]]


class EmbeddingTables:
    """The tables of a model that are looked up rather than read.

    Args:
        step: the model's pure functions, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        min_bytes: smaller tables are read whole: that is quicker. None reads all of them whole.
    """

    def __init__(self, step: ModelStep, element_spec: Any, min_bytes: int | None) -> None:
        self._step = step
        self._element_spec = element_spec
        self.tables: list[Table] = []
        self._calls: dict[bool, _Calls] = {}
        places = {id(variable): place for place, variable in enumerate(step.parameters)}
        self._layers = [
            layer
            for layer in ([] if min_bytes is None else _large(step.model, min_bytes))
            if _looks_up(layer, learned=id(layer._embeddings) in places)
        ]
        if self._layers:
            self._find(places)
        self._shards = [[int(part.shape[0]) for part in parts(table.variable)] for table in self.tables]

    @property
    def places(self) -> list[int]:
        """Their numbers among the model's parameters."""
        return [table.place for table in self.tables]

    def lookup(self, batches: Sequence[Any], *, training: bool = True) -> Lookup:
        """What batches look up together, in a forward pass for each."""
        if not self.tables:
            return Lookup([], [[] for _ in batches])
        calls = self._calls[training]
        found = [calls.numbers(*tf.nest.flatten(batch, expand_composites=True)) for batch in batches]
        # Table by table; all of them in one go, since each operation costs more than what it does here.
        order = sorted((table, n, call) for n in range(len(batches)) for call, table in enumerate(calls.tables))
        flat = [found[n][call] for _, n, call in order]
        sizes = [tf.size(part) for part in flat]
        of = _repeated([table for table, _, _ in order], sizes) if len(self.tables) > 1 else tf.constant(0)
        rows, where = self._unique(self._checked(tf.concat(flat, axis=0) if len(flat) > 1 else flat[0], of), of)
        positions: list[list[Any]] = [[None] * len(calls.tables) for _ in batches]
        own = tf.split(where, tf.stack(sizes), num=len(order)) if len(order) > 1 else [where]
        for (_, n, call), part in zip(order, own, strict=True):
            positions[n][call] = part
        return Lookup(rows, positions)

    def nothing(self) -> Lookup:
        """A lookup of no rows at all."""
        return Lookup([tf.zeros([0], tf.int32) for shards in self._shards for _ in shards], [])

    def given(self, positions: list[tf.Tensor], *, training: bool = True) -> Given:
        """How a forward pass gets what it looks up, for `ModelStep`.

        Args:
            positions: those of its batch.
            training: whether it is a training step's.
        """

        @contextlib.contextmanager
        def given(parameters: Tensors) -> Iterator[Tensors]:
            tables = self._calls[training].tables if self.tables else []
            calls = iter(zip(tables, positions, strict=True))

            def taken(_layer: Any, _numbers: tf.Tensor) -> tf.Tensor:
                table, where = next(calls)
                place = self.tables[table].place
                return _gathered(parameters[place], where, self.tables[table].variable)

            whole = list(parameters)
            for table in self.tables:  # stands in for the table where Keras wants one, and is never computed
                whole[table.place] = tf.zeros(table.variable.shape, table.variable.dtype)
            with _taking(self._layers, taken):
                yield whole

        return given

    def _checked(self, numbers: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
        """Numbers from 0 on; Keras counts those below 0 from the end.

        Args:
            numbers: some tables' numbers.
            of: which table each is of.
        """
        limits = tf.gather(tf.constant([table.rows for table in self.tables]), of)
        numbers = tf.where(numbers < 0, numbers + limits, numbers)
        wrong = tf.reduce_max(tf.where((numbers >= 0) & (numbers < limits), -1, of))  # a table's, if there is one
        says = [
            f"a batch looks up rows that {each.variable.path} does not have: it has {each.rows}" for each in self.tables
        ]
        said = tf.gather(says, tf.maximum(wrong, 0))
        least = tf.reduce_min(tf.where(of == wrong, numbers, tf.int32.max))
        most = tf.reduce_max(tf.where(of == wrong, numbers, tf.int32.min))
        with tf.control_dependencies([tf.debugging.Assert(wrong < 0, [said, least, most])]):
            return tf.identity(numbers)

    def _unique(self, numbers: tf.Tensor, of: tf.Tensor) -> tuple[Tensors, tf.Tensor]:
        """Each shard's rows that are looked up, and where among its table's each number stands."""
        sizes = [rows for own in self._shards for rows in own]
        if len(sizes) == 1:
            rows, where = tf.unique(numbers)
            return [rows], where
        begins = np.cumsum([0, *sizes[:-1]])  # if one stood behind the other
        dtype = tf.int32 if sum(sizes) <= tf.int32.max else tf.int64
        firsts = np.cumsum([0, *(len(own) for own in self._shards[:-1])])  # each table's first shard
        if len(self.tables) > 1:
            numbers = tf.cast(numbers, dtype) + tf.gather(tf.constant(begins[firsts], dtype), of)
        joined, where = tf.unique(numbers)
        owner = tf.raw_ops.UpperBound(sorted_inputs=tf.constant(begins[None, 1:], dtype), values=joined[None])[0]
        inside = tf.cast(joined - tf.gather(tf.constant(begins, dtype), owner), tf.int32)
        rows = tf.dynamic_partition(inside, owner, len(sizes))
        if len(sizes) > len(self.tables):
            order = tf.dynamic_partition(tf.range(tf.size(joined)), owner, len(sizes))
            where = tf.gather(tf.math.invert_permutation(tf.concat(order, axis=0)), where)
        if len(self.tables) > 1:
            before = tf.cumsum(tf.stack([tf.size(own) for own in rows]), exclusive=True)
            where -= tf.gather(tf.gather(before, firsts), of)
        return rows, where

    def _find(self, places: dict[int, int]) -> None:
        given = self._step, self._element_spec, self._layers
        traces = {training: _Trace(*given, training=training) for training in (True, False)}
        for layer in dict.fromkeys(self._layers):
            table = layer._embeddings
            reason = next(filter(None, (trace.why_whole(table) for trace in traces.values())), None)
            if reason:
                _say_whole(table, reason)
                self._layers = [other for other in self._layers if other._embeddings is not table]
        kept = {id(layer._embeddings): layer._embeddings for layer in self._layers}
        self.tables = [Table(places[key], variable) for key, variable in kept.items()]
        number_of = {key: number for number, key in enumerate(kept)}
        for training, trace in traces.items():
            calls = [(number_of[id(call.table)], call.numbers) for call in trace.calls if id(call.table) in number_of]
            numbers = trace.function.prune(trace.inputs, [numbers for _, numbers in calls])
            self._calls[training] = _Calls([number for number, _ in calls], numbers)


@dataclass(frozen=True)
class _Call:
    table: keras.Variable
    numbers: tf.Tensor


class _Trace:
    """A model's forward pass as a graph, to see what its `Embedding` layers look up and who else reads their tables."""

    def __init__(self, step: ModelStep, element_spec: Any, layers: list[Any], *, training: bool) -> None:
        self.calls: list[_Call] = []
        self.inputs: list[tf.Tensor] = []
        self._step, self._layers, self._training = step, layers, training
        self._element_spec = element_spec
        self._places = {id(variable): place for place, variable in enumerate(step.parameters)}
        self._tables = {id(layer._embeddings): layer._embeddings for layer in layers}
        self._whole: dict[int, tf.Tensor] = {}
        self._dense: set[int] = set()
        self._others: list[tf.Tensor] = []
        flat = tf.nest.flatten(element_spec, expand_composites=True)
        # What is scored may come in batches of another size than what is trained on.
        specs = [tf.TensorSpec(spec.shape and [None, *spec.shape[1:]], spec.dtype) for spec in flat]
        self.function = tf.compat.v1.wrap_function(self._traced, specs)
        # What a step changes without a gradient may be anything, so nothing that is looked up may depend on it; nor on
        # what comes out otherwise when it is computed again, such as numbers that TensorFlow draws.
        stateful = [
            op.outputs[0] for op in self.function.graph.get_operations() if op.op_def.is_stateful and op.outputs
        ]
        self._unsure = reached_from([*self._whole.values(), *self._others, *stateful], self.function.graph)

    def _traced(self, *flat: tf.Tensor) -> list[Any]:
        step = self._step
        self.inputs += flat
        parameters = [self._rows(variable) for variable in step.parameters]
        state, metrics = [unknown(each) for each in step.state], [unknown(each) for each in step.metrics]
        self._others = [*parameters, *state, *metrics]
        batch = tf.nest.pack_sequence_as(self._element_spec, flat, expand_composites=True)
        pure = step.train if self._training else step.evaluate
        result = pure(parameters, state, metrics, batch, self._given)
        if self._training:
            own = {key: result.gradients[self._places[key]] for key in self._tables}
            self._dense = {key for key, gradient in own.items() if isinstance(gradient, tf.Tensor)}
        gradients = [gradient for gradient in result.gradients if gradient is not None]
        return [result.loss, *result.state, *result.metrics, *tf.nest.flatten(gradients, expand_composites=True)]

    @contextlib.contextmanager
    def _given(self, parameters: Tensors) -> Iterator[Tensors]:
        """As `EmbeddingTables.given`: a table's parameter is the fetched rows; the model reads another one."""

        def taken(layer: Any, numbers: tf.Tensor) -> tf.Tensor:
            table = layer._embeddings
            self.calls.append(_Call(table, numbers))
            return _gathered(parameters[self._places[id(table)]], tf.zeros_like(numbers), table)

        self._whole = {key: unknown(table) for key, table in self._tables.items()}
        pairs = zip(self._step.parameters, parameters, strict=True)
        with _taking(self._layers, taken):
            yield [self._whole.get(id(variable), value) for variable, value in pairs]

    def _rows(self, variable: keras.Variable) -> tf.Tensor:
        """A parameter as it arrives at a worker."""
        shape = [None, *variable.shape[1:]] if id(variable) in self._tables else variable.shape
        return tf.compat.v1.placeholder(variable.dtype, shape)

    def why_whole(self, table: keras.Variable) -> str | None:
        """Why a table has to be read whole; None if it need not be."""
        graph = self.function.graph
        for call in self.calls:
            if call.table is table and (call.numbers.graph is not graph or call.numbers.op.name in self._unsure):
                return "what is looked up in it depends on more than the batch"
        if id(table) in self._dense:
            return "its gradient is one of the whole table"
        read = reached_from([self._whole[id(table)]], graph)
        if read & {output.op.name for output in self.function.outputs}:
            return "not only Embedding layers read it"
        return None


def _large(model: keras.Model, min_bytes: int) -> Iterator[Any]:
    """The `Embedding` layers whose tables have so many bytes."""
    for layer in model._flatten_layers():
        table = getattr(layer, "_embeddings", None) if isinstance(layer, keras.layers.Embedding) else None
        if table is not None and layer.built and _bytes(table) >= min_bytes:
            yield layer


def _looks_up(layer: Any, *, learned: bool) -> bool:
    """Whether an `Embedding` does what Keras's does, with a table that is learned; says it where it does not."""
    reasons = {
        "its layer is not Keras's own Embedding": type(layer).call is not keras.layers.Embedding.call
        or type(layer).embeddings is not keras.layers.Embedding.embeddings
        or "call" in vars(layer),
        "LoRA adds to it": layer.lora_enabled,
        "it is not trained": not learned,
        "it has a constraint": layer._embeddings.constraint is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason:
        _say_whole(layer._embeddings, reason)
    return reason is None


def _say_whole(table: keras.Variable, reason: str) -> None:
    log.info("%s is fetched whole in every step: %s", table.path, reason)


@contextlib.contextmanager
def _taking(layers: Sequence[Any], take: Callable[[Any, tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Within it, layers take rows by `take(layer, flat numbers)`, not from their tables."""

    def call_of(layer: Any) -> Callable[[Any], Any]:
        def call(inputs: Any) -> Any:
            if isinstance(inputs, tf.RaggedTensor):
                flat = take(layer, _whole(inputs.flat_values))
                return inputs.with_flat_values(tf.cast(flat, layer.compute_dtype))
            inputs = tf.convert_to_tensor(inputs)
            rows = take(layer, tf.reshape(_whole(inputs), [-1]))
            known = inputs.shape.rank > 0 and all(inputs.shape[1:])
            shape: Any = [-1, *inputs.shape[1:], layer.output_dim]
            if not known:
                shape = tf.concat([tf.shape(inputs), [layer.output_dim]], axis=0)
            rows = tf.ensure_shape(tf.reshape(rows, shape), [*inputs.shape, layer.output_dim])
            return tf.cast(rows, layer.compute_dtype)

        return call

    for layer in layers:
        vars(layer)["call"] = call_of(layer)  # setattr would have Keras track it
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["call"]


def _whole(numbers: tf.Tensor) -> tf.Tensor:
    """As int32; what is too large for it becomes a number that no table has."""
    wider = numbers.dtype.is_integer and numbers.dtype.max > tf.int32.max
    return tf.saturate_cast(numbers, tf.int32) if wider else tf.cast(numbers, tf.int32)


def _repeated(values: list[int], times: list[tf.Tensor]) -> tf.Tensor:
    """Each of some numbers as many times as is said, int32, shape (sum of `times`,)."""
    ends = tf.cumsum(tf.stack(times))
    return tf.gather(tf.constant(values), tf.searchsorted(ends, tf.range(ends[-1]), side="right"))


def _gathered(rows: tf.Tensor, where: tf.Tensor, table: keras.Variable) -> tf.Tensor:
    """Some of the rows that have been fetched of a table, which gradient functions see as a variable."""
    return Weight(rows, table.path).sparse_read(where)


def _bytes(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)
