"""If an optimization fails, training continues without it from the restored variables, and logs it once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.compare import assert_same, batches, classes, classifier, train_both
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine import fallback
from tfdist_cli.train.engine.fallback import VariableCopies, attempted
from tfdist_cli.train.engine.mirrored import engine
from tfdist_cli.train.optimizers.registry import KERNELS, Kernel

OFF = "optimizations are off"


def while_tracing(update):
    raise ValueError("this kernel cannot be traced")


def while_running(update):
    """Changes the variable before it fails."""
    changed = update.variable.assign_add(tf.ones_like(update.variable), read_value=False)
    with tf.control_dependencies([changed]):
        return tf.debugging.Assert(tf.reduce_any(update.gradient > 1e9), ["this kernel cannot be run"])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [while_tracing, while_running])
def test_training_continues_without_a_kernel_that_fails(kernel, monkeypatch, log):
    monkeypatch.setitem(KERNELS, keras.optimizers.SGD, Kernel(kernel, lambda _: ()))
    monkeypatch.setattr(fallback, "is_of_model", lambda error: isinstance(error, TrainingError))
    plain, ours = train_both(lambda: classifier(optimizer="sgd"))
    assert_same(plain, ours)
    (line,) = [line for line in log if OFF in line]
    assert "this kernel" in line


@pytest.mark.slow
def test_steps_are_taken_one_by_one_if_a_function_of_several_fails(monkeypatch, log):
    whole = engine.MirroredEngine._execution_function

    def single(self, count):
        if count > 1:
            raise RuntimeError("too many steps in a function")
        return whole(self, count)

    monkeypatch.setattr(engine.MirroredEngine, "_execution_function", single)
    monkeypatch.setattr(fallback, "is_of_model", lambda error: False)
    assert_same(*train_both(classifier))
    assert len([line for line in log if OFF in line]) == 1


class Strict(keras.layers.Layer):
    """Fails because of the data."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(x, -100.0, message="my own rule")]):
            return tf.identity(x)


@pytest.mark.slow
def test_an_error_of_the_model_itself_is_raised_unchanged(log):
    with pytest.raises(tf.errors.InvalidArgumentError, match="my own rule"):
        tfdist.fit(classifier(Strict()), batches())
    assert not [line for line in log if OFF in line]


@pytest.mark.slow
def test_labels_that_the_loss_rejects_are_an_error_of_the_model(log):
    x, _ = classes()
    model = classifier(keras.layers.Dense(4))

    def picked(y, logits):
        with tf.control_dependencies([tf.debugging.assert_less(tf.cast(y, tf.float32), 3.0)]):
            return tf.reduce_sum(tf.cast(tf.one_hot(tf.cast(y, tf.int32), 3), tf.float32) * logits)

    model.compile("sgd", picked)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tfdist.fit(model, batches(x, np.full(len(x), 7)))
    assert not [line for line in log if OFF in line]


def two(own_failure, others_failure):
    """An agreement of two tasks, as one of them sees it."""
    assert own_failure in (0.0, 1.0)
    return lambda values: values + others_failure


def failing():
    raise tf.errors.UnimplementedError(None, None, "no such kernel")


def test_a_failure_on_another_task_counts_here():
    found = attempted(lambda: "done", lambda values: values + 1)
    assert isinstance(found, RuntimeError)
    assert "another task" in str(found)


def test_a_failure_here_is_sent_to_the_other_tasks():
    sent = []

    def agree(values):
        sent.append(values.tolist())
        return values

    assert isinstance(attempted(failing, agree), tf.errors.UnimplementedError)
    assert attempted(lambda: "done", agree) == "done"
    assert sent == [[1.0], [0.0]]


def test_the_failure_is_raised_if_the_other_tasks_cannot_agree():
    def broken(values):
        raise TrainingError("worker:1 sums up something else", hint="")

    with pytest.raises(tf.errors.UnimplementedError, match="no such kernel"):
        attempted(failing, broken)


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("a user's mistake", hint=""),
        tf.errors.OutOfRangeError(None, None, "End of sequence"),
        tf.errors.UnavailableError(None, None, "the ps is gone"),
    ],
)
def test_errors_that_do_not_depend_on_the_path_are_raised_at_once(error):
    def attempt():
        raise error

    with pytest.raises(type(error)):
        attempted(attempt, lambda values: pytest.fail("the other tasks are not asked"))


def test_copies_restore_variables():
    some, none = keras.Variable([1.0, 2.0]), keras.Variable(3, dtype="int32")
    copies = VariableCopies([some, none], tf.distribute.get_strategy().scope)
    some.assign([5.0, 5.0])
    none.assign(7)
    copies.restore()
    assert some.numpy().tolist() == [1.0, 2.0]
    assert int(none.numpy()) == 3


def test_large_variables_are_not_copied(monkeypatch):
    some = [keras.Variable(np.zeros(10, np.float32))]
    assert VariableCopies.fit_memory(some)
    monkeypatch.setattr(fallback, "MAX_BYTES", 39)
    assert not VariableCopies.fit_memory(some)
