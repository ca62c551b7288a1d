"""The keys of ids in an index, where they may be, and how they are found."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_cli.tables.hashing import BUCKETS, FIRST, GROUP, INCREMENT, SECOND, TEXT_HASHES, WAYS
from tfdist_cli.tables.strings import CUT, WHOLE
from tfdist_cli.train.variables.rows import rows_of

_USED_BITS = 2 * (BUCKETS.bit_length() - 1)
"""The lowest bits of a key, which determine its buckets."""


def hashed(ids: tf.Tensor) -> tf.Tensor:
    """Returns the hash of each id, int64. Different ids have different hashes."""
    value = tf.bitcast(ids, tf.uint64) + _uint64(INCREMENT)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        value = tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, _uint64(shift)))
        value *= _uint64(factor)
    return tf.bitcast(value, tf.int64)


def strings_as_ids(strings: tf.Tensor) -> tf.Tensor:
    """Returns the id of each string, int64: 63 bits of its hash."""
    return tf.strings.to_hash_bucket_fast(strings, TEXT_HASHES)


def string_rows(strings: tf.Tensor, width: int) -> tf.Tensor:
    """Returns strings as `tables.strings` describes, uint8, shape (n, width)."""
    size = width - 1
    mark = tf.where(tf.strings.length(strings) > size, bytes([CUT]), bytes([WHOLE]))
    return tf.io.decode_raw(tf.strings.substr(strings, 0, size) + mark, tf.uint8, fixed_length=width)


def buckets_of(keys: tf.Tensor, group: tf.Tensor) -> tf.Tensor:
    """Returns the two buckets of each key within the shard, int32, shape (n, 2)."""
    low = tf.cast(tf.bitwise.bitwise_and(keys, _int64(BUCKETS * BUCKETS - 1)), tf.int32)
    first = tf.bitwise.bitwise_and(low, BUCKETS - 1)
    # Always odd, so never 0: another bucket. Bits are cheaper than a remainder.
    step = tf.bitwise.bitwise_or(tf.bitwise.right_shift(low, BUCKETS.bit_length() - 1), 1)
    base = group * BUCKETS
    return _pairs(base + first, base + tf.bitwise.bitwise_xor(first, step))


def home_ways(keys: tf.Tensor) -> tf.Tensor:
    """Returns the place within their buckets that keys get first, int32."""
    return tf.cast(tf.bitwise.bitwise_and(tf.bitwise.right_shift(keys, _int64(_USED_BITS)), _int64(WAYS - 1)), tf.int32)


def homes_of(keys: tf.Tensor, group: tf.Tensor) -> tf.Tensor:
    """Returns the row of each key within the shard where it is looked up first, int32, in its first bucket."""
    first = tf.cast(tf.bitwise.bitwise_and(keys, _int64(BUCKETS - 1)), tf.int32)
    return group * GROUP + first * WAYS + home_ways(keys)


def slot_of(variable: Any, keys: tf.Tensor, group: tf.Tensor) -> tf.Tensor:
    """Returns the row of each key within the shard, int32; -1 if it has none.

    One row is compared with each key first, and all candidates only with the keys that it does not have.

    Args:
        variable: the keys of rows, int64, shape (buckets, WAYS).
        keys: the keys to find. The key 0 is that of free rows.
        group: the group of each key within the shard, int32.
    """
    home = homes_of(keys, group)
    missed = tf.cast(tf.where(read(variable, home) != keys)[:, 0], tf.int32)
    found = _among_candidates(variable, tf.gather(keys, missed), tf.gather(group, missed))
    return tf.where(keys != 0, _replaced(home, missed, found), -1)


def _among_candidates(variable: Any, keys: tf.Tensor, group: tf.Tensor) -> tf.Tensor:
    """Returns the row of each key within the shard, int32, by comparing all candidates; -1 if it has none."""
    buckets = buckets_of(keys, group)
    same = tf.reshape(rows_of(variable, buckets), [-1, 2 * WAYS]) == keys[:, None]
    at = tf.cast(tf.where(tf.reshape(same, [-1]))[:, 0], tf.int32)
    bucket = tf.gather(tf.reshape(buckets, [-1]), tf.bitwise.right_shift(at, WAYS.bit_length() - 1))
    slot = bucket * WAYS + tf.bitwise.bitwise_and(at, WAYS - 1)
    return _replaced(tf.fill(tf.shape(keys), -1), tf.bitwise.right_shift(at, (2 * WAYS).bit_length() - 1), slot)


def _replaced(values: tf.Tensor, at: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Returns values of shape (n,) with others at some places, int32. It is faster than to scatter them."""
    return tf.dynamic_stitch([tf.range(tf.size(values)), at], [values, others])


def read(variable: Any, slot: tf.Tensor) -> tf.Tensor:
    """Returns what an index's variable, of shape (buckets, WAYS), has for rows within the shard."""
    return tf.raw_ops.ResourceGatherNd(resource=variable.handle, indices=places(slot), dtype=variable.dtype)


def written(variable: Any, slot: tf.Tensor, values: tf.Tensor) -> Any:
    """Writes what an index's variable, of shape (buckets, WAYS), has for rows within the shard."""
    return tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=places(slot), updates=values)


def places(slot: tf.Tensor) -> tf.Tensor:
    """Returns the bucket and the way of rows within the shard, int32, shape (n, 2)."""
    return _pairs(tf.bitwise.right_shift(slot, WAYS.bit_length() - 1), tf.bitwise.bitwise_and(slot, WAYS - 1))


def _pairs(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Returns two tensors of numbers from 0 on, int32, shape (n,), as one of shape (n, 2).

    Both numbers are written in one of int64, since `tf.stack` copies them one by one.
    """
    high = tf.bitwise.left_shift(tf.cast(second, tf.int64), _int64(32))
    return tf.bitcast(tf.bitwise.bitwise_or(high, tf.cast(first, tf.int64)), tf.int32)


def _int64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
