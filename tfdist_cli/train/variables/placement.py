"""Places variables on ps, and shards large ones over several ps.

TensorFlow places variables round-robin. With two ps and layers of a kernel and a bias, one ps gets all kernels and the
other one all biases. Greedy placement by bytes puts at most the mean plus the largest variable on a ps (Graham, Bounds
on Multiprocessing Timing Anomalies, 1969). A large variable is split into rows, one shard per ps, so it adds at most
one row to the imbalance. The slots of an optimizer are on the same ps as the shards of their variable.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.sections.updates import Balance, PlacementRule, ShardRule
from tfdist_cli.train.tf_compat.distribute import (
    VariableMethods,
    creator_of,
    num_ps,
    replace_variable_methods,
    set_next_ps,
)
from tfdist_cli.train.tf_compat.variables import stored
from tfdist_cli.train.variables.initializers import InitialValue, current_initial_value, record_initial_values
from tfdist_cli.train.variables.sharding import RowShardedVariable, Whole, blocks, parts, shard_sizes

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class PlacementRules:
    """The rules by which variables are placed.

    Args:
        placement: `greedy`, the ps with the fewest bytes; or `round_robin`, the next ps.
        shard: which variables are sharded; None for none.
        stages: the number of stages of a model whose layers are on several workers; None for one for each worker.
        place: the worker of each layer, by a pattern of names, in place of `stages`.
        balance: what stages have about equal amounts of: `bytes` of weights, or `time` in their layers.
    """

    placement: PlacementRule = "greedy"
    shard: ShardRule | None = field(default_factory=ShardRule)
    stages: int | None = None
    place: Mapping[str, str] | None = None
    balance: Balance = "bytes"

    def __str__(self) -> str:
        sharding = self.shard and ", ".join(f"{key}={value}" for key, value in self.shard.model_dump().items())
        return f"placement={self.placement!r}, shard={f'ShardRule({sharding})' if sharding else None}"

    def shard_count(self, shape: tuple[int, ...], size: int, servers: int) -> int:
        """Returns the number of shards of a variable.

        Args:
            shape: the shape of the variable.
            size: its size in bytes.
            servers: the number of ps.
        """
        if self.shard is None or not shape or size < self.shard.min_bytes:
            return 1
        return max(1, min(shape[0], servers, self.shard.max_shards or servers))

    def choose(self, stored: Sequence[int], created: int, count: int) -> list[int]:
        """Returns the ps of a variable, one for each of its shards.

        Args:
            stored: the bytes placed on each ps so far.
            created: the number of variables placed so far.
            count: the number of shards.
        """
        if self.placement == "round_robin":
            return [(created + number) % len(stored) for number in range(count)]
        return [int(ps) for ps in np.argsort(stored, kind="stable")[:count]]

    def planned_bytes(self, variables: Sequence[tuple[tuple[int, ...], int, int]], servers: int) -> list[int]:
        """Returns the bytes that each ps will store, before there is a cluster.

        Args:
            variables: the shape of each variable, its size in bytes, and that of its slots, in the order of creation.
            servers: the number of ps.
        """
        placed, stored, created = [0] * servers, [0.0] * servers, 0
        for shape, size, slots in variables:
            for ps in self.choose(placed, created, count := self.shard_count(shape, size, servers)):
                placed[ps] += size // count
                stored[ps] += (size + slots) / count
                created += 1
        return [round(each) for each in stored]


def created_beside(variable: Any, initial: Any, dtype: tf.DType) -> tf.Variable:
    """Creates a variable on the ps of another one. A strategy would place it on any ps, whatever the current device.

    Args:
        variable: the other one.
        initial: its first value.
        dtype: its type.
    """
    with tf.init_scope(), tf.distribute.get_strategy().extended.colocate_vars_with(variable):
        return tf.Variable(initial, trainable=False, dtype=dtype)


DEFAULT_PLACEMENT = PlacementRules()
"""The rules of a recipe without `placement` and `shard`."""


class Placement:
    """Places the variables of a strategy.

    Args:
        strategy: a `tf.distribute.ParameterServerStrategy` without variables.
        rules: the rules.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rules: PlacementRules = DEFAULT_PLACEMENT) -> None:
        self._strategy = strategy
        self._rules = rules
        self._created = 0
        self.bytes = [0] * num_ps(strategy)
        """The bytes placed on each ps, without the shards of slots."""
        own = VariableMethods(self._create_variable, self._update_variable, self._create_on_next)
        self._create, self._update, self._create_round_robin = replace_variable_methods(strategy, own)
        record_initial_values()

    def set_rules(self, rules: PlacementRules) -> None:
        """Sets the rules for all variables of the strategy.

        Raises:
            TrainingError: variables have already been placed by other rules.
        """
        if rules != self._rules and self._created:
            raise TrainingError(
                f"variables were already placed with {self._rules}, which cannot be changed to {rules}",
                code="placement-changed",
                hint="pass the same placement and shard to every tfdist.scope() of the program",
            )
        self._rules = rules

    def report(self, model: keras.Model, slots: Sequence[keras.Variable]) -> None:
        """Reports the bytes of model, metrics and optimizers on each ps, and the number of the model's variables.

        Args:
            model: the compiled model, built. A sharded variable counts on each ps that stores a shard.
            slots: the variables of its optimizers.
        """
        names = [f"ps:{number}" for number in range(len(self.bytes))]
        sizes, counts = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for variable in [*model.variables, *model.metrics_variables, *slots]:
            for part in parts(variable):
                if _task(part) in sizes:  # Keras's own evaluate may have created metrics on the chief
                    sizes[_task(part)] += Whole(part).bytes
        for variable in model.variables:
            for part in parts(variable):
                counts[_task(part)] += 1
        each = [f"{name} stores {readable(sizes[name])} ({_variables(counts[name])})" for name in names]
        log.info("%s, including metrics and optimizer slots", ", ".join(each))
        emit("placement", bytes=sizes, variables=counts)

    def _create_variable(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        """`StrategyExtended._create_variable`: creates a variable, sharded or not."""
        initial, beside = current_initial_value(), kwargs.get("colocate_with")
        if initial is None:
            return self._create(creator, **kwargs)
        if isinstance(beside, RowShardedVariable):
            creators = [functools.partial(self._create, creator, colocate_with=shard) for shard in beside.variables]
            return _create_sharded(initial, creators, kwargs, _sizes_beside(beside, initial.shape[0]))
        units = initial.shape and (initial.shape[0] // initial.row_unit, *initial.shape[1:])
        count = self._rules.shard_count(units, initial.bytes, len(self.bytes))
        if beside is not None or count == 1:
            return self._create(creator, **kwargs)
        creator = creator_of(self._strategy, creator, kwargs)
        creators = [functools.partial(self._create_on, ps, creator) for ps in self._next(count)]
        sizes = [size * initial.row_unit for size in shard_sizes(units[0], count)]
        return _create_sharded(initial, creators, kwargs, sizes)

    def _create_on_next(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        (ps,) = self._next(1)
        return self._create_on(ps, creator, **kwargs)

    def _create_on(self, ps: int, creator: Callable[..., Any], **kwargs: Any) -> Any:
        set_next_ps(self._strategy, ps)
        variable = self._create_round_robin(creator, **kwargs)
        self.bytes[ps] += variable.dtype.size * int(np.prod(variable.shape))
        self._created += 1
        return variable

    def _update_variable(self, variable: Any, function: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """`StrategyExtended.update`, by which Keras changes variables.

        If all arguments are sharded variables, the function is called for each shard. With any other argument, for
        example a gradient, the function is Keras's update of the whole variable, and is called with that.
        """
        if not isinstance(variable, RowShardedVariable):
            return self._update(variable, function, args, kwargs, group)
        arguments = [stored(argument) for argument in args]
        if not all(isinstance(argument, RowShardedVariable) for argument in arguments):
            return function(variable, *args, **kwargs)
        return [
            self._update(shard, function, [argument.variables[index] for argument in arguments], kwargs, group)
            for index, shard in enumerate(variable.variables)
        ]

    def _next(self, count: int) -> list[int]:
        """Returns the ps of the next variable, one for each of its shards."""
        return self._rules.choose(self.bytes, self._created, count)


def _task(part: Any) -> str:
    device = tf.DeviceSpec.from_string(part.device)
    return f"{device.job}:{device.task}"


def readable(size: int) -> str:
    """Returns a number of bytes with its unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def _variables(count: int) -> str:
    return f"{count} variable{'' if count == 1 else 's'}"


def _sizes_beside(variable: RowShardedVariable, rows: int) -> list[int]:
    """Returns the rows of each shard of a variable that is sharded as another one, with any number of rows."""
    return [int(shard.shape[0]) * rows // int(variable.shape[0]) for shard in variable.variables]


def _create_sharded(
    initial: InitialValue, creators: Sequence[Callable[..., Any]], kwargs: dict[str, Any], sizes: Sequence[int]
) -> RowShardedVariable:
    """Creates the shards of a variable, then computes the initial value on their devices, block by block.

    Args:
        initial: the initial value of the whole variable.
        creators: a function for each shard that creates a TensorFlow variable.
        kwargs: the arguments for the whole variable.
        sizes: the number of rows of each shard.
    """
    shards = []
    for index, (create, rows) in enumerate(zip(creators, sizes, strict=True)):
        shape = (rows, *initial.shape[1:])
        own = {
            "name": f"{kwargs.get('name') or 'variable'}/part_{index}",
            "shape": shape,
            "initial_value": functools.partial(tf.zeros, shape, initial.dtype),
        }
        shards.append(create(**{key: value for key, value in kwargs.items() if key != "colocate_with"} | own))
    variable = RowShardedVariable(shards)
    if not initial.is_zeros:
        rows_of = initial.rows()
        for block in blocks(variable):
            with tf.device(block.shard.device):
                value = rows_of(block)
            block.write(value)
    return variable
