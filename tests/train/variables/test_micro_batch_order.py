"""A stage takes one micro-batch after the other, and keeps few in progress."""

import tensorflow as tf

from tfdist_cli.train.variables.micro_batch_order import MicroBatchOrder


def taken(order, runs):
    """What each call of a micro-batch waits for, by name."""
    order.begin()
    waits = []
    for stage, name in runs:
        waits.append([int(each) for each in order.awaited(stage)])
        order.called(stage, {"out": tf.constant(name)})
    return waits


def test_a_run_of_calls_waits_for_the_same_run_of_the_micro_batch_before():
    order = MicroBatchOrder(2)
    assert taken(order, [(0, 1), (0, 2), (1, 3)]) == [[], [], []]
    order.end([])
    assert taken(order, [(0, 11), (0, 12), (1, 13)]) == [[2], [], [3]]


def test_a_stage_waits_for_gradients_so_that_few_micro_batches_are_in_progress():
    order = MicroBatchOrder(2)
    for number, expected in ((0, [[], []]), (10, [[1], [2, 5]]), (20, [[11, 4], [12, 15]])):
        assert taken(order, [(0, number + 1), (1, number + 2)]) == expected
        order.end([(0, tf.constant(number + 4)), (1, tf.constant(number + 5))])
