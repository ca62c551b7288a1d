"""Clusters of real processes, none of which outlives its test."""

import pytest

from tests.support.lab import containers
from tests.support.lab.hosts import make_hosts
from tests.support.tasks import Tasks

LONGEST = ("test_spark", "test_ray", "test_rules", "test_slurm", "test_mirrored_fit", "test_parameter_server_fit",
           "test_recipes", "test_roles", "test_containers", "test_launch_training", "test_losses",
           "test_task_environment")  # fmt: skip


def pytest_collection_modifyitems(items):
    """Begins with the files that take longest, so that the processes that run the tests end at about the same time."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


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


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Three hosts with an sshd each."""
    with make_hosts(tmp_path_factory.mktemp("hosts"), 3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The program that runs containers; what it needs here is in the environment of all that is started."""
    program = containers.engine()
    if program is None:
        pytest.skip("there is no podman or docker here")
    with pytest.MonkeyPatch.context() as patch:
        variables, reason = containers.settings(program, tmp_path_factory.mktemp("engine"))
        if reason:
            pytest.skip(f"no container runs here: {reason}")
        for name, value in variables.items():
            patch.setenv(name, value)
        yield program
