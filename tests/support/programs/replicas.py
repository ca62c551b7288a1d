"""Trains by several replicas in one process, as `MirroredStrategy` has them on GPUs, and prints the results as JSON.

replicas.py REPLICAS

For each line of its standard input, the name of a fact, it prints a line.

With 1 replica it is one process without a strategy, whose batches are as large as those of all replicas together.
"""

import json
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.programs.own_steps import LATENT, gan, optimizer_variables
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.train.cluster.join import join

REPLICAS = int(sys.argv[1])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
join(Environment(strategy="mirrored" if REPLICAS > 1 else "single"))
random = np.random.default_rng(0)
X = random.normal(size=(480, 6)).astype(np.float32)
Y = (X[:, :3] + random.normal(size=(480, 3))).argmax(axis=1)
BATCH = 24 // REPLICAS
optimizers, layers = keras.optimizers, keras.layers


def data(shard):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shard(shard.count, shard.index).batch(BATCH).repeat().skip(
        shard.step
    )  # fmt: skip


def build(optimizer, *hidden, policy="float32"):
    keras.utils.set_random_seed(11)
    keras.config.set_dtype_policy(policy)
    with tfdist.scope():
        first = layers.Dense(8, "relu", kernel_constraint="max_norm", kernel_regularizer="l2")
        model = keras.Sequential(
            [keras.Input((6,)), first, *(layer() for layer in hidden), layers.Dense(3, dtype="float32")]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def trained(model, **given):
    given = {"epochs": 2, "steps_per_epoch": 10, "steps_per_execution": 2} | given
    history = tfdist.fit(model, data, **given).history
    values = [*model.variables, *model.optimizer.variables]
    return {
        "variables": [variable.numpy().astype(float).ravel().tolist() for variable in values],
        "history": history,
        "rate": float(model.optimizer.learning_rate),
        "copies": [_spread(variable) for variable in values],
    }


def _spread(variable):
    """How far a variable's copies are from each other."""
    stored = variable.value
    copies = [copy.numpy().astype(float) for copy in getattr(stored, "values", [stored])]
    return max(float(np.max(np.abs(copy - copies[0]), initial=0)) for copy in copies)


def adam(**given):
    return lambda: optimizers.Adam(0.01, **given)


def rates():
    """A learning rate that a callback sets, scaled by the number of batches in an update."""
    rule = tfdist.LearningRate(scale="linear", warmup_steps=5)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, _: [0.02, 0.01][epoch])
    model = build(lambda: optimizers.SGD(0.5, momentum=0.9))
    found = trained(model, learning_rate=rule, callbacks=[schedule])
    return {"rate": found["rate"], "rates": found["history"]["learning_rate"], "history": found["history"]}


def scaled():
    """A rate that each replica scales by their number."""
    rule = tfdist.LearningRate(scale="linear") if REPLICAS > 1 else None
    return trained(build(lambda: optimizers.SGD(0.08 / REPLICAS, momentum=0.9)), learning_rate=rule)


def exported():
    """What is trained is exported, and answers as the model does."""
    model = build(adam())
    trained(model)
    with tempfile.TemporaryDirectory() as folder:
        path = tfdist.export(model, f"{folder}/model")
        served = tf.saved_model.load(str(path))
        answers = served.serve(X[:5]).numpy()
        tfdist.export(model, f"{folder}/model", format="keras")
        again = keras.models.load_model(f"{folder}/model.keras")
    given = np.asarray(model(X[:5]))
    own = [float(np.abs(other - given).max()) for other in (answers, np.asarray(again(X[:5])))]
    return {"difference": own, "rate": float(again.optimizer.learning_rate)}


def resumed():
    """A training that is begun anew from a checkpoint ends where one that went through ends."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = tfdist.Checkpoints(folder, every_steps=7)
        trained(build(adam()), max_steps=13, epochs=None, checkpoints=checkpoints)
        found = trained(build(adam()), checkpoints=checkpoints)
    whole = trained(build(adam()))
    pairs = zip(found["variables"], whole["variables"], strict=True)
    return {"difference": max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs), "copies": found["copies"]}


def counts():
    """A pass over arrays counts each example that is trained on; validation and evaluation score each one once."""
    examples = []

    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.count.assign_add(keras.ops.shape(y_true)[0])

        def result(self):
            return self.count

    with tfdist.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy", Count()]
        )
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda _, logs: examples.append([logs["count"], logs["val_count"]])
    )
    tfdist.fit(
        model, (X[:101], Y[:101]), batch_size=BATCH, epochs=2, callbacks=[note], validation_data=(X[:61], Y[:61])
    )
    scores = tfdist.evaluate(model, (X[:61], Y[:61]))
    predicted = np.asarray(model(X[:61])).argmax(axis=1)
    return {
        "examples": examples,
        "accuracy": [scores["accuracy"], float((predicted == Y[:61]).mean())],
        "read": {name: float(value) for name, value in model.get_metrics_result().items()},
        "scores": scores,
    }


def dropout():
    """Which of 64 units each replica keeps."""

    class Kept(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="kept")
            self.sums = self.add_weight(shape=(REPLICAS, 64), initializer="zeros", name="sums")

        def update_state(self, y_true, y_pred, sample_weight=None):
            context = tf.distribute.get_replica_context()  # none where the model is built
            replica = tf.one_hot(context.replica_id_in_sync_group if context else 0, REPLICAS)
            self.sums.assign_add(replica[:, None] * keras.ops.cast(y_pred > 0, "float32"))

        def result(self):
            return self.sums

    with tfdist.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5)])
        model.compile("sgd", "mse", metrics=[Kept()])
    ones = tf.data.Dataset.from_tensor_slices((np.ones((8, 64), np.float32), np.ones((8, 64), np.float32)))
    history = tfdist.fit(model, lambda _: ones.batch(1).repeat(), epochs=2, steps_per_epoch=1).history
    return np.array(history["kept"]).astype(int).tolist()


def state():
    """An integer that each step counts, and its copies."""

    class Steps(layers.Layer):
        def build(self, shape):
            self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

        def call(self, x):
            self.steps.assign_add(1)
            return x

    model = build(adam(), Steps)
    return {"copies": trained(model)["copies"], "steps": int(model.layers[1].steps.numpy())}


def predicted():
    """How many rows are predicted of 10, and how far they are from what the model gives."""
    model = build(adam())
    trained(model)
    rows = [model.predict_on_batch(X[:10]), model.predict(X[:10], verbose=0)]
    return [[len(each), float(np.abs(each - np.asarray(model(X[:10]))).max())] for each in rows]


def _training(make, *hidden, **given):
    def train():
        own = {key: value for key, value in given.items() if key != "policy"}
        return trained(build(make, *hidden, policy=given.get("policy", "float32")), **own)

    return train


def several_updates():
    """The updates of a GAN: each replica sums gradients twice in a step."""
    keras.utils.set_random_seed(11)
    with tfdist.scope():
        model = gan()

    def points(shard):
        arrays = X, np.tanh(X[:, :LATENT])
        return tf.data.Dataset.from_tensor_slices(arrays).shard(shard.count, shard.index).batch(BATCH).repeat()

    history = tfdist.fit(model, points, epochs=2, steps_per_epoch=10, steps_per_execution=2).history
    values = [*model.variables, *optimizer_variables(model)]
    return {
        "variables": [variable.numpy().astype(float).ravel().tolist() for variable in values],
        "history": history,
        "copies": [_spread(variable) for variable in values],
    }


FACTS = {
    "several updates": several_updates,
    "adamw": _training(lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)),
    "averages": _training(adam(use_ema=True, ema_overwrite_frequency=3)),
    "accumulation": _training(adam(gradient_accumulation_steps=2)),
    "bfloat16": _training(adam(), policy="mixed_bfloat16"),
    "float16": _training(
        lambda: optimizers.LossScaleOptimizer(adam()(), initial_scale=2.0**10, dynamic_growth_steps=9),
        policy="mixed_float16",
    ),
    "wire": _training(adam(), wire="bfloat16"),
    "norm": _training(adam(), layers.BatchNormalization),
    "scaled": scaled,
    "rates": rates,
    "exported": exported,
    "resumed": resumed,
    "counts": counts,
    "dropout": dropout,
    "state": state,
    "predicted": predicted,
}
for line in sys.stdin:
    keras.config.set_dtype_policy("float32")
    try:
        found = FACTS[line.strip()]()
    except Exception as error:  # noqa: BLE001 the test of this fact fails, the others go on
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)
