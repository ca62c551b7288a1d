"""A coordinator with one worker and one ps, all in this process: its private names, and its state after a failure."""

import json
import os
import socket

import tensorflow as tf

from tfdist_cli.train.tf_compat.coordinator import (
    clear_failure,
    failure_of,
    is_dead,
    per_worker_iterators,
    reserve_function_table,
    workers_of,
)
from tfdist_cli.train.tf_compat.eager_context import remote_caller


def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def coordinator_of_one_worker():
    cluster = {role: [address()] for role in ("chief", "worker", "ps")}
    servers.extend(
        tf.distribute.Server(cluster, job_name=role, task_index=0, protocol="grpc") for role in ("worker", "ps")
    )
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def take(iterator):
    return next(iterator)


@tf.function
def fail():
    tf.debugging.Assert(tf.random.uniform([]) < 0, ["never"])
    return tf.constant(0)


servers = []
coordinator = coordinator_of_one_worker()
assert not hasattr(coordinator, "workers"), "the workers are public now"
(worker,) = workers_of(coordinator)
assert not is_dead(worker)
reserve_function_table([worker.device_name])

assert remote_caller() is None
with tf.device(worker.device_name):
    assert remote_caller() == ("chief", 0)

remotes = [worker.create_resource(lambda: iter(tf.data.Dataset.range(5)), args=())]
iterators = per_worker_iterators(remotes, tf.TensorSpec([], tf.int64))
assert coordinator.schedule(take, args=(iterators,)).fetch() == 0

failed = coordinator.schedule(fail)
clear_failure(coordinator)
assert failure_of(failed) is not None
cluster = coordinator._cluster
cluster.resource_cancellation_mgr.start_cancel()
clear_failure(coordinator)
assert not cluster.resource_cancellation_mgr.is_cancelled
coordinator.join()
assert coordinator.schedule(take, args=(iterators,)).fetch() == 1
print("done", flush=True)
os._exit(0)  # servers cannot be stopped
