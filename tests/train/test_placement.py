"""Variables spread over ps by their bytes."""

from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.train.placement import Placement


class Extended:
    """TensorFlow's own way: a variable's number says its ps."""

    def __init__(self, ps):
        self._num_ps, self._variable_count = ps, 0
        self.chosen = []

    def _create_variable_round_robin(self, creator, **kwargs):
        self.chosen.append(self._variable_count % self._num_ps)
        self._variable_count += 1
        return creator(**kwargs)


def dealt(ps, sizes):
    extended = Extended(ps)
    placement = Placement(SimpleNamespace(extended=extended))
    for size in sizes:
        extended._create_variable_round_robin(
            lambda size=size: SimpleNamespace(dtype=tf.float32, shape=tf.TensorShape(size))
        )
    return extended.chosen, placement.bytes


def test_kernels_and_biases_go_to_both():
    chosen, loads = dealt(2, [(784, 500), (500,), (500, 500), (500,), (500, 10), (10,)])
    assert chosen == [0, 1, 1, 1, 1, 1]
    assert loads == [4 * 784 * 500, 4 * (500 + 500 * 500 + 500 + 5000 + 10)]


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), max_size=30))
def test_no_ps_has_more_than_the_mean_and_the_largest(ps, sizes):
    _, loads = dealt(ps, [(size,) for size in sizes])
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) <= np.mean(loads) + 4 * max(sizes, default=0)
