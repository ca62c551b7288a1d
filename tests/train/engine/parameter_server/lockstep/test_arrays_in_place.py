"""A worker computes with values where a ps has written them. No kernel may write its results there."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import round_operations
from tfdist_cli.train.cluster.shared_memory.lockstep.round_operations import Rounds

FLOATS = np.dtype(np.float32)
SIZE = 64
LAYOUT = Layout([[Array(FLOATS, SIZE)]], [[Array(FLOATS, SIZE)]], Array(np.dtype(np.float64), 1))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_part_of_the_values_stays_as_it_is(keeps, monkeypatch):
    monkeypatch.setattr(round_operations, "_process", round_operations._Process())
    round_operations.register()
    rounds = Rounds(["CPU:0"], LAYOUT)
    ps = rounds.opened(tf.constant(1))
    rounds.begin(0, ps)
    zero = tf.zeros([], tf.int64)
    rounds.publish(0, ps, zero, zero, [tf.ones([SIZE])])
    number = rounds.join(tf.constant(0), ps)

    @tf.function(autograph=False)
    def step():
        _, [values] = rounds.await_round(number, zero)
        result = tf.exp(values[: SIZE // 2])  # nothing else needs the values: the kernel may write it in their place
        gradients = [tf.concat([result, result], axis=0)]
        return rounds.commit(number, zero, tf.zeros([1], tf.float64), gradients, [values] if keeps else [])

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(step)
        rounds.collect(0, ps, zero, 1)
        taken.result()
    _, [values] = rounds.await_round(number, zero)
    assert (values.numpy().tolist() == [1.0] * SIZE) is keeps
    rounds.aborted(ps)
