"""A layout crosses between tasks as numbers."""

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout

TYPES = [np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float32", "bfloat16", "int64")]
LAYOUT = Layout(
    values=[[Array(dtype, 3) for dtype in TYPES], [Array(TYPES[0], 2)]],
    others=[[Array(TYPES[0], 4)], []],
    report=Array(np.dtype(np.float64), 2),
)


def test_a_layout_crosses_as_numbers():
    found = Layout.unpacked(LAYOUT.packed)
    assert [list(own) for own in found.values] == [list(own) for own in LAYOUT.values]
    assert [list(own) for own in found.others] == [list(own) for own in LAYOUT.others]
    assert found.report == LAYOUT.report


def test_a_layout_needs_no_report():
    found = Layout.unpacked(Layout(LAYOUT.values, LAYOUT.others).packed)
    assert found.report == Array(np.dtype(np.float64), 0)
    assert found.of_worker == [found.report, *LAYOUT.others[0]]


def test_each_ps_has_its_part_of_what_a_worker_writes():
    arrays = LAYOUT.of_worker
    assert arrays[LAYOUT.part(0)] == LAYOUT.others[0]
    assert arrays[LAYOUT.part(1)] == []
