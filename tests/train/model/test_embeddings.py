"""A step on fetched rows equals a step on the complete table; other tables are fetched completely, with a reason."""

import contextlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.engine.parameter_server.transport import Transport, dense
from tfdist_cli.train.model.embeddings import EmbeddingTables, unused_table_optimizers
from tfdist_cli.train.model.train_step import ModelStep, values
from tfdist_cli.train.variables.sharding import parts

pytestmark = pytest.mark.slow

ROWS, WIDTH, EXAMPLES, LENGTH = 11, 4, 6, 5
random = np.random.default_rng(0)
IDS = random.integers(0, ROWS, (EXAMPLES, LENGTH)).astype(np.int32)
Y = random.normal(size=(EXAMPLES, 1)).astype(np.float32)


def compiled(model):
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def embedding(**kwargs):
    return layers.Embedding(ROWS, WIDTH, name="table", **kwargs)


def sequential(*first, **kwargs):
    return compiled(
        keras.Sequential([*first, embedding(**kwargs), layers.Dropout(0.3), layers.Flatten(), layers.Dense(1)])
    )


def functional(function, dtype="int32", shape=(LENGTH,)):
    """A model with one input of ids."""
    ids = keras.Input(shape, dtype=dtype)
    return compiled(keras.Model(ids, layers.Dense(1)(layers.Flatten()(function(ids)))))


def tensors(*batch):
    """The tensors of a batch."""
    return tf.nest.map_structure(lambda each: tf.constant(each) if isinstance(each, np.ndarray) else each, batch)


def spec_of(batch):
    def spec(array):
        if isinstance(array, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, None], array.dtype, ragged_rank=1)
        if isinstance(array, tf.SparseTensor):
            return tf.SparseTensorSpec([None, array.shape[1]], array.dtype)
        return tf.TensorSpec([None, *array.shape[1:]], array.dtype)

    return tf.nest.map_structure(spec, batch)


def found(model, batch, min_bytes=0):
    step = ModelStep(model)
    step.build(spec_of(batch))
    return step, EmbeddingTables(step, spec_of(batch), min_bytes)


def numbers_of(lookup):
    return [rows.numbers for rows in lookup.rows]


def with_rows(step, tables, lookup):
    """The parameters as a worker fetches them: the looked-up rows of tables."""
    pulled = values(step.parameters)
    for table, rows in zip(tables.tables, numbers_of(lookup), strict=True):
        pulled[table.parameter_index] = tf.gather(pulled[table.parameter_index], rows)
    return pulled


def assert_same_as_whole(step, tables, batch):
    """Compares the results of a train step and of a test step with those on complete tables."""
    parameters, state, metrics = values(step.parameters), values(step.state), values(step.metrics)
    batch = tensors(*batch)
    for training, run in ((True, step.train), (False, step.evaluate)):
        lookup = tables.lookup([batch], training=training)
        given = tables.parameter_scope(lookup.positions[0], training=training)
        ours = run(with_rows(step, tables, lookup), state, metrics, batch, given)
        plain = run(parameters, state, metrics, batch)
        for one, other in zip(
            [ours.loss, *ours.state, *ours.metrics, ours.examples],
            [plain.loss, *plain.state, *plain.metrics, plain.examples],
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
        rows = {table.parameter_index: rows for table, rows in zip(tables.tables, numbers_of(lookup), strict=True)}
        for place, (one, other) in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
            assert (one is None) == (other is None)
            if one is None:
                continue
            whole = dense(other, parameters[place]).numpy()
            if place in rows:
                assert len(np.unique(rows[place])) == len(rows[place]), "each row once"
                spread = np.zeros_like(whole)
                spread[rows[place].numpy()] = dense(one, tf.gather(parameters[place], rows[place]))
                np.testing.assert_allclose(spread, whole, rtol=1e-6, atol=1e-7)
            else:
                np.testing.assert_array_equal(dense(one, parameters[place]), whole)


class Subclassed(keras.Model):
    """Looks up two inputs in one table, and one of them also in the table of a nested layer."""

    def __init__(self):
        super().__init__()
        self.table, self.own, self.out = embedding(mask_zero=True), Nested(), layers.Dense(1)

    def call(self, x, training=None):
        pooled = ops.mean(self.table(x["b"]), axis=1) + ops.mean(self.table(x["a"][:, ::2]), axis=1)
        return self.out(ops.concatenate([pooled, self.own(x["a"])], axis=-1))


class Nested(layers.Layer):
    """A layer with an inner layer."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Embedding(ROWS + 1, 3)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return ops.mean(self.inner(x + 1), axis=1)


class Positions(layers.Layer):
    """Looks up ids that depend on the shape of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = embedding()

    def call(self, x):
        return ops.cast(x, "float32")[:, :, None] + self.inner(ops.arange(ops.shape(x)[1]))


def shared():
    table = embedding()
    return functional(lambda ids: layers.Concatenate(axis=1)([table(ids[:, :2]), table(ids)]))


def nested():
    inner = keras.Sequential([keras.Input((LENGTH,)), embedding(mask_zero=True), layers.LSTM(3)])
    ids = keras.Input((LENGTH,), dtype="int32")
    return compiled(keras.Model(ids, layers.Dense(1)(inner(ids) + inner(ids * 0 + 1))))


def of_two_layers():
    """Two layers that share a table."""
    first, second = embedding(), layers.Embedding(ROWS, WIDTH, name="second")
    first.build()
    second._embeddings, second.built = first._embeddings, True
    return functional(lambda ids: layers.Concatenate()([first(ids), second(ids[:, ::-1])]))


class Renamed(layers.Embedding):
    """An `Embedding` by another name."""

    def compute_mask(self, inputs, mask=None):
        return ops.greater(inputs, 2)


def masked():
    return functional(lambda ids: layers.GlobalAveragePooling1D()(Renamed(ROWS, WIDTH)(ids)))


class Doubled(layers.Embedding):
    """Multiplies the looked-up rows."""

    def call(self, inputs):
        return super().call(inputs) * 2


class Normalized(layers.Embedding):
    """Looks up by TensorFlow's function, and normalizes; also has a call argument of its own."""

    def call(self, inputs, scale=2.0):
        rows = tf.gather(self.embeddings, inputs)
        return ops.normalize(rows, axis=-1) * scale


class Padded(layers.Embedding):
    """Has one row more than it is asked for, and returns zeros for id 0."""

    def __init__(self, rows, width, **kwargs):
        super().__init__(rows + 1, width, **kwargs)

    def call(self, inputs):
        kept = ops.cast(ops.not_equal(inputs, 0), self.compute_dtype)
        return ops.take(self.embeddings, inputs, axis=0) * kept[..., None]


class WithPositions(layers.Embedding):
    """Adds the row of each position in a second table."""

    def build(self, input_shape=None):
        super().build(input_shape)
        self.positions = self.add_weight(shape=(LENGTH, self.output_dim), name="positions")

    def call(self, inputs):
        return super().call(inputs) + ops.take(self.positions, ops.arange(ops.shape(inputs)[1]), axis=0)


def with_call_of_its_own():
    table = embedding()
    table.call = lambda x: ops.take(table.embeddings, x, axis=0) * 3
    return functional(table)


def of_class(kind):
    return lambda: functional(kind(ROWS, WIDTH))


ragged = tf.RaggedTensor.from_row_lengths(IDS.ravel()[:12], [3, 0, 4, 1, 2, 2])
LOOKED_UP = {
    "plain": (sequential, IDS, 1),
    "int64": (sequential, IDS.astype(np.int64), 1),
    "uint8": (sequential, IDS.astype(np.uint8), 1),
    "floats": (sequential, IDS + np.float32(0.4), 1),
    "negative": (sequential, IDS - 5, 1),
    "one number": (lambda: functional(embedding(), shape=()), IDS[:, 0], 1),
    "three axes": (sequential, IDS.reshape(EXAMPLES, LENGTH, 1), 1),
    "mask": (lambda: functional(lambda ids: layers.GRU(3)(embedding(mask_zero=True)(ids))), IDS % 3, 1),
    "own mask": (masked, IDS, 1),
    "call of its class": (of_class(Doubled), IDS, 1),
    "tf.gather": (of_class(Normalized), IDS, 1),
    "padded": (of_class(Padded), IDS, 1),
    "with positions": (of_class(WithPositions), IDS, 2),
    "call of its own": (with_call_of_its_own, IDS, 1),
    "computed": (lambda: functional(lambda ids: embedding()((ids * 7 + 3) % ROWS)), IDS, 1),
    "hashed": (lambda: functional(lambda ids: embedding()(layers.Hashing(ROWS)(ids))), IDS, 1),
    "shared": (shared, IDS, 1),
    "nested": (nested, IDS, 1),
    "subclassed": (lambda: compiled(Subclassed()), {"a": IDS, "b": IDS[:, :2] % 3}, 2),
    "positions": (lambda: functional(Positions()), IDS, 1),
    "of two layers": (of_two_layers, IDS, 1),
    "no numbers": (sequential, IDS[:0], 1),
    "unused": (lambda: functional(lambda ids: embedding()(ids) * 0), IDS, 1),
}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", LOOKED_UP)
def test_fetched_rows_give_the_result_of_the_complete_table(name, log):
    build, x, count = LOOKED_UP[name]
    keras.utils.set_random_seed(4)
    y = Y[: len(tf.nest.flatten(x)[0])]
    step, tables = found(build(), (x, y))
    assert len(tables.tables) == count, log
    assert log == []
    assert_same_as_whole(step, tables, (x, y))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_other_types(policy):
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(4)
    batch = tensors(IDS, Y)
    step, tables = found(sequential(), batch)
    assert len(tables.tables) == 1
    parameters, state, metrics = values(step.parameters), values(step.state), values(step.metrics)
    lookup = tables.lookup([batch])
    ours = step.train(
        with_rows(step, tables, lookup), state, metrics, batch, tables.parameter_scope(lookup.positions[0])
    )
    plain = step.train(parameters, state, metrics, batch)
    np.testing.assert_array_equal(ours.loss, plain.loss)
    assert ours.gradients[0].dtype == plain.gradients[0].dtype


RAGGED = tf.RaggedTensor.from_row_lengths(IDS.ravel()[:12], [3, 1, 4, 1, 2, 1])
SPARSE = tf.sparse.from_dense(IDS * (random.random(IDS.shape) < 0.7))
FEW = random.random(IDS.shape).astype(np.float32)
OF_KERAS_RS = {
    "mean": ("mean", {"a": IDS, "b": IDS[:, :2]}, None),
    "sum": ("sum", {"a": IDS, "b": IDS[:, 0]}, None),
    "sqrtn": ("sqrtn", {"a": IDS[:, 1:], "b": IDS[:, :1]}, None),
    "weights": ("sqrtn", {"a": IDS, "b": IDS[:, :2]}, {"a": FEW, "b": FEW[:, :2]}),
    "ragged": ("mean", {"a": RAGGED, "b": IDS}, None),
    "ragged weights": ("sum", {"a": RAGGED, "b": IDS}, {"a": RAGGED.with_values(FEW.ravel()[:12]), "b": FEW}),
    "sparse": ("mean", {"a": IDS, "b": SPARSE}, None),
}


class Features(keras.Model):
    """Two features of KerasRS's layer that share a table, and a third one with its own."""

    def __init__(self, combiner, ids):
        super().__init__()
        self.embed, self.out = of_keras_rs(combiner, {**ids, "c": ids["a"]}), layers.Dense(1)

    def call(self, x):
        looked_up = self.embed(*({**part, "c": part["a"]} for part in x))
        return self.out(ops.concatenate([looked_up[name] for name in "abc"], axis=-1))


def of_keras_rs(combiner, ids):
    rs = pytest.importorskip("keras_rs").layers
    shared = rs.TableConfig("shared", ROWS, WIDTH, combiner=combiner)
    tables = {"a": shared, "b": shared, "c": rs.TableConfig("own", ROWS, 2)}
    return rs.DistributedEmbedding(
        {
            name: rs.FeatureConfig(name, tables[name], tuple(own.shape), (EXAMPLES, tables[name].embedding_dim))
            for name, own in ids.items()
        }
    )


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", OF_KERAS_RS)
def test_features_of_keras_rs_look_up_rows(name, log):
    combiner, ids, weights = OF_KERAS_RS[name]
    keras.utils.set_random_seed(4)
    batch = (ids, weights) if weights else (ids,), Y
    step, tables = found(compiled(Features(combiner, ids)), batch)
    assert {table.variable.path.split("/")[-2] for table in tables.tables} == {"shared", "own"}, log
    assert_same_as_whole(step, tables, batch)


class PreprocessedFeatures(Features):
    """The same, of inputs that the layer has preprocessed in the pipeline."""

    def call(self, x):
        looked_up = self.embed(x)
        return self.out(ops.concatenate([looked_up[name] for name in "abc"], axis=-1))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", ["mean", "weights", "ragged weights"])
def test_preprocessed_features_of_keras_rs_look_up_rows(name, log):
    combiner, ids, weights = OF_KERAS_RS[name]
    keras.utils.set_random_seed(4)
    model = PreprocessedFeatures(combiner, ids)
    given = [{**part, "c": part["a"]} for part in (ids, weights) if part]
    batch = model.embed.preprocess(*given), Y
    step, tables = found(compiled(model), batch)
    assert {table.variable.path.split("/")[-2] for table in tables.tables} == {"shared", "own"}, log
    assert_same_as_whole(step, tables, batch)


@pytest.mark.parametrize(
    ("optimizer", "own", "unused"),
    [
        ("adagrad", "adam", None),
        (keras.optimizers.Adagrad(0.1), keras.optimizers.Adagrad(0.1, name="own"), None),
        ("adagrad", "Adagrad", None),
        ("adagrad", keras.optimizers.Adagrad(0.1), "Adagrad"),
        ("adagrad", "sgd", "sgd"),
    ],
)
def test_optimizers_of_tables_that_are_not_used(optimizer, own, unused):
    rs = pytest.importorskip("keras_rs").layers
    config = rs.FeatureConfig("ids", rs.TableConfig("table", ROWS, WIDTH, optimizer=own), (None,), (None, WIDTH))
    model = keras.Sequential([keras.Input((), dtype="int32"), rs.DistributedEmbedding(config)])
    model.compile(optimizer, "mse")
    assert unused_table_optimizers(model) == ({"table": unused} if unused else {})


def test_ragged_ids():
    class Bag(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.out = embedding(), layers.Dense(1)

        def call(self, x):
            looked_up = self.table(x)
            return self.out(tf.reduce_sum(looked_up, axis=1))

        def build(self, shape):
            self.table.build(shape)
            self.out.build((None, WIDTH))

    batch = ragged, tf.constant(Y)
    step, tables = found(compiled(Bag()), batch)
    assert len(tables.tables) == 1
    lookup = tables.lookup([batch])
    given = tables.parameter_scope(lookup.positions[0])
    state, metrics = values(step.state), values(step.metrics)
    ours = step.train(with_rows(step, tables, lookup), state, metrics, batch, given)
    table, *out = values(step.parameters)
    summed = tf.reduce_sum(tf.gather(table, ragged), axis=1)
    np.testing.assert_allclose(ours.loss, tf.reduce_mean((summed @ out[0] + out[1] - Y) ** 2), rtol=1e-6)


class Tied(keras.Model):
    """Its logits are the product of the table and the looked-up rows."""

    def __init__(self):
        super().__init__()
        self.table = embedding()

    def call(self, x):
        return ops.mean(ops.matmul(self.table(x), ops.transpose(self.table.embeddings)), axis=(1, 2))[:, None]


class Reversed(keras.Model):
    """Its logits are scores of the table's rows, by the layer's own method."""

    def __init__(self):
        super().__init__()
        self.table = layers.ReversibleEmbedding(ROWS, WIDTH, name="table")

    def call(self, x):
        return ops.mean(self.table(self.table(x), reverse=True), axis=(1, 2))[:, None]


class Retrieval(keras.Model):
    """Scores all rows of the table of items in test steps; train steps look up the item that the target names."""

    def __init__(self):
        super().__init__()
        self.users, self.items = layers.Embedding(5, WIDTH, name="users"), embedding()

    def build(self, shape):
        self.users.build(shape)
        self.items.build(shape)

    def call(self, x, training=False):
        users = self.users(x)
        return users if training else ops.matmul(users, ops.transpose(self.items.embeddings))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = ops.sum(y_pred * self.items(y), axis=-1) if training else ops.max(y_pred, axis=-1)
        return ops.mean((scores - 1) ** 2)


def test_a_table_that_only_test_steps_read_completely(servers, log):
    keras.utils.set_random_seed(4)
    batch = IDS[:, 0] % 5, IDS[:, 1]
    with servers(2, shard=ShardRule(min_bytes=60)).scope():
        model = Retrieval()
        model.compile(keras.optimizers.SGD(0.1))
        step, tables = found(model, batch)
    assert len(tables.tables) == 2
    assert ["evaluation fetches retrieval/table/embeddings completely" in line for line in log] == [True]
    parameters, state, metrics = values(step.parameters), values(step.state), values(step.metrics)
    assert [sum(map(len, numbers_of(tables.lookup_of_evaluation()))), *tables.evaluated_completely] == [ROWS, 1]
    whole = tables.tables[1].variable.value
    for training, run in ((True, step.train), (False, step.evaluate)):
        lookup = tables.lookup([tensors(*batch)], training=training)
        rows = iter(numbers_of(lookup))
        pulled = [tf.concat([tf.gather(part, next(rows)) for part in parts(each)], 0) for each in step.parameters]
        if not training:
            pulled[1] = tf.convert_to_tensor(whole)
        scope = tables.parameter_scope(lookup.positions[0], training=training)
        ours = run(pulled, state, metrics, tensors(*batch), scope)
        np.testing.assert_array_equal(ours.loss, run(parameters, state, metrics, tensors(*batch)).loss)


class Chained(keras.Model):
    """The ids of the second lookup depend on the rows of the first one."""

    def __init__(self):
        super().__init__()
        self.first, self.table, self.out = layers.Embedding(ROWS, 1, name="first"), embedding(), layers.Dense(1)

    def call(self, x):
        chosen = ops.cast(ops.abs(self.first(x)[..., 0]) * 1e3, "int32") % ROWS
        return self.out(ops.mean(self.table(chosen), axis=1))


class Drawn(layers.Layer):
    """Looks up random ids."""

    def __init__(self, draw):
        super().__init__()
        self.inner, self.seeds, self.draw = embedding(), keras.random.SeedGenerator(3), draw

    def call(self, x):
        return self.inner((x + self.draw(self, ops.shape(x))) % ROWS)


class CellOfRows(layers.Layer):
    """An RNN cell that looks up one id per time step."""

    def __init__(self):
        super().__init__()
        self.state_size, self.output_size, self.inner = WIDTH, WIDTH, embedding()

    def call(self, x, states):
        state = states[0] * 0.5 + self.inner(ops.cast(x[:, 0], "int32"))
        return state, [state]

    def build(self, shape):
        self.inner.build((None,))


class OtherRows(layers.Embedding):
    """Looks up in a function of the stored table."""

    @property
    def embeddings(self):
        return ops.tanh(self._embeddings)


def lora():
    model = sequential(keras.Input((LENGTH,), dtype="int32"))
    model.get_layer("table").enable_lora(2)
    return compiled(model)


def frozen():
    model = sequential(keras.Input((LENGTH,), dtype="int32"))
    model.get_layer("table").trainable = False
    return compiled(model)


def quantized():
    model = sequential(keras.Input((LENGTH,), dtype="int32"))
    model.get_layer("table").quantize("int8")
    return compiled(model)


def in_a_cell():
    return functional(lambda ids: layers.RNN(CellOfRows())(ops.cast(ids, "float32")[..., None]))


IDS_VARY, OTHER_READERS = "more than the batch", "not only lookups"
WHOLE = {
    "tied": (lambda: compiled(Tied()), OTHER_READERS),
    "regularized": (lambda: sequential(embeddings_regularizer="l2"), OTHER_READERS),
    "by a trained layer": (
        lambda: functional(
            lambda ids: embedding()(ops.argmax(layers.Dense(ROWS)(ops.cast(ids, "float32")[..., None]), axis=-1))
        ),
        IDS_VARY,
    ),
    "by a state": (
        lambda: functional(
            lambda ids: embedding()(
                ops.cast(layers.BatchNormalization()(ops.cast(ids, "float32")[..., None])[..., 0], "int32")
            )
        ),
        IDS_VARY,
    ),
    "drawn by Keras": (
        lambda: functional(Drawn(lambda self, shape: keras.random.randint(shape, 0, ROWS, seed=self.seeds))),
        IDS_VARY,
    ),
    "drawn by TensorFlow": (
        lambda: functional(Drawn(lambda _, shape: tf.random.uniform(shape, 0, ROWS, tf.int32))),
        IDS_VARY,
    ),
    "in a cell": (in_a_cell, IDS_VARY),
    "other rows": (lambda: functional(OtherRows(ROWS, WIDTH, name="table")), OTHER_READERS),
}
if hasattr(layers, "ReversibleEmbedding"):
    LOOKED_UP["reversible"] = of_class(layers.ReversibleEmbedding), IDS, 1
    WHOLE["reversed"] = lambda: compiled(Reversed()), OTHER_READERS
NOT_UPDATED_BY_ROWS = {
    "constraint": (lambda: sequential(embeddings_constraint="unit_norm"), "a constraint"),
    "lora": (lora, "LoRA"),
    "frozen": (frozen, "not trainable"),
    "quantized": (quantized, "quantized"),
}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", WHOLE)
def test_tables_with_other_uses_are_fetched_completely(name, log):
    build, reason = WHOLE[name]
    keras.utils.set_random_seed(4)
    step, tables = found(build(), (IDS, Y))
    assert tables.tables == []
    (line,) = log
    assert "table/embeddings completely" in line
    assert reason in line
    if name != "drawn by TensorFlow":
        assert_same_as_whole(step, tables, (IDS, Y))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", NOT_UPDATED_BY_ROWS)
def test_tables_that_are_not_updated_by_rows_are_fetched_completely(name, log):
    build, reason = NOT_UPDATED_BY_ROWS[name]
    keras.utils.set_random_seed(4)
    step, tables = found(build(), (IDS, Y))
    assert tables.tables == []
    (line,) = log
    assert reason in line
    assert_same_as_whole(step, tables, (IDS, Y))


def test_a_table_beside_one_that_is_fetched_completely_is_looked_up(log):
    keras.utils.set_random_seed(4)
    step, tables = found(compiled(Chained()), (IDS, Y))
    assert [table.variable.path.split("/")[-2] for table in tables.tables] == ["first"]
    assert len(log) == 1
    assert_same_as_whole(step, tables, (IDS, Y))


def test_small_tables_are_fetched_completely_without_a_log_line(log):
    model, size = sequential(), ROWS * WIDTH * 4
    assert len(found(model, (IDS, Y), size)[1].tables) == 1
    assert found(model, (IDS, Y), size + 1)[1].tables == []
    assert found(model, (IDS, Y), None)[1].tables == []
    assert log == []


def test_several_batches_are_looked_up_together():
    _, tables = found(shared(), (IDS, Y))
    lookup = tables.lookup([tensors(IDS, Y), tensors((IDS + 1) % ROWS, Y)])
    (rows,) = numbers_of(lookup)
    assert len(np.unique(rows)) == len(rows)
    for batch, positions in zip((IDS, (IDS + 1) % ROWS), lookup.positions, strict=True):
        two, all_of_them = (tf.gather(rows, part).numpy() for part in positions)
        np.testing.assert_array_equal(two, batch[:, :2].ravel())
        np.testing.assert_array_equal(all_of_them, batch.ravel())


@pytest.mark.rotates(5)
@pytest.mark.parametrize("make", ["three tables", "shared table", "shards"])
def test_rounds_are_looked_up_at_once_as_one_after_the_other(make, servers):
    ids: list = [(IDS + n) % ROWS for n in range(5)]
    if make == "shared table":
        model = shared()
    else:
        with servers(3, shard=ShardRule(min_bytes=60)).scope() if make == "shards" else contextlib.nullcontext():
            model = three_tables()
        ids = [tuple((IDS + n) % rows for rows in (ROWS, 5, 7)) for n in range(5)]
    _, tables = found(model, (ids[0], Y))
    batches = [tensors(each, Y) for each in ids]
    rounds = [batches[:2], batches[2:3], batches[3:]]
    for together, alone in zip(tables.lookups(rounds), map(tables.lookup, rounds), strict=True):
        for some, others in zip(numbers_of(together), numbers_of(alone), strict=True):
            np.testing.assert_array_equal(some, others)
        assert [int(some.count) for some in together.rows] == [int(others.count) for others in alone.rows]
        for some, others in zip(tf.nest.flatten(together.positions), tf.nest.flatten(alone.positions), strict=True):
            np.testing.assert_array_equal(some, others)


def test_an_invalid_id_of_a_later_round_names_the_table():
    x = [tuple(np.zeros((1, LENGTH), np.int32) for _ in range(3)) for _ in range(2)]
    x[1][1][0, 2] = 5
    y = np.zeros((1, 1), np.float32)
    _, tables = found(three_tables(), (x[0], y))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)second/embeddings .* has 5\D+0\D+5"):
        tables.lookups([[tensors(each, y)] for each in x])


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    "ids",
    [IDS + ROWS, IDS - 2 * ROWS, np.int64(IDS) + 2**32, np.int64(IDS) - 2**32],
    ids=["above", "below", "far above", "far below"],
)
def test_an_error_for_an_invalid_id_names_the_table(ids):
    _, tables = found(sequential(), (ids, Y))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"table/embeddings .* 11"):
        tf.function(lambda *batch: numbers_of(tables.lookup([batch])))(*tensors(ids, Y))


def three_tables():
    """A model with tables of 11, 5 and 7 rows."""
    ids = [keras.Input((LENGTH,), dtype="int32", name=name) for name in "abc"]
    tables = [layers.Embedding(ROWS, 2), layers.Embedding(5, 3, name="second"), layers.Embedding(7, 1)]
    found = [layers.Flatten()(table(own)) for table, own in zip(tables, ids, strict=True)]
    return compiled(keras.Model(ids, layers.Dense(1)(layers.Concatenate()(found))))


@pytest.mark.parametrize("size", [0, 1, EXAMPLES])
def test_each_of_several_tables_has_its_own_rows(size):
    x = tuple(random.integers(-rows, rows, (size, LENGTH)).astype(np.int32) for rows in (ROWS, 5, 7))
    y = np.zeros((size, 1), np.float32)
    _, tables = found(three_tables(), (x, y))
    numbers = {rows: own % rows for own, rows in zip(x, (ROWS, 5, 7), strict=True)}
    lookup = tables.lookup([tensors(x, y), tensors(x, y)])
    for table, rows in zip(tables.tables, numbers_of(lookup), strict=True):
        np.testing.assert_array_equal(np.sort(rows), np.unique(numbers[table.rows]))
    for positions in lookup.positions:
        for table, where in zip(tables._calls[True].tables, positions, strict=True):
            expected = numbers[tables.tables[table].rows].ravel()
            np.testing.assert_array_equal(tf.gather(numbers_of(lookup)[table], where), expected)


@pytest.mark.parametrize("size", [0, 1, EXAMPLES])
def test_rows_of_sharded_tables_are_found_in_each_shard(servers, size):
    with servers(3, shard=ShardRule(min_bytes=60)).scope():
        model = three_tables()
    x = tuple(random.integers(-rows, rows, (size, LENGTH)).astype(np.int32) for rows in (ROWS, 5, 7))
    y = np.zeros((size, 1), np.float32)
    _, tables = found(model, (x, y))
    lookup = tables.lookup([tensors(x, y)])
    (positions,), rows = lookup.positions, iter(numbers_of(lookup))
    places = dict(zip(tables._calls[True].tables, positions, strict=True))
    numbers = {rows: own % rows for own, rows in zip(x, (ROWS, 5, 7), strict=True)}
    counts = {}
    for place, table in enumerate(tables.tables):
        looked_up, begin = [], 0
        for part in parts(table.variable):
            inside = next(rows).numpy()
            assert len(set(inside)) == len(inside)
            assert all((inside >= 0) & (inside < part.shape[0]))
            looked_up.append(inside + begin)
            begin += part.shape[0]
        counts[table.rows] = len(looked_up)
        np.testing.assert_array_equal(np.concatenate(looked_up)[places[place]], numbers[table.rows].ravel())
    assert (counts, next(rows, None)) == ({ROWS: 3, 5: 3, 7: 1}, None)
    assert [rows.shape for rows in numbers_of(tables.lookup_of_evaluation())] == [(0,)] * 7


def test_an_error_for_an_invalid_id_names_the_right_one_of_several_tables():
    x = [np.zeros((1, LENGTH), np.int32) for _ in range(3)]
    x[1][0, 2:4] = [5, -6]
    _, tables = found(three_tables(), (tuple(x), np.zeros((1, 1), np.float32)))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)second/embeddings .* has 5\D+-1\D+5"):
        tables.lookup([tensors(tuple(x), np.zeros((1, 1), np.float32))])


def test_tables_may_have_more_rows_together_than_an_int32_counts():
    _, tables = found(three_tables(), (tuple(IDS for _ in range(3)), Y))
    many = 2**31 - 1
    tables.tables = [SimpleNamespace(rows=many) for _ in range(3)]
    tables._shards = [[many] for _ in range(3)]
    rows, where = tables._unique(tf.constant([5, 0, many - 1, 5, many - 1, 1]), tf.constant([0, 0, 1, 1, 2, 2]))
    assert [each.numpy().tolist() for each in rows] == [[5, 0], [many - 1, 5], [many - 1, 1]]
    assert where.numpy().tolist() == [0, 1] * 3


@pytest.mark.parametrize("size", [1, EXAMPLES, 2 * EXAMPLES])
def test_batches_of_any_size_are_scored(size):
    x, y = np.resize(IDS, (size, LENGTH)), np.resize(Y, (size, 1))
    fixed = tuple(tf.TensorSpec(array.shape, array.dtype) for array in (IDS, Y))
    step = ModelStep(sequential())
    step.build(fixed)
    tables = EmbeddingTables(step, fixed, 0)
    assert_same_as_whole(step, tables, (x, y))


def test_no_operation_reads_the_complete_table():
    keras.utils.set_random_seed(4)
    model = sequential()
    step, tables = found(model, (IDS, Y))
    wire = Transport(step.parameters, tables.parameter_indices)

    @tf.function(autograph=False)
    def one(*batch):
        lookup = tables.lookup([batch])
        pulled = wire.pull(lookup)
        given = tables.parameter_scope(lookup.positions[0])
        result = step.train(pulled.values, values(step.state), values(step.metrics), batch, given)
        arrival = wire.compensated(wire.push(result.gradients, pulled), pulled, 0.1)
        return wire.gradients([arrival])

    graph = one.get_concrete_function(*tensors(IDS, Y)).graph
    (table,) = tables.tables
    (handle,) = [inner for outer, inner in graph.captures if outer is table.variable.value.handle]
    assert {op.type for op in handle.consumers()} == {"ResourceGather"}
    ((gradient,), *_) = one(*tensors(IDS, Y))
    np.testing.assert_array_equal(np.sort(gradient.indices), np.unique(IDS))


def test_layers_are_restored():
    model = sequential()
    step, tables = found(model, (IDS, Y))
    before = model(IDS)
    assert_same_as_whole(step, tables, (IDS, Y))
    assert "call" not in vars(model.get_layer("table"))
    np.testing.assert_array_equal(model(IDS), before)
