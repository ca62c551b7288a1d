"""Training in one process equals `keras.Model.fit` for models of all kinds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import (
    BATCH,
    CLASSES,
    EXAMPLES,
    FEATURES,
    assert_same,
    batches,
    classes,
    classifier,
    difference,
    train_both,
)
from tests.support.programs.gradient_layers import Dropping, Penalized, every
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.assignments import counters_read_after
from tfdist_cli.train.model.many_classes import LEAST_CLASSES
from tfdist_cli.train.model.train_step import ModelStep, values

pytestmark = pytest.mark.slow


class Noise(layers.Layer):
    """Draws random values as Keras's documentation recommends for layers."""

    def __init__(self, seeds=None):
        super().__init__()
        self.seeds = seeds or keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        return x + keras.random.normal(ops.shape(x), 0, 0.1, seed=self.seeds) if training else x


class Counter(layers.Layer):
    """Counts steps in a state variable, and adds a loss."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
        self.add_loss(0.1 * ops.mean(ops.square(x * self.scale)))
        return x * self.scale


class Subclassed(keras.Model):
    """Overrides `compute_loss`; its `call` has no `training` argument."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, "tanh")
        self.out = layers.Dense(CLASSES)

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        given = super().compute_loss(x, y, y_pred, sample_weight, training)
        return given + 0.01 * ops.mean(ops.square(y_pred))


class Reconstruction(keras.Model):
    """Has only a loss from `add_loss`, and no y."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = layers.Dense(2), layers.Dense(FEATURES)

    def call(self, x):
        out = self.decode(self.encode(x))
        self.add_loss(ops.mean(ops.square(out - x)))
        return out


class Centred(layers.Layer):
    """Assigns a mean computed from its weights, and reads it again in the same call."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        x = x * self.scale
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


class Checked(layers.Layer):
    """Asserts that its input is not all zeros, as in a build with made-up data."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_greater(ops.max(ops.abs(x)), 0.0)]):
            return tf.identity(x)


class InPython(layers.Layer):
    """Calls Python code that fails for zeros."""

    def call(self, x):
        def divided(values):
            assert np.any(values)
            return values / np.abs(values).max()

        return tf.ensure_shape(tf.stop_gradient(tf.numpy_function(divided, [x], tf.float32)), x.shape)


def rematerialized():
    with keras.RematScope(mode="activations"):
        return classifier(layers.Dense(6, "tanh"), layers.Dropout(0.2, seed=4), layers.Dense(5, "relu"))


def subclassed():
    model = Subclassed()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def reconstruction():
    model = Reconstruction()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def frozen():
    first = layers.Dense(4)
    first.trainable = False
    return classifier(first, layers.Dense(4))


def shared():
    layer = layers.Dense(FEATURES, "relu")
    x = keras.Input((FEATURES,))
    model = keras.Model(x, layers.Dense(CLASSES)(layer(layer(x))))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def unused_part():
    x = keras.Input((FEATURES,))
    hidden = layers.Dense(3, name="used")(x)
    model = keras.Model(x, [hidden, layers.Dense(2, name="unused")(x)])
    model.compile("adam", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    return model


def shared_seeds():
    seeds = keras.random.SeedGenerator(5)
    return classifier(Noise(seeds), layers.Dense(4), Noise(seeds))


def many_classes():
    x = keras.Input((FEATURES,))
    model = keras.Model(x, layers.Dense(LEAST_CLASSES + 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"])
    return model


MODELS = {
    "many classes": many_classes,
    "dropout": lambda: classifier(layers.Dense(6, "relu"), layers.Dropout(0.5), layers.GaussianNoise(0.1)),
    "seed generator": lambda: classifier(Noise(), layers.Dense(4, "relu"), Noise()),
    "shared seed generator": shared_seeds,
    # The gradient of a bias before it would consist of rounding errors, and Adam would take full steps for them.
    "batch normalization": lambda: classifier(
        layers.Dense(6, use_bias=False), layers.BatchNormalization(), layers.ReLU()
    ),
    "state and a loss of its own": lambda: classifier(Counter(), layers.Dense(4)),
    "regularizers": lambda: classifier(
        layers.Dense(4, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2")
    ),
    "constraints": lambda: classifier(
        layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.3), bias_constraint="non_neg"), optimizer="sgd"
    ),
    "subclassed": subclassed,
    "frozen": frozen,
    "shared layer": shared,
    "gradient functions": lambda: classifier(*every(), Penalized(), optimizer="sgd"),
    "functions of layers": lambda: classifier(Dropping(), layers.Dense(4), Dropping()),
    "a state that is read again": lambda: classifier(Centred(), optimizer="sgd"),
    "checks of the data": lambda: classifier(Checked(), layers.Dropout(0.5, seed=2)),
    "python in an operation": lambda: classifier(InPython(), layers.Dropout(0.5, seed=2)),
    "rematerialized activations": rematerialized,
}


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_that_of_keras(name):
    plain, ours = train_both(MODELS[name], validation=batches(*classes(21, seed=1)))
    assert_same(plain, ours)


def test_a_vocabulary_without_out_of_vocabulary_tokens():
    x, y = np.array([["b"], ["a"], ["c"], ["a"]] * 3), np.arange(12) % CLASSES
    words = layers.StringLookup(vocabulary=["a", "b", "c"], num_oov_indices=0)

    def build():
        ids = keras.Input((1,), dtype="string")
        hidden = layers.Dropout(0.5, seed=1)(layers.Flatten()(layers.Embedding(3, 4)(words(ids))))
        model = keras.Model(ids, layers.Dense(CLASSES)(hidden))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    assert_same(*train_both(build, batches(x, y, batch=4)))


class Beneath(layers.Layer):
    """Uses the `tf.Variable` that stores its weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.beneath = self.scale.value

    def call(self, x):
        return x * self.beneath


@pytest.mark.parametrize("given", [{}, {"steps_per_execution": 1}])
def test_a_weight_whose_gradient_would_be_lost_is_refused(given):
    with raises(TrainingError, "gradient-lost") as caught:
        tfdist.fit(classifier(Beneath()), batches(), **given)
    assert "/scale'" in caught.value.message


def test_a_model_without_any_gradient_is_refused():
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES), layers.Lambda(ops.stop_gradient)])
    model.compile("sgd", "mse")
    with raises(TrainingError, "no-gradients") as caught:
        tfdist.fit(model, batches(np.ones((8, FEATURES), np.float32), np.ones((8, CLASSES), np.float32)))
    assert repr(model.name) in caught.value.message


class DrawsByBatch(layers.Layer):
    """Draws a number of random values that depends on the batch."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        self.seeds.state.assign(self.seeds.state + ops.cast(ops.shape(x)[0], self.seeds.state.dtype))
        return x


def test_draws_that_depend_on_the_batch_are_refused():
    with raises(TrainingError, "draws-depend-on-batch"):
        tfdist.fit(classifier(DrawsByBatch()), batches())


def test_a_model_without_y():
    x, _ = classes()
    assert_same(*train_both(reconstruction, batches(x)))


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_the_state_that_a_step_assigns():
    x = keras.Input((3,))
    frozen, moving = layers.BatchNormalization(trainable=False), layers.BatchNormalization()
    model = compiled(keras.Model(x, layers.Dense(CLASSES)(layers.Dropout(0.5)(moving(frozen(x))))))
    step = ModelStep(model)
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64))
    step.build(spec)
    assigned = {step.state[place].path.rpartition("/")[2] for place in step.assigned_state(spec)}
    assert len(step.assigned_state(spec)) == len(assigned) == 3
    assert assigned == {"seed_generator_state", "moving_mean", "moving_variance"}
    assert {id(variable) for variable in frozen.variables}.isdisjoint(
        id(step.state[place]) for place in step.assigned_state(spec)
    )


@pytest.mark.parametrize("build", [unused_part, lambda: classifier(layers.Lambda(lambda x: x))])
def test_weights_without_a_gradient_keep_their_values(build):
    def whole():
        model = build()
        model.layers[-1].trainable = False
        model.compile(model.optimizer, model.loss)
        return model

    assert_same(*train_both(build))


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_without_trainable_weights_is_evaluated():
    def build():
        model = classifier()
        model.trainable = False
        return model

    plain, ours = train_both(build)
    assert difference(plain.variables, ours.variables) == 0
    np.testing.assert_allclose(ours.history.history["loss"], plain.history.history["loss"], rtol=1e-6)


def outputs(kind):
    """A model with two inputs and two outputs, as dicts or lists."""
    a, b = keras.Input((FEATURES,), name="a"), keras.Input((2,), name="b")
    both = layers.Concatenate()([layers.Dense(3)(a), b])
    kinds = layers.Dense(CLASSES, name="kind")(both)
    value = layers.Dense(1, name="value")(both)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"}
    metrics = {"kind": ["accuracy"], "value": ["mae"]}
    if kind == "dict":
        model = keras.Model({"a": a, "b": b}, {"kind": kinds, "value": value})
        model.compile("adam", losses, metrics=metrics, loss_weights={"kind": 1.0, "value": 0.3})
    else:
        model = keras.Model([a, b], [kinds, value])
        model.compile("adam", list(losses.values()), metrics=list(metrics.values()), loss_weights=[1.0, 0.3])
    return model


def two_in_two_out(kind):
    a, y = classes()
    b = np.random.default_rng(2).normal(size=(EXAMPLES, 2)).astype(np.float32)
    value = a[:, :1] - b[:, 1:]
    if kind == "dict":
        return tf.data.Dataset.from_tensor_slices(({"a": a, "b": b}, {"kind": y, "value": value})).batch(BATCH)
    return tf.data.Dataset.from_tensor_slices(((a, b), (y, value))).batch(BATCH)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_several_inputs_outputs_and_losses(kind):
    data = two_in_two_out(kind)
    assert_same(*train_both(lambda: outputs(kind), data, validation=data))


def test_sample_weights():
    x, y = classes()
    weights = np.linspace(0, 2, EXAMPLES, dtype=np.float32)
    data = batches(x, y, weights)
    plain, ours = train_both(
        lambda: classifier(
            weighted_metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
        ),
        data,
        validation=data,
    )
    assert_same(plain, ours)


def test_embedding_with_a_mask():
    random = np.random.default_rng(0)
    x = random.integers(0, 11, (EXAMPLES, 6))
    y = random.integers(0, 2, EXAMPLES)

    def build():
        model = keras.Sequential(
            [layers.Embedding(11, 3, mask_zero=True), layers.LSTM(4, dropout=0.2), layers.Dense(1)]
        )
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    assert_same(*train_both(build, batches(x, y)))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    plain, ours = train_both(lambda: classifier(layers.Dense(4, "relu"), layers.BatchNormalization()))
    assert_same(plain, ours)
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")


@pytest.mark.parametrize("jit", [False, True])
def test_the_scale_of_a_loss_is_read_after_what_is_awaited(jit):
    """Parameter servers make the update of the step before in a function of their own."""
    keras.config.set_dtype_policy("mixed_float16")
    step = ModelStep(classifier(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))))
    data = batches()
    step.build(data.element_spec)
    step.jit = jit

    @tf.function(autograph=False)
    def train(token, batch):
        with counters_read_after([token]):
            return step.train(values(step.parameters), values(step.state), values(step.metrics), batch).loss

    graph = train.get_concrete_function(tf.TensorSpec([]), data.element_spec).graph
    [scale] = [inner for outer, inner in graph.captures if outer is step.optimizer.dynamic_scale.value.handle]
    reads = [each for each in scale.consumers() if each.type == "ReadVariableOp"]
    assert [[own.name for own in each.control_inputs] for each in reads] == [["token"]]


def test_an_overflow_of_float16_skips_the_step_and_halves_the_scale():
    keras.config.set_dtype_policy("mixed_float16")

    def build():
        return classifier(
            optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**30)
        )

    plain, ours = train_both(build)
    assert_same(plain, ours)
    assert float(ours.optimizer.dynamic_scale.numpy()) < 2.0**30
    assert int(ours.optimizer.iterations.numpy()) < 12


def test_images_of_any_size():
    random = np.random.default_rng(0)
    data = tf.data.Dataset.from_generator(
        lambda: ((random.normal(size=(4, 6 + 2 * n, 6, 1)), random.integers(0, 2, (4, 1))) for n in range(3)),
        output_signature=(tf.TensorSpec((None, None, None, 1)), tf.TensorSpec((None, 1), tf.int64)),
    )

    def build():
        model = keras.Sequential(
            [
                keras.Input((None, None, 1)),
                layers.RandomFlip(seed=1),
                layers.Conv2D(2, 3),
                layers.MaxPooling2D(2),
                layers.Dropout(0.2),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model

    model = build()
    history = tfdist.fit(model, lambda shard: data, steps_per_epoch=3)
    assert np.isfinite(history.history["loss"][0])


def test_a_model_that_is_not_compiled_is_refused():
    with raises(TrainingError, "model-not-compiled") as caught:
        tfdist.fit(keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1)], name="bare"), classes())
    assert "'bare'" in caught.value.message


def test_an_object_that_is_not_a_model_is_refused():
    with raises(TrainingError, "not-a-keras-model") as caught:
        tfdist.fit("model", classes())
    assert "got str" in caught.value.message


def test_data_of_another_shape_is_refused():
    x, y = classes()
    with pytest.raises(TrainingError, match=r"\(None, 4\).*\(None, 5\)"):
        tfdist.fit(classifier(), batches(x[:, :4], y))


def test_an_element_with_too_many_parts_is_refused():
    x, y = classes()
    with pytest.raises(TrainingError, match="elements have 4 parts"):
        tfdist.fit(classifier(), batches(x, y, y, y))


class Plain(keras.Model):
    """Does not pass `training` to its layers, which get it from Keras's call context."""

    def __init__(self, *hidden, head=None, **kwargs):
        super().__init__(**kwargs)
        self.hidden = list(hidden)
        self.head = head or layers.Dense(CLASSES)

    def call(self, x, training=None):
        for layer in self.hidden:
            x = layer(x)
        return self.head(x)


class Watched(Plain):
    """Updates metrics in `call`, also in a layer."""

    def __init__(self):
        super().__init__(layers.Dense(4, "tanh"), Activity())
        self.size = keras.metrics.Mean(name="size")

    def call(self, x, training=None):
        self.size.update_state(ops.abs(x))
        return super().call(x)


class Activity(layers.Layer):
    def __init__(self):
        super().__init__()
        self.activity = keras.metrics.Mean(name="activity")

    def call(self, x):
        self.activity.update_state(x)
        return x


class Statistic(Plain):
    """Draws random values and updates a metric in `compute_loss`."""

    def __init__(self):
        super().__init__(layers.Dense(4))
        self.drop, self.kept = layers.Dropout(0.5), keras.metrics.Sum(name="kept")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        dropped = self.drop(y_pred, training=training)
        self.kept.update_state(ops.cast(dropped != 0, "float32"))
        return super().compute_loss(x, y, dropped, sample_weight, training)


def compiled(model, **given):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **({"metrics": ["accuracy"]} | given))
    return model


def normalized():
    layer = layers.Normalization()
    layer.adapt(classes()[0])
    return classifier(layer, layers.Dense(4))


def weighted_by_a_tensor():
    model, weights = classifier(), tf.constant([1.0, 2.0, 0.5])

    def loss(y, y_pred):
        given = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return given * tf.gather(weights, tf.cast(tf.reshape(y, [-1]), tf.int32))

    model.compile("adam", loss, metrics=["accuracy"])
    return model


SUBCLASSED = {
    "training is not handed on": lambda: Plain(
        layers.Dense(6, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5)
    ),
    "a regularizer of its activity": lambda: Plain(layers.Dense(4), activity_regularizer="l2"),
    "metrics that it counts in when called": Watched,
    "random numbers and metrics in its loss": Statistic,
    "a model in a model": lambda: Plain(Plain(layers.Dense(4, "relu"), layers.Dropout(0.5))),
    "spectral normalization": lambda: Plain(layers.SpectralNormalization(layers.Dense(4))),
    "spectral normalization that is frozen": lambda: Plain(
        layers.SpectralNormalization(layers.Dense(4, trainable=False))
    ),
}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", SUBCLASSED)
def test_subclassed_models(name):
    assert_same(*train_both(lambda: compiled(SUBCLASSED[name]()), validation=batches(*classes(21, seed=1))))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_of_a_subclassed_model(policy):
    keras.config.set_dtype_policy(policy)
    seen = []

    class Sees(Plain):
        def call(self, x, training=None):
            seen.append(x.dtype)
            return super().call(x + 0.001)

    plain, ours = train_both(lambda: compiled(Sees(layers.Dense(4, "relu"))))
    assert_same(plain, ours)
    assert {dtype.name for dtype in map(tf.as_dtype, seen)} == {policy.removeprefix("mixed_")}


@pytest.mark.parametrize("build", [normalized, weighted_by_a_tensor])
def test_tensors_captured_by_a_model_or_its_loss(build):
    assert_same(*train_both(build, steps_per_execution=None))


def test_words():
    words = np.array(["a b", "b c", "c a a", "d"])[np.arange(EXAMPLES) % 4]
    y = np.arange(EXAMPLES) % 4 % CLASSES

    def build():
        lookup, text = layers.StringLookup(vocabulary=["a b", "d"]), layers.TextVectorization(output_sequence_length=3)
        text.adapt(words)
        x = keras.Input((), dtype="string")
        vectors = [layers.Embedding(4, 3)(lookup(x)), layers.Flatten()(layers.Embedding(9, 2)(text(x)))]
        return compiled(keras.Model(x, layers.Dense(CLASSES)(layers.Concatenate()(vectors))))

    assert_same(*train_both(build, batches(words, y), steps_per_execution=None))


class Untracked(layers.Layer):
    """Assigns a variable that Keras does not track."""

    def __init__(self):
        super().__init__()
        variable = keras.Variable(0.0, trainable=False, name="untracked")
        self.count = lambda: variable.assign_add(1.0)

    def call(self, x):
        self.count()
        return x


def stateful():
    rnn = layers.LSTM(3, stateful=True)
    x = keras.Input((FEATURES,), batch_size=4)
    return compiled(keras.Model(x, layers.Dense(CLASSES)(rnn(layers.Reshape((FEATURES, 1))(x)))))


def untracked_seeds():
    seeds = keras.random.SeedGenerator(1)
    return classifier(layers.Lambda(lambda x: x + keras.random.normal(ops.shape(x), seed=seeds)))


LOST = {
    "untracked": (lambda: classifier(Untracked()), "assigns-untracked-variable"),
    "seed_generator_state": (untracked_seeds, "assigns-untracked-variable"),
}


@pytest.mark.skipif(keras.__version__.startswith("3.12."), reason="fit() of this version cannot train it either")
def test_a_recurrent_layer_continues_from_batch_to_batch():
    assert_same(*train_both(stateful, batches(*classes(44), batch=4), validation=batches(*classes(20), batch=4)))


@pytest.mark.parametrize("variable", LOST)
def test_assignments_that_would_be_lost_are_refused(variable):
    build, code = LOST[variable]
    with raises(TrainingError, code) as caught:
        tfdist.fit(build(), batches(*classes(44), batch=4))
    assert variable in caught.value.message


class Own(keras.Model):
    """Overrides `metrics`, as in Keras's guides, without the metric of the compiled loss."""

    def __init__(self):
        super().__init__()
        self.head, self.total = layers.Dense(CLASSES), keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [self.total]

    def call(self, x):
        return self.head(x)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.total.update_state(loss)
        return loss


def test_a_model_that_overrides_metrics():
    assert_same(*train_both(lambda: compiled(Own())))


class ReadsOptimizer(keras.Model):
    """A step that weighs its loss by a variable of its optimizer."""

    def __init__(self, read):
        super().__init__()
        self.dense, self.read = keras.layers.Dense(3), read

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2) * tf.cast(self.read(self.optimizer), tf.float32)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("read", "reads"),
    [
        (lambda _: 1.0, False),
        (lambda optimizer: optimizer.learning_rate, False),  # it stays as it is in a run
        (lambda optimizer: optimizer.iterations, True),
        (lambda optimizer: tf.reduce_sum(optimizer.variables[-1]), True),
    ],
)
def test_it_is_known_whether_a_step_reads_variables_of_its_optimizer(read, reads):
    model = ReadsOptimizer(read)
    model.compile("adam", "mse")
    step, spec = ModelStep(model), (tf.TensorSpec([4, 5]), tf.TensorSpec([4, 3]))
    step.build(spec)
    assert step.reads_optimizers(spec) is reads


class Unused(layers.Layer):
    """Has a weight that is used now and then."""

    def __init__(self, used):
        super().__init__()
        self.used = used

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

    def call(self, x):
        return x * self.weight if self.used else x


@pytest.mark.parametrize("used", [False, True])
def test_whether_the_loss_depends_on_all_parameters(used):
    data, step = batches(*classes(44)), ModelStep(classifier(Unused(used)))
    step.build(data.element_spec)
    assert step.trains_all(data.element_spec) == used
