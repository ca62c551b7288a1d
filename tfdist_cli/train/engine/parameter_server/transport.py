"""Moves parameters and gradients between a worker and the ps: one tensor for many small variables of a ps.

Every tensor that crosses the network costs a request, whatever its size. So a ps packs the values of its variables
of one type, a bucket, into one tensor before they leave, the looked-up rows of its tables among them. It receives the
gradients of a bucket in one tensor, too, among them the sums of terms that updates take, see `optimizers/terms.py`. A
large variable is a bucket of its own: to copy it into the packed tensor and out of it takes longer than a request, and
it can be used, or applied, before the others have arrived.

Between tasks of one host, large variables and their gradients cross in shared memory, see `cluster/shared_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.tensors import receive, send
from tfdist_cli.train.model.compute_device import DeviceScope
from tfdist_cli.train.model.embeddings import LookedUpRows, Lookup
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.row_sums import row_sums
from tfdist_cli.train.optimizers.terms import SummedTerms, Terms
from tfdist_cli.train.variables.rows import rows_of
from tfdist_cli.train.variables.sharding import Gradient, parts

LARGE_BYTES = 2 << 20
"""Variables, or shards, of this size are not packed. The MLP 784-1024-1024-10, whose two largest have 3.1 and 4.0 MiB,
trains 1.3 times as fast on 2 cores as if all are packed. With 1.5 and 1.0 MiB it makes no difference (0.99, 0.97)."""
LARGE_SHARED_BYTES = 3 << 18
"""The same where large variables cross in shared memory. With variables of 1.6 and 1.0 MB, the MLP 784-500-500-10 at
batch 64 takes 1.1 times as many steps as with packed ones."""


@dataclass(frozen=True)
class VariableShard:
    """A variable, or one of the shards of a variable that is sharded over several ps.

    Args:
        parameter: the variable's index among the parameters.
        index: the shard's index among the variable's.
        variable: the variable that holds its values.
    """

    parameter: int
    index: int
    variable: Any

    @property
    def key(self) -> tuple[int, int]:
        """The indices of the parameter and of the shard."""
        return self.parameter, self.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.variable.shape)

    @property
    def size(self) -> int:
        """How many values it has."""
        return int(np.prod(self.shape))

    @property
    def bytes(self) -> int:
        """The bytes of its values."""
        return self.size * int(self.variable.dtype.size)


@dataclass(frozen=True)
class Bucket:
    """Variables of one type on one ps: their values cross as one tensor.

    Args:
        device: the ps.
        dtype: the type.
        dense: the shards of variables that cross whole.
        tables: the shards of tables, of which only looked-up rows cross.
        terms: what updates take of each term of a gradient, by the index of the parameter.
        is_large: whether it is that of one large variable.
    """

    device: str
    dtype: tf.DType
    is_large: bool
    dense: list[VariableShard] = field(default_factory=list)
    tables: list[VariableShard] = field(default_factory=list)
    terms: Mapping[int, Terms] = field(default_factory=dict)

    def with_terms(self, shards: Sequence[VariableShard]) -> list[VariableShard]:
        """Returns those of some shards whose gradients have terms."""
        return [shard for shard in shards if shard.parameter in self.terms]

    @property
    def sent_rows(self) -> list[VariableShard]:
        """The table shards of which values are pushed: each for its gradient, and again for the sums of terms."""
        return [*self.tables, *self.with_terms(self.tables)]

    @property
    def sent_whole(self) -> list[VariableShard]:
        """The other shards of which values are pushed."""
        return [*self.dense, *self.with_terms(self.dense)]


@dataclass(frozen=True)
class Pulled:
    """Parameters that have been read.

    Args:
        values: each parameter's value, or its looked-up rows, on the worker.
        rows: for each bucket and table shard the numbers of its looked-up rows, on the ps.
        counts: how many rows of each table shard are looked up, by `VariableShard.key`, on the worker.
        sent: for each bucket the packed values before they were rounded, on the ps.
    """

    values: Tensors
    rows: list[Tensors]
    counts: dict[tuple[int, int], tf.Tensor]
    sent: Tensors

    @classmethod
    def whole(cls, values: Tensors) -> Pulled:
        """Returns parameters that were read where they are stored."""
        return cls(values, [], {}, [])


@dataclass(frozen=True)
class PushedGradients:
    """A worker's gradients on the ps.

    Args:
        packed: for each bucket the gradients of its variables, packed: those of tables and the sums of their terms,
            then those of other variables and the sums of their terms. None for a bucket whose ps makes its part of an
            update by itself.
        rows: for each bucket and table shard the numbers of the rows.
        piggyback: the numbers that have crossed with them, float64.
    """

    packed: Sequence[Any]
    rows: list[Tensors]
    piggyback: tf.Tensor | None = None


@dataclass(frozen=True)
class Piggyback:
    """Numbers that cross with the gradients of a bucket, behind them: they cost no request.

    Args:
        bucket: the index of the bucket.
        numbers: float64, shape (numbers,).
    """

    bucket: int
    numbers: tf.Tensor


class Transport:
    """Moves a model's parameters and gradients.

    Args:
        parameters: variables, each on the device of its ps, or sharded over several.
        tables: the indices of those that are looked up.
        dtype: the type in which values cross; `float32` leaves them unchanged.
        device_scope: where workers compute; values are packed and unpacked there.
        packed: whether the small variables and the tables of one type on one ps are one bucket; otherwise each is a
            bucket of its own.
        terms: what updates take of each term of a gradient, by the index of the parameter.
        shared: whether large variables cross in memory that workers and ps share.
    """

    def __init__(
        self,
        parameters: Sequence[keras.Variable],
        tables: Sequence[int] = (),
        dtype: str = "float32",
        device_scope: DeviceScope = nullcontext,
        *,
        packed: bool = True,
        terms: Mapping[int, Terms] | None = None,
        shared: bool = False,
    ) -> None:
        self._tables = list(tables)
        self.shared = shared
        self.terms = dict(terms or {})
        self.device_scope = device_scope
        self._wire_dtype = None if dtype == "float32" else tf.as_dtype(dtype)
        self.shards = [_shards(index, variable) for index, variable in enumerate(parameters)]
        buckets: dict[Any, Bucket] = {}
        least = LARGE_SHARED_BYTES if shared else LARGE_BYTES
        for shard in (each for own in self.shards for each in own):
            owner, is_table = (shard.variable.device, shard.variable.dtype), shard.parameter in self._tables
            is_large = shard.bytes >= least and not is_table
            key = owner, shard.key if is_large or not packed else None
            bucket = buckets.setdefault(key, Bucket(*owner, is_large, terms=self.terms))
            (bucket.tables if is_table else bucket.dense).append(shard)
        self.buckets = list(buckets.values())

    @property
    def has_tables(self) -> bool:
        """Whether there are tables that are looked up."""
        return bool(self._tables)

    @property
    def shares(self) -> bool:
        """Whether there is a variable that crosses in shared memory."""
        return self.shared and any(bucket.is_large for bucket in self.buckets)

    def pull(
        self,
        lookup: Lookup | None = None,
        held: Tensors | None = None,
        after: Mapping[str, tf.Tensor] | None = None,
        received_after: Sequence[tf.Tensor] = (),
    ) -> Pulled:
        """Reads each parameter once, of tables the rows that are looked up.

        Args:
            lookup: the rows; None only for parameters without tables.
            held: values pulled before, which are reused: only rows are read.
            after: for each ps a tensor that is awaited before it reads.
            received_after: tensors that are awaited before the values are there.
        """
        local = self._by_shard(lookup)
        size = {key: own.count for key, own in local.items()}
        arrived: dict[tuple[int, int], tf.Tensor] = {}
        rows, sent = [], []
        for bucket in self.buckets:
            whole = [] if held is not None else bucket.dense
            counts = [size[shard.key] for shard in bucket.tables]
            wanted = [local[shard.key] for shard in bucket.tables]
            sent_numbers = [own.numbers for own in wanted if not own.on_ps]
            sent_counts = [own.count for own in wanted if not own.on_ps]
            packed_numbers: Any = sent_numbers
            if len(sent_numbers) > 1:
                packed_numbers = _packed([*sent_numbers, tf.stack(sent_counts)])
            with tf.device(bucket.device):
                arrived_numbers = iter(self._row_numbers(packed_numbers, sent_counts))
                numbers = [tf.identity(own.numbers) if own.on_ps else next(arrived_numbers) for own in wanted]
                with tf.control_dependencies([after[bucket.device]] if after else []):
                    packed = _read(whole, bucket.tables, numbers)
                on_wire = self._sent(bucket, self._rounded(packed))
            rows.append(numbers)
            sent.append(packed)
            with self.device_scope():
                with tf.control_dependencies(received_after):
                    received = tf.identity(on_wire)  # the worker's: gradients ask for the shape where a tensor is made
                received = tf.cast(self._received(bucket, received, bucket.dense), bucket.dtype)
                unpacked = _unpacked(received, counts, bucket.tables, whole)
            for shard, part in zip(bucket.tables + whole, unpacked, strict=True):
                arrived[shard.key] = part
        values = []
        for parameter, shards in enumerate(self.shards):
            if held is not None and parameter not in self._tables:
                values.append(held[parameter])
            else:
                values.append(self._whole([arrived[shard.key] for shard in shards]))
        return Pulled(values, rows, size, sent)

    def _whole(self, shards: Tensors) -> tf.Tensor:
        with self.device_scope():
            return shards[0] if len(shards) == 1 else tf.concat(shards, axis=0)

    def shown(self, bucket: Bucket) -> tf.Tensor:
        """The packed values of a bucket without tables, as they cross; called on its ps."""
        return self._rounded(_read(bucket.dense, [], []))

    def seen(self, values: Sequence[tf.Tensor]) -> Pulled:
        """Returns the parameters on a worker that has what `shown` returned for each bucket."""
        arrived: dict[tuple[int, int], tf.Tensor] = {}
        with self.device_scope():
            for bucket, packed in zip(self.buckets, values, strict=True):
                unpacked = _unpacked(tf.cast(packed, bucket.dtype), [], [], bucket.dense)
                arrived |= {shard.key: part for shard, part in zip(bucket.dense, unpacked, strict=True)}
        whole = [self._whole([arrived[shard.key] for shard in shards]) for shards in self.shards]
        return Pulled(whole, [[] for _ in self.buckets], {}, [])

    def sent_ahead(self, lookups: Sequence[Lookup]) -> list[Lookup]:
        """Sends the numbers of the rows of several pulls to the ps: one request in place of one for each of them.

        Args:
            lookups: the rows of each pull.
        """
        local = [self._by_shard(lookup) for lookup in lookups]
        for bucket in self.buckets:
            places = [(own, shard.key) for own in local for shard in bucket.tables if not own[shard.key].on_ps]
            if not places:
                continue
            counts = [own[key].count for own, key in places]
            on_wire = _packed([*(own[key].numbers for own, key in places), tf.stack(counts)])
            with tf.device(bucket.device):
                arrived = self._row_numbers(on_wire, counts)
            for (own, key), numbers, count in zip(places, arrived, counts, strict=True):
                own[key] = LookedUpRows(numbers, count, on_ps=True)
        keys = list(local[0])
        return [
            Lookup([own[key] for key in keys], lookup.positions) for own, lookup in zip(local, lookups, strict=True)
        ]

    def piggyback_bucket(self, device: str) -> int | None:
        """The index of a bucket on a ps with which numbers can cross; None if no bucket has several variables."""
        for index, bucket in enumerate(self.buckets):
            if bucket.device == device and len(bucket.dense) + len(bucket.tables) > 1:
                return index
        return None

    def push(self, gradients: Sequence[Any], pulled: Pulled, piggyback: Piggyback | None = None) -> PushedGradients:
        """Sends a worker's gradients to the ps; zeros for parameters that have none.

        Args:
            gradients: one per parameter, of the shape of the pulled value, `tf.IndexedSlices`, or None.
            pulled: the values that they are gradients of.
            piggyback: numbers that cross with them.
        """
        with self.device_scope():
            return self._pushed(gradients, pulled, piggyback)

    def packed_gradients(self, gradients: Sequence[Any], pulled: Pulled) -> Tensors:
        """Packs a worker's gradients as they cross: one tensor for each bucket, see `push`."""
        with self.device_scope():
            return [self._rounded(_packed(pieces)) for pieces in self._pieces(gradients, pulled)]

    def whole_gradients(self, gradients: Sequence[Any], pulled: Pulled) -> list[Gradient | None]:
        """Returns a worker's gradients as updates take them, if there are no tables and no shards; None stays None."""
        found: list[Gradient | None] = []
        for parameter, (gradient, value) in enumerate(zip(gradients, pulled.values, strict=True)):
            if gradient is None:
                found.append(None)
                continue
            with self.device_scope():
                total = dense(gradient, value)
                if parameter in self.terms:
                    total = SummedTerms(total, self._taken_of_terms(parameter, gradient, value), self.terms[parameter])
            found.append([total])
        return found

    def arrived(self, packed: Sequence[tf.Tensor]) -> PushedGradients:
        """The gradients on the ps that have what `packed_gradients` returned, if there are no tables."""
        whole = []
        for bucket, own in zip(self.buckets, packed, strict=True):
            with tf.device(bucket.device):
                whole.append(tf.cast(own, bucket.dtype))
        return PushedGradients(whole, [[] for _ in self.buckets])

    def crossing(self, bucket: Bucket) -> tuple[tf.DType, int, int]:
        """The type in which a bucket without tables crosses, and how many values its variables and gradients have."""
        values = sum(shard.size for shard in bucket.dense)
        return self._wire_dtype or bucket.dtype, values, sum(shard.size for shard in bucket.sent_whole)

    def _pushed(self, gradients: Sequence[Any], pulled: Pulled, piggyback: Piggyback | None) -> PushedGradients:
        packed, arrived = [], None
        all_pieces = self._pieces(gradients, pulled)
        for index, (bucket, pieces) in enumerate(zip(self.buckets, all_pieces, strict=True)):
            if piggyback is not None and piggyback.bucket == index:
                rounded = [self._rounded(piece) for piece in pieces]
                on_wire = _packed([*rounded, tf.bitcast(piggyback.numbers, rounded[0].dtype)])
                with tf.device(bucket.device):
                    arrived = _last_numbers(on_wire, int(piggyback.numbers.shape[0]))
            else:
                on_wire = self._sent(bucket, self._rounded(_packed(pieces)))
            with tf.device(bucket.device):
                packed.append(tf.cast(self._received(bucket, on_wire, bucket.sent_whole), bucket.dtype))
        return PushedGradients(packed, pulled.rows, arrived)

    def _pieces(self, gradients: Sequence[Any], pulled: Pulled) -> list[Tensors]:
        """What is sent of each bucket: the gradients of its variables and the sums of their terms."""
        by_shard: dict[tuple[int, int], tf.Tensor] = {}
        terms: dict[tuple[int, int], tf.Tensor] = {}
        together = [self._summed_together(bucket, gradients) for bucket in self.buckets]
        summed = {
            shard.parameter for bucket, of in zip(self.buckets, together, strict=True) if of for shard in bucket.tables
        }
        for parameter, shards in enumerate(self.shards):
            if parameter in summed:
                continue
            is_table = parameter in self._tables
            counts = [pulled.counts.get(shard.key) for shard in shards]
            sizes = counts if is_table else [shard.shape[0] for shard in shards if shard.shape]
            value, own = pulled.values[parameter], gradients[parameter]
            by_shard |= _by_shard(shards, dense(own, value, counts if is_table else None), sizes)
            if parameter in self.terms:
                terms |= _by_shard(shards, self._terms_of(parameter, own, value), sizes)
        found = []
        for bucket, of_tables in zip(self.buckets, together, strict=True):
            if of_tables:
                pieces = self._sums_of_tables(bucket, gradients, pulled)
            else:
                pieces = [by_shard[shard.key] for shard in bucket.tables]
                pieces += [terms[shard.key] for shard in bucket.with_terms(bucket.tables)]
            pieces += [by_shard[shard.key] for shard in bucket.dense]
            pieces += [terms[shard.key] for shard in bucket.with_terms(bucket.dense)]
            found.append(pieces)
        return found

    def _sent(self, bucket: Bucket, packed: tf.Tensor) -> tf.Tensor:
        """What crosses of a bucket: the packed values, or the message about the buffer that they are in."""
        return send(packed) if self.shared and bucket.is_large else packed

    def _received(self, bucket: Bucket, on_wire: tf.Tensor, sent: Sequence[VariableShard]) -> tf.Tensor:
        """The packed values of a bucket where they have arrived, those of some shards."""
        if not (self.shared and bucket.is_large):
            return on_wire
        shape = sent[0].shape if len(sent) == 1 else (sum(shard.size for shard in sent),)
        return receive(tf.identity(on_wire), self._wire_dtype or bucket.dtype, shape)

    def _summed_together(self, bucket: Bucket, gradients: Sequence[Any]) -> bool:
        """Whether the gradients of all tables of a bucket are summed at once: one operation costs less than many."""
        kinds = {self.terms.get(shard.parameter) for shard in bucket.tables}
        widths = {shard.shape[1:] for shard in bucket.tables}
        whole = all(len(self.shards[shard.parameter]) == 1 for shard in bucket.tables)
        found = [gradients[shard.parameter] for shard in bucket.tables]
        sparse = all(isinstance(each, tf.IndexedSlices) for each in found)
        return len(found) > 1 and len(kinds) == len(widths) == 1 and whole and sparse

    def _sums_of_tables(self, bucket: Bucket, gradients: Sequence[Any], pulled: Pulled) -> Tensors:
        """The sums of the gradients of a bucket's tables, those of all in one tensor, and those of their terms."""
        found = [gradients[shard.parameter] for shard in bucket.tables]
        counts = tf.stack([pulled.counts[shard.key] for shard in bucket.tables])
        lookups = [each.values.shape[0] for each in found]
        tables = np.arange(len(found), dtype=np.int32)
        if None in lookups:
            owners = tf.repeat(tables, [tf.size(each.indices) for each in found])
        else:
            owners = tf.constant(np.repeat(tables, lookups))
        values = tf.concat([each.values for each in found], axis=0)
        indices = tf.concat([tf.cast(each.indices, tf.int32) for each in found], axis=0)
        indices += tf.gather(tf.cumsum(counts, exclusive=True), owners)
        rows = tf.reduce_sum(counts)
        kind = self.terms.get(bucket.tables[0].parameter)
        if kind is None:
            return row_sums([values], indices, rows)
        total, terms = row_sums([values, kind.of(values)], indices, rows)
        return [total, kind.root(terms) if self._wire_dtype else terms]

    def _terms_of(self, parameter: int, gradient: Any, value: tf.Tensor) -> tf.Tensor:
        """What the update takes of the terms of a gradient, as it crosses: rounded, it is a root."""
        found = self._taken_of_terms(parameter, gradient, value)
        return self.terms[parameter].root(found) if self._wire_dtype else found

    def _taken_of_terms(self, parameter: int, gradient: Any, value: tf.Tensor) -> tf.Tensor:
        kind = self.terms[parameter]
        if isinstance(gradient, tf.IndexedSlices):
            return dense(tf.IndexedSlices(kind.of(gradient.values), gradient.indices), value)
        return kind.of(dense(gradient, value))

    def sizes(self, lookup: Lookup, *, ahead: bool = False) -> dict[str, tf.Tensor]:
        """Bytes that a pull brings to a worker, `pulled`, and that it and a push send to the ps, `pushed`.

        Args:
            lookup: the looked-up rows of tables.
            ahead: whether their numbers are sent together with those of other pulls, see `sent_ahead`.
        """
        values, numbers = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        terms = tf.constant(0, tf.int64)
        for (parameter, index), rows in self._by_shard(lookup).items():
            shard = self.shards[parameter][index]
            width = int(np.prod(shard.shape[1:])) * self._width(shard.variable.dtype)
            count = tf.cast(rows.count, tf.int64)
            values += count * width
            terms += count * width if parameter in self.terms else 0
            numbers += count * (tf.int64 if rows.on_ps else tf.int32).size  # ids, or numbers of rows
        for bucket in self.buckets:
            values += sum(shard.size for shard in bucket.dense) * self._width(bucket.dtype)
            terms += sum(shard.size for shard in bucket.with_terms(bucket.dense)) * self._width(bucket.dtype)
            if ahead or len(bucket.tables) > 1:
                numbers += len(bucket.tables) * tf.int32.size  # how many rows each table shard has
        return {"pulled": values, "pushed": values + terms + numbers}

    def compensated(self, pushed: PushedGradients, pulled: Pulled, factor: float) -> PushedGradients:
        """Compensates gradients for the changes of the parameters since they were pulled.

        g + λ·g⊙g⊙(w − w₀), where w₀ was pulled and w is the current value: Zheng et al., Asynchronous Stochastic
        Gradient Descent with Delay Compensation (2017), equation 10, whose diagonal g⊙g approximates the Hessian.

        Args:
            pushed: the gradients.
            pulled: the values that they are gradients of.
            factor: λ.
        """
        compensated = []
        for bucket, packed, numbers, before in zip(self.buckets, pushed.packed, pushed.rows, pulled.sent, strict=True):
            with tf.device(bucket.device):
                change = _read(bucket.dense, bucket.tables, numbers) - before
                compensated.append(packed + tf.cast(factor, packed.dtype) * packed * packed * change)
        return PushedGradients(compensated, pushed.rows)

    def gradients(self, pushed: Sequence[PushedGradients], piggyback_bucket: int | None = None) -> list[Gradient]:
        """Returns the mean of several workers' gradients, for each shard on its ps; None for those of other ps.

        Args:
            pushed: the gradients of each worker.
            piggyback_bucket: the index of the bucket behind whose gradients other numbers have crossed.
        """
        found: list[list[Any]] = [[None] * len(shards) for shards in self.shards]
        for number, bucket in enumerate(self.buckets):
            packed = [each.packed[number] for each in pushed]
            if packed[0] is None:
                continue
            with tf.device(bucket.device):
                rooted = self._wire_dtype is not None and bool(bucket.with_terms(bucket.dense))
                if not (bucket.tables or rooted):
                    packed = [_mean(packed)]  # before it is unpacked: one pass over it, not one for each shard
                of_each = [
                    self._of_bucket(bucket, own, each.rows[number], more=number == piggyback_bucket)
                    for own, each in zip(packed, pushed, strict=False)
                ]
                for shard in [*bucket.tables, *bucket.dense]:
                    own = [each[shard.key] for each in of_each]
                    found[shard.parameter][shard.index] = _mean_of(own, len(pushed))
        return found

    def _of_bucket(
        self, bucket: Bucket, packed: tf.Tensor, rows: Tensors, *, more: bool
    ) -> dict[tuple[int, int], tf.Tensor | tf.IndexedSlices | SummedTerms]:
        """Unpacks a worker's gradients of a bucket; returns them by `VariableShard.key`."""
        numbers = {shard.key: own for shard, own in zip(bucket.tables, rows, strict=True)}
        counts = [tf.size(numbers[shard.key]) for shard in bucket.sent_rows]
        unpacked = iter(
            _unpacked(tf.cast(packed, bucket.dtype), counts, bucket.sent_rows, bucket.sent_whole, more=more)
        )
        found: dict[tuple[int, int], Any] = {}
        for shards in (bucket.tables, bucket.dense):
            for shard in shards:
                found[shard.key] = value = next(unpacked)
                if shard.key in numbers:
                    found[shard.key] = tf.IndexedSlices(value, numbers[shard.key], tf.constant(shard.shape))
            for shard in bucket.with_terms(shards):
                kind, terms = bucket.terms[shard.parameter], next(unpacked)
                terms = kind.of(terms) if self._wire_dtype else terms
                found[shard.key] = SummedTerms(found[shard.key], terms, kind)
        return found

    def _by_shard(self, lookup: Lookup | None) -> dict[tuple[int, int], LookedUpRows]:
        """The looked-up rows, by `VariableShard.key`."""
        keys = [shard.key for table in self._tables for shard in self.shards[table]]
        return dict(zip(keys, lookup.rows if lookup else [], strict=True))

    def _row_numbers(self, wanted: Any, counts: list[tf.Tensor]) -> Tensors:
        """Unpacks row numbers on a ps, by table shard; if they are of several, their counts follow the numbers."""
        if len(counts) < 2:
            return [tf.identity(own) for own in wanted]
        return tf.split(wanted[: -len(counts)], wanted[-len(counts) :], num=len(counts))

    def _width(self, dtype: tf.DType) -> int:
        return int((self._wire_dtype or dtype).size)

    def _rounded(self, values: tf.Tensor) -> tf.Tensor:
        return values if self._wire_dtype is None else tf.cast(values, self._wire_dtype)


def _shards(parameter: int, variable: keras.Variable) -> list[VariableShard]:
    return [VariableShard(parameter, index, part) for index, part in enumerate(parts(variable))]


def _by_shard(
    shards: Sequence[VariableShard], value: tf.Tensor, sizes: Sequence[Any]
) -> dict[tuple[int, int], tf.Tensor]:
    """Splits a value of a parameter, of which each shard has some rows; returns it by `VariableShard.key`."""
    each = tf.split(value, sizes) if len(shards) > 1 else [value]
    return {shard.key: part for shard, part in zip(shards, each, strict=True)}


def _read(dense: Sequence[VariableShard], tables: Sequence[VariableShard], numbers: Tensors) -> tf.Tensor:
    """Packs rows of tables, by their numbers, and whole variables."""
    rows = [rows_of(shard.variable, each) for shard, each in zip(tables, numbers, strict=True)]
    return _packed([*rows, *(tf.convert_to_tensor(shard.variable) for shard in dense)])


def _unpacked(
    packed: tf.Tensor,
    counts: list[tf.Tensor],
    tables: Sequence[VariableShard],
    whole: Sequence[VariableShard],
    *,
    more: bool = False,
) -> Tensors:
    """The values of table shards, by how many rows they have, and of others; more numbers behind them are left out."""
    shapes = [(-1, *shard.shape[1:]) for shard in tables] + [shard.shape for shard in whole]
    sizes: Any = [shard.size for shard in whole]
    widths = [int(np.prod(shard.shape[1:])) for shard in tables]
    if len(shapes) < 2:
        parts = [packed]
    elif len(set(widths)) == 1:
        # Rows of one width are split as rows, and those of one table not at all: so they need not be copied.
        total = tf.add_n(counts) * widths[0]
        rows, rest = tf.reshape(packed[:total], [-1, *tables[0].shape[1:]]), packed[total:]
        parts = tf.split(rows, tf.stack(counts), num=len(counts)) if len(counts) > 1 else [rows]
        parts += tf.split(rest, [*sizes, -1] if more else sizes) if sizes or more else []
    else:
        if counts:
            sizes = tf.concat([tf.stack(counts) * widths, tf.constant(sizes, tf.int32)], axis=0)
        if more:
            sizes = tf.concat([sizes, [-1]], axis=0) if counts else [*sizes, -1]
        parts = tf.split(packed, sizes, num=len(shapes) + more)
    pairs = zip(parts[: len(shapes)], shapes, strict=True)
    return [part if _has_rows(part, shape) else tf.reshape(part, shape) for part, shape in pairs]


def _has_rows(value: tf.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is known to have rows of a shape, in any number."""
    return value.shape.rank is not None and value.shape.as_list() == [None, *shape[1:]]


def _last_numbers(values: tf.Tensor, count: int) -> tf.Tensor:
    """The float64 numbers whose bits are at the end of values of another type."""
    each = tf.float64.size // values.dtype.size
    last = values[-count * each :]
    return tf.bitcast(last if each == 1 else tf.reshape(last, [count, each]), tf.float64)


def _packed(values: Tensors) -> tf.Tensor:
    if not values:
        return tf.zeros([0])
    if len(values) == 1:
        return tf.identity(values[0])
    return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)


def dense(gradient: Any, value: tf.Tensor, counts: Sequence[tf.Tensor] | None = None) -> tf.Tensor:
    """Returns a gradient with respect to `value` as a tensor of its shape; zeros for None.

    Args:
        gradient: a tensor, `tf.IndexedSlices`, or None.
        value: the value that it is a gradient of.
        counts: numbers that add up to the rows of `value`, if they are known.
    """
    if gradient is None:
        return tf.zeros_like(value)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.add_n(counts) if counts else tf.shape(value)[0]
        return row_sums([gradient.values], gradient.indices, rows)[0]
    return gradient


def _mean(values: Tensors) -> tf.Tensor:
    return values[0] if len(values) == 1 else tf.add_n(values) * tf.cast(1 / len(values), values[0].dtype)


def _mean_of(gradients: Sequence[Any], workers: int) -> Any:
    """The mean of a shard's gradients.

    Args:
        gradients: those of all workers, or their mean alone.
        workers: how many workers there are.
    """
    first = gradients[0]
    kind = first.kind if isinstance(first, SummedTerms) else None
    totals = [each.total for each in gradients] if kind else list(gradients)
    if isinstance(totals[0], tf.IndexedSlices):
        terms = [each.terms for each in gradients] if kind else []
        total, *terms = _mean_of_rows(totals, terms)
    else:
        total, terms = _mean(totals), [_mean([each.terms for each in gradients])] if kind else []
    if kind is None:
        return total
    # The mean of the workers' sums is that of terms divided by their number, which squares are divided by once more.
    factor = kind.scale(1 / workers) * workers
    return SummedTerms(total, terms[0] if factor == 1 else terms[0] * tf.cast(factor, terms[0].dtype), kind)


def _mean_of_rows(slices: Sequence[tf.IndexedSlices], more: Tensors) -> list[Any]:
    """The mean of rows, and of other values for the same rows."""
    if len(slices) == 1:
        return [slices[0], *more]
    rows, where = tf.unique(tf.concat([each.indices for each in slices], axis=0))

    def mean(values: Tensors) -> tf.Tensor:
        [summed] = row_sums([tf.concat(values, axis=0)], where, tf.size(rows))
        return summed / tf.cast(len(slices), summed.dtype)

    means = [mean([each.values for each in slices]), *([mean(more)] if more else [])]
    return [tf.IndexedSlices(means[0], rows, slices[0].dense_shape), *means[1:]]
