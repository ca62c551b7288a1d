"""Sums over the tasks, outside of a step."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist_cli.train.cluster.all_reduce.sums import AllReduce


def summing(strategy: tf.distribute.Strategy, tasks: int, all_reduce: AllReduce | None) -> Callable[..., tf.Tensor]:
    """Returns a function that sums a tensor over all tasks. All of them call it.

    Args:
        strategy: whose replicas are on these tasks.
        tasks: how many there are.
        all_reduce: sums over them; None if TensorFlow's collectives do, in which the first replica of each task counts.
    """
    if all_reduce:
        return all_reduce.sum
    local = strategy.num_replicas_in_sync // tasks

    def once(value: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        first = tf.equal(tf.cast(replica.replica_id_in_sync_group, tf.int64) % local, 0)
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(first, value, tf.zeros_like(value)))

    @tf.function(autograph=False, reduce_retracing=True)
    def total(value: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(once, args=(value,)))[0]

    return total
