"""A Keras layer that turns any ids into vectors: a row of its table is created when an id is seen first."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import UsageError
from tfdist_cli.tables.hashing import GROUP
from tfdist_cli.tables.strings import row_width
from tfdist_cli.train.layers.initial_rows import InitialRows
from tfdist_cli.train.layers.row_index import Eviction, RowIndex, RowPolicy
from tfdist_cli.train.layers.row_keys import strings_as_ids
from tfdist_cli.train.tf_compat.variables import keep_row_index, stored

FILL = 0.7
"""How many of its rows a table without eviction uses. Until then an id of 100 million finds no free row in its two
buckets with a probability of 3e-5; with 0.8 it was 0.3 for a million ids already."""
_INDEX_BYTES = 20
"""The bytes of the index for each row, without strings."""

_KEPT = ("name", "trainable", "dtype", "embeddings_initializer", "mask_zero", "activity_regularizer")
"""The keys of the configuration that are those of Keras's layer."""
_NOT_TAKEN = ("embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank", "quantization_config")
"""Arguments of Keras's layer that would change or give all rows of a table."""


class _Rows(keras.initializers.Zeros):
    """The initial value of a table: its rows get theirs when they are created.

    Attributes:
        row_unit: shards have a multiple of so many rows.
    """

    row_unit = GROUP


@keras.saving.register_keras_serializable("tfdist")
class DynamicEmbedding(keras.layers.Embedding):
    """Turns ids into vectors of a fixed size, like `keras.layers.Embedding`, for ids that are not known in advance.

    Ids are any integers or strings. A row of the table is created when a training step looks up an id first. Its
    initial value depends on the id and the seed of the initializer alone: for the ids 0, 1, 2 … it is that of an
    `Embedding` of float32. Ids that have no row, such as new ones in evaluation, have the default row, which starts as
    zeros; ids that are not admitted yet train it.

    Args:
        dim: the size of the vectors.
        capacity: how many ids have rows at the same time. Without `evict`, the training fails when there are more.
        max_bytes: in place of `capacity`, the most bytes of rows and index; slots of the optimizer are as large as the
            rows, and count extra. Needs `evict`.
        admit_after: an id has a row from its n-th occurrence on; before, the default row is its row.
        evict: which row a new id replaces when no row is free for it, `lru` (the least recently used) or `lfu` (the
            least frequently used).
        ttl: seconds; rows not used for so long are replaced first.
        string_bytes: keeps the strings of ids beside their rows, so many bytes of each, for `vocabulary` and for
            pushed tables. Ids must be strings then. None: only their hashes are kept.
        embeddings_initializer: `RandomUniform`, `RandomNormal`, `Zeros`, `Ones` or `Constant`.
        **kwargs: those of every layer, and `mask_zero`.

    Raises:
        UsageError: an argument is not valid.
    """

    def __init__(  # noqa: PLR0913 all but two are named
        self,
        dim: int,
        capacity: int | None = None,
        *,
        max_bytes: int | None = None,
        admit_after: int = 1,
        evict: Eviction | None = None,
        ttl: float | None = None,
        string_bytes: int | None = None,
        embeddings_initializer: Any = "uniform",
        **kwargs: Any,
    ) -> None:
        _check(capacity, max_bytes, admit_after, evict, ttl, string_bytes)
        if refused := [name for name in _NOT_TAKEN if kwargs.get(name) is not None]:
            raise UsageError(
                f"DynamicEmbedding takes no {refused[0]}: it is for all rows of a table",
                code="invalid-argument",
                hint="leave it out, or use an Embedding",
            )
        row_bytes = (
            _bytes_of(kwargs.get("dtype")) * dim + _INDEX_BYTES + (row_width(string_bytes) if string_bytes else 0)
        )
        if max_bytes is not None:
            rows = max_bytes // row_bytes // GROUP * GROUP
        else:
            rows = math.ceil((capacity or 0) / (1 if evict else FILL) / GROUP) * GROUP
        if not rows:
            raise UsageError(
                f"max_bytes is {max_bytes}, less than the smallest table of {GROUP * row_bytes}",
                code="invalid-argument",
            )
        super().__init__(rows, dim, embeddings_initializer=embeddings_initializer, **kwargs)
        self.capacity, self.max_bytes, self.string_bytes = capacity, max_bytes, string_bytes
        self.policy = RowPolicy(admit_after, evict, ttl)
        self._initial = InitialRows(self.embeddings_initializer, dim)

    def build(self, input_shape: Any = None) -> None:
        """Creates the table."""
        given: Any = self.embeddings_initializer
        self.embeddings_initializer: Any = _Rows()
        super().build(input_shape)
        self.embeddings_initializer = given
        if not _creates_later():
            self._create_index()

    @property
    def index(self) -> RowIndex:
        """The index of the table, which is created with it."""
        if row_index_of(self.embeddings) is None:
            self._create_index()
        return row_index_of(self.embeddings)

    def _create_index(self) -> None:
        index = RowIndex(self.embeddings, self._initial, self.policy, self.string_bytes)
        keep_row_index(self.embeddings, index)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Layer`.

        Raises:
            UsageError: strings are to be kept, and the ids are none.
        """
        dtype = tf.as_dtype(getattr(inputs, "dtype", tf.string))
        if self.string_bytes and dtype != tf.string:  # an error in `call` would lose its code in Keras
            raise UsageError(
                f"the layer {self.name!r} has string_bytes, but its ids are {dtype.name}",
                code="dynamic-embedding-no-strings",
                hint="leave string_bytes out, or give the model's input the dtype 'string'",
            )
        return super().__call__(inputs, *args, **kwargs)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the vectors of ids; in training, new ids get rows."""
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self.call(inputs.flat_values, training=training))
        ids = _dense(inputs) if self.string_bytes else as_ids(inputs)
        looked_up = vars(self.embeddings).get("sparse_read")
        if looked_up:
            return tf.cast(looked_up(ids), self.compute_dtype)
        if (
            row_index_of(self.embeddings) is None and _creates_later()
        ):  # Keras builds a model, and creates its variables afterwards
            return keras.ops.zeros_like(ids, self.compute_dtype)[..., None] * tf.zeros(
                [self.output_dim], self.compute_dtype
            )
        flat = tf.reshape(ids, [-1])
        rows, created = self.index.rows(flat, create=bool(training))
        values = keras.ops.take(self.embeddings, rows, axis=0)
        if training:  # the step has read the table before the rows were created
            fresh = tf.cast(self.index.initial_rows(as_ids(flat)), values.dtype)
            values += tf.stop_gradient(tf.where(created[:, None], fresh - values, tf.zeros_like(values)))
        shape = tf.concat([tf.shape(ids), [self.output_dim]], axis=0)
        values = tf.cast(tf.reshape(values, shape), self.compute_dtype)  # as Keras's layer, which casts by itself
        return tf.ensure_shape(values, [*ids.shape, self.output_dim])

    def vocabulary(self) -> tuple[Any, Any]:
        """Returns the ids that have rows, shape (n,), and their rows in the table, int32, shape (n,).

        Ids are int64. A string is represented by `tf.strings.to_hash_bucket_fast(string, 2**63 - 1)`. With
        `string_bytes`, ids are `str`: a longer string ends with `…`, and bytes that are not UTF-8 are surrogates.
        """
        ids, rows = self.index.ids()
        return (self.index.strings_of(rows), rows) if self.string_bytes else (ids, rows)

    def save_own_variables(self, store: Any) -> None:
        """See `keras.Layer`; the index is saved with the table."""
        for number, variable in enumerate([self.embeddings, *self.index.variables]):
            store[str(number)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """See `keras.Layer`."""
        for number, variable in enumerate([self.embeddings, *self.index.variables]):
            variable.assign(store[str(number)])

    def quantize(self, *_: Any, **__: Any) -> None:
        """See `keras.Layer`: Keras leaves out the layers that cannot."""
        raise NotImplementedError("a DynamicEmbedding is not quantized")

    def get_config(self) -> dict[str, Any]:
        """See `keras.Layer`."""
        config = super().get_config()
        own = {key: config[key] for key in _KEPT if key in config}
        policy = {"admit_after": self.policy.admit_after, "evict": self.policy.evict, "ttl": self.policy.ttl}
        sizes = {"dim": self.output_dim, "capacity": self.capacity, "max_bytes": self.max_bytes}
        return own | policy | sizes | {"string_bytes": self.string_bytes}


def _bytes_of(dtype: Any) -> int:
    """The bytes of one number of a table with this dtype or policy; None for the global policy."""
    policy = keras.dtype_policies.get(keras.config.dtype_policy() if dtype is None else dtype)
    return tf.as_dtype(policy.variable_dtype).size


def row_index_of(variable: keras.Variable) -> Any:
    """Returns the `RowIndex` of a table; None for any other variable."""
    return vars(variable).get("row_index")


def _creates_later() -> bool:
    """Whether Keras creates the storage of new variables later, when it has built the model."""
    with tf.init_scope():
        return stored(keras.Variable("zeros", shape=(), dtype="int32", trainable=False)) is None


def as_ids(inputs: Any) -> tf.Tensor:
    """Returns ids as int64; strings by their hash."""
    inputs = _dense(inputs)
    return strings_as_ids(inputs) if inputs.dtype == tf.string else tf.cast(inputs, tf.int64)


def _dense(inputs: Any) -> tf.Tensor:
    if isinstance(inputs, tf.SparseTensor):
        inputs = tf.sparse.to_dense(inputs)
    return tf.convert_to_tensor(inputs)


def _check(capacity: Any, max_bytes: Any, admit_after: int, evict: Any, ttl: Any, string_bytes: Any) -> None:
    problem = None
    if (capacity is None) == (max_bytes is None):
        problem = "DynamicEmbedding needs either capacity or max_bytes"
    elif (capacity if max_bytes is None else max_bytes) < 1:
        problem = f"capacity and max_bytes must be at least 1, got {capacity if max_bytes is None else max_bytes}"
    elif evict not in {None, "lru", "lfu"}:
        problem = f"evict must be 'lru', 'lfu' or None, got {evict!r}"
    elif max_bytes is not None and evict is None:
        problem = "max_bytes needs evict: new ids replace others when the table is full"
    elif admit_after < 1:
        problem = f"admit_after must be at least 1, got {admit_after}"
    elif ttl is not None and ttl <= 0:
        problem = f"ttl must be positive, got {ttl}"
    elif string_bytes is not None and string_bytes < 1:
        problem = f"string_bytes must be at least 1, got {string_bytes}"
    if problem:
        raise UsageError(problem, code="invalid-argument")
