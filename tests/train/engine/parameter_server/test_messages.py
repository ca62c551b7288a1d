"""Messages are unpacked as they were packed, on the chief and in functions."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.messages import (
    AssignmentOrder,
    Commit,
    FunctionEnded,
    FunctionStarted,
    GradientStored,
    LockstepState,
    PackedAssignment,
    ReportKind,
    ReportLayout,
    StepKind,
    Token,
    UpdateApplied,
    UpdateOrder,
    has_assignment,
    pack_assignments,
    pack_report,
    unpack_report,
)
from tfdist_cli.train.engine.parameter_server.quorum.policy import Assignment

LAYOUT = ReportLayout(metrics=2, state=3, phases=1)


def counted():
    """A report of one step, packed in a function."""

    @tf.function(autograph=False)
    def pack():
        state = [tf.constant([[1.5], [2.5]]), tf.constant(7, tf.int32)]
        metrics = tf.constant([3.0, 4.0], tf.float64)
        report = LAYOUT.pack(tf.constant(0.25), tf.constant(16, tf.int64), metrics, state)
        return tf.concat([report, tf.constant([0.5], tf.float64)], axis=0)

    return pack().numpy()


def fields(report):
    return {name: np.asarray(value).tolist() for name, value in vars(report).items()}


REPORT = {
    "worker": 1,
    "loss": 0.25,
    "examples": 16,
    "metrics": [3.0, 4.0],
    "state": [1.5, 2.5, 7.0],
    "phases": [0.5],
}


@pytest.mark.parametrize("behind", [0, 2])
def test_a_step_report_is_unpacked_as_it_was_packed(behind):
    numbers = np.concatenate([counted(), np.ones(behind)])
    assert fields(LAYOUT.unpack(1, numbers)) == REPORT
    assert len(counted()) == LAYOUT.size
    assert LAYOUT.mean_state(np.stack([numbers, numbers]), np.array([1.0, 3.0])).numpy().tolist() == [1.5, 2.5, 7.0]
    assert LAYOUT.mean_state(np.stack([numbers, 5 * numbers]), np.array([3.0, 1.0])).numpy().tolist() == [3, 5, 14]


def test_many_reports_are_split_at_once():
    reports = np.arange(5 * 2 * (LAYOUT.size + 1), dtype=np.float64).reshape([5, 2, LAYOUT.size + 1])
    losses, examples, metrics, phases = LAYOUT.split(reports)
    for update, worker in np.ndindex(5, 2):
        report = LAYOUT.unpack(worker, reports[update, worker])
        assert (losses[update, worker], examples[update, worker]) == (report.loss, report.examples)
        assert (metrics[update, worker].tolist(), phases[update, worker].tolist()) == (
            report.metrics.tolist(),
            report.phases.tolist(),
        )


def test_a_report_without_phases():
    layout = ReportLayout(metrics=1, state=0, phases=0)
    report = layout.unpack(0, np.array([1.0, 8.0, 5.0]))
    assert (report.state.size, report.phases.size, report.metrics.tolist()) == (0, 0, [5.0])
    assert layout.without_counts([]).shape == layout.size
    packed = LAYOUT.without_counts([tf.constant([9.0], tf.float64)])
    assert LAYOUT.unpack(0, packed.numpy()).phases.tolist() == [9.0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReportKind.FUNCTION_STARTED, FunctionStarted(2, 30)),
        (ReportKind.FUNCTION_ENDED, FunctionEnded(30)),
        (ReportKind.STOP_LISTENING, None),
    ],
)
def test_messages_that_bring_no_gradient(kind, message):
    @tf.function(autograph=False)
    def pack(serial, worker):
        return pack_report(kind, serial, worker)

    head = pack(tf.constant(30, tf.int64), tf.constant(2, tf.int64)).numpy()
    assert unpack_report(head, LAYOUT.without_counts([]).numpy(), LAYOUT) == message


def test_a_message_that_an_update_is_applied_has_its_phases():
    body = LAYOUT.without_counts([tf.constant([9.0], tf.float64)]).numpy()
    message = unpack_report(pack_report(ReportKind.UPDATE_APPLIED).numpy(), body, LAYOUT)
    assert isinstance(message, UpdateApplied)
    assert message.phases.tolist() == [9.0]


def test_a_message_that_brings_a_gradient_begins_with_the_assignment_of_its_step():
    [row] = pack_assignments([Assignment(1, 5, several=True)], [77], workers=2).reshape(2, 4)[1:]
    message = unpack_report(row, counted(), LAYOUT)
    assert isinstance(message, GradientStored)
    assert (message.step, message.key, fields(message.report)) == (5, 77, REPORT)


def test_a_block_of_assignments_has_a_row_for_every_worker():
    packed = pack_assignments([Assignment(2, 5, several=False), Assignment(0, -1, several=False)], [8, 9], workers=3)
    block = packed.reshape(3, PackedAssignment.SIZE)
    assert [bool(has_assignment(block, worker)) for worker in range(3)] == [True, False, True]
    rows = [PackedAssignment(row) for row in block]
    assert [bool(row.goes_on) for row in rows] == [False, False, True]
    assert (rows[2].step, rows[2].key, rows[2].several) == (5, 8, False)
    assert rows[0].key == 9


def test_orders():
    assignments = pack_assignments([], [], workers=2)
    packed = UpdateOrder.pack([4, 5, 6], assignments, several=True)
    order = UpdateOrder(packed, 3)
    assert len(packed) == UpdateOrder.size(3, 2)
    assert (order.goes_on, order.several, order.keys.tolist()) == (True, True, [4, 5, 6])
    assert order.assignments.tolist() == assignments.tolist()
    packed = AssignmentOrder.pack(0, assignments)
    later = AssignmentOrder(packed)
    assert len(packed) == AssignmentOrder.size(2)
    assert (later.goes_on, later.updates, later.assignments.tolist()) == (True, 0, assignments.tolist())
    assert not AssignmentOrder(np.zeros_like(packed)).goes_on
    assert not UpdateOrder(np.zeros(9), 3).goes_on


def test_tokens_and_commits():
    token = Token(Token.pack(tf.constant(3, tf.int64), StepKind.CHUNK))
    assert (int(token.sequence), int(token.kind)) == (3, StepKind.CHUNK)
    packed = [Commit.pack(tf.constant(sequence, tf.int64), sequence + 5, sequence + 6) for sequence in (3, 4)]
    commits = Commit(tf.stack(packed))
    assert commits.sequence.numpy().tolist() == [3, 4]
    assert commits.key.numpy().tolist() == [8, 9]
    assert commits.microseconds.numpy().tolist() == [9, 10]


def test_the_state_of_a_worker_in_lockstep():
    state = LockstepState(LockstepState.pack(tf.constant(3, tf.int64), StepKind.SINGLE, 70, 1))
    following = LockstepState(state.next(workers=4))
    assert [int(number) for number in (following.sequence, following.key, following.single_steps)] == [4, 74, 1]
    token = Token(Token.pack(tf.constant(4, tf.int64), StepKind.END))
    ended = LockstepState(following.received(token))
    assert (int(ended.kind), int(ended.token.sequence), int(ended.key)) == (StepKind.END, 4, 74)
    for _ in range(2):
        ended = LockstepState(ended.counted_down())
        assert int(ended.single_steps) == 0
