import pytest

from tests.support.outcome import Outcome
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.sections.cluster import Cluster


@pytest.fixture
def make_cluster():
    """A cluster by its strategy and the number of tasks, the addresses, or the sections of its roles."""

    def section(tasks):
        return tasks if isinstance(tasks, dict) else {"replicas" if isinstance(tasks, int) else "hosts": tasks}

    def make(strategy="multi_worker_mirrored", **roles):
        given = {role: section(tasks) for role, tasks in roles.items()}
        return Cluster.model_validate({"strategy": strategy, "roles": given})

    return make


@pytest.fixture
def plan_for(tmp_path):
    """A plan in which the tasks of a cluster run a command."""

    def make(cluster, *command, run_dir=tmp_path, addresses=None):
        addresses = addresses or {task: cluster.address(task) for task in cluster.tasks}
        return make_plan(cluster, None, addresses=addresses, run_dir=run_dir, machine=Machine(2), command=command)

    return make


@pytest.fixture
def run(plan_for, make_cluster):
    """Runs a command in the tasks of a cluster, as a launch does, and gives its `Outcome`."""

    def run(*command, cluster=None, shutdown=20.0, react=lambda event, state: None, keep=True, max_restarts=0):
        plan = plan_for(cluster or make_cluster(worker=1), *command)
        rules = JobPolicy(plan.strategy, timeouts=Timeouts(shutdown=shutdown), max_restarts=max_restarts)
        own = {"TFDIST_TASK_DIR": str(plan.run_dir)}
        return Outcome(react, keep=keep).run(
            LocalLauncher(), plan, rules, lambda start: {**own, "OWN": f"{start.task} {start.attempt}"}
        )

    return run
