"""Operations send tensors in buffers, or in messages where there are none."""

import errno

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory import tensors
from tfdist_cli.train.cluster.shared_memory.buffers import MESSAGE_BYTES, Buffers
from tfdist_cli.train.cluster.shared_memory.memory import OthersMemory
from tfdist_cli.train.tf_compat.data import register_python

SHAPE = (300, 7)


@pytest.fixture
def process(monkeypatch):
    """This process, as if it had not sent anything yet; it is worker and ps."""
    process = tensors._Process()
    monkeypatch.setattr(tensors, "_process", process)
    tensors.register()
    return process


def sent(values):
    """What arrives, and the bytes that crossed."""

    @tf.function
    def send_and_receive(values):
        message = tensors.send(values)
        return tensors.receive(message, values.dtype, values.shape), tf.size(message)

    received, size = send_and_receive(values)
    return received, int(size)


def met(worker=0):
    return bool(tensors.meeting(worker, ["CPU:0", "CPU:0"])())


def test_a_task_that_neither_sends_nor_receives_may_open_the_memory_of_others(process, monkeypatch):
    assert tensors.opens_memory(["CPU:0", "CPU:0"])
    with monkeypatch.context() as patch:
        patch.setattr(OthersMemory, "opened", lambda _: None)
        assert not tensors.opens_memory(["CPU:0"])
    monkeypatch.setenv("TFDIST_SHARE_MEMORY", "0")
    assert not tensors.opens_memory(["CPU:0"])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.uint8])
def test_tensors_arrive_as_they_are(process, dtype):
    assert met()
    for number in range(5):
        values = tf.cast(tf.random.uniform(SHAPE, maxval=100, seed=number), dtype)
        received, size = sent(values)
        assert size == MESSAGE_BYTES
        assert received.dtype == dtype
        assert received.shape == values.shape
        tf.debugging.assert_equal(received, values)


def test_the_same_buffers_are_used_again(process):
    assert met()
    for number in range(20):
        received, _ = sent(tf.fill(SHAPE, float(number)))
        assert set(received.numpy().flat) == {float(number)}
    del received
    assert sum(map(len, process._buffers._buffers.values())) <= 3


def test_a_variable_may_keep_what_has_arrived(process):
    assert met()
    kept = [tf.Variable(sent(tf.fill(SHAPE, float(number)))[0]) for number in range(4)]
    for number in range(4, 10):
        sent(tf.fill(SHAPE, float(number)))
    for number, variable in enumerate(kept):
        variable.assign_add(tf.ones(SHAPE))
        assert set(variable.numpy().flat) == {number + 1.0}


def counted(process, name):
    """Counts the calls of a registered function from now on."""
    calls, function = [], getattr(process, f"_{name}")
    register_python(f"buffers_{name}", lambda *arguments: (calls.append(name), function(*arguments))[1])
    return calls


@pytest.mark.parametrize("wanted", ["constants", "equal tensors", "constants in a loop", "nothing"])
def test_each_message_is_sent_anew_and_only_if_it_is_received(process, wanted):
    assert met()
    sends, receives = counted(process, "send"), counted(process, "receive")

    def crossed(values):
        return tensors.receive(tensors.send(values), values.dtype, values.shape)

    @tf.function
    def run(values):
        if wanted == "nothing":
            crossed(values)
            return [values]
        if wanted == "equal tensors":
            return [crossed(values), crossed(values)]
        if wanted == "constants":
            return [crossed(tf.zeros_like(values)), crossed(tf.zeros_like(values))]
        total = values
        for _ in tf.range(3):
            total += crossed(tf.zeros_like(values))
        return [total]

    for number in range(1, 5):
        values = tf.fill(SHAPE, float(number))
        expected = 0.0 if wanted == "constants" else float(number)
        for received in run(values):
            assert set(received.numpy().flat) == {expected}
    each = {"constants": 2, "equal tensors": 2, "constants in a loop": 3, "nothing": 0}[wanted]
    assert (len(sends), len(receives)) == (4 * each, 4 * each)


def test_before_they_have_met_the_data_crosses(process):
    received, size = sent(tf.fill(SHAPE, 3.0))
    assert size == 4 * np.prod(SHAPE)
    assert set(received.numpy().flat) == {3.0}


def test_one_worker_that_cannot_read_stops_all_and_may_come_back(process, monkeypatch):
    assert met(0)
    with monkeypatch.context() as patched:
        patched.setattr(OthersMemory, "opened", lambda identity: None)
        assert not met(1)
    assert sent(tf.fill(SHAPE, 3.0))[1] > MESSAGE_BYTES
    assert met(1)
    assert sent(tf.fill(SHAPE, 3.0))[1] == MESSAGE_BYTES


def test_a_system_without_shared_memory(process, monkeypatch):
    def unsupported():
        raise AttributeError("memfd_create")

    monkeypatch.setattr(tensors, "Buffers", unsupported)
    assert not met()
    assert sent(tf.fill(SHAPE, 3.0))[1] > MESSAGE_BYTES


def test_without_room_for_a_buffer_the_data_crosses(process, monkeypatch):
    def no_memory(*_):
        raise OSError(errno.ENOMEM, "no memory")

    assert met()
    with monkeypatch.context() as patched:
        patched.setattr(Buffers, "write", no_memory)
        received, size = sent(tf.fill(SHAPE, 3.0))
    assert size > MESSAGE_BYTES
    assert set(received.numpy().flat) == {3.0}
    assert sent(tf.fill(SHAPE, 3.0))[1] == MESSAGE_BYTES


@pytest.mark.parametrize(
    ("addresses", "one"),
    [
        (["a:1", "a:2", "a:3"], True),
        (["[::1]:1", "[::1]:2"], True),
        (["a:1", "a:2", "b:2"], False),
        ([], False),
    ],
)
def test_whether_tasks_are_on_one_host(addresses, one):
    assert tensors.on_one_host(addresses) == one
