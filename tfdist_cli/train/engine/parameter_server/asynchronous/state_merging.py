"""State that asynchronous workers assign at the same time: moving statistics, sums over batches, and other values.

An execution of k steps reads a variable's value s₀, and computes sₖ from it. In the meantime others have changed the
variable to s. What becomes of it follows from the part r of its old value that a step leaves in the variable, which the
step's graph tells (`additivity.py`). The execution is the function x → rᵏ·x + (sₖ − rᵏ·s₀), and is applied to s:

    s ← sₖ + rᵏ·(s − s₀)

So the variable becomes what it would be if the executions had followed each other, each with its own batches.

- A moving average with momentum r: sₖ − rᵏ·s₀ is 1 − rᵏ times an average of the statistics of k batches. So each
  execution moves the variable towards that average by the share that k steps of one process would, and never beyond it.
  N executions at the same time leave rᴺᵏ of what was there, as N·k steps do. (If the changes sₖ − s₀ were added up, N
  executions would move the variable by N·(1 − rᵏ) of the way: beyond the target, and without a limit, as N grows.)
- A sum, r = 1: the terms of all executions are added up.
- Any other value, r = 0: the last execution that writes it decides. A maximum is an example, or the last value seen.

If nobody else has changed the variable, it becomes exactly sₖ. Otherwise the result is as exact as the roundings of sₖ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.registry import row_lock
from tfdist_cli.train.tf_compat import control_flow
from tfdist_cli.train.variables.sharding import parts, split_rows


def merge_state(
    context: ParameterServerContext,
    before: Tensors,
    after: Tensors,
    steps: tf.Tensor | int,
    awaited: Sequence[tf.Tensor] = (),
) -> None:
    """Merges what an execution has made of the model's state into the variables on the ps.

    Args:
        context: the model on its cluster.
        before: the values of the state that the execution has read.
        after: the values at its end.
        steps: how many steps it has taken, at least 1.
        awaited: what has to be there before anything is assigned.
    """
    merges: dict[str, list[tuple[tf.Tensor, Callable[[], Any]]]] = {}
    for index, rate in context.assigned.items():
        shards = parts(context.step.state[index])
        old, new = (split_rows(state[index], shards) for state in (before, after))
        for shard, own_old, computed in zip(shards, old, new, strict=True):
            own_new = control_flow.after(computed, awaited)
            merge = partial(_merged, shard, own_old, own_new, rate, steps)
            merges.setdefault(shard.device, []).append((own_new, merge))
    for device, some in merges.items():
        row_lock(device, [new for new, _ in some], [merge for _, merge in some])


def _merged(shard: Any, old: tf.Tensor, new: tf.Tensor, rate: float, steps: tf.Tensor | int) -> Any:
    """Assigns the new value of a shard, on its device."""
    if rate == 0 or not (new.dtype.is_floating or new.dtype.is_integer):
        return shard.assign(new, read_value=False)
    others = tf.convert_to_tensor(shard) - old
    if rate < 1:
        left = tf.pow(tf.constant(rate, tf.float64), tf.cast(steps, tf.float64))
        others *= tf.cast(left, others.dtype)
    return shard.assign(new + others, read_value=False)
