"""Rows are marked when they are written, and a mark is taken once."""

import numpy as np
import tensorflow as tf

from tfdist_cli.train.variables.changed_rows import MARK, keep_marks, mark_all, marked, take_marks


def test_rows_are_marked_and_taken_once():
    variable, marks = tf.Variable(tf.zeros([8, 3])), tf.Variable(tf.zeros([2, 4], MARK))
    assert marked(variable, tf.constant([5]), None) is None  # nobody wants to know
    keep_marks(variable, marks)
    for rows in ([5, 0], [5]):
        marked(variable, tf.constant(rows), None)
    assert take_marks(marks).numpy().tolist() == [0, 5]
    assert take_marks(marks).numpy().tolist() == []
    mark_all(marks)
    np.testing.assert_array_equal(take_marks(marks), range(8))
