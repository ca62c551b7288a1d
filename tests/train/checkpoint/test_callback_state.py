"""Tests of callbacks' state: changed attributes are saved and restored, configuration is not."""

import random
from collections import deque

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as kc
from tensorflow.python.ops import stateful_random_ops

from tfdist_cli.train.checkpoint.callback_state import CallbackStates, random_states, restore_random_states


class Stateful(kc.Callback):
    """A callback with any attributes."""

    def __init__(self, **attributes):
        super().__init__()
        self.change(attributes)

    def change(self, attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def restored_attributes(changes, /, **initial):
    """Returns the attributes of a new callback after the state of another one is restored to it."""
    states = CallbackStates([old := Stateful(**initial)])
    old.change(changes)
    saved, arrays = states.save()
    CallbackStates([new := Stateful(**initial)]).restore(saved, arrays)
    return vars(new)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "text",
        [1, [2.5, None]],
        (1, (2,)),
        {3: "three", ("a", 1): [None]},
        {1, 2},
        deque([1, 2], maxlen=2),
        keras.ops.less,
        np.greater,
    ],
)
def test_values_that_are_restored(value):
    after = restored_attributes({"attributes": value}, attributes=-1)["attributes"]
    assert after == value
    assert type(after) is type(value)
    assert getattr(after, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "<U3"])
def test_arrays_that_are_restored(dtype):
    value = np.ones((2, 3)).astype(tf.bfloat16.as_numpy_dtype if dtype == "bfloat16" else dtype)
    after = restored_attributes({"weights": [value, value[0, 0]]}, weights=None)["weights"]
    assert [part.dtype for part in after] == [value.dtype] * 2
    np.testing.assert_array_equal(after[0], value)
    assert after[1] == value[0, 0]
    assert after[1].shape == ()


def test_a_tensor_is_restored_as_an_array():
    np.testing.assert_array_equal(restored_attributes({"attributes": tf.range(3)})["attributes"], [0, 1, 2])


def test_an_array_that_is_changed_in_place():
    states = CallbackStates([callback := Stateful(counts=np.zeros(3))])
    callback.counts += 1
    saved, arrays = states.save()
    assert list(saved[0]["state"]) == ["counts"]
    np.testing.assert_array_equal(arrays[0], [1, 1, 1])


def test_unchanged_attributes_are_configuration():
    states = CallbackStates([kc.EarlyStopping(patience=3)])
    saved, arrays = states.save()
    CallbackStates([other := kc.EarlyStopping(patience=5)]).restore(saved, arrays)
    assert other.patience == 5


@pytest.mark.parametrize("value", [object(), len, [object()], {"a": print}, np.array([object()])])
def test_values_that_cannot_be_saved_keep_their_initial_value(value):
    assert restored_attributes({"attributes": value}, attributes=-1)["attributes"] == -1


def test_a_recursive_list_is_not_saved():
    endless = []
    endless.append(endless)
    assert "endless" not in restored_attributes({"endless": endless})


def test_restored_attributes_are_saved_again():
    """A program may use the same callback in two trainings."""
    callback = Stateful(seen=0)
    states = CallbackStates([callback])
    callback.seen = 4
    saved, arrays = states.save()
    again = CallbackStates([callback])
    again.restore(saved, arrays)
    assert again.save()[0] == saved


def test_callbacks_are_matched_by_class_and_order():
    states = CallbackStates(pair := [Stateful(n=0), Stateful(n=0), kc.EarlyStopping()])
    pair[0].n, pair[1].n, pair[2].wait = 1, 2, 3
    saved, arrays = states.save()
    CallbackStates(others := [kc.History(), Stateful(n=0), Stateful(n=0)]).restore(saved, arrays)
    assert [other.n for other in others[1:]] == [1, 2]


def test_files_and_clocks_of_tensorboard_are_not_restored(tmp_path):
    states = CallbackStates([board := kc.TensorBoard(tmp_path / "a")])
    board._global_train_batch, board._is_tracing, board._epoch_start_time = 7, True, 1.5
    saved, arrays = states.save()
    CallbackStates([other := kc.TensorBoard(tmp_path / "b")]).restore(saved, arrays)
    assert (other._global_train_batch, getattr(other, "_is_tracing", False)) == (7, False)
    assert not hasattr(other, "_epoch_start_time")
    assert other.log_dir == str(tmp_path / "b")


def test_random_generators_are_restored(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    keras.utils.set_random_seed(3)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    np.random.normal()

    def draw():
        return random.random(), np.random.normal(), float(tf.random.get_global_generator().normal([]))

    states = random_states()
    drawn = draw()
    assert draw() != drawn
    restore_random_states(states)
    assert draw() == drawn


def test_no_generator_is_created_to_save_its_state(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    assert "tensorflow" not in random_states()
    assert stateful_random_ops.global_generator is None
