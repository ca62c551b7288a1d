"""Orders and assignments in their queues: an assignment arrives when the updates before it are applied."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.messages import (
    AssignmentOrder,
    PackedAssignment,
    UpdateOrder,
)
from tfdist_cli.train.engine.parameter_server.quorum import queues
from tfdist_cli.train.engine.parameter_server.quorum.policy import NO_MORE_STEPS, Assignment
from tfdist_cli.train.engine.parameter_server.quorum.queues import QuorumQueues

DEVICES = ["/job:localhost/replica:0/task:0/device:CPU:0"]


@pytest.fixture
def two(monkeypatch):
    """Queues of two workers, one ps, which is this process, and updates of two gradients with one number of state."""
    monkeypatch.setattr(queues, "CHIEF_DEVICE", DEVICES[0])
    return QuorumQueues(DEVICES, workers=2, aggregate=2, state=1, report=3)


@tf.function(autograph=False)
def update(handles):
    """Applies the next ordered update and sends its assignments; returns the order and the state."""
    order, state = queues.next_update(handles, 2)
    queues.count_update(handles["applied"][0], after=[])
    queues.send_assignments(handles["assignments0"], UpdateOrder(order, 2).assignments)
    return order, state


@tf.function(autograph=False)
def later(handles):
    """Sends the next assignments that follow no update, when the updates before them are applied."""
    (packed,) = queues.next_assignments(handles)
    order = AssignmentOrder(packed)
    with tf.control_dependencies([queues.wait_for_updates(handles["applied"][0], order.updates)]):
        queues.send_assignments(handles["assignments0"], order.assignments)
    return order.updates


def waiting(two):
    """How many assignments wait for each worker."""
    return [int(tf.raw_ops.QueueSizeV2(handle=two.of(worker)["assignments"][0])) for worker in range(2)]


def received(two, worker):
    (packed,) = queues.next_assignment(DEVICES, two.of(worker)["assignments"])
    return PackedAssignment(packed.numpy())


def test_an_order_has_the_keys_the_state_and_the_assignments(two):
    two.order_update([7, 8], np.array([0.5]), [Assignment(1, 3, several=True)], several=False)
    packed, state = update(two.handles)
    order = UpdateOrder(packed.numpy(), 2)
    assert (order.goes_on, order.several, order.keys.tolist()) == (True, False, [7, 8])
    assert state.numpy().tolist() == [0.5]
    assert waiting(two) == [0, 1]
    assignment = received(two, 1)
    assert (assignment.step, assignment.several, assignment.goes_on) == (3, True, True)
    assert assignment.packed[3] == 1, "the worker's number"


def test_an_order_tells_that_several_updates_follow(two):
    two.order_update([7, 8], np.zeros([1]), [], several=True)
    packed, _ = update(two.handles)
    assert UpdateOrder(packed, 2).several
    assert waiting(two) == [0, 0]


def test_no_two_assignments_have_the_same_key(two):
    two.assign([Assignment(0, 0, several=False), Assignment(1, 0, several=False)])
    two.assign([Assignment(0, 1, several=False)])
    later(two.handles)
    later(two.handles)
    keys = [received(two, worker).key for worker in (0, 0, 1)]
    assert len(set(keys)) == 3


def test_an_assignment_waits_for_the_updates_that_were_ordered_before_it(two):
    for _ in range(2):
        two.order_update([1, 2], np.zeros([1]), [], several=False)
    two.assign([Assignment(0, 2, several=False)])
    sent = threading.Thread(target=later, args=(two.handles,))
    sent.start()
    update(two.handles)
    assert sent.is_alive()
    assert waiting(two) == [0, 0]
    update(two.handles)
    sent.join()
    assert received(two, 0).step == 2
    two.assign([Assignment(0, 3, several=False)])  # waits only for updates that were ordered since
    later(two.handles)
    assert received(two, 0).step == 3


def test_a_run_that_is_aborted_tells_all_workers_to_exit_after_the_ordered_updates(two):
    two.order_update([1, 2], np.zeros([1]), [], several=True)
    two.abort(2)
    update(two.handles)
    for _ in range(2):
        later(two.handles)
    assignments = [received(two, worker) for worker in (0, 0, 1, 1)]
    assert [assignment.step for assignment in assignments] == [NO_MORE_STEPS] * 4
    assert not any(assignment.goes_on for assignment in assignments)
    (packed,) = queues.next_assignments(two.handles)
    assert not AssignmentOrder(packed).goes_on


def test_a_wait_for_an_order_that_never_comes_fails(two):
    two.close_updates()
    with pytest.raises(tf.errors.OutOfRangeError):
        update(two.handles)


def test_a_wait_for_an_update_that_is_never_applied_fails(two):
    two.order_update([1, 2], np.zeros([1]), [], several=False)
    two.assign([Assignment(0, 1, several=False)])
    two.close_applied()
    with pytest.raises(tf.errors.OutOfRangeError):
        later(two.handles)


def test_the_count_of_updates_is_reset_now_and_then(two, monkeypatch):
    monkeypatch.setattr(queues, "_MAX_UNCOUNTED", 3)
    for _ in range(3):
        two.order_update([1, 2], np.zeros([1]), [], several=False)
        update(two.handles)
    assert later(two.handles) == 3
    assert int(tf.raw_ops.QueueSizeV2(handle=two.handles["applied"][0])) == 0


def test_the_functions_that_take_orders_are_told_to_end(two):
    two.end()
    packed, _ = queues.next_update(two.handles, 2)
    assert not UpdateOrder(packed, 2).goes_on
    (packed,) = queues.next_assignments(two.handles)
    assert not AssignmentOrder(packed).goes_on
