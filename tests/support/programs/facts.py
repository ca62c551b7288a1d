"""Runs one training after the other on its cluster, and prints counts and results as JSON.

facts.py FACT...
"""

import hashlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.datasets import digits
from tfdist_cli.errors import TfdistError
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine

for engine in (MirroredEngine, ParameterServerEngine):
    engine.max_steps_per_execution = 2  # tracing is most of the time of a short training
BATCH = 7
random = np.random.default_rng(0)
X = random.normal(size=(350, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Examples(keras.metrics.Metric):
    """Counts examples, and sums their first numbers."""

    def __init__(self):
        super().__init__(name="examples")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_true)[0])

    def result(self):
        return self.count


class Rates(keras.callbacks.Callback):
    """Records the learning rate of each epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))


def build(optimizer=lambda: keras.optimizers.SGD(0.01), dropout=0.0):
    with tfdist.scope():
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dropout(dropout), keras.layers.Dense(1)]
        )
        model.compile(optimizer(), "mse", metrics=[Examples()])
    return model


def data(shard):
    own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(shard.count, shard.index)
    return own.repeat().batch(BATCH).skip(shard.step)


def counts():
    """Counts that should equal the number of steps, in a run of 203 steps."""
    model = build(lambda: keras.optimizers.Adam(0.01))
    history = tfdist.fit(model, data, steps_per_epoch=100, max_steps=203, steps_per_execution=4)
    return [int(model.optimizer.iterations.numpy()), sum(history.history["examples"]), len(history.epoch)]


def validation():
    """Scores each of 61 examples once, whatever the number of workers."""
    model = build()
    scored = tfdist.fit(model, data, max_steps=4, steps_per_epoch=4, validation_data=(X[:61], Y[:61]))
    seen = float(np.mean((np.array(model(X[:61])) - Y[:61]) ** 2))
    some = tfdist.fit(build(), data, max_steps=4, steps_per_epoch=4,
                      validation_data=tfdist.Validation(data, steps=5))  # fmt: skip
    after = tfdist.evaluate(model, (X[:61], Y[:61]))
    return [
        scored.history["val_examples"][0], scored.history["val_loss"][0], seen, some.history["val_examples"][0],
        after["examples"], after["loss"],
    ]  # fmt: skip


def callbacks():
    """Keras's callbacks run on the chief, and take effect on all tasks."""
    rates = Rates()
    model = build(lambda: keras.optimizers.SGD(0.02))
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: [0.02, 0.01, 0.005, 0.004][epoch])
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9, restore_best_weights=True)
    history = tfdist.fit(model, data, epochs=6, steps_per_epoch=6, callbacks=[rates, schedule, stop])
    plateau = Rates()
    reduced = build(lambda: keras.optimizers.SGD(0.02))
    tfdist.fit(
        reduced, data, epochs=3, steps_per_epoch=6,
        callbacks=[keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e9, factor=0.5), plateau],
    )  # fmt: skip
    return {
        "epochs": len(history.epoch),
        "rates": np.round(rates.rates, 6).tolist(),
        "own rate": round(float(model.optimizer.learning_rate.numpy()), 6),
        "reduced": np.round(plateau.rates, 6).tolist(),
        "own reduced": round(float(reduced.optimizer.learning_rate.numpy()), 6),
        "weights": [np.float64(weight).sum() for weight in model.get_weights()],
    }


def chiefs_callbacks():
    """A program may pass callbacks on its chief only."""
    steps = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(model.optimizer, "learning_rate", 0.01 / (batch + 1)),
        on_train_batch_end=lambda batch, logs: steps.append(batch),
    )
    saver = keras.callbacks.ModelCheckpoint("best.keras", monitor="loss")
    model = build(dropout=0.2)
    tfdist.fit(model, data, epochs=2, steps_per_epoch=6, callbacks=[note, saver] if tfdist.is_chief() else [])
    same = None
    if tfdist.is_chief():
        loaded = keras.saving.load_model("best.keras", compile=False)
        same = bool(np.allclose(loaded(X[:5]), model(X[:5])))
    return [len(steps), same, [np.float64(weight).sum() for weight in model.get_weights()]]


class TestBatches(keras.callbacks.Callback):
    """Records the batches of the validation, and the number of examples scored after each."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_test_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.ended.append([batch, logs["examples"]])


def scored_batches():
    """The calls of a callback for the 9 batches of a validation."""
    note = TestBatches()
    scored = tf.data.Dataset.from_tensor_slices((X[:61], Y[:61])).batch(BATCH)
    given = {"steps_per_epoch": 4, "validation_data": scored, "callbacks": [note] if tfdist.is_chief() else []}
    history = tfdist.fit(build(), data, **given).history
    return [note.begun, note.ended, history["val_examples"]]


def backup():
    """The epoch at which a training with Keras's backups continues, and its weights."""
    for epochs in (2, 3):
        model = build(lambda: keras.optimizers.Adam(0.01))
        saver = keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False)
        callbacks = [saver] if tfdist.is_chief() else []
        history = tfdist.fit(model, data, steps_per_epoch=6, epochs=epochs, callbacks=callbacks)
    weights = [np.float64(weight).sum() for weight in model.get_weights()]
    return [history.epoch, int(model.optimizer.iterations.numpy()), weights]


class Weighed(keras.Model):
    """Has a weight for its loss that only callbacks assign, and a table that is not trained."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(350, 4, trainable=False)
        self.normal, self.head = keras.layers.BatchNormalization(), keras.layers.Dense(1)
        self.share = self.add_weight(shape=(), initializer="zeros", trainable=False, name="share")

    def call(self, x, training=False):
        found = self.table(keras.ops.cast(keras.ops.abs(x), "int32"))
        return self.head(self.normal(x + self.share * keras.ops.mean(found, axis=1), training=training))


def untrained():
    """The value that a callback has assigned at a batch, whether a table is unchanged, and the weights."""
    found = []
    for updates in (None, tfdist.Updates(mode="sync")):
        with tfdist.scope():
            model = Weighed()
            model.compile(keras.optimizers.SGD(0.001), "mse")
            model.table.build()
        before = np.array(model.table.embeddings)
        assign = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, model=model: model.share.assign(7.0) if batch == 3 else None
        )
        given = {} if updates is None else {"updates": updates}
        tfdist.fit(model, data, steps_per_epoch=12, callbacks=[assign] if tfdist.is_chief() else [], **given)
        stayed = bool(np.array_equal(before, model.table.embeddings))
        weights = [np.float64(weight).sum() for weight in model.get_weights()]
        found.append([float(model.share.numpy()), stayed, weights])
    return found


class Assigning(keras.callbacks.Callback):
    """Assigns a bias, to another variable what the weights are after some steps, and keeps what it reads."""

    def __init__(self, other):
        super().__init__()
        self.other, self.steps, self.numbers, self.read, self.kept = other, 0, [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        (bias,) = self.model.layers[-1].bias.value.numpy()
        self.numbers.append(float(bias))
        if self.steps == 6:
            for other, own in zip(self.other, self.model.weights, strict=True):
                other.assign(own)
            self.read = [own.value.read_value() for own in self.model.weights]
            self.kept = [each.numpy() for each in self.read]
        self.model.layers[-1].bias.assign([self.steps])


def assigned_values():
    """What a callback assigns to variables, and what it keeps of them."""
    model, teacher = build(lambda: keras.optimizers.SGD(1e-9)), build()
    assigning = Assigning(teacher.weights)
    tfdist.fit(model, data, epochs=2, steps_per_epoch=6, callbacks=[assigning])
    kept = [np.array_equal(other.numpy(), now) for other, now in zip(teacher.weights, assigning.kept, strict=True)]
    read = [np.array_equal(each.numpy(), now) for each, now in zip(assigning.read, assigning.kept, strict=True)]
    return [np.round(assigning.numbers, 3).tolist(), float(np.round(model.layers[-1].bias.numpy()[0], 3)), kept, read]


def generated(passes=None):
    """Batches from a Python generator; they have no end, unless the number of passes is given."""
    numbers = tf.data.Dataset.from_generator(lambda: iter(Y), output_signature=tf.TensorSpec([1], tf.float32))
    return numbers.map(lambda y: (tf.tile(y, [4]), y)).batch(BATCH).repeat(passes)


EARLY = tf.data.Dataset.from_tensor_slices((X[:21], Y[:21])).batch(BATCH) if "datasets" in sys.argv else None
EARLY_GENERATED = {passes: generated(passes) for passes in (1, None)} if "generators" in sys.argv else {}
"""Created before the cluster is joined, which programs that train on parameter servers may do."""


def datasets():
    """Dataset objects, whose batches the workers divide, and datasets that cannot be sent to workers."""
    model = build()
    examples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(350, seed=1).batch(BATCH).prefetch(1)
    history = tfdist.fit(model, examples, epochs=2, validation_data=EARLY)
    errors = [error_of(lambda shard: examples.shard(shard.count, shard.index).repeat())]
    errors.append(error_of(lambda shard: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)))
    try:
        tfdist.predict(build(), generated(1))
    except TfdistError as error:
        errors.append(described(error))
    return [history.history["examples"], history.history["val_examples"], *errors]


def generators():
    """Counts of examples trained and scored, from a generator on the chief of which each worker gets a share."""

    def share(shard):
        return generated().shard(shard.count, shard.index)

    def share_of_pass(shard):
        return generated(passes=1).shard(shard.count, shard.index)

    found = []
    trained = {"steps_per_epoch": 15, "epochs": 2}
    for given, scored in (
        (share, tfdist.Validation(share, steps=9)),
        (share, share_of_pass),
        (EARLY_GENERATED[None], EARLY_GENERATED[1]),
    ):
        history = tfdist.fit(build(), given, **trained, validation_data=scored).history
        found += [history["examples"], history["val_examples"]]
    found.append(tfdist.fit(build(), EARLY_GENERATED[1], epochs=2).history["examples"])  # its length is found out
    return found


def error_of(data):
    """The code and the text of the error that a training with this data ends with."""
    try:
        tfdist.fit(build(), data, steps_per_epoch=30)
    except TfdistError as error:
        return described(error)
    return None


def described(error):
    """An error's code, and its text."""
    return [error.code, f"{error} {error.hint}"]


def after_failure():
    """Trains after a training whose data ended early on several workers."""

    def few(shard):
        batches = tf.data.Dataset.from_tensor_slices((X[:63], Y[:63])).batch(BATCH).shard(shard.count, shard.index)
        return batches.filter(lambda *_: True)  # so that their number is not known

    errors = error_of(few)
    return [errors, tfdist.fit(build(), data, steps_per_epoch=9).history["examples"]]


def rare_pushes():
    """An update of so many steps that TensorFlow warns of the number of batches read in one function."""
    model = build()
    history = tfdist.fit(model, data, steps_per_epoch=80, updates=tfdist.Updates(push_every=40))
    return [int(model.optimizer.iterations.numpy()), history.history["examples"]]


def broken_off():
    """A synchronous training that its callback aborts, and one after it."""
    together = tfdist.Updates(mode="sync")

    def stop(batch, logs):
        if batch >= 40:
            raise RuntimeError("enough")

    try:
        tfdist.fit(
            build(), data, steps_per_epoch=100, steps_per_execution=4, updates=together,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
        )  # fmt: skip
    except RuntimeError as error:
        errors = str(error)
    model = build()
    history = tfdist.fit(model, data, steps_per_epoch=50, steps_per_execution=4, updates=together)
    return [errors, int(model.optimizer.iterations.numpy()), history.history["examples"]]


def resumed():
    """Only the chief has a checkpoint folder; all tasks continue from its checkpoint."""
    folder = Path("checkpoints" if tfdist.is_chief() else "nowhere")
    kept = tfdist.Checkpoints(folder, every_steps=10)
    tfdist.fit(build(lambda: keras.optimizers.Adam(0.01)), data, steps_per_epoch=50, max_steps=23, checkpoints=kept)
    model = build(lambda: keras.optimizers.Adam(0.5))
    history = tfdist.fit(model, data, steps_per_epoch=50, max_steps=61, checkpoints=kept)
    return [
        int(model.optimizer.iterations.numpy()),
        history.history["examples"],
        sorted(path.name for path in folder.glob("step-*")),
        round(float(model.optimizer.learning_rate.numpy()), 6),
        [np.float64(weight).sum() for weight in model.get_weights()],
    ]


def drawn():
    """The weights of a training with `Dropout` that was not interrupted, and of one that resumes."""
    found = []
    for stops in ((20,), (9, 20)):
        kept = tfdist.Checkpoints(Path(f"drawn-{len(stops)}" if tfdist.is_chief() else "nowhere"))
        for stop in stops:
            model = build(dropout=0.5)
            tfdist.fit(model, data, steps_per_epoch=20, max_steps=stop, checkpoints=kept)
        found.append(numbers(model.trainable_variables))
    return found


class Noted(keras.layers.Layer):
    """Counts how often it is called: when a function is traced."""

    calls = 0

    def call(self, x):
        Noted.calls += 1
        return x


def again():
    """For each mode of updates, what three trainings of a model, each with an evaluation, have called and counted.

    The second one has a callback, which ends it after two epochs. Before the third one, the model is compiled.
    """
    found = []
    for updates in (None, tfdist.Updates(mode="sync"), tfdist.Updates(mode="bounded", staleness=2)):
        keras.utils.set_random_seed(5)
        with tfdist.scope():
            layers = [Noted(), keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
        trainings = []
        for epochs, compiles in ((3, True), (2, False), (3, True)):
            if compiles:
                with tfdist.scope():
                    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Examples()])
            before = Noted.calls
            stop = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, model=model: setattr(model, "stop_training", epoch == 1)
            )
            history = tfdist.fit(
                model, data, steps_per_epoch=12, epochs=3, steps_per_execution=4, validation_data=(X[:61], Y[:61]),
                callbacks=[stop] if tfdist.is_chief() and epochs == 2 else [],
                **({} if updates is None else {"updates": updates}),
            ).history  # fmt: skip
            trained, steps = Noted.calls, int(model.optimizer.iterations.numpy())
            scored = tfdist.evaluate(model, X[:61], Y[:61])["examples"]
            calls = [trained > before, Noted.calls > trained]
            trainings.append([calls, steps, history["examples"], history["val_examples"], scored])
        found.append([trainings, numbers(model.trainable_variables)])
    return found


def refused():
    """Trainings that are refused, or fail; the cluster can train something else after them."""
    errors = []
    outside = keras.optimizers.Adam(0.01)
    for optimizer in (
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(1e20),
        lambda: outside,
    ):
        try:
            tfdist.fit(build(optimizer), data, steps_per_epoch=20, steps_per_execution=2)
            errors.append(None)
        except TfdistError as error:
            errors.append(described(error))
    return errors


def own_arrays():
    """Calls with arrays of each task's own, and a training with a dataset function that permutes the same ones."""
    own = X[np.random.default_rng().permutation(len(X))]
    made_before = tf.data.Dataset.from_tensor_slices((own, Y)).batch(BATCH)
    model, codes = build(), []
    for call in (
        lambda: tfdist.fit(model, own, Y),
        lambda: tfdist.fit(model, X, Y, validation_data=made_before),
        lambda: tfdist.evaluate(model, own, Y),
        lambda: tfdist.predict(model, own),
        lambda: tfdist.fit(model, own, Y, share="copy", verbose=0),
    ):
        try:
            call()
            codes.append(None)
        except TfdistError as error:
            codes.append(error.code)
    seen = []

    def permuted(shard):
        seen.append(np.random.permutation(len(X)).tolist())
        examples = tf.data.Dataset.from_tensor_slices((X[seen[-1]], Y[seen[-1]]))
        return examples.shard(shard.count, shard.index).batch(BATCH)

    tfdist.fit(build(), permuted, epochs=2)
    return [codes, seen[-1]]


def wires():
    """Test accuracy on digits, and the weights, by the type of the wire."""
    found = {}
    for wire in ("float32", "bfloat16", "float16"):
        with tfdist.scope():
            keras.utils.set_random_seed(5)
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
        seen = tf.data.Dataset.from_tensor_slices(digits.load("train")).batch(32)
        history = tfdist.fit(model, seen, epochs=8, validation_data=digits.load("test"), wire=wire)
        weights = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights()))
        found[wire] = [history.history["val_accuracy"][-1], weights.hexdigest()]
    return found


def overflow():
    """Gradients of 100,000 in the second step: on float16 (maximum 65,504), on bfloat16, and with loss scaling."""
    sizes = tf.data.Dataset.from_tensor_slices([[1.0], [1e5], [1.0], [1.0]]).batch(1).repeat()
    errors = []
    for wire, scales in (("float16", False), ("bfloat16", False), ("float16", True)):
        with tfdist.scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layer])
            sgd = keras.optimizers.SGD(1e-9)
            scaling = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=1.0) if scales else sgd
            model.compile(scaling, lambda y_true, y_pred: keras.ops.mean(y_pred))
        try:
            tfdist.fit(model, lambda _: sizes.map(lambda x: (x, x)), steps_per_epoch=4, wire=wire, share="copy")
            errors.append(None if np.isfinite(layer.kernel.numpy()).all() else "not finite")
        except TfdistError as error:
            errors.append(described(error))
    return errors


def own_weights():
    """The weights after a training that begins with other weights on each task."""
    model = build()
    model.set_weights([weight + 0.1 * (1 + tfdist.is_chief()) for weight in model.get_weights()])
    tfdist.fit(model, data, steps_per_epoch=3)
    return [weight.tolist() for weight in model.get_weights()]


class Scaled(keras.layers.Layer):
    """Multiplies by a weight of int8, and counts its calls in a training in a variable of uint32."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[1:], dtype="int8", initializer="ones", trainable=False)
        self.calls = self.add_weight(shape=(), dtype="uint32", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x * keras.ops.cast(self.factor, x.dtype)


def of_many_types(seed):
    """A model with weights of int8, some of them with LoRA, of uint32 and of bfloat16."""
    with tfdist.scope():
        keras.utils.set_random_seed(seed if tfdist.is_chief() else seed + 1)
        quantized, scaled = keras.layers.Dense(6, "relu"), Scaled()
        narrow = keras.layers.Dense(6, "relu", dtype="bfloat16")
        model = keras.Sequential([keras.Input((4,)), quantized, scaled, narrow, keras.layers.Dense(1)])
        quantized.quantize("int8")
        quantized.enable_lora(2)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse", metrics=[Examples()])
    return model, scaled


def weight_types():
    """A training of a model with weights of many types, which continues from a checkpoint of the chief."""

    def same_steps(shard):
        own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(shard.count, shard.index)
        return own.repeat().batch(2 * BATCH // shard.count).skip(shard.step)

    model, _ = of_many_types(5)
    begun = numbers(model.variables)
    kept = tfdist.Checkpoints(Path("types" if tfdist.is_chief() else "nowhere"), every_steps=10)
    tfdist.fit(model, same_steps, steps_per_epoch=20, max_steps=23, checkpoints=kept)
    model, scaled = of_many_types(8)
    tfdist.fit(model, same_steps, steps_per_epoch=20, max_steps=40, checkpoints=kept)
    scores = tfdist.evaluate(model, (X[:61], Y[:61]))
    return {
        "begun": begun,
        "types": sorted({variable.dtype for variable in model.variables + model.optimizer.variables}),
        "trained": numbers(model.variables + model.optimizer.variables),
        "calls": int(scaled.calls.numpy()),
        "loss": scores["loss"],
        "predicted": np.ravel(tfdist.predict(model, X[:5])).tolist(),
    }


def numbers(variables):
    """The values of variables."""
    return [np.float64(tf.cast(variable.value, tf.float64)).ravel().tolist() for variable in variables]


FACTS = (
    counts,
    generators,
    validation,
    callbacks,
    chiefs_callbacks,
    untrained,
    assigned_values,
    scored_batches,
    backup,
    datasets,
    after_failure,
    rare_pushes,
    broken_off,
    resumed,
    drawn,
    again,
    refused,
    own_arrays,
    wires,
    overflow,
    own_weights,
    weight_types,
)
named = {fact.__name__: fact for fact in FACTS}
print(json.dumps([[name, named[name]()] for name in sys.argv[1:]]))
