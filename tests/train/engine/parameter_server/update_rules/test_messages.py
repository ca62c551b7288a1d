"""Orders and answers on their way: an answer is there when the updates before it are."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.update_rules import messages
from tfdist_cli.train.engine.parameter_server.update_rules.messages import (
    KEY,
    NO_MORE,
    SEVERAL,
    STEP,
    WORKER,
    MessageChannels,
)

DEVICES = ["/job:localhost/replica:0/task:0/device:CPU:0"]


@pytest.fixture
def two(monkeypatch):
    """Channels of two workers, a ps that is this process, and updates of two gradients with a number of state."""
    monkeypatch.setattr(messages, "CHIEF_DEVICE", DEVICES[0])
    return MessageChannels(DEVICES, workers=2, aggregate=2, state=1, counted=3)


@tf.function(autograph=False)
def update(handles):
    """Makes the update that is ordered next, and gives its answers; returns the order and the state."""
    order, state = messages.next_order(handles, 2)
    messages.count_update(handles["made"][0], after=[])
    messages.give(handles["answers0"], order[3:])
    return order, state


@tf.function(autograph=False)
def later(handles):
    """Gives the answers that are ordered next, when the updates before them have been made."""
    (order,) = messages.next_answers(handles)
    with tf.control_dependencies([messages.updates_made(handles["made"][0], order[0] - 1)]):
        messages.give(handles["answers0"], order[1:])
    return order[0]


def waiting(two):
    """How many answers wait for each worker."""
    return [int(tf.raw_ops.QueueSizeV2(handle=two.of(worker)["answers"][0])) for worker in range(2)]


def received(two, worker):
    (answer,) = messages.receive(DEVICES, two.of(worker)["answers"])
    return answer.numpy()


def test_an_order_has_the_keys_the_state_and_the_answers(two):
    two.order([7, 8], np.array([0.5]), [(1, 3, True)], several=False)
    order, state = update(two.handles)
    assert order[:3].numpy().tolist() == [1, 7, 8]
    assert state.numpy().tolist() == [0.5]
    assert waiting(two) == [0, 1]
    answer = received(two, 1)
    assert (answer[STEP], answer[SEVERAL], answer[WORKER]) == (3, 1, 1)


def test_that_several_follow_each_other_is_said(two):
    two.order([7, 8], np.zeros([1]), [], several=True)
    order, _ = update(two.handles)
    assert order[0] == 2
    assert waiting(two) == [0, 0]


def test_no_two_answers_have_the_same_key(two):
    two.answer([(0, 0, False), (1, 0, False)])
    two.answer([(0, 1, False)])
    later(two.handles)
    later(two.handles)
    keys = [received(two, worker)[KEY] for worker in (0, 0, 1)]
    assert len(set(keys)) == 3


def test_an_answer_waits_for_the_updates_that_were_ordered_before_it(two):
    for _ in range(2):
        two.order([1, 2], np.zeros([1]), [], several=False)
    two.answer([(0, 2, False)])
    given = threading.Thread(target=later, args=(two.handles,))
    given.start()
    update(two.handles)
    assert given.is_alive()
    assert waiting(two) == [0, 0]
    update(two.handles)
    given.join()
    assert received(two, 0)[STEP] == 2
    two.answer([(0, 3, False)])  # counts only what has been ordered since
    later(two.handles)
    assert received(two, 0)[STEP] == 3


def test_a_run_that_is_broken_off_tells_all_to_leave_when_what_was_ordered_is_done(two):
    two.order([1, 2], np.zeros([1]), [], several=True)
    two.break_off(2)
    update(two.handles)
    for _ in range(2):
        later(two.handles)
    assert [received(two, worker)[STEP] for worker in (0, 0, 1, 1)] == [NO_MORE] * 4
    (order,) = messages.next_answers(two.handles)
    assert order[0] == 0


def test_who_waits_for_an_order_that_never_comes_fails(two):
    two.end_orders()
    with pytest.raises(tf.errors.OutOfRangeError):
        update(two.handles)


def test_who_waits_for_an_update_that_is_never_made_fails(two):
    two.order([1, 2], np.zeros([1]), [], several=False)
    two.answer([(0, 1, False)])
    two.end_waiting()
    with pytest.raises(tf.errors.OutOfRangeError):
        later(two.handles)


def test_the_count_of_updates_is_taken_now_and_then(two, monkeypatch):
    monkeypatch.setattr(messages, "_KEPT", 3)
    for _ in range(3):
        two.order([1, 2], np.zeros([1]), [], several=False)
        update(two.handles)
    assert later(two.handles) == 4
    assert int(tf.raw_ops.QueueSizeV2(handle=two.handles["made"][0])) == 0


def test_who_takes_orders_is_told_to_end(two):
    two.close()
    order, _ = messages.next_order(two.handles, 2)
    assert order[0] == 0
    (order,) = messages.next_answers(two.handles)
    assert order[0] == 0
