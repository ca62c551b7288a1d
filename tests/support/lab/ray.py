"""A real Ray cluster of several nodes on this machine: processes of Ray's own test cluster."""

import importlib.util

import pytest


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster whose head node has no cores; tests add nodes."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'tfdist-cli[ray]'")
    from ray.cluster_utils import Cluster  # noqa: PLC0415 an extra

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()
