"""Tests of the training loop: callbacks behave as in Keras; steps and examples are counted exactly."""

import contextlib
import http.server
import json
import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as kc

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import BATCH, CLASSES, assert_same, batches, classes, classifier, difference, train_both
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.trainer import loop
from tfdist_cli.train.trainer.batch_callbacks import acts_on_batches

pytestmark = pytest.mark.slow

VALIDATION = batches(*classes(21, seed=1))


class Recorder(kc.Callback):
    """Records the calls of hooks, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append("train begin")

    def on_train_end(self, logs=None):
        self.calls.append(("train end", sorted(logs)))

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("epoch begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch end", epoch, {name: round(value, 5) for name, value in logs.items()}))

    def on_test_begin(self, logs=None):
        self.calls.append("test begin")

    def on_test_end(self, logs=None):
        self.calls.append(("test end", sorted(logs)))


class BatchRecorder(Recorder):
    """Records training batches too."""

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("batch begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("batch end", batch, {name: round(value, 5) for name, value in logs.items()}))


@pytest.mark.parametrize("kind", [Recorder, BatchRecorder])
def test_callbacks_are_called_as_in_keras(kind):
    keras.utils.set_random_seed(7)
    expected, ours = kind(), kind()
    plain = classifier()
    plain.fit(batches(), epochs=2, verbose=0, shuffle=False, callbacks=[expected], validation_data=VALIDATION)
    keras.utils.set_random_seed(7)
    tfdist.fit(classifier(), batches(), epochs=2, verbose=0, callbacks=[ours], validation_data=VALIDATION)
    assert ours.calls == expected.calls
    assert ours.params == expected.params


class TestBatchRecorder(BatchRecorder):
    """Records validation batches too."""

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("test batch begin", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("test batch end", batch, {name: round(value, 5) for name, value in logs.items()}))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("size", [1, 2, 4, 101])  # of 6 training and 3 validation batches
def test_batches_are_numbered_as_in_keras(size):
    def train(fit):
        keras.utils.set_random_seed(7)
        recorder, model = TestBatchRecorder(), classifier(steps_per_execution=size)
        fit(model, batches(), epochs=2, callbacks=[recorder], validation_data=VALIDATION)
        return recorder.calls

    expected = train(lambda model, data, **given: model.fit(data, verbose=0, shuffle=False, **given))
    assert train(tfdist.fit) == expected


def test_batch_hooks_are_called_for_validation_data_of_unknown_length():
    recorder = TestBatchRecorder()
    unknown = VALIDATION.filter(lambda *_: True)
    tfdist.fit(classifier(), batches(), callbacks=[recorder], validation_data=unknown)
    assert [call[:2] for call in recorder.calls if call[0].startswith("test batch")] == [
        (f"test batch {what}", number) for number in range(3) for what in ("begin", "end")
    ]


def test_a_callback_stops_a_validation():
    def ends(batch, logs):
        model.stop_evaluating = batch == 1

    model = classifier(metrics=[Examples()])
    callback = kc.Callback()
    callback.on_test_batch_end = ends
    history = tfdist.fit(model, batches(), epochs=2, callbacks=[callback], validation_data=VALIDATION)
    assert history.history["val_examples"] == [2 * BATCH] * 2


class SetLearningRate(kc.Callback):
    """Sets the learning rate before or after each batch."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def set(self, batch):
        self.model.optimizer.learning_rate = 0.2 / (batch + 1) ** 2

    def on_train_batch_begin(self, batch, logs=None):
        self.set(batch) if self.hook == "begin" else None

    def on_train_batch_end(self, batch, logs=None):
        self.set(batch) if self.hook == "end" else None


@pytest.mark.parametrize("hook", ["begin", "end"])
def test_a_learning_rate_set_by_a_callback_applies_to_the_next_batch(hook):
    keras.utils.set_random_seed(7)
    plain = classifier(optimizer="sgd")
    plain.fit(batches(), epochs=2, verbose=0, shuffle=False, callbacks=[SetLearningRate(hook)])
    keras.utils.set_random_seed(7)
    ours = classifier(optimizer="sgd")
    tfdist.fit(ours, batches(), epochs=2, callbacks=[SetLearningRate(hook)])
    assert_same(plain, ours)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_callbacks_of_batches_assign_is_shared_while_a_run_goes_on(one_by_one, monkeypatch):
    seen = []
    monkeypatch.setattr(MirroredEngine, "one_by_one", one_by_one)
    monkeypatch.setattr(MirroredEngine, "share_changes", lambda self: seen.append("changes"))
    callback = kc.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    tfdist.fit(classifier(), batches(), epochs=1, callbacks=[callback])
    between = seen[seen.index(0) : seen.index(5) + 1]
    assert "changes" in between
    assert [each for each in between if each != "changes"] == list(range(6))
    assert seen[-1] == "changes"


def test_lambda_callback_on_batches():
    seen = []
    callback = kc.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    tfdist.fit(classifier(), batches(), epochs=2, callbacks=[callback])
    assert seen == [0, 1, 2, 3, 4, 5] * 2


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("callback", "acts"),
    [
        (kc.EarlyStopping(), False),
        (kc.ModelCheckpoint("m.keras"), False),
        (kc.ModelCheckpoint("m.keras", save_freq=3), True),
        (kc.BackupAndRestore("backup"), False),
        (kc.BackupAndRestore("backup", save_freq=3), True),
        (kc.TensorBoard("logs"), False),
        (kc.TensorBoard("logs", profile_batch=2), True),
        (kc.TensorBoard("logs", update_freq="batch"), True),
        (kc.TensorBoard("logs", update_freq=5), True),
        (kc.TerminateOnNaN(), True),
        (kc.LambdaCallback(on_epoch_end=print), False),
        (kc.LambdaCallback(on_train_batch_begin=print), True),
    ],
)
def test_which_callbacks_act_on_batches(callback, acts):
    assert acts_on_batches(callback) == acts


def test_early_stopping_restores_the_best_weights():
    def stopping():
        return kc.EarlyStopping("val_loss", patience=1, restore_best_weights=True)

    x, y = classes(60, seed=3)
    harmful = batches(x, (y + 1) % CLASSES)  # training on it makes the validation loss worse
    keras.utils.set_random_seed(7)
    plain = classifier()
    plain.fit(harmful, epochs=9, verbose=0, shuffle=False, callbacks=[stopping()], validation_data=VALIDATION)
    keras.utils.set_random_seed(7)
    ours = classifier()
    tfdist.fit(ours, harmful, epochs=9, callbacks=[stopping()], validation_data=VALIDATION)
    assert len(ours.history.epoch) < 9
    assert_same(plain, ours)


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    "callback",
    [
        lambda: kc.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        lambda: kc.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1)),
        lambda: kc.SwapEMAWeights(swap_on_epoch=True),
    ],
    ids=["ReduceLROnPlateau", "LearningRateScheduler", "SwapEMAWeights"],
)
def test_callbacks_that_change_the_training(callback):
    def build():
        return classifier(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))

    keras.utils.set_random_seed(7)
    plain = build()
    plain.fit(batches(), epochs=4, verbose=0, shuffle=False, callbacks=[callback()])
    keras.utils.set_random_seed(7)
    ours = build()
    tfdist.fit(ours, batches(), epochs=4, callbacks=[callback()])
    assert_same(plain, ours)


@pytest.mark.parametrize("name", ["best.keras", "best.weights.h5"])
def test_model_checkpoint_holds_the_weights_of_its_epoch(name, tmp_path):
    saver = kc.ModelCheckpoint(tmp_path / name, monitor="loss", save_weights_only=name.endswith("h5"))
    model = classifier(keras.layers.Dense(4), keras.layers.Dropout(0.3))
    tfdist.fit(model, batches(), epochs=2, callbacks=[saver])
    again = classifier(keras.layers.Dense(4), keras.layers.Dropout(0.3))
    if name.endswith("h5"):
        again.load_weights(tmp_path / name)
    else:
        again = keras.saving.load_model(tmp_path / name)
        assert int(again.optimizer.iterations) == 12
    x, _ = classes()
    np.testing.assert_array_equal(again(x), model(x))


def test_csv_logger(tmp_path):
    tfdist.fit(classifier(), batches(), epochs=3, callbacks=[kc.CSVLogger(tmp_path / "log.csv")])
    lines = (tmp_path / "log.csv").read_text().split()
    assert lines[0] == "epoch,accuracy,loss,val_accuracy,val_loss"
    assert len(lines) == 4


class Interrupt(kc.Callback):
    """Raises KeyboardInterrupt at a batch, counted over all epochs."""

    def __init__(self, at=None):
        super().__init__()
        self.left, self.batches = at, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.left:
            raise KeyboardInterrupt


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("save_freq", "whole"), [("epoch", 2), (4, 1)])  # Keras counts an epoch after its end
def test_backup_and_restore_resumes_after_the_last_complete_epoch(tmp_path, save_freq, whole):
    def train(fit, folder):
        """Interrupts the training in the third of four epochs, and starts it again, as another process would."""
        keras.utils.set_random_seed(7)
        batch_counts = []
        for breaks_at in (15, None):
            model, counter = classifier(keras.layers.Dense(4), keras.layers.Dropout(0.4)), Interrupt(breaks_at)
            with contextlib.suppress(KeyboardInterrupt):
                fit(model, batches(), epochs=4, callbacks=[kc.BackupAndRestore(folder, save_freq), counter])
            batch_counts.append(counter.batches)
        return model, batch_counts

    plain, expected = train(
        lambda model, data, **given: model.fit(data, verbose=0, shuffle=False, **given), tmp_path / "a"
    )
    ours, own = train(tfdist.fit, tmp_path / "b")
    assert own == expected == [15, 6 * (4 - whole)]
    assert_same(plain, ours)


def test_backups_and_checkpoints_together_are_an_error(tmp_path):
    backup, checkpoints = kc.BackupAndRestore(tmp_path / "a"), tfdist.Checkpoints(tmp_path / "b")
    with raises(UsageError, "backup-and-checkpoints"):
        tfdist.fit(classifier(), batches(), callbacks=[backup], checkpoints=checkpoints)


@pytest.fixture
def limits():
    yield keras.config
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


def test_keras_own_limits_shorten_a_training(limits):
    limits.set_max_epochs(2)
    limits.set_max_steps_per_epoch(2)
    model = classifier(metrics=[Examples()])
    history = tfdist.fit(model, batches(), epochs=5, validation_data=VALIDATION)
    assert history.history["examples"] == history.history["val_examples"] == [2 * BATCH] * 2
    assert len(tfdist.fit(model, batches(), max_steps=100).epoch) == 2
    assert len(tfdist.fit(model, batches()).epoch) == 1


def test_another_strategys_scope_is_an_error():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = classifier()
        with raises(UsageError, "foreign-strategy-scope") as caught:
            tfdist.fit(model, batches())
    assert "MirroredStrategy" in caught.value.message


def test_a_profile_of_a_batch_is_written(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tfdist.fit(classifier(), batches(), callbacks=[kc.TensorBoard(tmp_path, profile_batch=2)])
    records = [
        value
        for path in tmp_path.glob("train/events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert "batch_2" in [record.tag for record in records]
    assert list(tmp_path.rglob("*.xplane.pb"))


def events(folder):
    return [event for path in folder.glob("events*") for event in tf.compat.v1.train.summary_iterator(str(path))]


def test_tensorboard_has_histograms_images_and_graphs(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    board = kc.TensorBoard(tmp_path, histogram_freq=1, write_images=True, write_steps_per_second=True, update_freq=1)
    model = classifier()
    tfdist.fit(model, batches(), epochs=2, callbacks=[board], validation_data=VALIDATION)
    found = events(tmp_path / "train")
    tags = [value.tag for event in found for value in event.summary.value]
    weights = [weight.path for layer in model.layers for weight in layer.weights]
    assert {tag: tags.count(tag) for tag in (f"{path}/histogram" for path in weights)} == {
        f"{path}/histogram": 2 for path in weights
    }
    assert {"keras", "epoch_steps_per_second", "batch_loss", f"{weights[0]}/image"} <= set(tags)
    graphs = [tf.compat.v1.GraphDef.FromString(event.graph_def) for event in found if event.graph_def]
    assert len(graphs) == 1
    assert "MatMul" in {node.op for node in graphs[0].node}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tfdist.fit(classifier(), batches(), epochs=2, callbacks=[kc.TensorBoard(tmp_path)], validation_data=VALIDATION)
    assert list((tmp_path / "train").glob("events*"))
    assert list((tmp_path / "validation").glob("events*"))


def test_remote_monitor(monkeypatch):
    posts = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Logs nothing."""

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monitor = kc.RemoteMonitor(f"http://127.0.0.1:{server.server_port}", send_as_json=True)
        history = tfdist.fit(classifier(), batches(), epochs=2, callbacks=[monitor], validation_data=VALIDATION)
        server.shutdown()
    assert [post["epoch"] for post in posts] == [0, 1]
    for name, values in history.history.items():
        assert [float(post[name]) for post in posts] == pytest.approx(values), name


class StopAt(kc.Callback):
    """Stops the training after a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.place, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            self.model.stop_training = True


def test_a_callback_stops_the_training_within_an_epoch():
    keras.utils.set_random_seed(7)
    plain = classifier()
    plain.fit(batches(), epochs=4, verbose=0, shuffle=False, callbacks=[StopAt(1, 2)], validation_data=VALIDATION)
    keras.utils.set_random_seed(7)
    ours = classifier()
    tfdist.fit(ours, batches(), epochs=4, callbacks=[StopAt(1, 2)], validation_data=VALIDATION)
    assert int(ours.optimizer.iterations) == 9
    assert_same(plain, ours)


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin"])
def test_a_request_to_stop_before_a_batch_ends_the_training_after_it_as_in_keras(hook):
    def train(fit):
        keras.utils.set_random_seed(7)
        model = classifier()
        stop = kc.LambdaCallback(**{hook: lambda *_: setattr(model, "stop_training", True)})
        fit(model, batches(), epochs=3, shuffle=False, callbacks=kc.CallbackList([stop], add_history=True, model=model))
        return model

    plain, ours = train(keras.Model.fit), train(tfdist.fit)
    assert int(ours.optimizer.iterations) == 1
    assert_same(plain, ours)


class Own(kc.Callback):
    """A program's callback that decides everything by itself."""

    def on_train_begin(self, logs=None):
        self.steps, self.rates = self.params["steps"], []

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 * (self.steps - batch) / self.steps * min(1, logs["loss"])
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = self.rates[-1]
        self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])
        self.model.stop_training = epoch == 1


def test_a_callback_of_the_programs_own_changes_rate_weights_logs_and_length():
    def train(fit):
        keras.utils.set_random_seed(7)
        model, own = classifier(optimizer="sgd"), Own()
        fit(model, batches(), epochs=4, callbacks=own, verbose=0, shuffle=False)
        return model, own

    (plain, expected), (ours, own) = train(keras.Model.fit), train(tfdist.fit)
    assert own.rates == pytest.approx(expected.rates, rel=1e-5)
    assert len(ours.history.history["rate"]) == 2
    assert_same(plain, ours)


def test_a_second_fit_continues_the_first():
    def build():
        keras.utils.set_random_seed(7)
        return classifier(keras.layers.Dense(4), keras.layers.Dropout(0.4))

    plain, ours = build(), build()
    for _ in range(2):
        plain.fit(batches(), verbose=0, shuffle=False)
        tfdist.fit(ours, batches())
    assert_same(plain, ours)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("given", "steps", "epochs"),
    [
        ({"max_steps": 1}, 1, [0]),
        ({"max_steps": 17}, 17, [0, 1, 2]),
        ({"max_steps": 17, "steps_per_execution": 4}, 17, [0, 1, 2]),
        ({"max_steps": 17, "epochs": 2}, 12, [0, 1]),
        ({"max_steps": 7, "epochs": 20}, 7, [0, 1]),
        ({"epochs": 3, "steps_per_epoch": 7, "steps_per_execution": 5}, 21, [0, 1, 2]),
        ({"epochs": 2, "steps_per_epoch": 12, "steps_per_execution": 12}, 24, [0, 1]),
        ({"steps_per_epoch": 13}, 13, [0]),
        ({"max_steps": 11, "steps_per_epoch": 100}, 11, [0]),
        ({"max_steps": 13, "steps_per_epoch": 1}, 13, list(range(13))),
    ],
)
def test_the_number_of_steps_is_exact(given, steps, epochs, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    model = classifier()
    seen = Examples()
    model.compile(model.optimizer, model.loss, metrics=[seen])
    data = tf.data.Dataset.from_tensor_slices(classes(48)).batch(BATCH).repeat()
    given = {"steps_per_epoch": 6} | given
    history = tfdist.fit(model, data, **given)
    assert int(model.optimizer.iterations) == steps
    assert history.epoch == epochs
    assert sum(history.history["examples"]) == steps * BATCH
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == steps
    assert lines[-1]["worker_steps"] == {"chief:0": steps}


class Examples(keras.metrics.Metric):
    """The number of examples."""

    def __init__(self, name="examples", **given):
        super().__init__(name=name, **given)
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_true)[0])

    def result(self):
        return self.count


def test_a_loss_that_is_not_finite_is_reported_with_its_step():
    x, y = classes(48)
    x[8 * 4 + 3] = np.nan  # in the fifth batch
    with raises(TrainingError, "loss-not-finite") as caught:
        tfdist.fit(classifier(keras.layers.Dense(4)), batches(x, y), steps_per_execution=3)
    assert "nan at step 5 " in caught.value.message


def test_terminate_on_nan_ends_the_training_as_in_keras():
    x, y = classes(48)
    x[8 * 4 + 3] = np.nan
    model = classifier(keras.layers.Dense(4))
    history = tfdist.fit(model, batches(x, y), epochs=3, callbacks=[kc.TerminateOnNaN()])
    assert int(model.optimizer.iterations) == 5
    assert history.epoch == [0]


@pytest.mark.parametrize("size", [1, 4])
def test_batches_are_numbered_as_in_keras_up_to_an_end_that_nobody_knows(size, monkeypatch):
    monkeypatch.setattr(loop, "_BLOCK", 1)  # the data is known to follow for one execution
    recorders = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        recorders.append(BatchRecorder())
        data = batches().filter(lambda *_: True)
        train(classifier(steps_per_execution=size), data, epochs=2, verbose=0, callbacks=[recorders[-1]])
    expected, ours = recorders
    # Keras notices the end in a step of its own: a batch begins and does not end, and Adam counts it if it runs alone.
    empty = [at for at, call in enumerate(expected.calls) if call[0] == "epoch end"]
    assert {expected.calls.pop(at - 1)[0] for at in reversed(empty)} == {"batch begin"}
    parts = 2 if size == 1 else 3
    assert [call[:parts] for call in ours.calls] == [call[:parts] for call in expected.calls]
    assert ours.params == expected.params


def test_arrays_are_shuffled_unless_shuffle_is_false():
    x, y = classes()
    orders = {}
    for shuffle in (True, False):
        keras.utils.set_random_seed(7)
        model = classifier(metrics=[Examples()])
        history = tfdist.fit(model, (x, y), epochs=2, batch_size=BATCH, shuffle=shuffle)
        assert history.history["examples"] == [len(x), len(x)]
        assert int(model.optimizer.iterations) == 2 * 6
        orders[shuffle] = model
    keras.utils.set_random_seed(7)
    plain = classifier(metrics=[Examples()])
    plain.fit(x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(plain, orders[False])
    assert difference(plain.variables, orders[True].variables) > 1e-4


def test_data_without_targets_is_an_error():
    x, _ = classes()
    with raises(TrainingError, "no-targets"):
        tfdist.fit(classifier(), (x,))


def test_validation_data_without_an_end_is_an_error():
    with raises(TrainingError, "endless-evaluation-data"):
        tfdist.fit(classifier(), batches(), validation_data=batches().repeat())
    limited = tfdist.Validation(batches().repeat(), steps=2)
    assert "val_loss" in tfdist.fit(classifier(), batches(), validation_data=limited).history


def test_a_metric_with_a_vector_result():
    def build():
        one_hot = keras.losses.CategoricalCrossentropy(from_logits=True)
        model = classifier()
        model.compile("adam", one_hot, metrics=[keras.metrics.F1Score()])
        return model

    x, y = classes()
    plain, ours = train_both(build, batches(x, np.eye(CLASSES, dtype=np.float32)[y]))
    assert_same(plain, ours)


def test_a_model_in_float8_is_trained():
    def build():
        model = classifier()
        model.quantize("float8")
        model.compile("sgd", model.loss)
        return model

    assert_same(*train_both(build))


def test_training_without_graph_optimizers():
    # Ops that TensorFlow's graph optimizers remove are not executed, so errors in them would not be noticed.
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        assert_same(*train_both(classifier))
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


class SinceTheStart(keras.metrics.MeanMetricWrapper):
    """The accuracy over all epochs."""

    def __init__(self):
        super().__init__(keras.metrics.sparse_categorical_accuracy, name="since_the_start")

    def reset_state(self):
        """Keeps what was counted."""


def test_a_metric_that_resets_nothing_continues_in_the_next_epoch():
    assert_same(*train_both(lambda: classifier(metrics=[SinceTheStart()]), epochs=3))


class MetricReader(kc.LambdaCallback):
    """Records the results of the model's metrics in each hook."""

    def __init__(self, hooks):
        self.read = []
        super().__init__(**{hook: partial(self._read, hook) for hook in hooks})

    def _read(self, hook, *_, **__):
        results = self.model.get_metrics_result()
        self.read.append((hook, {name: round(float(value), 5) for name, value in results.items()}))


EPOCH_HOOKS = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")
BATCH_HOOKS = tuple(f"on_{what}_{when}" for what in ("train_batch", "test_batch", "test") for when in ("begin", "end"))


class ReadsAllHooks(MetricReader):
    """Reads them in hooks of evaluations and batches, too."""

    def __init__(self):
        super().__init__(EPOCH_HOOKS)
        for hook in BATCH_HOOKS:
            setattr(self, hook, partial(self._read, hook))


@pytest.mark.parametrize("kind", [partial(MetricReader, EPOCH_HOOKS), ReadsAllHooks], ids=["epochs", "batches"])
def test_metrics_are_read_in_callbacks_and_afterwards_as_in_keras(kind):
    def read(fit, evaluate):
        keras.utils.set_random_seed(7)
        model, callbacks = classifier(), [kind(), kind()]
        model.test_on_batch(*classes(9))  # Keras builds the metrics
        fit(model, batches(), epochs=2, validation_data=VALIDATION, callbacks=callbacks[:1])
        callbacks[0].read.append({name: round(float(value), 5) for name, value in model.get_metrics_result().items()})
        evaluate(model, VALIDATION, callbacks=callbacks[1:])
        callbacks[1].read.append([round(float(metric.result()), 5) for metric in model.metrics[:1]])
        return callbacks[0].read, callbacks[1].read

    plain = read(
        lambda model, data, **given: model.fit(data, verbose=0, shuffle=False, **given),
        lambda model, data, **given: model.evaluate(data, verbose=0, **given),
    )
    assert read(tfdist.fit, tfdist.evaluate) == plain
    assert plain[0][-1]["accuracy"] > 0
