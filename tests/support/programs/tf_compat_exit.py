"""A coordinator whose process exits while a worker's thread traces functions, and another worker runs one.

tf_compat_exit.py [ROLE INDEX]
"""

import json
import os
import socket
import subprocess
import sys
import threading
from functools import partial

import tensorflow as tf

from tfdist_cli.train.tf_compat.coordinator import stop_workers, workers_of
from tfdist_cli.train.tf_compat.exit_hooks import stop_at_exit

SERVERS = {"worker": 2, "ps": 1}


def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def serve(role, index):
    """Runs a server until the coordinator's process exits."""
    cluster = json.loads(os.environ["CLUSTER"])
    server = tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc")
    sys.stdin.read()
    del server
    os._exit(0)


@tf.function
def run_for_a_minute():
    end = tf.timestamp() + 60
    return tf.while_loop(lambda *_: tf.timestamp() < end, lambda n: [n + 1], [0])[0]


def trace_at_exit(begun):
    """Traces functions, also after the exit has begun."""
    begun.set()
    while True:
        tf.function(lambda x: tf.nn.relu(x) + 1).get_concrete_function(tf.TensorSpec([2]))


if len(sys.argv) > 1:
    serve(sys.argv[1], int(sys.argv[2]))
cluster = {role: [address() for _ in range(count)] for role, count in {"chief": 1, **SERVERS}.items()}
os.environ["CLUSTER"] = json.dumps(cluster)
servers = [
    subprocess.Popen([sys.executable, __file__, role, str(index)], stdin=subprocess.PIPE)
    for role, count in SERVERS.items()
    for index in range(count)
]
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
stop_at_exit(partial(stop_workers, strategy))
begun = threading.Event()
tracing, running = workers_of(coordinator)
kept = [tracing.create_resource(partial(trace_at_exit, begun)), running.create_resource(run_for_a_minute)]
begun.wait()
print("exits", flush=True)
