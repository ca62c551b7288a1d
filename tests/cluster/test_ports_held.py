"""A held port and the server it is held for: TensorFlow's, which listens on every interface."""

import socket
import subprocess
import sys

import pytest

from tfdist_cli.launch.process.ports import hold
from tfdist_cli.spec.sections.cluster import Cluster

SERVER = """
import sys
import tensorflow as tf

cluster = tf.train.ClusterSpec({"worker": [sys.argv[1]]})
server = tf.distribute.Server(cluster, job_name="worker", task_index=0)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.cluster
def test_a_tensorflow_server_gets_the_port_that_is_held_for_it():
    cluster = Cluster.model_validate({"strategy": "multi_worker_mirrored", "roles": {"worker": {"replicas": 2}}})
    with hold(cluster) as addresses, hold(cluster) as another_launch:
        assert not {address.port for address in addresses.values()} & {
            address.port for address in another_launch.values()
        }
        address = next(iter(addresses.values()))
        for _ in range(2):  # and again, for a task that is started again
            server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(address)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert server.stdout
            assert server.stdout.readline() == b"up\n"
            socket.create_connection((address.host, address.port), timeout=10).close()
            server.communicate()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", address.port))
