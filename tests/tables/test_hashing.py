"""Hashes of ids without TensorFlow: the same as in training."""

import random

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.tables.hashing import GROUP, WAYS, as_ids, candidates, hashed, unhashed
from tfdist_cli.train.layers import row_keys

IDS = np.concatenate([np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 500), [0, -1, 2**63 - 1, -(2**63)]])


def test_strings_have_the_ids_of_training():
    lengths = [*range(140), 191, 192, 193, 255, 256, 257, 1000]
    texts = [random.Random(size).randbytes(size) for size in lengths] + ["Grüße".encode()]
    expected = tf.strings.to_hash_bucket_fast(texts, 2**63 - 1)
    np.testing.assert_array_equal(as_ids(np.array(texts, object)), expected)
    assert as_ids("Grüße") == as_ids(np.array("Grüße".encode(), object)) == int(expected[-1])


@pytest.mark.parametrize("groups", [1, 7, 1000])
def test_keys_and_buckets_are_those_of_training(groups):
    keys = hashed(IDS)
    np.testing.assert_array_equal(keys, row_keys.hashed(tf.constant(IDS)))
    np.testing.assert_array_equal(unhashed(keys), IDS)
    found = candidates(keys, groups * GROUP)
    group = tf.constant(found[:, 0] // (GROUP // WAYS), tf.int32)
    np.testing.assert_array_equal(found, row_keys.buckets_of(tf.constant(keys), group))
    assert found.min() >= 0
    assert found.max() < groups * GROUP // WAYS


def test_ids_keep_their_shape():
    assert as_ids([[1, 2], [3, 4]]).shape == (2, 2)
    assert as_ids([["a"], ["b"]]).shape == (2, 1)
