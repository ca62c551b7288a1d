"""The keys of ids in an index, where they may be, and how they are found."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_cli.tables.hashing import BUCKETS, FIRST, INCREMENT, SECOND, TEXT_HASHES, WAYS
from tfdist_cli.tables.strings import CUT, WHOLE


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
    return group[:, None] * BUCKETS + tf.stack([first, tf.bitwise.bitwise_xor(first, step)], axis=1)


def same_keys(variable: Any, keys: tf.Tensor, buckets: tf.Tensor) -> tf.Tensor:
    """Returns where each key is among its candidates, bool, shape (n, 2 · WAYS).

    Args:
        variable: the keys of rows, int64, shape (buckets, WAYS).
        keys: the keys to find. The key 0 is that of free rows.
        buckets: the buckets of each key within the shard, shape (n, 2).
    """
    return tf.reshape(gathered(variable, buckets), [-1, 2 * WAYS]) == keys[:, None]


def slot_at(buckets: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """Returns the row within the shard, int32, of a place among the candidates of each key."""
    bucket = tf.where(place < WAYS, buckets[:, 0], buckets[:, 1])
    return bucket * WAYS + tf.bitwise.bitwise_and(place, WAYS - 1)


def slot_of(variable: Any, keys: tf.Tensor, buckets: tf.Tensor) -> tf.Tensor:
    """Returns the row of each key within the shard, int32; -1 if it has none. For the arguments see `same_keys`."""
    place = tf.reduce_max(tf.where(same_keys(variable, keys, buckets), tf.range(2 * WAYS), -1), axis=1)
    return tf.where((place >= 0) & (keys != 0), slot_at(buckets, place), -1)


def gathered(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable, in the shape of their numbers."""
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=rows, dtype=variable.dtype)


def scattered(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> Any:
    """Writes rows of a variable."""
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=rows, updates=values)


def read(variable: Any, slot: tf.Tensor) -> tf.Tensor:
    """Returns what an index's variable, of shape (buckets, WAYS), has for rows within the shard."""
    return tf.raw_ops.ResourceGatherNd(resource=variable.handle, indices=places(slot), dtype=variable.dtype)


def written(variable: Any, slot: tf.Tensor, values: tf.Tensor) -> Any:
    """Writes what an index's variable, of shape (buckets, WAYS), has for rows within the shard."""
    return tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=places(slot), updates=values)


def places(slot: tf.Tensor) -> tf.Tensor:
    """Returns the bucket and the way of rows within the shard, int32, shape (n, 2)."""
    bucket = tf.bitwise.right_shift(slot, WAYS.bit_length() - 1)
    return tf.stack([bucket, tf.bitwise.bitwise_and(slot, WAYS - 1)], axis=1)


def _int64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
