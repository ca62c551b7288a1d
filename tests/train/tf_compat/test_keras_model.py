"""What Keras's models, layers and callbacks keep private is there, and the public way still does not do."""

import inspect
import traceback
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as keras_losses

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.train.tf_compat import keras_model
from tfdist_cli.train.tf_compat.keras_model import (
    CALLBACK_MODEL,
    COMPUTES_LOSS,
    TENSORBOARD_PROCESS_ATTRIBUTES,
    Functional,
    sublayers,
)


def classifier(**options):
    inner = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input([4]), inner, keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


SPEC = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int64))


def test_keras_has_no_public_name_for_functional_models():
    x = keras.Input([4])
    assert type(keras.Model(x, keras.layers.Dense(1)(x))) is Functional
    assert not hasattr(keras, "Functional")
    assert not hasattr(keras.models, "Functional")


class MixedIn(TensorFlowTrainer, keras.layers.Dense):
    """A layer that Keras trains, as Keras's own tests make them."""

    def __init__(self):
        keras.layers.Dense.__init__(self, 2)
        TensorFlowTrainer.__init__(self)


def test_a_layer_with_the_trainer_is_a_model():
    assert keras_model.is_model(classifier())
    assert keras_model.is_model(MixedIn())
    assert not isinstance(MixedIn(), keras.Model), "the public class is enough now"
    assert not keras_model.is_model(keras.layers.Dense(2))
    assert not keras_model.is_model(3)


def test_values_of_an_evaluation_are_listed_in_the_order_of_keras():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert keras_model.listed_logs(model, {"b": 2.0, "loss": 1.0, "a": 3.0}) == [1.0, 3.0, 2.0]
    assert keras_model.listed_logs(model, {"loss": 1.0}) == 1.0


def test_layers_at_any_depth():
    model = classifier()
    names = [type(layer).__name__ for layer in keras_model.layers_of(model)]
    assert sorted(names) == ["Dense", "Dense", "Dropout", "InputLayer", "InputLayer", "Sequential", "Sequential"]
    assert len(model.layers) == 2, "the public list has all layers now"


def test_the_states_of_recurrent_layers():
    layer = keras.layers.GRU(3, stateful=True)
    assert not keras_model.recurrent_states(layer), "they are made when the layer is built"
    layer.build((2, 5, 4))
    (state,) = keras_model.recurrent_states(layer)
    assert state.shape == (2, 3)
    assert not any(each is state for each in layer.variables), "the public list has them now"
    assert not keras_model.recurrent_states(keras.layers.Dense(2))


def test_draws_without_a_seed_come_from_the_process_wide_generator():
    keras.utils.set_random_seed(3)
    before = keras.ops.convert_to_numpy(keras_model.process_wide_seeds().state)
    keras.random.normal((2,))
    after = keras.ops.convert_to_numpy(keras_model.process_wide_seeds().state)
    factor, modulus = keras_model.UNSEEDED_FACTOR, keras_model.UNSEEDED_MODULUS
    np.testing.assert_array_equal(after, (before.astype(np.int64) + 1) * factor % modulus)


def test_seed_generators_of_one_layer():
    model = classifier()
    found = [generator for layer in keras_model.layers_of(model) for generator in keras_model.seed_generators(layer)]
    assert [type(generator) for generator in found] == [keras.random.SeedGenerator]


def test_the_public_table_is_no_variable_with_lora():
    layer = keras.layers.Embedding(5, 3)
    assert keras_model.embeddings_of(layer) is None
    layer.build()
    layer.enable_lora(2)
    assert isinstance(keras_model.embeddings_of(layer), keras.Variable)
    assert not isinstance(layer.embeddings, keras.Variable), "the public table is the variable now"


def test_one_call_builds_model_metrics_and_optimizer():
    model = classifier(metrics=["accuracy"])
    model.optimizer = keras.optimizers.Adam()
    keras_model.build(model, SPEC)
    assert model.optimizer.built
    assert {metric.name for metric in model.metrics} == {"loss", "compile_metrics"}
    assert model.get_metrics_result().keys() == {"loss", "accuracy"}
    model = classifier()
    model.build((None, 4))
    assert not model.optimizer.built, "the public `build` builds the optimizer now"


def test_a_call_with_the_argument_training():
    class Plain(keras.Model):
        def call(self, x):
            return x

    assert keras_model.accepts_training(classifier())
    assert not keras_model.accepts_training(Plain())


class OwnLoss(keras.Model):
    """A model whose `compute_loss` is as Keras wanted it before 3.3."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        if y is None:
            raise ValueError("no targets")
        return tf.constant(7.0)


def test_a_loss_without_the_argument_training():
    model = OwnLoss()
    model.compile("sgd")
    assert keras_model.compute_loss(model, y=tf.zeros([1]), training=True).numpy() == 7
    given: dict[str, Any] = {"training": True}
    with pytest.raises(TypeError, match="training"):
        model.compute_loss(y=tf.zeros([1]), **given)
    with pytest.raises(ValueError, match="no targets") as caught:
        keras_model.compute_loss(model, training=True)
    names = {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert set(COMPUTES_LOSS) <= names


def test_metrics_that_a_model_leaves_out_of_its_list():
    class OwnMetrics(keras.Sequential):
        @property
        def metrics(self):
            return []

    model = OwnMetrics([keras.Input([4]), keras.layers.Dense(2)])
    assert not keras_model.has_compiled_loss(model)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    keras_model.build(model, SPEC)
    assert keras_model.has_compiled_loss(model)
    assert keras_model.loss_tracker(model).name == "loss"
    found = keras_model.compiled_metrics(model)
    assert [metric.name for metric in found][:2] == ["loss", "compile_metrics"]
    assert not model.metrics


def test_the_loss_of_each_output_is_replaced():
    model = classifier()
    keras_model.build(model, SPEC)
    seen = []

    def double(loss):
        seen.append(loss)
        return lambda y, y_pred, sample_weight=None: 2 * loss(y, y_pred, sample_weight)

    y, y_pred = np.zeros(3, int), np.zeros([3, 2], np.float32)
    plain = float(model.compute_loss(y=y, y_pred=y_pred))
    keras_model.replace_losses(model, double)
    assert isinstance(seen[0], keras.losses.SparseCategoricalCrossentropy)
    assert float(model.compute_loss(y=y, y_pred=y_pred)) == pytest.approx(2 * plain)


def test_losses_are_scaled_unless_that_is_off(monkeypatch):
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        monkeypatch.setattr(keras_losses, name, getattr(keras_losses, name))
    within = []
    keras_model.skip_loss_scaling(lambda: bool(within))
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", 4)
    loss, y = keras.losses.MeanSquaredError(), np.ones([2, 1], np.float32)
    assert float(loss(y, 0 * y)) == pytest.approx(0.25), "Keras does not scale losses any more"
    within.append(True)
    assert float(loss(y, 0 * y)) == pytest.approx(1)


def test_keras_finds_the_loss_and_the_argmax_of_classes_where_they_are_replaced(monkeypatch):
    for owner, name in ((tf.nn, "sparse_softmax_cross_entropy_with_logits"), (keras_numpy, "argmax")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    called = []

    def counted(name, function):
        def call(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return call

    keras_model.replace_class_functions(partial(counted, "loss"), partial(counted, "argmax"))
    labels, scores = np.array([1]), tf.constant([[0.0, 1.0, 0.0]])
    keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, scores)
    assert keras.metrics.sparse_categorical_accuracy(labels, scores).numpy() == [1.0]
    assert called == ["loss", "argmax"]


def test_the_epoch_that_a_backup_has_restored():
    model = classifier()
    assert keras_model.initial_epoch(model) == 0
    source = inspect.getsource(keras.callbacks.BackupAndRestore)
    assert "model._initial_epoch = epoch" in source


def test_the_shapes_of_several_arguments():
    class Two(keras.layers.Layer):
        def build(self, a_shape, b_shape):
            pass

        def call(self, a, b):
            return a

    layer = Two()
    layer(np.zeros([2, 3]), np.zeros([2, 4]))
    assert keras_model.build_shapes(layer) == {"a_shape": (2, 3), "b_shape": (2, 4)}


def test_inputs_and_outputs_with_their_keys():
    given = {"a": keras.Input([2], name="a"), "b": keras.Input([3], name="b")}
    model = keras.Model(given, {"sum": keras.layers.Concatenate()(list(given.values()))})
    assert keras_model.structure_of(model, "inputs").keys() == {"a", "b"}
    assert keras_model.structure_of(model, "outputs").keys() == {"sum"}
    assert isinstance(model.outputs, list), "the public outputs have their keys now"
    assert keras_model.structure_of(classifier(), "inputs").shape == (None, 4)
    assert keras_model.structure_of(OwnLoss(), "inputs") == ()


def test_hooks_of_callbacks_that_do_nothing():
    class Own(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            pass

    assert keras_model.is_default(Own().on_batch_begin)
    assert not keras_model.is_default(Own().on_batch_end)


def test_state_of_callbacks(tmp_path):
    callback = keras.callbacks.TensorBoard(tmp_path, write_steps_per_second=True)
    model = classifier()
    callback.set_model(model)
    assert vars(callback)[CALLBACK_MODEL] is model
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    assert vars(callback).keys() >= TENSORBOARD_PROCESS_ATTRIBUTES
    assert not keras_model.profiles_batches(callback)
    callback.on_train_end()
    profiling = keras.callbacks.TensorBoard(tmp_path, profile_batch=2)
    assert keras_model.profiles_batches(profiling)


def test_the_graph_of_the_train_step_is_written_once(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    callback = keras.callbacks.TensorBoard(tmp_path)
    callback.set_model(classifier())
    graph = tf.Graph()
    with graph.as_default():
        tf.constant(7, name="seven")
    for _ in range(2):
        keras_model.write_train_graph(callback, lambda: graph)
    callback.on_train_end()
    found = [
        event.graph_def
        for path in (tmp_path / "train").glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        if event.graph_def
    ]
    assert [[node.name for node in tf.compat.v1.GraphDef.FromString(each).node] for each in found] == [["seven"]]


def test_what_draws_without_a_seed():
    class Refused:
        def next(self, **_):
            raise ValueError("drawn")

    keras.random.normal([1])
    with keras_model.global_seed_generator(Refused()), pytest.raises(ValueError, match="drawn"):
        keras.random.normal([1])
    keras.random.normal([1])


@pytest.fixture
def keras_methods(monkeypatch):
    """Puts Keras's methods back after a test."""
    trainer = TensorFlowTrainer
    assert trainer in keras.Model.__mro__
    for name in ("predict", "predict_on_batch", "evaluate", "test_on_batch", "fit", "train_on_batch"):
        monkeypatch.setattr(trainer, name, getattr(trainer, name))


def test_models_of_a_cluster_predict_here_and_do_not_fit(keras_methods):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = classifier()
    keras_model.adapt(strategy)
    x = np.zeros([2, 4], np.float32)
    seen = []

    def call(x, **_):
        seen.append(tf.distribute.has_strategy())
        return x[:, :2]

    model.layers[-1].call = call
    model.run_eagerly = True
    with strategy.scope():
        assert model.predict(x, verbose=0).shape == (2, 2)
    assert seen
    assert not any(seen)
    assert model.distribute_strategy is strategy
    with raises(UsageError, "keras-fit-on-cluster"):
        model.fit(x, np.zeros(2))


@pytest.mark.parametrize("compiles", [False, True])
def test_models_whose_variables_are_in_other_tasks_predict_without_xla(keras_methods, monkeypatch, compiles):
    strategy, compiled = tf.distribute.OneDeviceStrategy("CPU:0"), []
    monkeypatch.setattr(TensorFlowTrainer, "predict", lambda model: compiled.append(model.jit_compile))
    with strategy.scope():
        model = classifier(jit_compile=True)
    keras_model.adapt(strategy, compiles=compiles)
    model.predict()
    assert compiled == [compiles]
    assert model.jit_compile


def test_one_batch_is_predicted_once(keras_methods):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = classifier()
    keras_model.adapt_batches(strategy)
    assert model.predict_on_batch(np.zeros([2, 4], np.float32)).shape == (2, 2)


def test_layers_of_a_model_without_a_call_are_built():
    model = classifier()
    outer = keras.Model()
    outer.inner = model
    assert not outer.built
    assert keras_model.layers_are_built(outer)
    outer.other = keras.layers.Dense(1)
    assert not keras_model.layers_are_built(outer)


def test_variables_made_in_a_symbolic_trace_are_initialized_after_it():
    layer, shapes = keras.layers.Dense(2), []

    def function(batch):
        assert keras_model.stateless_scope() is not None
        shapes.append(layer(batch[0]).shape)

    keras_model.traced_symbolically(function, SPEC)
    assert [tuple(shape) for shape in shapes] == [(None, 2)]
    assert layer.kernel.numpy().shape == (4, 2)
    assert not hasattr(keras.backend, "compute_output_spec"), "there is a public function now"


def test_a_stateless_scope_is_left_for_a_while():
    variable = keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        assert keras_model.stateless_scope() is scope
        with keras_model.without_stateless_scope():
            variable.assign(2.0)
        variable.assign(3.0)
    assert keras_model.stateless_scope() is None
    assert float(variable.numpy()) == 2


def test_sublayers_are_one_level_deep():
    inner = keras.Sequential([keras.layers.Dense(1)])
    outer = keras.Sequential([inner, keras.layers.Dense(2)])
    assert sublayers(outer) == outer.layers


def test_evaluate_and_predict_call_a_function_after_each_batch():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, calls, methods = np.ones((6, 2), "float32"), [], (keras.Model.evaluate, keras.Model.predict)
    given = keras.callbacks.LambdaCallback(on_predict_end=lambda logs: calls.append("end"))
    with keras_model.checked_between_batches(lambda: calls.append("batch")):
        model.evaluate(x, x[:, :1], 2, verbose=0)
        model.predict(x, batch_size=3, verbose=0, callbacks=[given])
    assert calls == ["batch"] * 5 + ["end"]
    model.predict(x, batch_size=3, verbose=0)
    assert len(calls) == 6
    assert (keras.Model.evaluate, keras.Model.predict) == methods


def test_each_compile_has_an_object_of_its_own():
    model = classifier()
    compiled = keras_model.compiled_as(model)
    model.fit(np.zeros([4, 4]), np.zeros([4]), verbose=0)
    assert keras_model.compiled_as(model) is compiled is model._compile_config
    model.compile("sgd", "mse")
    assert keras_model.compiled_as(model) is not compiled
    assert keras_model.compiled_as(keras.Sequential([keras.Input([4])])) is None
