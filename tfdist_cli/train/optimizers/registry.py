"""The table of Keras's optimizers with fused kernels, and their updates of a variable, a shard or some rows.

Keras computes an update by about a dozen elementwise operations. Each of them passes over the whole variable, also if
the gradient has only a few rows. A fused kernel passes over the variable once, and there are kernels that touch only
some rows. An optimizer is in the table if its function in `kernels.py` computes Keras's formula up to rounding. For all
others, Keras's own code computes the update; `why_no_kernel` returns the reason.

Sparse updates: the update of some rows changes these rows and their slots as Keras's update of the whole variable
does. Other rows and their slots keep their values. For SGD without momentum and for Adagrad, the result equals Keras's.
For the others, the semantics are lazy, as in LazyAdam: momentum and weight decay act on a row only in the updates that
touch it. Bias corrections count all updates.

Keras updates a row that a batch looks up several times by each of its gradients: Adagrad adds the square of each, not
that of their sum. So an update may take the sum of these squares, too, see `terms.py`.

Several workers may update a variable at the same time. A dense update holds the locks of the variable and its slots, so
no update is lost; workers that share memory hold a lock of the ps (`cluster/shared_memory/locks.py`). Sparse updates,
with their weight decay, hold a lock of the ps, too (`row_lock`).

After its first sparse update or gather, TensorFlow keeps a variable in copy-on-read mode: rows are changed in place
whatever reads them, but each dense read or update copies the variable. So a table should have either sparse or dense
updates, not both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist_cli.train.optimizers import kernels
from tfdist_cli.train.optimizers.kernels import Update
from tfdist_cli.train.optimizers.row_sums import row_sums
from tfdist_cli.train.optimizers.terms import SIZES, SQUARES, Terms
from tfdist_cli.train.tf_compat import keras_optimizer as compat
from tfdist_cli.train.tf_compat.control_flow import last_of, made_once, unordered
from tfdist_cli.train.tf_compat.keras_optimizer import SlotNames
from tfdist_cli.train.tf_compat.patching import replaced
from tfdist_cli.train.variables.changed_rows import marked
from tfdist_cli.train.variables.sharding import parts, split_rows


@dataclass(frozen=True)
class Slot:
    """One of the variables that an optimizer keeps for each parameter.

    Attributes:
        attribute: the optimizer's attribute that lists them.
        decay_rate: the factor by which an update multiplies the slot before it adds a term.
        kind: `sum` of any terms; `positive`, a sum of squares, which rounding must not make negative; or `largest`, for
            which an update takes the maximum instead of adding.
    """

    attribute: str
    decay_rate: float = 1.0
    kind: Literal["sum", "positive", "largest"] = "sum"


@dataclass(frozen=True)
class Kernel:
    """The row of an optimizer class in `KERNELS`.

    Attributes:
        update: the function of `kernels.py` that updates a variable, or some rows of it.
        slots: returns the slots of an optimizer, in the order in which `update` takes them.
        leaves_other_rows: whether the update of a whole variable changes only the rows whose gradient is not 0. If so,
            an update of these rows is the same.
        terms: what the update takes of each term of a gradient; None if it is linear in the gradient up to where the
            terms are summed.
    """

    update: Callable[[Update], Any]
    slots: Callable[[Any], tuple[Slot, ...]]
    leaves_other_rows: Callable[[Any], bool] = lambda _: False
    terms: Terms | None = SQUARES


def _adam_slots(optimizer: Any) -> tuple[Slot, ...]:
    moments = Slot(SlotNames.MOMENTUMS, optimizer.beta_1), Slot(SlotNames.VELOCITIES, optimizer.beta_2, "positive")
    return (*moments, Slot(SlotNames.VELOCITY_HATS, kind="largest")) if optimizer.amsgrad else moments


def _rmsprop_slots(optimizer: Any) -> tuple[Slot, ...]:
    momentum = (Slot(SlotNames.MOMENTUMS, optimizer.momentum),) if optimizer.momentum > 0 else ()
    mean = (Slot(SlotNames.AVERAGE_GRADIENTS, optimizer.rho),) if optimizer.centered else ()
    return Slot(SlotNames.VELOCITIES, optimizer.rho, "positive"), *momentum, *mean


KERNELS: dict[type, Kernel] = {
    keras.optimizers.SGD: Kernel(
        kernels.sgd,
        lambda o: (Slot("momentums", o.momentum),) if o.momentum else (),
        lambda o: not o.momentum,
        terms=None,
    ),
    keras.optimizers.Adam: Kernel(kernels.adam, _adam_slots),
    keras.optimizers.AdamW: Kernel(kernels.adam, _adam_slots),
    keras.optimizers.RMSprop: Kernel(kernels.rmsprop, _rmsprop_slots),
    keras.optimizers.Adagrad: Kernel(
        kernels.adagrad,
        lambda _: (Slot(SlotNames.ACCUMULATORS, kind="positive"),),
        lambda _: True,
    ),
    keras.optimizers.Adadelta: Kernel(
        kernels.adadelta,
        lambda o: (
            Slot(SlotNames.ACCUMULATED_GRADIENTS, o.rho, "positive"),
            Slot(SlotNames.ACCUMULATED_DELTAS, o.rho, "positive"),
        ),
    ),
    keras.optimizers.Adamax: Kernel(
        kernels.adamax,
        lambda o: (Slot(SlotNames.ADAMAX_MEANS, o.beta_1), Slot(SlotNames.ADAMAX_NORMS, o.beta_2, "largest")),
        terms=SIZES,
    ),
    keras.optimizers.Ftrl: Kernel(
        kernels.ftrl, lambda _: (Slot(SlotNames.ACCUMULATORS, kind="positive"), Slot(SlotNames.LINEARS))
    ),
    keras.optimizers.Lion: Kernel(kernels.lion, lambda o: (Slot(SlotNames.MOMENTUMS, o.beta_2),), terms=None),
}
"""The optimizers with a fused kernel. Not their subclasses, which may compute another update."""


@dataclass(frozen=True)
class FusedUpdate:
    """The fused update of one optimizer.

    Attributes:
        optimizer: the optimizer, built.
        kernel: its row in `KERNELS`.
        slots: its slots, in the order in which the kernel takes them.
    """

    optimizer: Any
    kernel: Kernel
    slots: tuple[Slot, ...]

    def slot_variables(self, variable: Any) -> list[keras.Variable]:
        """Returns the slots of a parameter.

        Args:
            variable: the Keras variable, or the TensorFlow variable that stores it.
        """
        index = compat.index_of(self.optimizer, variable)
        return [getattr(self.optimizer, slot.attribute)[index] for slot in self.slots]

    def dense(
        self,
        variable: tf.Variable,
        slots: Sequence[tf.Variable],
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        iterations: tf.Tensor,
        terms: tf.Tensor | None = None,
    ) -> Any:
        """Updates a whole variable or shard, on its device.

        Args:
            variable: the variable or shard.
            slots: its slots, in the order of `self.slots`.
            gradient: of the shape of `variable`.
            learning_rate: a scalar.
            iterations: the number of updates before this one, an int64 scalar.
            terms: see `Update.terms`.

        Returns:
            The operation.
        """
        return self._run(variable, slots, gradient, learning_rate, iterations, None, terms)

    def sparse(
        self,
        variable: tf.Variable,
        slots: Sequence[tf.Variable],
        gradient: tf.IndexedSlices,
        learning_rate: tf.Tensor,
        iterations: tf.Tensor,
        *,
        decays: bool = False,
        terms: tf.Tensor | None = None,
    ) -> Any:
        """Updates some rows of a variable or shard, on its device. No operation passes over the other rows.

        Args:
            variable: the variable or shard.
            slots: its slots, in the order of `self.slots`.
            gradient: its indices are rows of `variable`, each at most once.
            learning_rate: a scalar.
            iterations: the number of updates before this one, an int64 scalar.
            decays: whether weight decay applies to the rows before the update.
            terms: see `Update.terms`.

        Returns:
            The operation. It fails with `InvalidArgumentError` if the variable does not have a row.
        """
        rows = gradient.indices
        before = [kernels.decay_weights(self.optimizer, variable, learning_rate, rows)] if decays else []
        with tf.control_dependencies(before):
            done = self._run(variable, slots, gradient.values, learning_rate, iterations, rows, terms)
        with tf.device(variable.device):
            return marked(variable, rows, done)

    def sparse_each(
        self,
        variable: tf.Variable,
        slots: Sequence[tf.Variable],
        gradient: tf.IndexedSlices,
        learning_rate: tf.Tensor,
        iterations: tf.Tensor,
    ) -> Any:
        """Updates some rows by one or more gradients each, as Keras does where `leaves_other_rows` is true.

        Args:
            variable: the variable.
            slots: its slots, in the order of `self.slots`.
            gradient: its indices are rows of `variable`, in any order and number.
            learning_rate: a scalar.
            iterations: the number of updates before this one, an int64 scalar.

        Returns:
            The operation.
        """
        rows, where = tf.unique(gradient.indices)
        terms = tf.cast(gradient.values, variable.dtype)
        kind = self.kernel.terms
        total, *each = row_sums([terms, *([kind.of(terms)] if kind else [])], where, tf.size(rows))
        return self._run(variable, slots, total, learning_rate, iterations, rows, *each)

    def _run(
        self,
        variable: Any,
        slots: Any,
        gradient: Any,
        learning_rate: Any,
        iterations: Any,
        rows: Any = None,
        terms: Any = None,
    ) -> Any:
        with tf.device(variable.device):
            gradient, learning_rate = tf.cast(gradient, variable.dtype), tf.cast(learning_rate, variable.dtype)
            if terms is not None:
                terms = tf.cast(terms, variable.dtype)
            update = Update(self.optimizer, variable, slots, gradient, learning_rate, iterations, rows, terms)
            return self.kernel.update(update)


def row_lock(device: str, inputs: Sequence[tf.Tensor], updates: Sequence[Callable[[], Any]]) -> Any:
    """Runs sparse updates under a lock of their ps, so that no two of them change a table at the same time.

    Args:
        device: the device of the ps.
        inputs: the inputs of the updates. The lock is acquired after they have arrived.
        updates: functions that create the operations of an update and return the last one.

    Returns:
        The operation that releases the lock.
    """
    return _locked("tfdist-rows", device, inputs, updates)


def update_lock(device: str, inputs: Sequence[tf.Tensor], update: Callable[[], Any]) -> None:
    """Runs an update by Keras's own operations under a lock, so that no two of them run at the same time.

    They read a variable, compute, and assign it. Without a lock, a worker would undo what another one has assigned in
    the meantime. A row could keep the momentum of one and the velocity of the other, 0 at first, by whose root it is
    divided.

    Args:
        device: where the lock is: the device of the optimizer's count.
        inputs: the inputs of the update. The lock is acquired after they have arrived.
        update: creates the operations of the update. It may acquire row locks.
    """
    graph = tf.compat.v1.get_default_graph()
    begin = len(graph.get_operations())

    def run() -> Any:
        with tf.device(None):
            update()
        with tf.control_dependencies([each for each in graph.get_operations()[begin:] if each.op_def.is_stateful]):
            return tf.no_op()

    _locked("tfdist-updates", device, inputs, [run])


def _locked(name: str, device: str, inputs: Sequence[tf.Tensor], updates: Sequence[Callable[[], Any]]) -> tf.Operation:
    """Runs updates under a lock.

    Within one function, the updates acquire the lock in the order of the program. Otherwise a later one could hold it
    while it waits for an earlier one.

    Args:
        name: the lock's.
        device: the device of the ps.
        inputs: the inputs of the updates. The lock is acquired after they have arrived.
        updates: functions that create the operations of an update and return the last one.

    Returns:
        The operation that releases the lock.
    """
    with tf.device(device):
        before = last_of(f"{name} of {device}")
        with tf.control_dependencies([*inputs, *before]):
            mutex = unordered(tf.raw_ops.MutexV2(shared_name=name))
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            done = [update() for update in updates]
        with tf.control_dependencies(done):
            before[:] = [unordered(tf.raw_ops.ConsumeMutexLock(mutex_lock=lock))]
        return before[0]


class _Disabled(threading.local):
    """Whether this thread traces updates without kernels."""

    active = False


_disabled = _Disabled()


@contextlib.contextmanager
def kernels_disabled() -> Iterator[None]:
    """Within the context, no optimizer has a fused update: Keras's own code computes all updates."""
    before, _disabled.active = _disabled.active, True
    try:
        yield
    finally:
        _disabled.active = before


def fused_update_of(optimizer: keras.optimizers.Optimizer) -> FusedUpdate | None:
    """Returns the fused update of an optimizer, or None if only Keras's own code computes its update.

    Parameters of float16 and bfloat16 have no fused update: the kernels would compute 1 − 0.999 as 0.
    """
    kernel = KERNELS.get(type(optimizer))
    if kernel is None or _disabled.active or _unsupported_types(optimizer):
        return None
    return FusedUpdate(optimizer, kernel, kernel.slots(optimizer))


def terms_of(optimizer: keras.optimizers.Optimizer) -> Terms | None:
    """Returns what the update of an optimizer takes of each term of a gradient, see `Kernel.terms`."""
    kernel = KERNELS.get(type(optimizer))
    return SQUARES if kernel is None else kernel.terms


def why_no_kernel(optimizer: keras.optimizers.Optimizer) -> str:
    """Returns the reason why an optimizer has no fused update, for messages; "" if it has one."""
    kind = type(optimizer)
    if kind in KERNELS:
        types = _unsupported_types(optimizer)
        return f"the parameters have the type {' and '.join(types)}, not float32 or float64" if types else ""
    for known in KERNELS:
        if isinstance(optimizer, known):
            return f"{kind.__name__} is a subclass, whose update may differ from that of {known.__name__}"
    return f"TensorFlow has no kernels for {kind.__name__}"


def _unsupported_types(optimizer: Any) -> list[str]:
    return sorted({variable.dtype for variable in compat.parameters_of(optimizer)} - {"float32", "float64"})


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether the weight decay of an optimizer applies to a Keras variable."""
    return optimizer.weight_decay is not None and compat.decays(optimizer, variable)


def fused(
    optimizer: keras.optimizers.Optimizer,
    by_rows: Sequence[keras.Variable] = (),
    *,
    summed: bool = True,
    terms: Mapping[int, tf.Tensor] | None = None,
) -> AbstractContextManager[None]:
    """Within the context, Keras's `apply` uses the fused update of an optimizer, if it has one.

    Only `update_step` is replaced. Keras still does the clipping, weight decay, averages and constraints.

    Args:
        optimizer: the optimizer.
        by_rows: the parameters of which sparse gradients update rows; with those of others, Keras updates.
        summed: whether each row occurs once in these gradients.
        terms: by the `id` of a parameter, what `Update.terms` says of its gradient.
    """
    update = fused_update_of(optimizer)
    if update is None:
        return replaced(optimizer, {})
    own, each = {id(variable) for variable in by_rows}, terms or {}
    parameters = compat.parameters_of(optimizer)
    rows = frozenset(n for n, variable in enumerate(parameters) if id(variable) in own)
    found = {n: each[id(variable)] for n, variable in enumerate(parameters) if id(variable) in each}
    return replaced(optimizer, {"update_step": _FusedStep(update, rows, found, summed=summed)})


class _FusedStep:
    """Replaces an optimizer's `update_step` by its fused update."""

    def __init__(
        self, update: FusedUpdate, by_rows: frozenset[int], terms: Mapping[int, tf.Tensor], *, summed: bool
    ) -> None:
        self._update, self._by_rows, self._terms, self._summed = update, by_rows, terms, summed

    def __call__(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        update, optimizer = self._update, self._update.optimizer
        index, sparse = compat.index_of(optimizer, variable), isinstance(gradient, tf.IndexedSlices)
        if sparse and index not in self._by_rows:
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return
        shards, slots = parts(variable), [parts(slot) for slot in update.slot_variables(variable)]
        rate, terms = tf.convert_to_tensor(learning_rate), self._terms.get(index)
        iterations = made_once(
            ("iterations", self, shards[0].device), lambda: tf.convert_to_tensor(optimizer.iterations)
        )
        if sparse:
            (shard,), own = shards, [slot for (slot,) in slots]
            if self._summed:
                update.sparse(shard, own, gradient, rate, iterations, terms=terms)
            else:
                update.sparse_each(shard, own, gradient, rate, iterations)
            return
        each = [None] * len(shards) if terms is None else split_rows(terms, shards)
        pieces = zip(shards, split_rows(gradient, shards), each, strict=True)
        for number, (shard, part, own_terms) in enumerate(pieces):
            update.dense(shard, [slot[number] for slot in slots], part, rate, iterations, own_terms)
