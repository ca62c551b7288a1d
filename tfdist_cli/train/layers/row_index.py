"""The index of a dynamic table: which row of the table holds the vector of an id.

The rows form groups of 64 buckets with 16 rows each. The hash of an id determines its group and two buckets in it (Azar
et al., Balanced Allocations, 1999), so an id is found by comparing 32 keys. It also determines the home of the id, one
of the 16 rows of the first bucket. The key there is compared first, and the 32 keys only for ids that have another row.
A new id gets its home if that is free, and half of the bucket with it; otherwise a free row of the bucket that has more
of them. If none is free, it replaces the row that was used least among the 32, as in a set-associative cache and in
NVIDIA's HierarchicalKV. The index consists of plain variables beside the rows. So shards, checkpoints and exports hold
it like any variable, whatever the number of ps; a group is never divided between two ps.

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

from tfdist_cli.tables.hashing import BUCKETS, GROUP, WAYS, unhashed
from tfdist_cli.tables.strings import decoded, row_width
from tfdist_cli.train.layers.initial_rows import InitialRows
from tfdist_cli.train.layers.row_keys import (
    buckets_of,
    hashed,
    home_ways,
    places,
    read,
    slot_of,
    string_rows,
    strings_as_ids,
    written,
)
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import clock
from tfdist_cli.train.tf_compat.functions import function_kept_whole
from tfdist_cli.train.tf_compat.variables import after_assignments
from tfdist_cli.train.variables.changed_rows import MARK, keep_marks, mark_all, marked, take_marks
from tfdist_cli.train.variables.rows import assign_rows, rows_of
from tfdist_cli.train.variables.sharding import parts, pieces

GRACE_SECONDS = 2.0
"""On parameter servers, rows used so recently are not replaced: a worker may still send their gradients."""
_FREE, _NEVER = tf.int64.min, tf.int64.max
_UNADMITTED = 1 << 62
_MOST_USES = 1 << 30
"""Uses of a row are counted so far: int32 ends at twice as many, and workers count at the same time."""
_HALF_FREE = WAYS // 2
"""A new id gets the row where it is looked up first if so many rows of that bucket are free. Otherwise the buckets are
balanced: with less, ids would find no free row in a table that is less full."""

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
    def records_times(self) -> bool:
        """Whether it is recorded when a row was used last."""
        return self.evict is not None or self.ttl is not None

    @property
    def counts_uses(self) -> bool:
        """Whether it is recorded how often a row was used."""
        return self.admit_after > 1 or self.evict == "lfu"

    @property
    def every_id_has_a_row(self) -> bool:
        """Whether each id of a training step has a row of its own, or the step fails."""
        return self.admit_after == 1 and self.evict is None


@dataclass(frozen=True)
class FoundRows:
    """The rows of some ids.

    Args:
        rows: for each shard the numbers of the rows within it, each once, int32, on its ps.
        counts: how many they are, int32, where the ids are.
        positions: for each id the position of its row in `rows`, those of all shards concatenated, int32.
    """

    rows: list[tf.Tensor]
    counts: list[tf.Tensor]
    positions: tf.Tensor


@dataclass(frozen=True, eq=False)
class _Shard:
    """The part of the index on one ps.

    Args:
        number: its number.
        rows: the part of the table.
        keys: the hash of the id of each row; 0 if the row is free. int64, shape (buckets, ways).
        used: when each row was used last, in microseconds since 1970; likewise.
        count: how often each row was used; likewise, int32.
        strings: the string of each row, uint8, shape (rows, `row_width`); None if they are not kept.
        first_group: the group that it begins with.
        lock: held while rows are created or replaced; None in one process.
    """

    number: int
    rows: Any
    keys: Any
    used: Any
    count: Any
    strings: Any
    first_group: int
    lock: Any

    @property
    def groups(self) -> int:
        return int(self.keys.shape[0]) // BUCKETS


@dataclass(frozen=True)
class _Ids:
    """Distinct ids.

    Args:
        ids: int64, shape (n,).
        uses: how often each is used, int32; None to create no rows, and to record nothing.
        strings: the string of each; None if they are not kept, or no rows are created.
    """

    ids: tf.Tensor
    uses: tf.Tensor | None
    strings: tf.Tensor | None

    def at(self, places: tf.Tensor) -> _Ids:
        """Returns some of them."""
        uses, strings = (None if each is None else tf.gather(each, places) for each in (self.uses, self.strings))
        return _Ids(tf.gather(self.ids, places), uses, strings)


class RowIndex:
    """The index of a table.

    Args:
        table: the table, whose number of rows is a multiple of `GROUP`.
        initial: computes the first values of a row.
        policy: which ids have rows.
        string_bytes: the bytes that are kept of each string; ids are strings then. None if strings are not kept.
    """

    def __init__(
        self, table: keras.Variable, initial: InitialRows, policy: RowPolicy, string_bytes: int | None = None
    ) -> None:
        self._initial, self.policy = initial, policy
        self.table = table
        shape = (int(table.shape[0]) // WAYS, WAYS)
        with tf.init_scope():
            self.keys, self.used, self.count = (
                _beside(table, shape, dtype, f"{table.name}_{name}")
                for name, dtype in (("keys", "int64"), ("used", "int64"), ("count", "int32"))
            )
            self.strings: keras.Variable | None = None
            if string_bytes:
                self.strings = _beside(
                    table, (int(table.shape[0]), row_width(string_bytes)), "uint8", f"{table.name}_strings", "CPU:0"
                )
            self._shards = self._new_shards()
        self._changed: keras.Variable | None = None
        self._marking: set[int] = set()
        """The `id`s of the variables whose assignments mark all rows."""
        self.attach([])

    def attach(self, slots: list[tuple[keras.Variable, float]]) -> None:
        """Sets the optimizer's slots of the table, each with its initial value: they start anew with a row's id."""
        self._slots = slots
        if self._changed is not None:
            for variable in self.row_variables:
                if id(variable) not in self._marking:
                    self._marking.add(id(variable))
                    after_assignments(variable, self._mark_all)
                for shard, marks in zip(parts(variable), parts(self._changed), strict=True):
                    keep_marks(shard, marks)
        self._functions = {create: self._function(create=create) for create in (False, True)}
        self._place_ids = self._placing_function()

    @property
    def variables(self) -> list[keras.Variable]:
        """Its variables, which checkpoints hold."""
        return [self.keys, self.used, self.count, *([] if self.strings is None else [self.strings])]

    @property
    def row_variables(self) -> list[keras.Variable]:
        """The variables that have a part for each row: the table, its slots, and those of the index."""
        return [self.table, *(slot for slot, _ in self._slots), *self.variables]

    def row_shape(self, variable: keras.Variable) -> tuple[int, ...]:
        """Returns the shape of a row in one of the `row_variables`; () in those of the index but for strings."""
        of_buckets = any(variable is own for own in (self.keys, self.used, self.count))
        return () if of_buckets else tuple(variable.shape[1:])

    @property
    def first_rows(self) -> list[int]:
        """The number of the first row of each shard."""
        return [shard.first_group * GROUP for shard in self._shards]

    def track_changes(self) -> None:
        """Records from now on which rows change, for `take_changes`. To be called before steps are traced."""
        if self._changed is None:
            with tf.init_scope():
                self._changed = _beside(self.table, self.keys.shape, MARK, f"{self.table.name}_changed")
        self.attach(self._slots)

    @property
    def tracks_changes(self) -> bool:
        """Whether it records which rows change."""
        return self._changed is not None

    def take_changes(self) -> list[tf.Tensor]:
        """Returns which rows have changed since the last call, and forgets them.

        A row that is written during the call has its new value when it is read afterwards, or the next call returns it.

        Returns:
            For each shard the numbers of the rows in it, int32, ascending, on its device.
        """
        return [take_marks(marks) for marks in parts(self._changed)]

    def _mark_all(self) -> None:
        for marks in parts(self._changed):
            mark_all(marks)

    @property
    def groups(self) -> int:
        """The number of groups of all shards."""
        return int(self.table.shape[0]) // GROUP

    def rows(self, ids: tf.Tensor, *, create: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of ids; those of ids that have none are 0.

        Args:
            ids: int64, shape (n,); strings if these are kept.
            create: whether ids are counted, and new ones get rows.

        Returns:
            The row of each id, int32, and whether it was created now, bool, both of shape (n,).
        """
        if create and self._shards[0].lock is None:  # a single one
            own, where = self._distinct(ids, create=create)
            slot, created = self._slots_of_shard(self._shards[0], own)
            created &= slot >= 0  # an id that is not admitted yet has the row 0
            return tf.gather(tf.maximum(slot, 0), where), tf.gather(created, where)
        found = self.fetch(ids, create=create)
        numbers = [own + shard.first_group * GROUP for own, shard in zip(found.rows, self._shards, strict=True)]
        return tf.gather(tf.concat(numbers, axis=0), found.positions), tf.zeros_like(found.positions, tf.bool)

    def fetch(self, ids: tf.Tensor, *, create: bool) -> FoundRows:
        """Returns the rows of ids, each row once and where it is.

        Args:
            ids: int64, shape (n,); strings if these are kept.
            create: whether ids are counted, and new ones get rows.
        """
        distinct, where = self._distinct(ids, create=create)
        owner: Any = tf.zeros_like(distinct.ids, tf.int32)
        places = [tf.range(tf.size(distinct.ids))]
        own = [distinct]
        if len(self._shards) > 1:
            firsts = tf.constant([[shard.first_group for shard in self._shards[1:]]])
            owner = tf.raw_ops.UpperBound(sorted_inputs=firsts, values=self._group(hashed(distinct.ids))[None])[0]
            places = tf.dynamic_partition(places[0], owner, len(self._shards))
            own = [distinct.at(place) for place in places]
        slots = [self._slots_on_device(*each) for each in zip(self._shards, own, strict=True)]
        if create and self.policy.every_id_has_a_row:
            place = tf.range(tf.size(distinct.ids))
            counts = [tf.size(each.ids) for each in own]
        else:  # the row 0, in the first shard, is that of all ids that have none
            has, slots = self._without_missing(slots)
            joined = tf.concat(has, axis=0)
            place = tf.where(joined, tf.cumsum(tf.cast(joined, tf.int32)), 0)
            counts = [tf.reduce_sum(tf.cast(each, tf.int32)) for each in has]
            counts[0] += 1
        if len(places) > 1:
            place = tf.gather(place, tf.math.invert_permutation(tf.concat(places, axis=0)))
        return FoundRows(slots, counts, tf.gather(place, where))

    def clear(self) -> None:
        """Takes all rows from their ids."""
        for keys in parts(self.keys):
            with tf.device(keys.device):
                keys.assign(tf.zeros_like(keys))

    def place(self, ids: tf.Tensor) -> np.ndarray:
        """Gives rows to ids that have none, whatever their number of uses. No step is running.

        Args:
            ids: int64, shape (n,), distinct.

        Returns:
            The row of each id, int32, shape (n,); -1 if it found none.

        Raises:
            tf.errors.InvalidArgumentError: a table that does not evict is full.
        """
        found = np.full(ids.shape, -1, np.int32)
        firsts = [shard.first_group for shard in self._shards]
        owner = np.searchsorted(firsts, self._group(hashed(ids)).numpy(), side="right") - 1
        for shard in self._shards:
            own = np.flatnonzero(owner == shard.number)
            rows = self._place_ids(shard, tf.gather(ids, own)).numpy()
            found[own] = np.where(rows < 0, -1, rows + shard.first_group * GROUP)
        return found

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that have rows, int64, and their rows, int32, both of shape (n,)."""
        keys, counts = (np.concatenate([part.numpy() for part in parts(each)]) for each in (self.keys, self.count))
        has = keys.reshape(-1) != 0
        if self.policy.admit_after > 1:
            has &= counts.reshape(-1) >= self.policy.admit_after
        rows = np.flatnonzero(has).astype(np.int32)
        return unhashed(keys.reshape(-1)[rows]), rows

    def strings_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the strings of rows as an array of `str`, shape (n,). Blocks of the variable are read one by one.

        Args:
            rows: the rows of ids, ascending.
        """
        found: list[np.ndarray] = []
        first = 0
        for piece in pieces(self.strings):
            block = piece.read().numpy()
            start, end = np.searchsorted(rows, [first, first + len(block)])
            found.append(decoded(block[rows[start:end] - first]))
            first += len(block)
        return np.concatenate(found)

    def initial_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the initial rows of ids, of the type that is stored."""
        return self._initial(ids, parts(self.table)[0].dtype)  # Keras's own attribute is that of a mixed policy

    def _new_shards(self) -> list[_Shard]:
        shards: list[_Shard] = []
        first = 0
        own = [parts(each) for each in (self.table, self.keys, self.used, self.count)]
        own.append([None] * len(own[0]) if self.strings is None else parts(self.strings))
        for rows, keys, used, count, strings in zip(*own, strict=True):
            with tf.device(rows.device):
                lock = tf.CriticalSection() if _is_shared() else None
            shards.append(_Shard(len(shards), rows, keys, used, count, strings, first, lock))
            first += shards[-1].groups
        return shards

    def _group(self, keys: tf.Tensor) -> tf.Tensor:
        """The group of each key, int32."""
        high = tf.bitwise.right_shift(tf.bitcast(keys, tf.uint64), tf.constant(32, tf.uint64))
        scaled = high * tf.constant(self.groups, tf.uint64)
        return tf.cast(tf.bitwise.right_shift(scaled, tf.constant(32, tf.uint64)), tf.int32)

    def _distinct(self, given: tf.Tensor, *, create: bool) -> tuple[_Ids, tf.Tensor]:
        """Returns distinct ids, and for each given one its position among them.

        If two strings have the same id, the first one stands for both.
        """
        ids = given if self.strings is None else strings_as_ids(given)
        if create and self.policy.counts_uses:
            distinct, where, uses = tf.unique_with_counts(ids)
        else:
            distinct, where = tf.unique(ids)
            uses = tf.ones_like(distinct, tf.int32)
        strings = None
        if create and self.strings is not None:
            first = tf.math.unsorted_segment_min(tf.range(tf.size(ids)), where, tf.size(distinct))
            strings = tf.gather(given, first)
        return _Ids(distinct, uses if create else None, strings), where

    def _slots_on_device(self, shard: _Shard, own: _Ids) -> tf.Tensor:
        """Returns the rows of distinct ids within a shard, on its ps: a function there finds them, only ids cross."""
        if shard.lock is None:
            return self._slots_of_shard(shard, own)[0]
        create = own.uses is not None
        uses = own.uses if self.policy.counts_uses else None
        with tf.device(shard.rows.device):
            return unordered(self._functions[create](shard, own.ids, uses, own.strings))

    def _without_missing(self, slots: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns which ids have rows; and the rows of those that have, on their ps, with the row 0 before them."""
        has: list[tf.Tensor] = []
        found: list[tf.Tensor] = []
        for shard, slot in zip(self._shards, slots, strict=True):
            with tf.device(shard.rows.device) if shard.lock else nullcontext():
                own = slot >= 0
                has.append(own)
                rows = tf.boolean_mask(slot, own)
                found.append(rows if found else tf.concat([[0], rows], axis=0))
        return has, found

    def _function(self, *, create: bool) -> Any:
        def slots(shard: _Shard, ids: tf.Tensor, uses: tf.Tensor | None, strings: tf.Tensor | None) -> tf.Tensor:
            with tf.device(shard.rows.device):
                some = tf.ones_like(ids, tf.int32) if create and uses is None else uses
                return self._slots_of_shard(shard, _Ids(ids, some, strings))[0]

        return function_kept_whole(slots)

    def _placing_function(self) -> Any:
        def placed(shard: _Shard, ids: tf.Tensor) -> tf.Tensor:
            with tf.device(shard.rows.device):
                keys = hashed(ids)
                strings = None if shard.strings is None else tf.fill(tf.shape(ids), "")
                own = _Ids(ids, tf.ones_like(ids, tf.int32), strings)
                group = self._group(keys) - shard.first_group
                return _locked(shard, lambda: self._create(shard, own, keys, group, _now()))[0]

        return function_kept_whole(placed)

    def _slots_of_shard(self, shard: _Shard, own: _Ids) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the row of each id within a shard, -1 if it has none, and whether it was created now."""
        keys, uses = hashed(own.ids), own.uses
        group = self._group(keys) - shard.first_group
        slot = slot_of(shard.keys, keys, group)
        if uses is None:
            return self._admitted(shard, slot), tf.zeros_like(keys, tf.bool)
        now = _now()
        if self.policy.records_times:
            slot = self._still_found(shard, keys, slot, now)

        def some_new() -> tuple[Any, Any]:
            return self._with_new(shard, own, slot, keys, group, now)

        complete = tf.reduce_all(slot >= 0)  # usually all ids have rows
        slot, created = tf.cond(complete, lambda: (slot, tf.zeros_like(slot, tf.bool)), some_new)
        if not self.policy.counts_uses:
            return slot, created
        has = tf.where(slot >= 0)[:, 0]
        rows = tf.gather(slot, has)
        more = tf.minimum(tf.gather(uses, has), tf.maximum(_MOST_USES - read(shard.count, rows), 0))
        count = tf.raw_ops.ResourceScatterNdAdd(ref=shard.count.handle, indices=places(rows), updates=more)
        count = marked(shard.count, rows, count)
        with tf.control_dependencies([count] if count is not None else []):
            return self._admitted(shard, tf.identity(slot)), created

    def _admitted(self, shard: _Shard, slot: tf.Tensor) -> tf.Tensor:
        """Rows within the shard, without those of ids that are not admitted yet."""
        if self.policy.admit_after == 1:
            return slot
        return tf.where(read(shard.count, tf.maximum(slot, 0)) >= self.policy.admit_after, slot, -1)

    def _stamped(self, shard: _Shard, slot: tf.Tensor, now: tf.Tensor) -> Any:
        done = written(shard.used, slot, tf.fill(tf.shape(slot), now))
        if not self.policy.counts_uses:  # otherwise the rows are marked when they are counted
            done = marked(shard.used, slot, done)
        return done or tf.no_op()

    def _still_found(self, shard: _Shard, keys: tf.Tensor, slot: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Records the use of rows. Returns them with -1 for those that a worker has replaced meanwhile.

        A row that is replaced loses its key before its time is looked at, see `_claimed`: so either the key is missed
        here, or the time is seen there.
        """
        has = tf.where(slot >= 0)[:, 0]
        found = tf.gather(slot, has)
        with tf.control_dependencies([self._stamped(shard, found, now)]):
            if shard.lock is None:
                return tf.identity(slot)
            lost = tf.boolean_mask(has, read(shard.keys, found) != tf.gather(keys, has))
        return tf.tensor_scatter_nd_update(slot, lost[:, None], tf.fill(tf.shape(lost), -1))

    def _with_new(
        self, shard: _Shard, ids: _Ids, slot: tf.Tensor, keys: tf.Tensor, group: tf.Tensor, now: tf.Tensor
    ) -> tuple[Any, Any]:
        """The row of each key, with rows for those that have none, if possible; and whether it was created now."""
        missing = tf.where(slot < 0)
        at = missing[:, 0]
        own, new_keys, new_group = ids.at(at), tf.gather(keys, at), tf.gather(group, at)
        found, new = _locked(shard, lambda: self._found_or_created(shard, own, new_keys, new_group, now))
        if self.policy.every_id_has_a_row:
            found = tf.maximum(found, 0)
        created = tf.tensor_scatter_nd_update(tf.zeros_like(slot, tf.bool), missing, new)
        return tf.tensor_scatter_nd_update(slot, missing, found), created

    def _found_or_created(
        self, shard: _Shard, ids: _Ids, keys: tf.Tensor, group: tf.Tensor, now: tf.Tensor
    ) -> tuple[Any, Any]:
        """The row of each key; keys without one get one, if possible."""
        if shard.lock is None:
            return self._create(shard, ids, keys, group, now)
        now = _now()  # others may have held the lock for long
        slot = slot_of(shard.keys, keys, group)  # another worker may have created it meanwhile
        stamped = []
        if self.policy.records_times:
            stamped = [self._stamped(shard, tf.boolean_mask(slot, slot >= 0), now)]
        with tf.control_dependencies(stamped):
            missing = tf.where(slot < 0)
        at = missing[:, 0]
        own, created = self._create(shard, ids.at(at), tf.gather(keys, at), tf.gather(group, at), now)
        return (
            tf.tensor_scatter_nd_update(slot, missing, own),
            tf.tensor_scatter_nd_update(tf.zeros_like(slot, tf.bool), missing, created),
        )

    def _create(self, shard: _Shard, ids: _Ids, keys: tf.Tensor, group: tf.Tensor, now: tf.Tensor) -> tuple[Any, Any]:
        """Gives keys rows, in rounds: if several take the same row, the first one gets it."""
        count = tf.size(keys)
        # The key 0 marks free rows: the id with this hash never has a row.
        state = (tf.fill([count], -1), keys != 0, tf.zeros([count], tf.bool))

        def body(slot: tf.Tensor, open_: tf.Tensor, created: tf.Tensor) -> tuple[Any, Any, Any]:
            index = tf.where(open_)[:, 0]
            score, candidates = self._scores(shard, tf.gather(keys, index), tf.gather(group, index), now)
            best = tf.argmin(score, axis=1)
            target = tf.gather(candidates, best, batch_dims=1)
            possible = tf.reduce_min(score, axis=1) < _NEVER
            index_possible, target = tf.boolean_mask(index, possible), tf.boolean_mask(target, possible)
            distinct, place = tf.unique(target)
            winner = tf.math.unsorted_segment_min(tf.range(tf.size(target)), place, tf.size(distinct))
            won = tf.gather(index_possible, winner)
            if shard.lock and self.policy.records_times:
                distinct, won = self._claimed(shard, distinct, won, now)
            placed = self._place(shard, ids.at(won), tf.gather(keys, won), distinct, now)
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
        if self.policy.evict is None:
            message = f"the table {self.table.path} is full: give its DynamicEmbedding a larger capacity, or evict"
            with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all((slot >= 0) | (keys == 0)), [message])]):
                slot = tf.identity(slot)
        return slot, created

    def _claimed(self, shard: _Shard, slot: tf.Tensor, won: tf.Tensor, now: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes rows from their ids; without those that a step without the lock has used meanwhile.

        Args:
            shard: the shard.
            slot: the rows.
            won: what belongs to each row.
            now: microseconds since 1970.
        """
        before = read(shard.keys, slot)
        with tf.control_dependencies([before]):
            taken = written(shard.keys, slot, tf.zeros_like(before)) or tf.no_op()
        with tf.control_dependencies([taken]):
            still = (before == 0) | (read(shard.used, slot) < now - round(GRACE_SECONDS * 1e6))
            back = tf.boolean_mask(slot, ~still), tf.boolean_mask(before, ~still)
            restored = marked(shard.keys, back[0], written(shard.keys, *back)) or tf.no_op()
        with tf.control_dependencies([restored]):
            return tf.boolean_mask(slot, still), tf.boolean_mask(won, still)

    def _scores(self, shard: _Shard, new: tf.Tensor, group: tf.Tensor, now: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Which rows new keys take: those with the lowest score, int64; and all candidates within the shard, int32.

        Args:
            shard: the shard.
            new: the keys.
            group: their groups within the shard.
            now: microseconds since 1970.
        """
        buckets = buckets_of(new, group)
        keys, policy = rows_of(shard.keys, buckets), self.policy
        candidates = buckets[:, :, None] * WAYS + tf.range(WAYS)
        free = keys == 0
        if shard.first_group == 0:
            free &= candidates != 0
        number = tf.reduce_sum(tf.cast(free, tf.int64), axis=2, keepdims=True)
        score = tf.fill(tf.shape(keys), tf.constant(_NEVER, tf.int64))
        if policy.evict or policy.ttl is not None:
            used = rows_of(shard.used, buckets)
            grace = round(GRACE_SECONDS * 1e6) if shard.lock else 0
            if policy.evict == "lru":
                score = used
            elif policy.evict == "lfu":
                counts = tf.cast(tf.minimum(rows_of(shard.count, buckets), (1 << 18) - 1), tf.int64)
                score = counts * (1 << 43) + used // (1 << 9)
            if policy.admit_after > 1 and policy.evict:
                score -= tf.where(rows_of(shard.count, buckets) < policy.admit_after, _int64(_UNADMITTED), _int64(0))
            if policy.ttl is not None:
                expired = used < now - round(policy.ttl * 1e6)
                score = tf.where(expired, used - _int64(_UNADMITTED), score)
            score = tf.where((used < now - grace) & (candidates != 0), score, _int64(_NEVER))
        home = tf.range(WAYS) == home_ways(new)[:, None, None]
        first = home & (tf.constant([[True], [False]]) & (number >= _HALF_FREE))
        order = tf.where(first, _int64(0), 2 * (WAYS - number) + tf.cast(~home, tf.int64))
        score = tf.where(free, _int64(_FREE) + order, score)
        return tf.reshape(score, [-1, 2 * WAYS]), tf.reshape(candidates, [-1, 2 * WAYS])

    def _place(self, shard: _Shard, ids: _Ids, keys: tf.Tensor, slot: tf.Tensor, now: tf.Tensor) -> list[Any]:
        """Gives rows to keys. Returns operations; the keys are written last, when their rows have their values."""
        values = [assign_rows(shard.rows, slot, self.initial_rows(ids.ids))]
        if shard.strings is not None:
            values.append(assign_rows(shard.strings, slot, string_rows(ids.strings, int(shard.strings.shape[1]))))
        for variable, value in self._slots:
            own = parts(variable)[shard.number]
            shape = tf.concat([tf.shape(slot), own.shape[1:]], axis=0)
            values.append(assign_rows(own, slot, tf.fill(shape, tf.cast(value, own.dtype))))
        at = places(slot)
        for variable, value in ((shard.used, now), (shard.count, 0)):
            updates = tf.fill(tf.shape(slot), tf.cast(value, variable.dtype))
            values.append(tf.raw_ops.ResourceScatterNdUpdate(ref=variable.handle, indices=at, updates=updates))
        with tf.control_dependencies(values):
            done = tf.raw_ops.ResourceScatterNdUpdate(ref=shard.keys.handle, indices=at, updates=keys)
        return [marked(shard.keys, slot, done)]


def _now() -> tf.Tensor:
    """Microseconds since 1970, int64."""
    return tf.cast(clock() * 1e6, tf.int64)


def _is_shared() -> bool:
    """Whether several workers use the variables that are created now."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)


def _locked(shard: _Shard, function: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    return shard.lock.execute(function) if shard.lock else function()


def _int64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _beside(
    table: keras.Variable, shape: Sequence[int], dtype: str, name: str, device: str | None = None
) -> keras.Variable:
    """Creates a variable of zeros on the ps of a table, sharded like it; in one process on a device if one is given."""
    strategy = tf.distribute.get_strategy()
    with strategy.extended.colocate_vars_with(table.value) if tf.distribute.has_strategy() else tf.device(device):
        return keras.Variable("zeros", shape=tuple(shape), dtype=dtype, trainable=False, name=name)
