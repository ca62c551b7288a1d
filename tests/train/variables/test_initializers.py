"""Initial values computed block by block equal those of the whole variable, to the last bit."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import initializers

from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.variables import sharding
from tfdist_cli.train.variables.initializers import InitialValue, _advance
from tfdist_cli.train.variables.sharding import Block, parts

BY_VALUE = {
    "uniform": lambda: initializers.RandomUniform(-0.3, 0.7, seed=5),
    "normal": lambda: initializers.RandomNormal(0.1, 2.0, seed=6),
    "truncated normal": lambda: initializers.TruncatedNormal(0.1, 3.0, seed=7),
    "glorot uniform": lambda: initializers.GlorotUniform(seed=8),
    "he normal": lambda: initializers.HeNormal(seed=9),
    "untruncated": lambda: initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=10),
    "zeros": initializers.Zeros,
    "ones": initializers.Ones,
    "constant": lambda: initializers.Constant(0.3),
}
WHOLE = {
    "orthogonal": lambda: initializers.Orthogonal(seed=11),
    "a function": lambda: lambda shape, dtype: tf.reshape(tf.range(np.prod(shape)), shape),
    "user code": lambda: Own(seed=12),
    "a constant of several numbers": lambda: initializers.Constant(np.arange(3.0)),
}


class Own(initializers.RandomUniform):
    def __call__(self, shape, dtype=None):
        return super().__call__(shape, dtype) ** 2


def made_in_blocks(initializer, shape, dtype, cuts):
    rows = InitialValue(initializer, shape, dtype).rows()
    bounds = [0, *cuts, shape[0]]
    pieces = [rows(Block(None, first, end - first, 0)) for first, end in itertools.pairwise(bounds)]
    return np.concatenate([piece.numpy() for piece in pieces])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", BY_VALUE)
def test_blocks_equal_the_rows_of_the_whole_value(name, dtype):
    make = BY_VALUE[name]
    for shape, cuts in [((1003, 7), [1, 334, 335]), ((513,), [2, 5]), ((90, 3, 5), [17, 33, 80])]:
        whole = tf.convert_to_tensor(make()(shape, dtype=dtype)).numpy()
        np.testing.assert_array_equal(made_in_blocks(make(), shape, dtype, cuts), whole)


@pytest.mark.parametrize("name", WHOLE)
def test_other_initializers_compute_the_whole_value(name):
    make = WHOLE[name]
    whole = np.float32(make()((40, 3), dtype="float32"))
    np.testing.assert_array_equal(made_in_blocks(make(), (40, 3), "float32", [7, 11]), whole)


def test_only_the_block_is_computed(monkeypatch):
    """The whole value would not fit into memory."""
    shapes = []
    draw = tf.raw_ops.StatelessRandomUniformV2

    def recorded(**arguments):
        shapes.append(arguments["shape"])
        return draw(**arguments)

    monkeypatch.setattr(tf.raw_ops, "StatelessRandomUniformV2", recorded)
    rows = InitialValue(initializers.RandomUniform(seed=1), (2**40, 32), "float32").rows()
    last = rows(Block(None, 2**40 - 3, 3, 0))
    assert last.shape == (3, 32)
    assert shapes == [[96]]


def test_a_seed_generator_advances_once():
    seeds = keras.random.SeedGenerator(4)
    blocks = made_in_blocks(initializers.RandomNormal(seed=seeds), (50, 4), "float32", [9, 30])
    after = seeds.state.numpy()
    seeds.state.assign([4, 0])
    whole = initializers.RandomNormal(seed=seeds)((50, 4), dtype="float32")
    np.testing.assert_array_equal(blocks, whole)
    np.testing.assert_array_equal(after, seeds.state.numpy())


@pytest.mark.parametrize(
    ("counter", "by", "moved"),
    [
        ((5, 7), 3, (8, 7)),
        ((2**64 - 1, 7), 1, (0, 8)),
        ((2**64 - 2, 2**64 - 1), 5, (3, 0)),
        ((1, 0), 2**70, (1, 64)),
    ],
)
def test_a_counter_carries(counter, by, moved):
    np.testing.assert_array_equal(_advance(np.array(counter, np.uint64), by), np.array(moved, np.uint64))


def test_a_counter_carries_as_in_tensorflow():
    key, start = np.array([77], np.uint64), np.array([2**64 - 3, 41], np.uint64)

    def drawn(counter, count):
        return tf.raw_ops.StatelessRandomUniformV2(shape=[count], key=key, counter=counter, alg=1).numpy()

    np.testing.assert_array_equal(drawn(start, 40)[20:], drawn(_advance(start, 5), 20))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["glorot uniform", "truncated normal", "constant", "zeros"])
def test_a_sharded_variable_has_the_initial_value_of_a_whole_one(name, count, servers, monkeypatch):
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 100)
    with servers(count, shard=ShardRule(min_bytes=0)).scope():
        variable = keras.Variable(BY_VALUE[name](), shape=(101, 3))
    assert len(parts(variable)) == count
    np.testing.assert_array_equal(variable.numpy(), keras.Variable(BY_VALUE[name](), shape=(101, 3)).numpy())
