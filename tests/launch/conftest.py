import pytest

from tfdist_cli.plan import make_plan
from tfdist_cli.resources import Machine
from tfdist_cli.spec.cluster import Cluster


@pytest.fixture
def make_cluster():
    """A cluster by its strategy and the number of tasks, or the addresses, of its roles."""

    def make(strategy="multi_worker_mirrored", **roles):
        given = {
            role: {"replicas": tasks} if isinstance(tasks, int) else {"hosts": tasks} for role, tasks in roles.items()
        }
        return Cluster.model_validate({"strategy": strategy, "roles": given})

    return make


@pytest.fixture
def plan_for(tmp_path):
    """A plan in which the tasks of a cluster run a command."""

    def make(cluster, *command, run_dir=tmp_path, addresses=None):
        addresses = addresses or {task: cluster.address(task) for task in cluster.tasks}
        return make_plan(cluster, None, addresses=addresses, run_dir=run_dir, machine=Machine(2), command=command)

    return make
