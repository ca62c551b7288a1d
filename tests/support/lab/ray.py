"""A real Ray cluster of several nodes on this machine: processes of Ray's own test cluster."""

import importlib.util
import os
from contextlib import closing

import psutil
import pytest

from tests.support.ports import free_address

CORES = 2
"""The cores of each node that has any."""


def missing():
    """Why Ray cannot run here; empty if it can."""
    return "" if importlib.util.find_spec("ray") else "needs ray: pip install 'tfdist-cli[ray]'"


class Lab:
    """The cluster: a head node without cores, and the nodes that are added."""

    def __init__(self):
        from ray.cluster_utils import Cluster  # noqa: PLC0415 an extra

        # A forked child of Ray's client server may die in a handler of gRPC, before it executes another program.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        port = free_address().port
        head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = []
        self.address = self._cluster.address
        self.client_address = f"ray://127.0.0.1:{port}"
        """The address for Ray Client."""

    def close(self):
        """Ends all processes of the cluster."""
        self._cluster.shutdown()

    def add_node(self):
        """Adds a node."""
        self._nodes.append(self._cluster.add_node(num_cpus=CORES))

    def remove_node(self):
        """Kills the node that was added first."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def replace_node(self):
        """Kills a node, and adds another one."""
        self.remove_node()
        self.add_node()

    def slots(self):
        """The processes of the actors in which tasks run."""
        return [each for each in psutil.Process().children(recursive=True) if _is_slot(each)]


def _is_slot(process):
    try:
        return " ".join(process.cmdline()).startswith("ray::Slot")
    except psutil.Error:  # it has ended
        return False


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster whose head node has no cores; tests add nodes."""
    if reason := missing():
        pytest.skip(reason)
    with closing(Lab()) as lab:
        yield lab
