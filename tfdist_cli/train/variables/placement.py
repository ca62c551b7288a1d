"""Which ps a variable lives on, and which ones are spread over several.

TensorFlow deals variables out in turn, so that of layers that have a kernel and a bias each, one of two ps gets all the
kernels and the other all the biases. By bytes, no ps has more than the mean and the largest variable together (Graham,
Bounds on Multiprocessing Timing Anomalies, 1969). A variable that is large is cut into rows, one shard for each ps, and
adds no more than a row to the difference. An optimizer's slots follow their variable, shard by shard.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.sections.updates import PlacementRule, ShardRule
from tfdist_cli.train.tf_compat.distribute import (
    VariableMethods,
    creator_of,
    num_ps,
    replace_variable_methods,
    set_next_ps,
)
from tfdist_cli.train.tf_compat.variables import stored
from tfdist_cli.train.variables.initializers import Initial, initial_now, note_initializers
from tfdist_cli.train.variables.sharding import Shards, Whole, blocks, divided, parts

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class PlacementRules:
    """Where variables go.

    Args:
        placement: the ps with the fewest bytes (`greedy`), or the next in turn.
        shard: which variables are spread; None for none.
    """

    placement: PlacementRule = "greedy"
    shard: ShardRule | None = field(default_factory=ShardRule)

    def __str__(self) -> str:
        spread = self.shard and ", ".join(f"{key}={value}" for key, value in self.shard.model_dump().items())
        return f"placement={self.placement!r}, shard={f'ShardRule({spread})' if spread else None}"

    def shards(self, shape: tuple[int, ...], size: int, servers: int) -> int:
        """How many shards a variable has.

        Args:
            shape: its shape.
            size: its bytes.
            servers: how many ps there are.
        """
        if self.shard is None or not shape or size < self.shard.min_bytes:
            return 1
        return max(1, min(shape[0], servers, self.shard.max_shards or servers))


DEFAULT_PLACEMENT = PlacementRules()
"""What a recipe that says nothing of it asks for."""


class Placement:
    """Deals out the variables of one strategy, from its first on.

    Args:
        strategy: a new `tf.distribute.ParameterServerStrategy`.
        rules: where they go.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rules: PlacementRules = DEFAULT_PLACEMENT) -> None:
        self._strategy = strategy
        self._rules = rules
        self._dealt = 0
        self.bytes = [0] * num_ps(strategy)
        """Bytes on each ps, without slots."""
        own = VariableMethods(self._create_whole_or_spread, self._update_spread, self._create_on_next)
        self._create, self._update, self._create_in_turn = replace_variable_methods(strategy, own)
        note_initializers()

    def follow(self, rules: PlacementRules) -> None:
        """Takes rules for the variables to come.

        Raises:
            TrainingError: variables have been made by other rules.
        """
        if rules != self._rules and self._dealt:
            raise TrainingError(
                f"variables have been placed by {self._rules} already, and now {rules} is asked for",
                hint="give the first tfdist.scope() of the program, and every other one, the same placement and shard",
            )
        self._rules = rules

    def report(self, model: keras.Model) -> None:
        """Says what each ps holds: bytes of the model, its metrics and its optimizer, and in how many variables.

        Args:
            model: the compiled model, built. Of its variables, a spread one counts wherever there is a part of it.
        """
        names = [f"ps:{number}" for number in range(len(self.bytes))]
        sizes, counts = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for variable in [*model.variables, *model.metrics_variables, *model.optimizer.variables]:
            for part in parts(variable):
                if _task(part) in sizes:  # metrics may have been made on the chief, by Keras's own evaluate
                    sizes[_task(part)] += Whole(part).bytes
        for variable in model.variables:
            for part in parts(variable):
                counts[_task(part)] += 1
        held = [f"{name} holds {_readable(sizes[name])} ({_variables(counts[name])})" for name in names]
        log.info("%s, with metrics and optimizer slots", ", ".join(held))
        emit("placement", bytes=sizes, variables=counts)

    def _create_whole_or_spread(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        initial, beside = initial_now(), kwargs.get("colocate_with")
        if initial is None:
            return self._create(creator, **kwargs)
        if isinstance(beside, Shards):
            ways = [functools.partial(self._create, creator, colocate_with=shard) for shard in beside.variables]
            return _spread(initial, ways, kwargs)
        count = self._rules.shards(initial.shape, initial.bytes, len(self.bytes))
        if beside is not None or count == 1:
            return self._create(creator, **kwargs)
        creator = creator_of(self._strategy, creator, kwargs)
        return _spread(initial, [functools.partial(self._create_on, ps, creator) for ps in self._next(count)], kwargs)

    def _create_on_next(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        (ps,) = self._next(1)
        return self._create_on(ps, creator, **kwargs)

    def _create_on(self, ps: int, creator: Callable[..., Any], **kwargs: Any) -> Any:
        set_next_ps(self._strategy, ps)
        variable = self._create_in_turn(creator, **kwargs)
        self.bytes[ps] += variable.dtype.size * int(np.prod(variable.shape))
        self._dealt += 1
        return variable

    def _update_spread(self, variable: Any, function: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """`StrategyExtended.update`, through which Keras changes variables.

        With nothing but spread arguments a spread variable is changed shard by shard. Where there is another one, a
        gradient for instance, the function is Keras's update of the whole variable, and gets the whole.
        """
        if not isinstance(variable, Shards):
            return self._update(variable, function, args, kwargs, group)
        held = [stored(argument) for argument in args]
        if not all(isinstance(argument, Shards) for argument in held):
            return function(variable, *args, **kwargs)
        return [
            self._update(shard, function, [argument.variables[number] for argument in held], kwargs, group)
            for number, shard in enumerate(variable.variables)
        ]

    def _next(self, count: int) -> list[int]:
        """The ps that the next variable, or each of its shards, goes to."""
        servers = len(self.bytes)
        if self._rules.placement == "round_robin":
            return [(self._dealt + number) % servers for number in range(count)]
        return [int(ps) for ps in np.argsort(self.bytes, kind="stable")[:count]]


def _task(part: Any) -> str:
    device = tf.DeviceSpec.from_string(part.device)
    return f"{device.job}:{device.task}"


def _readable(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def _variables(count: int) -> str:
    return f"{count} variable{'' if count == 1 else 's'}"


def _spread(initial: Initial, ways: Sequence[Callable[..., Any]], kwargs: dict[str, Any]) -> Shards:
    """A variable for each way of making one; their values are then made where they are, a block at a time."""
    made = []
    for number, (make, rows) in enumerate(zip(ways, divided(initial.shape[0], len(ways)), strict=True)):
        shape = (rows, *initial.shape[1:])
        own = {
            "name": f"{kwargs.get('name') or 'variable'}/part_{number}",
            "shape": shape,
            "initial_value": functools.partial(tf.zeros, shape, initial.dtype),
        }
        made.append(make(**{key: value for key, value in kwargs.items() if key != "colocate_with"} | own))
    spread = Shards(made)
    if not initial.is_zeros:
        rows_of = initial.rows()
        for block in blocks(spread):
            with tf.device(block.shard.device):
                value = rows_of(block)
            block.write(value)
    return spread
