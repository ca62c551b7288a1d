"""Operations with side effects that nobody waits for but the function's end."""

import tensorflow as tf

from tfdist_cli.train.tf_compat.control_flow import after, changes, last_of, made_once, unordered


def waits_for(graph, kind):
    """For each operation of a kind, how many of the same kind it waits for."""
    return [
        sum(other.type == kind for other in operation.control_inputs)
        for operation in graph.get_operations()
        if operation.type == kind
    ]


def notes(wrapped):
    @tf.function(autograph=False)
    def function():
        return [wrapped(tf.timestamp()), wrapped(tf.timestamp())]

    return function


def test_they_do_not_wait_for_each_other():
    assert waits_for(notes(lambda time: time).get_concrete_function().graph, "Timestamp") == [0, 1]
    assert waits_for(notes(unordered).get_concrete_function().graph, "Timestamp") == [0, 0]


def test_they_are_done_when_the_function_is_though_nobody_takes_what_they_give():
    kept = tf.queue.FIFOQueue(9, [tf.int32], [[]])

    @tf.function(autograph=False)
    def function():
        for number in (1, 2, 3):
            operation = tf.raw_ops.QueueEnqueueV2(handle=kept.queue_ref, components=[tf.constant(number)])
            assert unordered(operation) is operation
        return tf.constant(0)

    function()
    assert sorted(kept.dequeue_many(3).numpy()) == [1, 2, 3]


def test_outside_of_functions_there_is_an_order_anyway():
    assert unordered(tf.constant(4)).numpy() == 4


def test_what_comes_next_finds_what_was_the_last_in_its_own_function():
    found = []

    @tf.function(autograph=False)
    def function():
        for _ in range(2):
            last = last_of("this")
            found.append(len(last))
            last[:] = [tf.no_op()]
        assert last_of("that") == []
        tf.cond(tf.constant(True), lambda: found.append(len(last_of("this"))), lambda: None)
        assert last_of("this") == last

    function()
    assert found == [0, 1, 0]
    last_of("this")[:] = [None]
    assert last_of("this") == []


def test_a_tensor_waits_by_itself_for_what_it_is_to_come_after():
    """Not by the constants that an operation on it is given, which TensorFlow's optimizer may take away."""

    @tf.function(autograph=False)
    def function(given):
        first = tf.stack([given, given + 1])
        time = unordered(tf.timestamp())
        return after(first[0], [time])

    graph = function.get_concrete_function(tf.TensorSpec([])).graph
    (wanted,) = [operation for operation in graph.get_operations() if operation.type == "Timestamp"]
    waiting = [each for each in graph.get_operations() if wanted in each.control_inputs and each.type == "Identity"]
    assert len(waiting) == 1
    assert waiting[0].inputs[0].op.type == "StridedSlice"


def test_what_is_needed_several_times_is_made_once_and_waits_for_no_one():
    def five():
        return made_once("five", lambda: tf.constant(2) + 3)

    @tf.function(autograph=False)
    def function():
        with tf.control_dependencies([tf.timestamp()]):
            first = five()
        assert five() is first
        assert not first.op.control_inputs
        made = [operation.type for operation in first.graph.get_operations()]
        assert made.count("AddV2") == 1
        assert made_once("six", lambda: tf.constant(6)) is not first
        within = []
        tf.cond(tf.constant(True), lambda: within.append(five()), lambda: None)
        assert all(each.graph is not first.graph for each in within)  # it has its own
        assert five() is first
        return five()

    assert function().numpy() == 5
    assert five().numpy() == 5


def test_which_operations_may_change_something():
    variable = tf.Variable(1.0)
    found = {}

    @tf.function(autograph=False)
    def function():
        variable.assign_add(1.0)
        with changes() as made:
            assert not made
            variable.assign(variable.read_value() * 2)
            tf.cond(variable > 0, lambda: variable.assign_sub(1.0), variable.read_value)
        variable.assign_add(3.0)
        with changes() as none:
            tf.constant(1.0) + 2
        found.update(made=made, none=none)
        with tf.control_dependencies(made):
            return tf.constant(0)

    function()
    kinds = [each.type for each in found["made"]]
    assert [each for each in kinds if each != "ReadVariableOp"] == ["AssignVariableOp", "If"]
    assert found["none"] == []
    assert variable.numpy() == 6
