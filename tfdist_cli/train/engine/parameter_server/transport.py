"""Parameters and gradients on their way between a worker and the ps: one tensor for each ps, not one for each variable.

Every tensor that crosses the network costs a request, whatever its size. So a ps joins the values of all its variables
of one type before they leave, the looked-up rows of its tables among them, and takes the gradients of all of them in
one piece, a parcel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.compute_device import DeviceScope
from tfdist_cli.train.model.embeddings import Lookup
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.variables.sharding import Gradient, parts


@dataclass(frozen=True)
class Shard:
    """A variable, or one of the parts in which it is spread over the ps.

    Args:
        place: the variable's number among the parameters.
        index: the shard's number among the variable's.
        variable: what holds its values.
    """

    place: int
    index: int
    variable: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.variable.shape)

    @property
    def size(self) -> int:
        """How many values it has."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Post:
    """What one ps holds of one type.

    Args:
        device: the ps.
        dtype: the type.
        dense: what crosses whole.
        tables: what crosses by rows.
    """

    device: str
    dtype: tf.DType
    dense: list[Shard] = field(default_factory=list)
    tables: list[Shard] = field(default_factory=list)


@dataclass(frozen=True)
class Pulled:
    """Parameters that have been read.

    Args:
        values: each parameter's value, or its looked-up rows, on the worker.
        rows: for each post and table shard the numbers of its looked-up rows, on the ps.
        counts: how many looked-up rows each shard of a table has, by the table's number and its own, on the worker.
        read: for each post what it sent, before it was rounded, on the ps.
    """

    values: Tensors
    rows: list[Tensors]
    counts: dict[tuple[int, int], tf.Tensor]
    read: Tensors


@dataclass(frozen=True)
class Arrival:
    """A worker's gradients at the ps.

    Args:
        parcels: for each post, its variables' gradients, joined, those of tables first.
        rows: for each post and table shard the numbers of the rows.
        beside: numbers that have crossed with them, float64, on the post that was to take them.
    """

    parcels: Tensors
    rows: list[Tensors]
    beside: tf.Tensor | None = None


@dataclass(frozen=True)
class Beside:
    """Numbers that cross in a parcel, behind the gradients: no request is theirs alone.

    Args:
        post: whose parcel, by its number.
        numbers: float64, shape (numbers,).
    """

    post: int
    numbers: tf.Tensor


class Transport:
    """The way of a model's parameters.

    Args:
        parameters: variables, each on the device of its ps, or spread over several.
        tables: the numbers of those that are looked up.
        dtype: the type in which values cross; `float32` leaves them as they are.
        device_scope: where workers compute; values are joined and parted there, and cross to it in one piece.
        packed: whether what a ps has of a type crosses as one tensor.
    """

    def __init__(
        self,
        parameters: Sequence[keras.Variable],
        tables: Sequence[int] = (),
        dtype: str = "float32",
        device_scope: DeviceScope = nullcontext,
        *,
        packed: bool = True,
    ) -> None:
        self._tables = list(tables)
        self.device_scope = device_scope
        self._crossing = None if dtype == "float32" else tf.as_dtype(dtype)
        self.shards = [_shards(place, variable) for place, variable in enumerate(parameters)]
        posts: dict[Any, Post] = {}
        for shard in (each for own in self.shards for each in own):
            where = shard.variable.device, shard.variable.dtype
            post = posts.setdefault((where, None if packed else (shard.place, shard.index)), Post(*where))
            (post.tables if shard.place in self._tables else post.dense).append(shard)
        self.posts = list(posts.values())

    def pull(
        self, lookup: Lookup | None = None, held: Tensors | None = None, after: Mapping[str, tf.Tensor] | None = None
    ) -> Pulled:
        """Reads each parameter once, of tables the rows that are looked up.

        Args:
            lookup: which rows; only for parameters without tables it may be left out.
            held: values pulled before, which are kept: only rows are read.
            after: for each ps what it waits for before it reads; by default nothing.
        """
        local = self._by_shard(lookup)
        size = {key: tf.size(own) for key, own in local.items()}
        arrived: dict[tuple[int, int], tf.Tensor] = {}
        rows, read = [], []
        for post in self.posts:
            whole = [] if held is not None else post.dense
            counts = [size[shard.place, shard.index] for shard in post.tables]
            sent: Any = [local[shard.place, shard.index] for shard in post.tables]
            sent = _joined([*sent, tf.stack(counts)]) if len(sent) > 1 else sent
            with tf.device(post.device):
                numbers = self._numbers(sent, counts)
                with tf.control_dependencies([after[post.device]] if after else []):
                    joined = _read(whole, post.tables, numbers)
                crossing = self._rounded(joined)
            rows.append(numbers)
            read.append(joined)
            with self.device_scope():
                parted = self._parted(crossing, counts, post, whole)
            for shard, part in zip(post.tables + whole, parted, strict=True):
                arrived[shard.place, shard.index] = part
        values = []
        for place, shards in enumerate(self.shards):
            if held is not None and place not in self._tables:
                values.append(held[place])
                continue
            own = [arrived[place, shard.index] for shard in shards]
            with self.device_scope():
                values.append(own[0] if len(own) == 1 else tf.concat(own, axis=0))
        return Pulled(values, rows, size, read)

    def carrier(self, device: str) -> int | None:
        """The number of a post on a ps in whose parcel numbers can cross; None where none is joined of several."""
        for number, post in enumerate(self.posts):
            if post.device == device and len(post.dense) + len(post.tables) > 1:
                return number
        return None

    def push(self, gradients: Sequence[Any], pulled: Pulled, beside: Beside | None = None) -> Arrival:
        """Sends a worker's gradients to the ps; what has none crosses as zeros.

        Args:
            gradients: one per parameter, of the shape of what was pulled, `tf.IndexedSlices`, or None.
            pulled: what they are gradients of.
            beside: what crosses with them.
        """
        with self.device_scope():
            return self._pushed(gradients, pulled, beside)

    def _pushed(self, gradients: Sequence[Any], pulled: Pulled, beside: Beside | None) -> Arrival:
        cut: dict[tuple[int, int], tf.Tensor] = {}
        for place, shards in enumerate(self.shards):
            counts = [pulled.counts.get((place, each.index)) for each in shards]
            gradient = dense(gradients[place], pulled.values[place], counts if place in self._tables else None)
            own = [gradient]
            if len(shards) > 1:
                sizes = counts if place in self._tables else [each.shape[0] for each in shards]
                own = tf.split(gradient, sizes)
            cut |= {(place, shard.index): part for shard, part in zip(shards, own, strict=True)}
        parcels, arrived = [], None
        for number, post in enumerate(self.posts):
            pieces = [cut[shard.place, shard.index] for shard in post.tables + post.dense]
            if beside is not None and beside.post == number:
                pieces = [self._rounded(piece) for piece in pieces]
                crossing = _joined([*pieces, tf.bitcast(beside.numbers, pieces[0].dtype)])
                with tf.device(post.device):
                    arrived = _last_numbers(crossing, int(beside.numbers.shape[0]))
            else:
                crossing = self._rounded(_joined(pieces))
            with tf.device(post.device):
                parcels.append(tf.cast(crossing, post.dtype))
        return Arrival(parcels, pulled.rows, arrived)

    def sizes(self, lookup: Lookup) -> dict[str, tf.Tensor]:
        """Bytes that a pull brings to a worker, `pulled`, and that it and the push of its gradients take, `pushed`.

        Args:
            lookup: which rows of tables.
        """
        values, numbers = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        for (place, index), rows in self._by_shard(lookup).items():
            shard = self.shards[place][index]
            width = int(np.prod(shard.shape[1:])) * self._width(shard.variable.dtype)
            values += tf.size(rows, tf.int64) * width
            numbers += tf.size(rows, tf.int64) * rows.dtype.size
        for post in self.posts:
            values += sum(shard.size for shard in post.dense) * self._width(post.dtype)
            if len(post.tables) > 1:
                numbers += len(post.tables) * tf.int32.size  # how many rows are whose
        return {"pulled": values, "pushed": values + numbers}

    def compensated(self, arrival: Arrival, pulled: Pulled, factor: float) -> Arrival:
        """Gradients that make up for what has become of the parameters since they were pulled.

        g + λ·g⊙g⊙(w − w₀), where w₀ was pulled and w is there now: Zheng et al., Asynchronous Stochastic Gradient
        Descent with Delay Compensation (2017), equation 10, whose diagonal g⊙g stands for the Hessian.

        Args:
            arrival: the gradients.
            pulled: what they are gradients of.
            factor: λ.
        """
        parcels = []
        for post, parcel, numbers, before in zip(self.posts, arrival.parcels, arrival.rows, pulled.read, strict=True):
            with tf.device(post.device):
                moved = _read(post.dense, post.tables, numbers) - before
                parcels.append(parcel + tf.cast(factor, parcel.dtype) * parcel * parcel * moved)
        return Arrival(parcels, arrival.rows)

    def gradients(self, arrivals: Sequence[Arrival], carrier: int | None = None) -> list[Gradient]:
        """The mean of some workers' gradients, for each shard where it is.

        Args:
            arrivals: theirs.
            carrier: the number of the post in whose parcels something has crossed beside them.
        """
        found: list[list[Any]] = [[None] * len(shards) for shards in self.shards]
        for number, post in enumerate(self.posts):
            with tf.device(post.device):
                parcels = [each.parcels[number] for each in arrivals]
                if not post.tables:
                    parcels = [_mean(parcels)]  # before it is parted: one pass over it, not one for each of the parts
                counts = [[tf.size(own) for own in each.rows[number]] for each in arrivals]
                more = number == carrier
                parted = [self._parted(*each, post, post.dense, more) for each in zip(parcels, counts, strict=False)]
                for index, shard in enumerate(post.tables):
                    numbers = [each.rows[number][index] for each in arrivals]
                    values = [parts[index] for parts in parted]
                    found[shard.place][shard.index] = _mean_of_rows(values, numbers, shard.shape)
                for index, shard in enumerate(post.dense, len(post.tables)):
                    found[shard.place][shard.index] = _mean([parts[index] for parts in parted])
        return found

    def _by_shard(self, lookup: Lookup | None) -> dict[tuple[int, int], tf.Tensor]:
        """The numbers of looked-up rows by table and shard."""
        keys = [(place, shard.index) for place in self._tables for shard in self.shards[place]]
        return dict(zip(keys, lookup.rows if lookup else [], strict=True))

    def _numbers(self, sent: Any, counts: list[tf.Tensor]) -> Tensors:
        """Row numbers as they reached a ps, by table shard; behind them stands how many are whose."""
        if len(counts) < 2:
            return [tf.identity(own) for own in sent]
        return tf.split(sent[: -len(counts)], sent[-len(counts) :], num=len(counts))

    def _parted(
        self, joined: tf.Tensor, counts: list[tf.Tensor], post: Post, whole: list[Shard], more: bool = False
    ) -> Tensors:
        """The values of a post's shards, from one tensor; there may be more behind them, which is left out."""
        joined = tf.cast(joined, post.dtype)
        shapes = [(-1, *shard.shape[1:]) for shard in post.tables] + [shard.shape for shard in whole]
        sizes: Any = [shard.size for shard in whole]
        widths = [int(np.prod(shard.shape[1:])) for shard in post.tables]
        if len(shapes) < 2:
            parts = [joined]
        elif len(set(widths)) == 1:
            # Rows of one width are parted as rows, and those of one table not at all: so they need not be copied.
            total = tf.add_n(counts) * widths[0]
            rows, rest = tf.reshape(joined[:total], [-1, widths[0]]), joined[total:]
            parts = tf.split(rows, tf.stack(counts), num=len(counts)) if len(counts) > 1 else [rows]
            parts += tf.split(rest, [*sizes, -1] if more else sizes) if sizes or more else []
        else:
            if counts:
                sizes = tf.concat([tf.stack(counts) * widths, tf.constant(sizes, tf.int32)], axis=0)
            if more:
                sizes = tf.concat([sizes, [-1]], axis=0) if counts else [*sizes, -1]
            parts = tf.split(joined, sizes, num=len(shapes) + more)
        return [tf.reshape(part, shape) for part, shape in zip(parts[: len(shapes)], shapes, strict=True)]

    def _width(self, dtype: tf.DType) -> int:
        return int((self._crossing or dtype).size)

    def _rounded(self, joined: tf.Tensor) -> tf.Tensor:
        return joined if self._crossing is None else tf.cast(joined, self._crossing)


def _shards(place: int, variable: keras.Variable) -> list[Shard]:
    return [Shard(place, index, part) for index, part in enumerate(parts(variable))]


def _read(dense: Sequence[Shard], tables: Sequence[Shard], numbers: Tensors) -> tf.Tensor:
    """The named rows of tables, and variables, as one tensor."""
    rows = [_gathered(shard.variable, each) for shard, each in zip(tables, numbers, strict=True)]
    return _joined([*rows, *(tf.convert_to_tensor(shard.variable) for shard in dense)])


def _last_numbers(values: tf.Tensor, count: int) -> tf.Tensor:
    """So many float64 of which the bits stand at the end of values of another type."""
    each = tf.float64.size // values.dtype.size
    last = values[-count * each :]
    return tf.bitcast(last if each == 1 else tf.reshape(last, [count, each]), tf.float64)


def _joined(values: Tensors) -> tf.Tensor:
    if not values:
        return tf.zeros([0])
    if len(values) == 1:
        return tf.identity(values[0])
    return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)


def _gathered(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=rows, dtype=variable.dtype)


def dense(gradient: Any, value: tf.Tensor, counts: Sequence[tf.Tensor] | None = None) -> tf.Tensor:
    """A gradient with respect to `value` as a tensor of its shape; zeros for None.

    Args:
        gradient: it, or `tf.IndexedSlices`, or None.
        value: what it is a gradient of.
        counts: numbers of rows that are those of `value` together, where they are at hand.
    """
    if gradient is None:
        return tf.zeros_like(value)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.add_n(counts) if counts else tf.shape(value)[0]
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    return gradient


def _mean(values: Tensors) -> tf.Tensor:
    return values[0] if len(values) == 1 else tf.add_n(values) * tf.cast(1 / len(values), values[0].dtype)


def _mean_of_rows(values: Tensors, numbers: Tensors, shape: tuple[int, ...]) -> tf.IndexedSlices:
    if len(values) == 1:
        return tf.IndexedSlices(values[0], numbers[0], tf.constant(shape))
    rows, where = tf.unique(tf.concat(numbers, axis=0))
    summed = tf.math.unsorted_segment_sum(tf.concat(values, axis=0), where, tf.size(rows))
    return tf.IndexedSlices(summed / tf.cast(len(values), summed.dtype), rows, tf.constant(shape))
