"""Clusters of real processes, none of which outlives its test."""

import pytest

from tests.cluster.tasks import Tasks


@pytest.fixture
def cluster(tmp_path):
    """Makes a cluster with so many tasks of each role, `cluster(ps=1, worker=2, chief=1)`."""
    made = []

    def make(**roles):
        made.append(Tasks(tmp_path / f"cluster{len(made)}", **roles))
        return made[-1]

    yield make
    for tasks in made:
        tasks.close()


@pytest.fixture(scope="module")
def module_cluster(tmp_path_factory):
    """The same, kept for all tests of a module."""
    made = []

    def make(**roles):
        made.append(Tasks(tmp_path_factory.mktemp("cluster"), **roles))
        return made[-1]

    yield make
    for tasks in made:
        tasks.close()
