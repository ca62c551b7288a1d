"""The index of a dynamic table: which row of the table holds the vector of an id.

The rows form groups of 64 buckets with 16 rows each. The hash of an id determines its group and two buckets in it (Azar
et al., Balanced Allocations, 1999), so an id is found by comparing 32 keys. A new id gets a free row of the bucket that
has more of them. If none is free, it replaces the row that was used least among the 32, as in a set-associative cache
and in NVIDIA's HierarchicalKV. The index consists of plain variables beside the rows. So shards, checkpoints and
exports hold it like any variable, whatever the number of ps; a group is never divided between two ps.

Row 0 belongs to no id. It is the row of ids that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.layers.initial_rows import InitialRows
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.functions import function_kept_whole
from tfdist_cli.train.variables.sharding import parts

WAYS = 16
BUCKETS = 64
GROUP = WAYS * BUCKETS
"""Rows in a group."""
GRACE_SECONDS = 2.0
"""On parameter servers, rows used so recently are not replaced: a worker may still send their gradients."""
_INCREMENT, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014)."""
_FREE, _NEVER = tf.int64.min, tf.int64.max
_UNADMITTED = 1 << 62

Eviction = Literal["lru", "lfu"]


@dataclass(frozen=True)
class RowPolicy:
    """Which ids have rows.

    Args:
        admit_after: an id has a row of its own from this occurrence on.
        evict: which row a new id replaces if no row is free: the least recently or the least frequently used one. None:
            the table must not become full.
        ttl: seconds after which a row that is not used may be replaced, even if others are used less; None for never.
    """

    admit_after: int = 1
    evict: Eviction | None = None
    ttl: float | None = None

    @property
    def records_uses(self) -> bool:
        """Whether each use of a row is recorded."""
        return self.admit_after > 1 or self.evict is not None or self.ttl is not None


@dataclass(frozen=True, eq=False)
class _Shard:
    """The part of the index on one ps.

    Args:
        number: its number.
        rows: the part of the table.
        keys: the hash of the id of each row; 0 if the row is free. int64, shape (buckets, ways).
        used: when each row was used last, in microseconds since 1970; likewise.
        count: how often each row was used; likewise, int32.
        first_group: the group that it begins with.
        lock: held while rows are created or replaced; None in one process.
    """

    number: int
    rows: Any
    keys: Any
    used: Any
    count: Any
    first_group: int
    lock: Any

    @property
    def groups(self) -> int:
        return int(self.keys.shape[0]) // BUCKETS


class RowIndex:
    """The index of a table.

    Args:
        table: the table, whose number of rows is a multiple of `GROUP`.
        initial: computes the first values of a row.
        policy: which ids have rows.
    """

    def __init__(self, table: keras.Variable, initial: InitialRows, policy: RowPolicy) -> None:
        self._initial, self._policy = initial, policy
        self.table = table
        shape = (int(table.shape[0]) // WAYS, WAYS)
        with tf.init_scope():
            self.keys, self.used, self.count = (
                _beside(table, shape, dtype, f"{table.name}_{name}")
                for name, dtype in (("keys", "int64"), ("used", "int64"), ("count", "int32"))
            )
            self._shards = self._new_shards()
        self.attach([])

    def attach(self, slots: list[tuple[keras.Variable, float]]) -> None:
        """Sets the optimizer's slots of the table, each with its initial value: they start anew with a row's id."""
        self._slots = slots
        self._functions = {create: self._function(create=create) for create in (False, True)}

    @property
    def variables(self) -> list[keras.Variable]:
        """Its variables, which checkpoints hold."""
        return [self.keys, self.used, self.count]

    @property
    def groups(self) -> int:
        """The number of groups of all shards."""
        return int(self.table.shape[0]) // GROUP

    def rows(self, ids: tf.Tensor, *, create: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of ids.

        Args:
            ids: int64, shape (n,).
            create: whether ids are counted, and new ones get rows.

        Returns:
            The row of each id, int32, and whether it was created now, bool, both of shape (n,).
        """
        if not create:
            return self._rows(ids, None), tf.zeros_like(ids, tf.bool)
        distinct, where, counts = tf.unique_with_counts(ids)
        if self._shards[0].lock is None:  # a single one
            rows, created = self._rows_of_shard(self._shards[0], distinct, counts)
            return tf.gather(rows, where), tf.gather(created, where)
        return tf.gather(self._rows(distinct, counts), where), tf.zeros_like(ids, tf.bool)

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that have rows, int64, and their rows, int32, both of shape (n,)."""
        keys, counts = (np.concatenate([part.numpy() for part in parts(each)]) for each in (self.keys, self.count))
        has = keys.reshape(-1) != 0
        if self._policy.admit_after > 1:
            has &= counts.reshape(-1) >= self._policy.admit_after
        rows = np.flatnonzero(has).astype(np.int32)
        return unhashed(keys.reshape(-1)[rows]), rows

    def initial_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the initial rows of ids."""
        return self._initial(ids, self.table.dtype)

    def _new_shards(self) -> list[_Shard]:
        shards: list[_Shard] = []
        first = 0
        variables = (parts(each) for each in (self.table, *self.variables))
        for rows, keys, used, count in zip(*variables, strict=True):
            with tf.device(rows.device):
                lock = tf.CriticalSection() if _is_shared() else None
            shards.append(_Shard(len(shards), rows, keys, used, count, first, lock))
            first += shards[-1].groups
        return shards

    def _group(self, keys: tf.Tensor) -> tf.Tensor:
        """The group of each key, int32."""
        high = tf.bitwise.right_shift(tf.bitcast(keys, tf.uint64), tf.constant(32, tf.uint64))
        scaled = high * tf.constant(self.groups, tf.uint64)
        return tf.cast(tf.bitwise.right_shift(scaled, tf.constant(32, tf.uint64)), tf.int32)

    def _rows(self, ids: tf.Tensor, counts: tf.Tensor | None) -> tf.Tensor:
        """Returns the rows of ids, which are distinct if they are counted."""
        if len(self._shards) == 1:
            return self._rows_on_device(self._shards[0], ids, counts)
        firsts = tf.constant([shard.first_group for shard in self._shards])
        owner = tf.searchsorted(firsts, self._group(hashed(ids)), side="right") - 1
        places = tf.dynamic_partition(tf.range(tf.size(ids)), owner, len(self._shards))
        own = [(tf.gather(ids, place), None if counts is None else tf.gather(counts, place)) for place in places]
        rows = [self._rows_on_device(shard, *given) for shard, given in zip(self._shards, own, strict=True)]
        return tf.dynamic_stitch(places, rows)

    def _rows_on_device(self, shard: _Shard, ids: tf.Tensor, counts: tf.Tensor | None) -> tf.Tensor:
        """Returns the rows of ids of a shard. On a ps, one function finds them, so only ids and rows cross."""
        if shard.lock is None:
            return self._rows_of_shard(shard, ids, counts)[0]
        given = [ids] if counts is None or not self._policy.records_uses else [ids, counts]
        with tf.device(shard.rows.device):
            return unordered(self._functions[counts is not None](shard, *given))

    def _function(self, *, create: bool) -> Any:
        def rows(shard: _Shard, ids: tf.Tensor, counts: tf.Tensor | None = None) -> tf.Tensor:
            with tf.device(shard.rows.device):
                some = tf.ones_like(ids, tf.int32) if create and counts is None else counts
                return self._rows_of_shard(shard, ids, some)[0]

        return function_kept_whole(rows)

    def _rows_of_shard(self, shard: _Shard, ids: tf.Tensor, counts: Any) -> tuple[tf.Tensor, tf.Tensor]:
        keys = hashed(ids)
        buckets = _buckets(keys, self._group(keys) - shard.first_group)
        if counts is None:
            rows, created = self._found(shard, keys, buckets), tf.zeros_like(keys, tf.bool)
        elif self._policy.records_uses:
            rows, created = _locked(shard, lambda: self._used(shard, ids, keys, counts, buckets))
        else:
            rows, created = self._created(shard, ids, keys, buckets)
        return tf.where(rows >= 0, rows + shard.first_group * GROUP, 0), created

    def _found(self, shard: _Shard, keys: tf.Tensor, buckets: tf.Tensor) -> tf.Tensor:
        """The row of each key within the shard, -1 if it has none."""
        slot = _slot_of(shard, keys, buckets)
        if self._policy.admit_after > 1:
            counts = tf.reshape(_gathered(shard.count, tf.maximum(slot, 0) // WAYS), [-1, WAYS])
            counts = tf.gather(counts, tf.maximum(slot, 0) % WAYS, batch_dims=1)
            slot = tf.where(counts >= self._policy.admit_after, slot, -1)
        return slot

    def _created(self, shard: _Shard, ids: tf.Tensor, keys: tf.Tensor, buckets: tf.Tensor) -> tuple[Any, Any]:
        """The row of each key; new keys get one. The lock is taken only for these."""
        slot = _slot_of(shard, keys, buckets)

        def create() -> tuple[Any, Any]:
            missing = tf.where(slot < 0)[:, 0]
            some = [tf.gather(of, missing) for of in (ids, keys, buckets)]
            own, created = _locked(shard, lambda: self._create(shard, *some))
            place = missing[:, None]
            return (
                tf.tensor_scatter_nd_update(slot, place, own),
                tf.tensor_scatter_nd_update(tf.zeros_like(slot, tf.bool), place, created),
            )

        return tf.cond(tf.reduce_any(slot < 0), create, lambda: (slot, tf.zeros_like(slot, tf.bool)))

    def _used(self, shard: _Shard, ids: tf.Tensor, keys: tf.Tensor, counts: Any, buckets: tf.Tensor) -> tuple[Any, Any]:
        """The row of each key; uses are recorded, and new keys get a row."""
        slot = _slot_of(shard, keys, buckets)
        now = tf.cast(tf.timestamp() * 1e6, tf.int64)
        with tf.control_dependencies([slot]):
            known = tf.where(slot >= 0)[:, 0]
            stamped = _written(shard.used, tf.gather(slot, known), tf.fill(tf.shape(known), now))

        def create() -> tuple[Any, Any]:
            missing = tf.where(slot < 0)[:, 0]
            own, created = self._create(shard, *(tf.gather(of, missing) for of in (ids, keys, buckets)))
            place = missing[:, None]
            return (
                tf.tensor_scatter_nd_update(slot, place, own),
                tf.tensor_scatter_nd_update(tf.zeros_like(slot, tf.bool), place, created),
            )

        with tf.control_dependencies([stamped]):
            slot, created = tf.cond(
                tf.reduce_any(slot < 0), create, lambda: (tf.identity(slot), tf.zeros_like(slot, tf.bool))
            )
        has = tf.where(slot >= 0)[:, 0]
        at = _places(tf.gather(slot, has))
        count = tf.raw_ops.ResourceScatterNdAdd(ref=shard.count.handle, indices=at, updates=tf.gather(counts, has))
        with tf.control_dependencies([count] if count is not None else []):
            if self._policy.admit_after > 1:
                total = tf.gather_nd(shard.count, _places(tf.maximum(slot, 0)))
                slot = tf.where(total >= self._policy.admit_after, slot, -1)
            return tf.identity(slot), created

    def _create(self, shard: _Shard, ids: tf.Tensor, keys: tf.Tensor, buckets: tf.Tensor) -> tuple[Any, Any]:
        """Gives keys rows, in rounds: if several take the same row, the first one gets it."""
        slot = _slot_of(shard, keys, buckets)  # another worker may have created it meanwhile
        now = tf.cast(tf.timestamp() * 1e6, tf.int64)
        count = tf.size(keys)
        # The key 0 marks free rows: the id with this hash never has a row.
        state = (slot, (slot < 0) & (keys != 0), tf.zeros([count], tf.bool))

        def body(slot: tf.Tensor, open_: tf.Tensor, created: tf.Tensor) -> tuple[Any, Any, Any]:
            index = tf.where(open_)[:, 0]
            own = tf.gather(buckets, index)
            score, candidates = self._scores(shard, own, now)
            best = tf.argmin(score, axis=1)
            target = tf.gather(candidates, best, batch_dims=1)
            possible = tf.reduce_min(score, axis=1) < _NEVER
            index_possible, target = tf.boolean_mask(index, possible), tf.boolean_mask(target, possible)
            distinct, place = tf.unique(target)
            winner = tf.math.unsorted_segment_min(tf.range(tf.size(target)), place, tf.size(distinct))
            won = tf.gather(index_possible, winner)
            placed = self._place(shard, tf.gather(ids, won), tf.gather(keys, won), distinct, now)
            with tf.control_dependencies(placed):
                at = won[:, None]
                slot = tf.tensor_scatter_nd_update(slot, at, distinct)
            done = tf.ones_like(won, tf.bool)
            created = tf.tensor_scatter_nd_update(created, at, done)
            refused = tf.boolean_mask(index, ~possible)[:, None]
            open_ = tf.tensor_scatter_nd_update(open_, at, ~done)
            open_ = tf.tensor_scatter_nd_update(open_, refused, tf.zeros_like(refused[:, 0], tf.bool))
            return slot, open_, created

        slot, _, created = tf.while_loop(
            lambda _slot, open_, _created: tf.reduce_any(open_), body, state, parallel_iterations=1
        )
        if self._policy.evict is None:
            message = f"the table {self.table.path} is full: give its DynamicEmbedding a larger capacity, or evict"
            with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all((slot >= 0) | (keys == 0)), [message])]):
                slot = tf.identity(slot)
        return slot, created

    def _scores(self, shard: _Shard, buckets: tf.Tensor, now: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Which rows new keys take: those with the lowest score, int64; and all candidates within the shard, int32.

        Args:
            shard: the shard.
            buckets: the buckets of each key, shape (n, 2).
            now: microseconds since 1970.
        """
        keys, policy = _gathered(shard.keys, buckets), self._policy
        candidates = buckets[:, :, None] * WAYS + tf.range(WAYS)
        free = keys == 0
        if shard.first_group == 0:
            free &= candidates != 0
        number = tf.reduce_sum(tf.cast(free, tf.int64), axis=2, keepdims=True)
        score = tf.fill(tf.shape(keys), tf.constant(_NEVER, tf.int64))
        if policy.evict or policy.ttl is not None:
            used = _gathered(shard.used, buckets)
            grace = round(GRACE_SECONDS * 1e6) if shard.lock else 0
            if policy.evict == "lru":
                score = used
            elif policy.evict == "lfu":
                counts = tf.cast(tf.minimum(_gathered(shard.count, buckets), (1 << 18) - 1), tf.int64)
                score = counts * (1 << 43) + used // (1 << 9)
            if policy.admit_after > 1 and policy.evict:
                score -= tf.where(_gathered(shard.count, buckets) < policy.admit_after, _int64(_UNADMITTED), _int64(0))
            if policy.ttl is not None:
                expired = used < now - round(policy.ttl * 1e6)
                score = tf.where(expired, used - _int64(_UNADMITTED), score)
            score = tf.where((used < now - grace) & (candidates != 0), score, _int64(_NEVER))
        score = tf.where(free, _int64(_FREE) + WAYS - number, score)
        return tf.reshape(score, [-1, 2 * WAYS]), tf.reshape(candidates, [-1, 2 * WAYS])

    def _place(self, shard: _Shard, ids: tf.Tensor, keys: tf.Tensor, slot: tf.Tensor, now: tf.Tensor) -> list[Any]:
        """Gives rows to keys. Returns operations; the keys are written last, when their rows have their values."""
        written = [_scattered(shard.rows, slot, self.initial_rows(ids))]
        for variable, value in self._slots:
            own = parts(variable)[shard.number]
            shape = tf.concat([tf.shape(slot), own.shape[1:]], axis=0)
            written.append(_scattered(own, slot, tf.fill(shape, tf.cast(value, own.dtype))))
        at = _places(slot)
        for variable, value in ((shard.used, now), (shard.count, 0)):
            updates = tf.fill(tf.shape(slot), tf.cast(value, variable.dtype))
            written.append(tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=at, updates=updates))
        with tf.control_dependencies(written):
            return [tf.raw_ops.ResourceScatterNdUpdate(ref=shard.keys.handle, indices=at, updates=keys)]


def hashed(ids: tf.Tensor) -> tf.Tensor:
    """Returns the hash of each id, int64. Different ids have different hashes."""
    value = tf.bitcast(ids, tf.uint64) + _uint64(_INCREMENT)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        value = tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, _uint64(shift)))
        value *= _uint64(factor)
    return tf.bitcast(value, tf.int64)


def unhashed(keys: np.ndarray) -> np.ndarray:
    """Returns the ids of hashes."""
    value = keys.view(np.uint64)
    for shift, factor in ((31, 1), (27, _SECOND), (30, _FIRST)):
        value = value * np.uint64(pow(factor, -1, 2**64))
        value = value ^ (value >> np.uint64(shift)) ^ (value >> np.uint64(2 * shift))
    return (value - np.uint64(_INCREMENT)).view(np.int64)


def _buckets(keys: tf.Tensor, group: tf.Tensor) -> tf.Tensor:
    """Returns the two buckets of each key within the shard, int32, shape (n, 2)."""
    low = tf.cast(tf.bitwise.bitwise_and(keys, _int64(0xFFFF)), tf.int32)
    first = low % BUCKETS
    second = tf.bitwise.bitwise_xor(first, 1 + (low // BUCKETS) % (BUCKETS - 1))
    return group[:, None] * BUCKETS + tf.stack([first, second], axis=1)


def _slot_of(shard: _Shard, keys: tf.Tensor, buckets: tf.Tensor) -> tf.Tensor:
    """Returns the row of each key within the shard, int32; -1 if it has none."""
    same = tf.reshape(_gathered(shard.keys, buckets) == keys[:, None, None], [-1, 2 * WAYS])
    place = tf.reduce_max(tf.where(same, tf.range(2 * WAYS), -1), axis=1)
    bucket = tf.where(place < WAYS, buckets[:, 0], buckets[:, 1])
    return tf.where((place >= 0) & (keys != 0), bucket * WAYS + place % WAYS, -1)


def _gathered(variable: Any, buckets: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=buckets, dtype=variable.dtype)


def _scattered(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> Any:
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=rows, updates=values)


def _written(variable: Any, slot: tf.Tensor, values: tf.Tensor) -> Any:
    return tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=_places(slot), updates=values)


def _places(slot: tf.Tensor) -> tf.Tensor:
    return tf.stack([slot // WAYS, slot % WAYS], axis=1)


def _is_shared() -> bool:
    """Whether several workers use the variables that are created now."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)


def _locked(shard: _Shard, function: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    return shard.lock.execute(function) if shard.lock else function()


def _int64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _beside(table: keras.Variable, shape: Sequence[int], dtype: str, name: str) -> keras.Variable:
    """Creates a variable of zeros on the ps of a table, sharded like it."""
    strategy = tf.distribute.get_strategy()
    with strategy.extended.colocate_vars_with(table.value) if tf.distribute.has_strategy() else nullcontext():
        return keras.Variable("zeros", shape=tuple(shape), dtype=dtype, trainable=False, name=name)
