"""Embedding tables of which a step fetches only the rows that its batch looks up: from parameter servers, or in memory.

Keras's `Embedding` reads the whole table as a tensor, so the whole table would cross the network in every step, or be
copied in memory, since TensorFlow copies a table whose rows change before another operation reads all of it. Here
the ids that a batch looks up are computed first, from the batch alone. Their rows are fetched, each row once, and the
lookup returns them in place of the table's. The gradient and the update consist of these rows, too.

A table is a variable of an `Embedding` layer or of a class derived from it, such as those of KerasRS, whatever their
`call` does. It can be looked up this way if only `keras.ops.take` and `tf.gather` read it, and if the ids depend on the
batch alone. Both conditions are checked in the model's graph. Any other table, for example one that is regularized or
tied to the output layer, is fetched completely, as other variables are.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.layers.dynamic_embedding import row_index_of
from tfdist_cli.train.model.trace.additivity import dependents
from tfdist_cli.train.model.trace.step_trace import placeholder_for
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, Tensors
from tfdist_cli.train.optimizers.apply import innermost, leaf_optimizers
from tfdist_cli.train.tf_compat.keras_model import embeddings_of, layers_of
from tfdist_cli.train.tf_compat.variables import WeightTensor, rows_looked_up
from tfdist_cli.train.variables.sharding import parts, variable_bytes

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Table:
    """A table of which steps fetch rows.

    Args:
        parameter_index: its index in the model's parameters.
        variable: the table, shape (rows, width).
    """

    parameter_index: int
    variable: keras.Variable

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.variable.shape[0])


@dataclass(frozen=True)
class LookedUpRows:
    """The rows that some batches look up in a shard of a table.

    Args:
        numbers: the indices of the rows within the shard, each once, int32, shape (n,).
        count: how many they are, int32, shape (), on the worker.
        on_ps: whether the numbers are on the ps of the shard; otherwise they are on the worker.
    """

    numbers: tf.Tensor
    count: tf.Tensor
    on_ps: bool = False

    @classmethod
    def on_worker(cls, numbers: tf.Tensor) -> LookedUpRows:
        """Rows whose numbers are on the worker."""
        return cls(numbers, tf.size(numbers))


@dataclass(frozen=True)
class Lookup:
    """The rows that some batches look up.

    Args:
        rows: those of each shard of each table.
        positions: for each batch and each lookup in a table, the position of each id in the `rows` of its table, those
            of all its shards concatenated, int32, shape (ids,).
    """

    rows: list[LookedUpRows]
    positions: list[list[tf.Tensor]]


@dataclass(frozen=True)
class _Calls:
    """The lookups in a forward pass, in their order.

    Args:
        tables: for each lookup, the index of its table in `EmbeddingTables.tables`.
        ids: a function from the tensors of a batch to the flat ids of each lookup.
    """

    tables: list[int]
    ids: Callable[..., list[tf.Tensor]]


class EmbeddingTables:
    """The tables of a model of which steps fetch rows.

    The index of a `DynamicEmbedding` finds the rows of ids on the ps, where their numbers stay.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        min_bytes: smaller tables are fetched completely, which is faster. None: all tables are.
        among: the only tables whose rows may be fetched, in memory, where any table can be read completely; None for
            any, on parameter servers, where a `DynamicEmbedding` has to be read by rows.
    """

    def __init__(
        self,
        step: ModelStep,
        element_spec: Any,
        min_bytes: int | None,
        among: Sequence[keras.Variable] | None = None,
    ) -> None:
        self._step = step
        self._element_spec = element_spec
        self._may_read_completely = among is not None
        self.tables: list[Table] = []
        self.whole: list[tuple[keras.Variable, str]] = []
        """The large tables that are fetched completely, each with the reason."""
        self.evaluated_completely: set[int] = set()
        """Those that test steps read completely, as indices of parameters: tables whose rows are all scored, say."""
        self._calls: dict[bool, _Calls] = {}
        indices = {id(variable): index for index, variable in enumerate(step.parameters)}
        candidates = []
        allowed = None if among is None else set(map(id, among))
        for each in _large_variables(step.model, min_bytes):
            if allowed is not None and id(each.variable) not in allowed:
                continue
            if id(each.variable) in indices and each.variable.constraint is None:
                candidates.append(each)
            elif each.main:
                self._fetch_completely(each.variable, each.why_not_updated_by_rows())
        if candidates:
            self._find_tables(candidates, indices)
        self._shards = [[int(part.shape[0]) for part in parts(table.variable)] for table in self.tables]
        self._static = [number for number, table in enumerate(self.tables) if row_index_of(table.variable) is None]
        """The indices of the tables whose ids are numbers of rows: all but dynamic ones."""

    @property
    def parameter_indices(self) -> list[int]:
        """The indices of the tables in the model's parameters."""
        return [table.parameter_index for table in self.tables]

    @property
    def are_numbered(self) -> bool:
        """Whether there are tables, and the ids of all are numbers of rows: no table is dynamic."""
        return bool(self.tables) and len(self._static) == len(self.tables)

    def lookup(self, batches: Sequence[Any], *, training: bool = True) -> Lookup:
        """Returns the rows that some batches look up together, one forward pass for each batch.

        Args:
            batches: the batches.
            training: whether the passes are those of train steps or of test steps.
        """
        [found] = self.lookups([batches], training=training)
        return found

    def lookups(self, rounds: Sequence[Sequence[Any]], *, training: bool = True) -> list[Lookup]:
        """Returns the rows that the batches of each of some rounds look up together.

        All ids are processed at once, since the overhead of an operation exceeds its work here. In dynamic tables the
        rows of a round are not found before those of the round before it.

        Args:
            rounds: the batches of each round.
            training: whether the passes are those of train steps or of test steps.
        """
        if not self.tables:
            return [Lookup([], [[] for _ in batches]) for batches in rounds]
        calls = self._calls[training]
        ids = [[calls.ids(*tf.nest.flatten(batch, expand_composites=True)) for batch in batches] for batches in rounds]
        positions: list[list[list[Any]]] = [[[None] * len(calls.tables) for _ in batches] for batches in rounds]
        rows = self._numbered(calls.tables, ids, positions) if self._static else [{} for _ in rounds]
        for table in range(len(self.tables)):
            if table not in self._static:
                for found, own, places in zip(rows, ids, positions, strict=True):
                    found[table] = self._found(table, calls.tables, own, places, create=training)
        return [
            Lookup([each for table in range(len(self.tables)) for each in found[table]], own)
            for found, own in zip(rows, positions, strict=True)
        ]

    def _found(
        self, table: int, calls: list[int], ids: list[list[tf.Tensor]], positions: Any, *, create: bool
    ) -> list[LookedUpRows]:
        """Returns the rows of a dynamic table; in training, its index creates them. Sets `positions`."""
        places = [(n, call) for n in range(len(ids)) for call, owner in enumerate(calls) if owner == table]
        if not places:
            return [LookedUpRows.on_worker(tf.zeros([0], tf.int32)) for _ in self._shards[table]]
        joined, sizes = _joined([ids[n][call] for n, call in places])
        found = row_index_of(self.tables[table].variable).fetch(joined, create=create)
        for (n, call), part in zip(places, _split(found.positions, sizes), strict=True):
            positions[n][call] = part
        return [LookedUpRows(*each, on_ps=True) for each in zip(found.rows, found.counts, strict=True)]

    def _numbered(
        self, calls: list[int], ids: list[list[list[tf.Tensor]]], positions: Any
    ) -> list[dict[int, list[LookedUpRows]]]:
        """Returns for each round the rows of the tables whose ids are numbers of rows. Sets `positions`."""
        # Sorted by round and table: a table has other rows in each round, as if it were several tables.
        order = [
            (number + len(self._static) * r, r, n, call)
            for r, own in enumerate(ids)
            for number, table in enumerate(self._static)
            for n in range(len(own))
            for call, owner in enumerate(calls)
            if owner == table
        ]
        if not order:
            none = LookedUpRows.on_worker(tf.zeros([0], tf.int32))
            return [{table: [none for _ in self._shards[table]] for table in self._static} for _ in ids]
        joined, sizes = _joined([ids[r][n][call] for _, r, n, call in order])
        tables = len(self._static) * len(ids)
        owners = _repeated([number for number, *_ in order], sizes) if tables > 1 else tf.constant(0)
        numbers, where = self._unique(self._checked(joined, owners), owners, len(ids))
        for (_, r, n, call), part in zip(order, _split(where, sizes), strict=True):
            positions[r][n][call] = part
        each = iter(numbers)
        return [
            {table: [LookedUpRows.on_worker(next(each)) for _ in self._shards[table]] for table in self._static}
            for _ in ids
        ]

    def lookup_of_evaluation(self) -> Lookup:
        """Returns what all test steps look up: all rows of the tables that they read completely."""
        whole = self.evaluated_completely
        shards = [(table, size) for table, sizes in zip(self.tables, self._shards, strict=True) for size in sizes]
        numbers = [tf.range(size if table.parameter_index in whole else 0) for table, size in shards]
        return Lookup([LookedUpRows.on_worker(each) for each in numbers], [])

    def parameter_scope(self, positions: list[tf.Tensor], *, training: bool = True) -> ParameterScope:
        """Returns the scope in which a forward pass uses fetched rows in place of the tables.

        Args:
            positions: the positions of its batch, from `Lookup.positions`.
            training: whether the pass is that of a train step or of a test step.
        """

        @contextlib.contextmanager
        def scope(parameters: Tensors) -> Iterator[Tensors]:
            tables = self._calls[training].tables if self.tables else []
            calls = iter(zip(tables, positions, strict=True))

            def gather(_table: keras.Variable, _ids: tf.Tensor) -> tf.Tensor:
                table, where = next(calls)
                index = self.tables[table].parameter_index
                return _gathered(parameters[index], where, self.tables[table].variable)

            weights = list(parameters)
            whole = set() if training else self.evaluated_completely
            looked_up = [table for table in self.tables if table.parameter_index not in whole]
            for table in looked_up:  # a placeholder for Keras, which is never computed
                weights[table.parameter_index] = tf.zeros(table.variable.shape, table.variable.dtype)
            with rows_looked_up([table.variable for table in looked_up], gather):
                yield weights

        return scope

    def _checked(self, ids: tf.Tensor, owners: tf.Tensor) -> tf.Tensor:
        """Returns the ids as row indices from 0 on; Keras counts negative ids from the end.

        Args:
            ids: ids of some tables.
            owners: for each id, the index of its table in `_static`, which repeats in each round.
        """
        tables = [self.tables[table] for table in self._static]
        owners %= len(tables)
        limits = tf.gather(tf.constant([table.rows for table in tables]), owners)
        ids = tf.where(ids < 0, ids + limits, ids)
        wrong = tf.reduce_max(tf.where((ids >= 0) & (ids < limits), -1, owners))  # a table with an invalid id, or -1
        messages = [
            f"a batch looks up rows that {each.variable.path} does not have: it has {each.rows}" for each in tables
        ]
        message = tf.gather(messages, tf.maximum(wrong, 0))
        smallest = tf.reduce_min(tf.where(owners == wrong, ids, tf.int32.max))
        largest = tf.reduce_max(tf.where(owners == wrong, ids, tf.int32.min))
        # Not `tf.debugging.Assert`: it adds a condition, which TensorFlow's single-threaded executor does not run.
        with tf.control_dependencies([tf.raw_ops.Assert(condition=wrong < 0, data=[message, smallest, largest])]):
            return tf.identity(ids)

    def _unique(self, ids: tf.Tensor, owners: tf.Tensor, rounds: int = 1) -> tuple[Tensors, tf.Tensor]:
        """Returns the distinct rows of each shard, and the position of each id in the rows of its table."""
        shards = [self._shards[table] for table in self._static] * rounds
        sizes = [rows for own in shards for rows in own]
        if len(sizes) == 1:
            rows, where = tf.unique(ids)
            return [rows], where
        offsets = np.cumsum([0, *sizes[:-1]])  # of each shard, if all shards of all tables were concatenated
        dtype = tf.int32 if sum(sizes) <= tf.int32.max else tf.int64
        first_shards = np.cumsum([0, *(len(own) for own in shards[:-1])])  # of each table
        if len(shards) > 1:
            ids = tf.cast(ids, dtype) + tf.gather(tf.constant(offsets[first_shards], dtype), owners)
        joined, where = tf.unique(ids)
        shard = tf.raw_ops.UpperBound(sorted_inputs=tf.constant(offsets[None, 1:], dtype), values=joined[None])[0]
        inside = tf.cast(joined - tf.gather(tf.constant(offsets, dtype), shard), tf.int32)
        rows = tf.dynamic_partition(inside, shard, len(sizes))
        if len(sizes) > len(shards):
            order = tf.dynamic_partition(tf.range(tf.size(joined)), shard, len(sizes))
            where = tf.gather(tf.math.invert_permutation(tf.concat(order, axis=0)), where)
        if len(shards) > 1:
            before = tf.cumsum(tf.stack([tf.size(own) for own in rows]), exclusive=True)
            where -= tf.gather(tf.gather(before, first_shards), owners)
        return rows, where

    def _fetch_completely(self, table: keras.Variable, reason: str) -> None:
        if row_index_of(table) is not None and not self._may_read_completely:
            raise TrainingError(
                f"the table {table.path} of a DynamicEmbedding cannot be read row by row: {reason}",
                code="dynamic-embedding-read-completely",
                hint="only look up ids of the batch in it",
            )
        log.info("each step fetches %s completely: %s", table.path, reason)
        self.whole.append((table, reason))

    def _find_tables(self, candidates: Sequence[_Variable], indices: dict[int, int]) -> None:
        """Traces the model and keeps the tables that nothing but lookups reads.

        Args:
            candidates: the tables that can be updated row by row.
            indices: the index of each parameter, by the `id` of its variable.
        """
        variables = [each.variable for each in candidates]
        traces = {
            training: _Trace(self._step, self._element_spec, variables, training=training) for training in (True, False)
        }
        for each in candidates:
            reason, test_reason = (traces[training].why_not_by_rows(each.variable) for training in (True, False))
            looked_up = any(trace.looks_up(each.variable) for trace in traces.values())
            if looked_up and not reason:
                self.tables.append(Table(indices[id(each.variable)], each.variable))
                if test_reason:
                    if row_index_of(each.variable) is not None:
                        self._fetch_completely(each.variable, test_reason)
                    log.info("each evaluation fetches %s completely: %s", each.variable.path, test_reason)
                    self.evaluated_completely.add(self.tables[-1].parameter_index)
            elif looked_up or each.main:
                self._fetch_completely(each.variable, reason or "no lookup reads it")
        for training, trace in traces.items():
            whole = set() if training else self.evaluated_completely
            table_index = {
                id(table.variable): index
                for index, table in enumerate(self.tables)
                if table.parameter_index not in whole
            }
            calls = [(table_index[id(call.table)], call.ids) for call in trace.calls if id(call.table) in table_index]
            ids = trace.function.prune(trace.inputs, [ids for _, ids in calls])
            self._calls[training] = _Calls([table for table, _ in calls], ids)


@dataclass(frozen=True)
class _Call:
    """One lookup: its table and its flat ids."""

    table: keras.Variable
    ids: tf.Tensor


class _Trace:
    """The graph of a step, which shows the ids that are looked up in tables and what else reads the tables."""

    def __init__(self, step: ModelStep, element_spec: Any, tables: Sequence[keras.Variable], *, training: bool) -> None:
        self.calls: list[_Call] = []
        self.inputs: list[tf.Tensor] = []
        self._step, self._training = step, training
        self._element_spec = tf.nest.map_structure(_of_any_size, element_spec)
        self._indices = {id(variable): index for index, variable in enumerate(step.parameters)}
        self._tables = {id(table): table for table in tables}
        self._whole: dict[int, tf.Tensor] = {}
        """The placeholder of each complete table, which anything but a lookup reads."""
        self._dense: set[int] = set()
        self._variables: list[tf.Tensor] = []
        specs = tf.nest.flatten(self._element_spec, expand_composites=True)
        self.function = tf.compat.v1.wrap_function(self._traced, specs)
        # Ids must not depend on variables, which the step may change, nor on operations that give another result when
        # they are computed again, such as random ones: ids are computed before the step.
        stateful = [
            op.outputs[0] for op in self.function.graph.get_operations() if op.op_def.is_stateful and op.outputs
        ]
        self._varying = dependents([*self._whole.values(), *self._variables, *stateful])

    def _traced(self, *flat: tf.Tensor) -> list[Any]:
        step = self._step
        self.inputs += flat
        parameters = [self._placeholder(variable) for variable in step.parameters]
        state, metrics = ([placeholder_for(each) for each in group] for group in (step.state, step.metrics))
        self._variables = [*parameters, *state, *metrics]
        batch = tf.nest.pack_sequence_as(self._element_spec, flat, expand_composites=True)
        run = step.train if self._training else step.evaluate
        result = run(parameters, state, metrics, batch, self._parameter_scope)
        if self._training:
            own = {key: result.gradients[self._indices[key]] for key in self._tables}
            self._dense = {key for key, gradient in own.items() if isinstance(gradient, tf.Tensor)}
        gradients = [gradient for gradient in result.gradients if gradient is not None]
        return [result.loss, *result.state, *result.metrics, *tf.nest.flatten(gradients, expand_composites=True)]

    @contextlib.contextmanager
    def _parameter_scope(self, parameters: Tensors) -> Iterator[Tensors]:
        """As `EmbeddingTables.parameter_scope`: lookups use fetched rows, and all else reads another placeholder."""

        def gather(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
            self.calls.append(_Call(table, ids))
            return _gathered(parameters[self._indices[id(table)]], tf.zeros_like(ids, tf.int32), table)

        self._whole = {key: placeholder_for(table) for key, table in self._tables.items()}
        pairs = zip(self._step.parameters, parameters, strict=True)
        with rows_looked_up(list(self._tables.values()), gather):
            yield [self._whole.get(id(variable), value) for variable, value in pairs]

    def _placeholder(self, variable: keras.Variable) -> tf.Tensor:
        """A placeholder for what a worker fetches of a parameter: of a table, any number of rows."""
        shape = [None, *variable.shape[1:]] if id(variable) in self._tables else variable.shape
        return tf.compat.v1.placeholder(variable.dtype, shape)

    def looks_up(self, table: keras.Variable) -> bool:
        """Whether the step looks up rows of a table."""
        return any(call.table is table for call in self.calls)

    def why_not_by_rows(self, table: keras.Variable) -> str | None:
        """Returns the reason why a table has to be fetched completely, or None."""
        graph = self.function.graph
        for call in self.calls:
            if call.table is table and (call.ids.graph is not graph or call.ids.op.name in self._varying):
                return "the ids depend on more than the batch"
        if id(table) in self._dense:
            return "its gradient is dense"
        if dependents([self._whole[id(table)]]) & {output.op.name for output in self.function.outputs}:
            return "not only lookups of rows read it"
        return None


@dataclass(frozen=True)
class RowReads:
    """Tables of which lookups read single rows where these are stored.

    Only the forward pass can do so: the rows have no gradients.

    Args:
        tables: the tables.
    """

    tables: tuple[keras.Variable, ...]

    @property
    def variables(self) -> set[int]:
        """The `id`s of the tables."""
        return {id(table) for table in self.tables}

    def without(self, variables: set[int]) -> RowReads:
        """Returns these tables but for some, given by their `id`s."""
        return RowReads(tuple(table for table in self.tables if id(table) not in variables))

    def replaced(self) -> contextlib.AbstractContextManager[None]:
        """Within the context, lookups do so."""
        return rows_looked_up(self.tables, _read_rows)

    def parameters_of(self, step: ModelStep) -> tuple[Tensors, ParameterScope]:
        """Returns the values of a step's parameters without the tables, and the scope in which test steps use them."""

        @contextlib.contextmanager
        def scope(parameters: Tensors) -> Iterator[Tensors]:
            with self.replaced():
                yield parameters

        read = [
            tf.zeros(each.shape, each.dtype)  # a placeholder for Keras, which is never computed
            if id(each) in self.variables
            else tf.convert_to_tensor(each.value)
            for each in step.parameters
        ]
        return read, scope


def rows_read_from_tables(model: keras.Model, min_bytes: int | None) -> RowReads:
    """Returns the tables of a model of which single rows can be read, trained or not.

    Args:
        model: the model, built.
        min_bytes: smaller tables are read completely; None: all are.
    """
    return RowReads(tuple(each.variable for each in _large_variables(model, min_bytes)))


def _read_rows(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    rows, index = int(table.shape[0]), row_index_of(table)
    if index is not None:
        ids, _ = index.rows(ids, create=False)
    ids = tf.where(ids < 0, ids + rows, ids)
    inside = tf.reduce_all((ids >= 0) & (ids < rows))
    message = f"a batch looks up rows that {table.path} does not have: it has {rows}"
    with tf.control_dependencies([tf.debugging.Assert(inside, [message, tf.reduce_min(ids), tf.reduce_max(ids)])]):
        ids = tf.identity(ids)
    shards = parts(table)
    if len(shards) == 1:
        # Of a variable that a strategy mirrors, only the copies can read rows.
        return tf.distribute.get_strategy().experimental_local_results(shards[0])[0].sparse_read(ids)
    offsets = np.cumsum([0, *(int(shard.shape[0]) for shard in shards)], dtype=np.int32)
    owner = tf.searchsorted(tf.constant(offsets[1:]), ids, side="right")
    places = tf.dynamic_partition(tf.range(tf.size(ids)), owner, len(shards))
    pairs = zip(shards, offsets, places, strict=False)
    return tf.dynamic_stitch(places, [shard.sparse_read(tf.gather(ids, own) - first) for shard, first, own in pairs])


def unused_table_optimizers(model: keras.Model) -> dict[str, str]:
    """Returns KerasRS's tables whose own optimizer is not used, each with the class of that optimizer.

    KerasRS uses `TableConfig.optimizer` on TPUs only. Elsewhere the model's optimizer updates all tables.

    Args:
        model: the model, compiled.
    """
    keras_rs = sys.modules.get("keras_rs")  # a model can have its layers only if it has been imported
    if keras_rs is None or len(leaf_optimizers(model.optimizer)) > 1:  # each table may have an optimizer of its own
        return {}
    layers = [layer for layer in layers_of(model) if isinstance(layer, keras_rs.layers.DistributedEmbedding)]
    tables = {table["name"]: table["optimizer"] for layer in layers for table in layer.get_config()["tables"]}
    models = keras.saving.serialize_keras_object(innermost(model.optimizer))
    given = {name: own for name, own in tables.items() if own != "adam" and not _is_same(own, models)}  # the default
    return {name: own if isinstance(own, str) else own["class_name"] for name, own in given.items()}


def _is_same(table: Any, models: dict[str, Any]) -> bool:
    """Whether the serialized optimizer of a table is that of the model; by default it is Keras's of this name."""
    if isinstance(table, str):
        return table.lower() == models["class_name"].lower()
    one, other = ({**each["config"], "name": None} for each in (table, models))
    return table["class_name"] == models["class_name"] and one == other


@dataclass(frozen=True)
class _Variable:
    """A large variable of an `Embedding` layer.

    Args:
        layer: the layer, or one of another class derived from `Embedding`.
        variable: the variable.
    """

    layer: Any
    variable: keras.Variable

    @property
    def main(self) -> bool:
        """Whether it is the layer's table, and not a variable that the class has added."""
        return self.variable is embeddings_of(self.layer)

    def why_not_updated_by_rows(self) -> str:
        """Returns why single rows of it cannot be updated, if it is not a parameter or has a constraint."""
        if self.layer.quantization_mode is not None:
            return "it is quantized, and not trainable"
        if self.layer.lora_enabled:
            return "LoRA trains what is added to it"
        return "it is not trainable" if self.variable.constraint is None else "it has a constraint"


def _large_variables(model: keras.Model, min_bytes: int | None) -> list[_Variable]:
    """Returns the variables that are read row by row if possible, each once.

    They are the tables of `DynamicEmbedding` layers, and the variables of at least `min_bytes` bytes that other
    `Embedding` layers have, if it is not None.
    """
    embeddings = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding) and layer.built]
    found = {id(variable): _Variable(layer, variable) for layer in embeddings for variable in layer.variables}

    def is_large(variable: keras.Variable) -> bool:
        return min_bytes is not None and bool(variable.shape.rank) and variable_bytes(variable) >= min_bytes

    return [each for each in found.values() if row_index_of(each.variable) is not None or is_large(each.variable)]


def _of_any_size(spec: Any) -> Any:
    """Returns the spec of batches of any size: those of evaluation may have another size than those of training."""
    if not isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec) or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _joined(parts: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Concatenates tensors; returns their sizes, too."""
    return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0], [tf.size(part) for part in parts]


def _split(joined: tf.Tensor, sizes: list[tf.Tensor]) -> list[tf.Tensor]:
    """Splits what has been concatenated."""
    return tf.split(joined, tf.stack(sizes), num=len(sizes)) if len(sizes) > 1 else [joined]


def _repeated(values: list[int], counts: list[tf.Tensor]) -> tf.Tensor:
    """Repeats each value as often as its count, int32, shape (sum of `counts`,)."""
    ends = tf.cumsum(tf.stack(counts))
    return tf.gather(tf.constant(values), tf.searchsorted(ends, tf.range(ends[-1]), side="right"))


def _gathered(rows: tf.Tensor, positions: tf.Tensor, table: keras.Variable) -> tf.Tensor:
    """Gathers some of the fetched rows of a table, which gradient functions see as a variable."""
    return WeightTensor(rows, table.path).sparse_read(positions)
