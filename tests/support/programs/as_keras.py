"""Trains small models on its cluster, or with `keras.Model.fit` if there is none, and prints the results.

as_keras.py UPDATES CASE...

Without a cluster each batch is two workers' batches together. UPDATES is the update mode on parameter servers. Without
a CASE all cases are trained.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist_cli as tfdist
from tfdist_cli.errors import UsageError

IN_CLUSTER = "TF_CONFIG" in os.environ
MODE = sys.argv[1]
BATCH, STEPS = 4, 6
WORKERS = 2
random = np.random.default_rng(0)
X = random.normal(size=(WORKERS * BATCH * STEPS, 3)).astype(np.float32)
Y = (X.sum(axis=1, keepdims=True) + 0.1 * random.normal(size=(len(X), 1))).astype(np.float32)
WEIGHTS = np.repeat(random.uniform(0.5, 2, len(X) // WORKERS), WORKERS).astype(np.float32)
"""The same for each worker, so that their means have equal weight."""


def data(*arrays):
    """The batches of a worker; the batches of all workers together are those of Keras."""

    def batches(shard):
        examples = tf.data.Dataset.from_tensor_slices(arrays).shard(shard.count, shard.index)
        return examples.batch(BATCH if IN_CLUSTER else WORKERS * BATCH).repeat().skip(shard.step)

    return batches if IN_CLUSTER else batches(tfdist.Shard())


def fit(model, *arrays, **given):
    given = {"epochs": 2, "steps_per_epoch": STEPS // 2} | given
    if not IN_CLUSTER:
        return model.fit(data(*arrays), verbose=0, **given)
    return tfdist.fit(model, data(*arrays), updates=tfdist.Updates(mode=MODE), **given)


def found(model, history):
    """The results of a training."""
    weights = [variable.numpy().tolist() for variable in model.variables if "seed" not in variable.path]
    return {"weights": weights, **history.history}


def compiled(model, loss="mse", rate=0.05, **given):
    model.compile(keras.optimizers.SGD(rate), loss, **given)
    return model


def linear(**given):
    return keras.Sequential([keras.Input((3,)), layers.Dense(1, **given)])


# Losses: which are means, which are sums, and what of them Keras has scaled.


def reduced(reduction, *arrays, rate=0.05):
    with tfdist.scope():
        model = compiled(linear(), keras.losses.MeanSquaredError(reduction=reduction), rate)
    return found(model, fit(model, *(arrays or (X, Y))))


class OwnLoss(keras.Model):
    """The example in Keras's docstring."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = ops.mean((y_pred - y) ** 2)
        loss += ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self):
        self.loss_tracker.reset_state()

    @property
    def metrics(self):
        return [self.loss_tracker]


def own_loss():
    with tfdist.scope():
        x = keras.Input((3,))
        model = compiled(OwnLoss(x, layers.Dense(1, kernel_regularizer="l2")(x)))
    return found(model, fit(model, X, Y))


class Endpoint(layers.Layer):
    """Keras's example of a layer that adds the loss of its model."""

    def __init__(self):
        super().__init__()
        self.loss_fn = keras.losses.MeanSquaredError()
        self.dense = layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.1))

    def call(self, inputs):
        x, y = inputs
        y_pred = self.dense(x)
        self.add_loss(self.loss_fn(y, y_pred))
        self.add_loss(0.1 * ops.mean(ops.abs(y_pred)))
        return y_pred


def endpoint():
    with tfdist.scope():
        x, y = keras.Input((3,)), keras.Input((1,))
        model = keras.Model({"x": x, "y": y}, Endpoint()([x, y]))
        model.compile(keras.optimizers.SGD(0.05))
    return found(model, fit(model, {"x": X, "y": Y}))


def several_outputs():
    with tfdist.scope():
        x = keras.Input((3,))
        hidden = layers.Dense(2, kernel_regularizer="l2")(x)
        model = keras.Model(x, {"mean": layers.Dense(1, name="mean")(hidden), "sum": layers.Dense(1, name="sum")(x)})
        losses = {"mean": "mse", "sum": keras.losses.MeanSquaredError(reduction="sum")}
        model.compile(
            keras.optimizers.SGD(0.01), losses, loss_weights={"mean": 2.0, "sum": 0.3}, metrics=["mae", "mae"]
        )
    return found(model, fit(model, X, {"mean": Y, "sum": 2 * Y}))


def distilled():
    with tfdist.scope():
        model = keras.distillation.Distiller(
            teacher=linear(kernel_initializer="ones"), student=linear(),
            distillation_losses=keras.distillation.LogitsDistillation(temperature=2.0), student_loss_weight=0.6,
        )  # fmt: skip
        compiled(model)
    return found(model, fit(model, X, Y))


def float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with tfdist.scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(1), layers.Activation("linear", dtype="float32")])
            scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
            model.compile(scaled, keras.losses.MeanSquaredError(reduction="sum"))
        return found(model, fit(model, X, Y))
    finally:
        keras.config.set_dtype_policy("float32")


# State and callbacks: what they assign holds for all workers from the next batch, or score, on.


class Annealed(keras.Model):
    """Has a weight for its loss that a callback assigns, and records it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.share = self.add_weight(shape=(), initializer="zeros", trainable=False, name="share")
        self.noted = keras.metrics.Mean(name="noted")

    def call(self, x):
        self.noted.update_state(self.share)
        prediction = self.dense(x)
        self.add_loss(self.share * ops.mean(prediction**2))
        return prediction


class Anneal(keras.callbacks.Callback):
    """Assigns variables with Keras, with TensorFlow, and in a `tf.function`."""

    def __init__(self, model):
        super().__init__()
        self.assign = tf.function(model.share.assign)

    def on_train_batch_begin(self, batch, logs=None):
        ways = [self.model.share.assign, self.model.share.value.assign, self.assign]
        ways[batch % 3](tf.constant(1.0 / 2**batch))


def annealed():
    with tfdist.scope():
        model = compiled(Annealed())
        model.build((None, 3))
    return found(model, fit(model, X, Y, callbacks=[Anneal(model)]))


class Raises(keras.callbacks.Callback):
    """Raises the weight of the loss in each epoch."""

    def on_train_begin(self, logs=None):
        self.model.share.assign(0.0)

    def on_epoch_begin(self, epoch, logs=None):
        self.model.share.assign_add(0.3)


def resumed():
    """A training; on a cluster one that resumes within its second epoch, on a chief that has the checkpoints alone."""
    folder = Path("resumes" if tfdist.is_chief() else "nowhere")
    given = {"checkpoints": tfdist.Checkpoints(folder, every_steps=1, keep=9)} if IN_CLUSTER else {}
    for kept in (4, 9)[not IN_CLUSTER :]:
        keras.utils.set_random_seed(11)
        with tfdist.scope():
            model = compiled(Annealed())
            model.build((None, 3))
        history = fit(model, X, Y, callbacks=[Raises()], **given)
        for later in sorted(folder.glob("step-*"))[kept:]:
            shutil.rmtree(later)
    return found(model, history)


class Reads(keras.callbacks.Callback):
    """Reads the metrics of the model in its hooks."""

    def __init__(self, model):
        super().__init__()
        self.set_model(model)
        self.read = []

    def note(self, *_, **__):
        self.read.append([float(value) for value in self.model.get_metrics_result().values()])

    on_epoch_end = on_train_batch_end = on_test_begin = on_test_end = note


def read():
    with tfdist.scope():
        model = compiled(linear(), metrics=["mae", keras.metrics.R2Score()])
    model.test_on_batch(X[:5], Y[:5])  # Keras builds the metrics
    reads = Reads(model)
    history = fit(model, X, Y, callbacks=[reads], validation_data=(X, Y))
    reads.note()
    return {**found(model, history), "read": reads.read}


class Shifts(keras.callbacks.Callback):
    """Scores with other weights than those that are trained."""

    def on_test_begin(self, logs=None):
        self.kept = self.model.get_weights()
        self.model.set_weights([weight + 1 for weight in self.kept])

    def on_test_end(self, logs=None):
        self.model.set_weights(self.kept)


def averaged(callback):
    with tfdist.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5), "mse")
    return found(model, fit(model, X, Y, callbacks=[callback], validation_data=(X, Y)))


class Counts(layers.Layer):
    """Counts the batches that it is trained and scored on, in integers and in floats."""

    def build(self, shape):
        self.trained = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="trained")
        self.mean = self.add_weight(shape=(3,), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            self.trained.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x


def counted():
    with tfdist.scope():
        model = compiled(keras.Sequential([keras.Input((3,)), Counts(), layers.Dense(1)]))
    return found(model, fit(model, X, Y))


class Scored(layers.Layer):
    """Counts the batches and examples that it is scored on."""

    def build(self, shape):
        self.batches = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="batches")
        self.examples = self.add_weight(shape=(), initializer="zeros", trainable=False, name="examples")

    def call(self, x, training=False):
        if not training:
            self.batches.assign_add(1)
            self.examples.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x


def scored():
    with tfdist.scope():
        model = compiled(keras.Sequential([keras.Input((3,)), Scored(), layers.Dense(1)]))
    batches = tf.data.Dataset.from_tensor_slices((X[:22], Y[:22])).batch(4)
    return found(model, fit(model, X, Y, validation_data=batches))


class Predicts(keras.callbacks.Callback):
    """Predicts and scores a few examples, as for a plot."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def note(self):
        model, x, y = self.model, X[:5], Y[:5]
        self.noted.append(
            [
                model.predict(x, batch_size=2, verbose=0).tolist(),
                model.predict_on_batch(x).tolist(),
                np.array(model(x)).tolist(),
                model.evaluate(x, y, verbose=0, return_dict=True)["mae"],
                model.test_on_batch(x, y)[1],
            ]
        )

    def on_train_batch_end(self, batch, logs=None):
        self.note()

    def on_epoch_end(self, epoch, logs=None):
        self.note()


def predicted():
    with tfdist.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.LayerNormalization(), layers.Dense(1)])
        compiled(model, metrics=["mae"])
    predicts = Predicts()
    predicts.set_model(model)
    before = [model.predict(X[:3], verbose=0).tolist(), model.predict_on_batch(X[:3]).tolist()]
    fit(model, X, Y, callbacks=[predicts])
    with tfdist.scope():
        predicts.note()
    return {"before": before, **{f"{place}": noted for place, noted in enumerate(predicts.noted)}}


def refused():
    """The errors of Keras's methods that train or predict, on a cluster."""
    with tfdist.scope():
        model, unbuilt = compiled(linear()), compiled(keras.Sequential([layers.Dense(1)]))
    said = []
    for call in (lambda: model.fit(X, Y), lambda: model.train_on_batch(X, Y), lambda: unbuilt.predict(X)):
        try:
            call()
        except UsageError as error:
            said.append([error.code, f"{error} {error.hint}"])
    return said


class CallsTfdist(keras.callbacks.Callback):
    """Evaluates with all tasks, and with Keras, at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def on_epoch_end(self, epoch, logs=None):
        try:
            loss = tfdist.evaluate(self.model, (X, Y))["loss"]
        except UsageError as error:
            loss = error.code
        self.noted.append([loss, self.model.evaluate(X, Y, verbose=0)])


def nested():
    """The results of `tfdist.evaluate` in a callback on a cluster, and after the training."""
    with tfdist.scope():
        model = compiled(linear())
    calls = CallsTfdist()
    fit(model, X, Y, callbacks=[calls])
    return {"noted": calls.noted, "after": tfdist.evaluate(model, (X, Y))["loss"]}


class Own(keras.callbacks.Callback):
    """A program's callback that decides everything by itself, and counts the calls of its hooks."""

    calls = 0

    def on_train_begin(self, logs=None):
        self.noted = [self.params["epochs"], self.params["steps"]]

    def on_train_batch_end(self, batch, logs=None):
        self.calls += 1
        rate = 0.1 / (batch + 1) * min(1.0, logs["loss"])
        self.model.optimizer.learning_rate = rate
        self.noted.append(float(self.model.optimizer.learning_rate.numpy()))
        self.model.stop_training = self.calls == STEPS // 2 + 2

    def on_epoch_end(self, epoch, logs=None):
        logs["batches"] = self.calls
        self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])


def own():
    with tfdist.scope():
        model = compiled(linear())
    callback = Own()
    history = fit(model, X, Y, callbacks=[callback], epochs=4)
    return {**found(model, history), "noted": getattr(callback, "noted", []), "calls": callback.calls}


class Scores(keras.callbacks.Callback):
    """Evaluates and predicts with other weights, and notes the batches."""

    def __init__(self):
        super().__init__()
        self.tested, self.predicted = [], []

    def shift(self, by):
        self.model.set_weights([weight + by for weight in self.model.get_weights()])

    def on_test_begin(self, logs=None):
        self.shift(1)

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append(batch)

    def on_test_end(self, logs=None):
        self.shift(-1)

    def on_predict_begin(self, logs=None):
        self.shift(2)

    def on_predict_batch_end(self, batch, logs=None):
        self.predicted.append([batch, float(np.sum(logs["outputs"]))])
        self.model.stop_predicting = batch == 2

    def on_predict_end(self, logs=None):
        self.shift(-2)


def hooks():
    """The results of evaluations and predictions with callbacks, and the batches for which these were called."""
    with tfdist.scope():
        model = compiled(linear())
    scores = Scores()
    if IN_CLUSTER:
        loss = tfdist.evaluate(model, X, Y, batch_size=BATCH, callbacks=[scores])["loss"]
        predicted = tfdist.predict(model, X, batch_size=BATCH, callbacks=[scores])
    else:
        loss = model.evaluate(X, Y, batch_size=BATCH, callbacks=[scores], verbose=0)
        predicted = model.predict(X, batch_size=BATCH, callbacks=[scores], verbose=0)
    return {
        "loss": loss,
        "outputs": predicted.tolist(),
        "after": [weight.tolist() for weight in model.get_weights()],
        "predicted": scores.predicted,
        "tested": scores.tested,
    }


CASES = {
    "a mean": lambda: reduced("sum_over_batch_size"),
    "a mean with weights": lambda: reduced("mean_with_sample_weight", X, Y, WEIGHTS),
    "a weighted sum": lambda: reduced("sum", X, Y, WEIGHTS, rate=0.01),
    "a sum": lambda: reduced("sum", rate=0.01),
    "no reduction": lambda: reduced("none", rate=0.01),
    "a compute_loss of its own": own_loss,
    "losses of layers": endpoint,
    "several outputs": several_outputs,
    "distillation": distilled,
    "float16": float16,
    "annealing": annealed,
    "a training that resumes": resumed,
    "metrics in hooks": read,
    "averages in the place of weights": lambda: averaged(keras.callbacks.SwapEMAWeights()),
    "averages after each epoch": lambda: averaged(keras.callbacks.SwapEMAWeights(swap_on_epoch=True)),
    "other weights to score": lambda: averaged(Shifts()),
    "state": counted,
    "state of scores": scored,
    "predictions": predicted,
    "a callback of its own": own,
    "hooks of scores": hooks,
    **({"refused": refused, "nested": nested} if IN_CLUSTER else {}),
}

written = {}
for name in sys.argv[2:] or CASES:
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    written[name] = CASES[name]()
print(json.dumps(written))
