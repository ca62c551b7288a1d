"""Keras's update rules on TensorFlow's kernels: for a whole variable, for one shard of it, for some of its rows.

Keras writes an update as a dozen elementwise operations, each of which passes over the variable once, and a gradient
of a few rows as one of the whole table. TensorFlow has one kernel for most of the rules, which passes over the variable
once in all, and one that touches some rows only. A rule here is used where it computes Keras's formula to the rounding
of the variable's type; where a kernel's formula is another one, the rule is a few operations that have Keras's.
Every operation runs on the device of the variable. Keras's own code does the rest (`why_not` says why).

Rows: an update of some rows does to these, and to their slots, what Keras's update of the whole variable does to them;
the other rows and their slots stay as they are. For SGD without momentum and Adagrad the result is Keras's. For the
others it is the lazy meaning, as in LazyAdam: a row's momentum moves the row, and decays, in the updates that touch it
only, and so does weight decay. Bias corrections count all updates.

Several workers may update a variable at the same time. An update of the whole variable holds the variable's lock (and
its slots'), so none is lost. Updates of rows, decay included, take turns at a ps by a lock of their own (`in_turn`), so
none of these is either.

A table whose rows have been updated or gathered once is in TensorFlow's copy-on-read mode: rows are then changed where
they are, whoever reads, but each *whole* read or update copies the table. So a table takes the one kind of update or
the other, not both in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist_cli.train.optimizers import kernels
from tfdist_cli.train.optimizers.kernels import Update
from tfdist_cli.train.tf_compat import keras_optimizer
from tfdist_cli.train.tf_compat.control_flow import last_of, unordered
from tfdist_cli.train.tf_compat.keras_optimizer import SlotNames
from tfdist_cli.train.tf_compat.patching import replaced
from tfdist_cli.train.tf_compat.variables import ShardedVariable


@dataclass(frozen=True)
class Slot:
    """One of the values that an optimizer keeps beside each parameter.

    Attributes:
        name: the optimizer's list of them.
        kept: how much of it is left after an update, which adds something to that.
        kind: `sum`: of anything; `positive`: of squares, which rounding must not bring below 0; `largest`: an update
            doesn't add, but takes the larger one of what is left and something.
    """

    name: str
    kept: float = 1.0
    kind: Literal["sum", "positive", "largest"] = "sum"


@dataclass(frozen=True)
class Rule:
    """How one kind of optimizer updates a variable.

    Attributes:
        kinds: the optimizer's slots, in the order of `slots`.
        whole: updates a whole piece.
        some: updates some rows of a piece.
    """

    kinds: tuple[Slot, ...]
    whole: Callable[[Update], Any]
    some: Callable[[Update], Any]

    def slots(self, optimizer: keras.optimizers.Optimizer, variable: Any) -> list[keras.Variable]:
        """The slots of a Keras variable, or of TensorFlow's below it, in the order in which the updates take them."""
        place = keras_optimizer.index_of(optimizer, variable)
        return [getattr(optimizer, kind.name)[place] for kind in self.kinds]

    def dense(
        self,
        optimizer: keras.optimizers.Optimizer,
        variable: tf.Variable,
        slots: Sequence[tf.Variable],
        gradient: tf.Tensor,
        rate: tf.Tensor,
        number: tf.Tensor,
    ) -> Any:
        """Updates a whole piece: a variable or a shard of one.

        Args:
            optimizer: with the hyperparameters; built.
            variable: the piece.
            slots: the same piece of each of `slots()`.
            gradient: of the piece's shape.
            rate: the learning rate, a scalar.
            number: how many updates the optimizer had before this one, an int64 scalar.

        Returns:
            The operation.
        """
        return _run(self.whole, Update(optimizer, variable, slots, gradient, rate, number))

    def sparse(  # noqa: PLR0913 an update is made of these
        self,
        optimizer: keras.optimizers.Optimizer,
        variable: tf.Variable,
        slots: Sequence[tf.Variable],
        gradient: tf.Tensor,
        rows: tf.Tensor,
        rate: tf.Tensor,
        number: tf.Tensor,
        *,
        decaying: bool = False,
    ) -> Any:
        """Updates some rows of a piece; nothing passes over the others.

        Args:
            optimizer: with the hyperparameters; built.
            variable: the piece.
            slots: the same piece of each of `slots()`.
            gradient: (n, …), the sum for each row.
            rows: (n,) int32 or int64, row numbers within the piece, each at most once.
            rate: the learning rate, a scalar.
            number: how many updates the optimizer had before this one, an int64 scalar.
            decaying: whether the rows decay before.

        Returns:
            The operation. It fails with `InvalidArgumentError` where a row is not in the piece.
        """
        before = [decay_rows(optimizer, variable, rows, rate)] if decaying else []
        with tf.control_dependencies(before):
            return _run(self.some, Update(optimizer, variable, slots, gradient, rate, number, rows))


def in_turn(device: str, given: Sequence[tf.Tensor], updates: Sequence[Callable[[], Any]]) -> Any:
    """Updates rows of a ps's tables while no other update of its tables' rows does.

    A function's own updates take the lock in their order: one that had it first would wait for the one before it.

    Args:
        device: the ps.
        given: what the updates take; nobody waits for it while it is still on its way.
        updates: each makes its operations and returns the last one.

    Returns:
        The operation that is done last.
    """
    with tf.device(device):
        before = last_of(f"turn at {device}")
        with tf.control_dependencies([*given, *before]):
            mutex = unordered(tf.raw_ops.MutexV2(shared_name="tfdist-rows"))
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            done = [update() for update in updates]
        with tf.control_dependencies(done):
            before[:] = [unordered(tf.raw_ops.ConsumeMutexLock(mutex_lock=lock))]
        return before[0]


def _run(formula: Callable[[Update], Any], update: Update) -> Any:
    dtype = update.variable.dtype
    with tf.device(update.variable.device):
        gradient, rate = tf.cast(update.gradient, dtype), tf.cast(update.rate, dtype)
        return formula(dataclasses.replace(update, gradient=gradient, rate=rate))


def _sgd(optimizer: Any) -> Rule:
    if optimizer.momentum:
        return Rule((Slot("momentums", optimizer.momentum),), kernels.momentum, kernels.momentum)
    return Rule((), kernels.descent, kernels.descent)


def _adam(optimizer: Any) -> Rule:
    means = Slot(SlotNames.MOMENTUMS, optimizer.beta_1), Slot(SlotNames.VELOCITIES, optimizer.beta_2, "positive")
    hats = (Slot(SlotNames.VELOCITY_HATS, kind="largest"),) if optimizer.amsgrad else ()
    return Rule((*means, *hats), kernels.adam, kernels.adam_rows)


def _rmsprop(optimizer: Any) -> Rule:
    squares = Slot(SlotNames.VELOCITIES, optimizer.rho, "positive")
    means = (Slot(SlotNames.AVERAGE_GRADIENTS, optimizer.rho),) if optimizer.centered else ()
    if optimizer.momentum > 0:
        slots = squares, Slot(SlotNames.MOMENTUMS, optimizer.momentum), *means
        return Rule(slots, kernels.rmsprop, kernels.rmsprop)
    return Rule((squares, *means), kernels.rmsprop_without_momentum, kernels.rmsprop_without_momentum)


def _adagrad(_: Any) -> Rule:
    return Rule((Slot(SlotNames.ACCUMULATORS, kind="positive"),), kernels.adagrad, kernels.adagrad_by_operations)


def _adadelta(optimizer: Any) -> Rule:
    names = SlotNames.ACCUMULATED_GRADIENTS, SlotNames.ACCUMULATED_DELTAS
    return Rule(tuple(Slot(name, optimizer.rho, "positive") for name in names), kernels.adadelta, kernels.adadelta)


def _adamax(optimizer: Any) -> Rule:
    slots = Slot(SlotNames.ADAMAX_MEANS, optimizer.beta_1), Slot(SlotNames.ADAMAX_NORMS, optimizer.beta_2, "largest")
    return Rule(slots, kernels.adamax, kernels.adamax_rows)


def _ftrl(_: Any) -> Rule:
    return Rule((Slot(SlotNames.ACCUMULATORS, kind="positive"), Slot(SlotNames.LINEARS)), kernels.ftrl, kernels.ftrl)


def _lion(optimizer: Any) -> Rule:
    return Rule((Slot(SlotNames.MOMENTUMS, optimizer.beta_2),), kernels.lion, kernels.lion)


_RULES: dict[type, Callable[[Any], Rule]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.Ftrl: _ftrl,
    keras.optimizers.Lion: _lion,
}


class _LeftOut(threading.local):
    """Whether this thread traces updates without kernels."""

    active = False


_left_out = _LeftOut()


@contextlib.contextmanager
def kernels_left_out() -> Iterator[None]:
    """Within it no optimizer has a rule, so that all updates are Keras's own."""
    before, _left_out.active = _left_out.active, True
    try:
        yield
    finally:
        _left_out.active = before


def rule_of(optimizer: keras.optimizers.Optimizer) -> Rule | None:
    """The rule that computes what the optimizer's `update_step` does; None where only Keras's own code does.

    A class derived from one of Keras's may compute something else: it has no rule. Nor have parameters of float16 and
    bfloat16, in which 1 − 0.999, as the kernels compute it, is 0.
    """
    make = _RULES.get(type(optimizer))
    return make(optimizer) if make and not _left_out.active and not _other_types(optimizer) else None


def why_not(optimizer: keras.optimizers.Optimizer) -> str:
    """Why `rule_of` has none for an optimizer; "" where it has one."""
    kind = type(optimizer)
    if kind in _RULES:
        types = _other_types(optimizer)
        return f"parameters are of type {' and '.join(types)}, not float32 or float64" if types else ""
    for known in _RULES:
        if isinstance(optimizer, known):
            return f"{kind.__name__} is a class of its own, whose update may be another than {known.__name__}'s"
    return f"TensorFlow has no kernels for {kind.__name__}"


def _other_types(optimizer: Any) -> list[str]:
    return sorted({variable.dtype for variable in keras_optimizer.parameters_of(optimizer)} - {"float32", "float64"})


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether the optimizer lets a Keras variable decay."""
    return optimizer.weight_decay is not None and keras_optimizer.decays(optimizer, variable)


def decay(optimizer: keras.optimizers.Optimizer, variable: tf.Variable, rate: tf.Tensor) -> Any:
    """Weight decay of a whole piece, before its update: w ← w − η·λ·w (Loshchilov and Hutter, 2019, as Keras has it).

    Args:
        optimizer: with λ, `weight_decay`, not None.
        variable: the piece.
        rate: the learning rate η, a scalar.

    Returns:
        The operation.
    """
    with tf.device(variable.device):
        return variable.assign_sub(variable * _share(optimizer, variable, rate), read_value=False)


def decay_rows(optimizer: keras.optimizers.Optimizer, variable: tf.Variable, rows: tf.Tensor, rate: tf.Tensor) -> Any:
    """Weight decay of some rows of a piece, before their update; the others don't decay (the lazy meaning).

    Args:
        optimizer: with λ, `weight_decay`, not None.
        variable: the piece.
        rows: (n,) int32 or int64, row numbers within the piece, each at most once.
        rate: the learning rate η, a scalar.

    Returns:
        The operation.
    """
    with tf.device(variable.device):
        lost = variable.sparse_read(rows) * _share(optimizer, variable, rate)
        return tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=rows, updates=lost)


def _share(optimizer: Any, variable: tf.Variable, rate: Any) -> tf.Tensor:
    return tf.cast(optimizer.weight_decay, variable.dtype) * tf.cast(rate, variable.dtype)


def fused(optimizer: keras.optimizers.Optimizer) -> AbstractContextManager[None]:
    """Within it, Keras's `apply` updates by the optimizer's rule, if it has one.

    Only `update_step` is replaced: clipping, weight decay, averages, constraints and everything else around it stays
    Keras's. So do sparse gradients, which Keras takes for dense ones.
    """
    rule = rule_of(optimizer)
    step = {} if rule is None else {"update_step": _FusedStep(optimizer, rule)}
    return replaced(optimizer, step)


class _FusedStep:
    """An optimizer's `update_step` by its rule."""

    def __init__(self, optimizer: Any, rule: Rule) -> None:
        self._optimizer, self._rule = optimizer, rule

    def __call__(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            type(self._optimizer).update_step(self._optimizer, gradient, variable, learning_rate)
            return
        optimizer, rule, pieces = self._optimizer, self._rule, _pieces(variable)
        slots = [_pieces(slot) for slot in rule.slots(optimizer, variable)]
        rate, number = tf.convert_to_tensor(learning_rate), tf.convert_to_tensor(optimizer.iterations)
        for place, (piece, part) in enumerate(zip(pieces, _parts(gradient, pieces), strict=True)):
            rule.dense(optimizer, piece, [slot[place] for slot in slots], part, rate, number)


def _pieces(variable: Any) -> list[Any]:
    """TensorFlow's variables below a Keras one: the shards of a sharded one."""
    stored = variable.value if isinstance(variable, keras.Variable) else variable
    return list(stored.variables) if isinstance(stored, ShardedVariable) else [stored]


def _parts(gradient: tf.Tensor, pieces: list[Any]) -> list[tf.Tensor]:
    """The gradient of each shard; shards are blocks of rows."""
    return [gradient] if len(pieces) == 1 else tf.split(gradient, [piece.shape[0] for piece in pieces])
