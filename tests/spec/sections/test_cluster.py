"""The tasks of a cluster, and the roles that fit its strategy."""

import pytest
from pydantic import ValidationError

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.model import Inconsistent
from tfdist_cli.spec.task_id import TaskId

PS = {"worker": {}, "ps": {}}


def cluster(strategy="parameter_server", **roles):
    return Cluster.model_validate({"strategy": strategy, "roles": roles})


def test_tasks_and_addresses():
    spec = cluster(chief={}, worker={"hosts": ["127.0.0.1:7", "localhost:8"]}, ps={"replicas": 2}, evaluator={})
    assert [str(task) for task in spec.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1", "evaluator:0"]
    assert spec.address(TaskId("worker", 1)) == Address("localhost", 8)
    assert spec.address(TaskId("ps", 1)) == Address("127.0.0.1", 0)
    assert spec.role(TaskId("ps", 1)).replicas == 2
    served = cluster("single", chief={}, data_worker={"replicas": 2}, data_dispatcher={})
    assert [str(task) for task in served.tasks] == ["chief:0", "data_dispatcher:0", "data_worker:0", "data_worker:1"]
    with pytest.raises(KeyError):
        cluster("single", chief={}).role(TaskId("ps"))


def test_names_a_task():
    spec = cluster(chief={}, worker={}, ps={})
    assert spec.task("worker:0") == TaskId("worker", 0)
    for text in ("worker:1", "wrker"):
        with raises(UsageError, "unknown-task") as caught:
            spec.task(text)
        assert text in caught.value.message
        assert "chief:0, worker:0, ps:0" in str(caught.value.hint)


def test_workers_that_may_join_are_named_and_know_those_before_them():
    spec = cluster(chief={}, worker={"replicas": 2, "max": 5}, ps={}, evaluator={})
    assert [task.index for task in spec.tasks if task.role == "worker"] == [0, 1]
    assert [task.index for task in spec.possible_tasks if task.role == "worker"] == [0, 1, 2, 3, 4]
    assert spec.task("worker:4") == TaskId("worker", 4)
    with raises(UsageError, "task-above-max") as caught:
        spec.task("worker:5")
    assert "max to 6" in str(caught.value.hint)
    assert spec.listed_for(TaskId("chief")) == spec.tasks
    joined = spec.listed_for(TaskId("worker", 3))
    assert [task.index for task in joined if task.role == "worker"] == [0, 1, 2, 3]
    assert set(spec.tasks) < set(joined)


def test_hosts_may_list_the_addresses_of_workers_that_join():
    spec = cluster(chief={}, worker={"replicas": 1, "max": 3, "hosts": ["localhost:8", "localhost:9"]}, ps={})
    assert len(spec.tasks) == 3
    assert (spec.roles.count("worker"), spec.roles.capacity("worker")) == (1, 2)
    assert spec.address(TaskId("worker", 1)) == Address("localhost", 9)


@pytest.mark.parametrize(
    ("strategy", "roles"),
    [
        ("parameter_server", {"chief": {}, "worker": {}, "ps": {}}),
        ("parameter_server", {"chief": {}, "worker": {"replicas": 9}, "ps": {"replicas": 3}, "evaluator": {}}),
        ("multi_worker_mirrored", {"worker": {}}),
        ("multi_worker_mirrored", {"chief": {}, "worker": {"replicas": 3}, "evaluator": {}}),
        ("mirrored", {"chief": {}}),
        ("single", {"worker": {}}),
        ("single", {"chief": {}, "evaluator": {}}),
        ("single", {"chief": {}, "worker": {"replicas": 0}}),
        ("single", {"chief": {}, "data_dispatcher": {}, "data_worker": {}}),
        ("mirrored", {"chief": {}, "data_dispatcher": {}, "data_worker": {"replicas": 2}}),
        ("multi_worker_mirrored", {"worker": {}, "data_dispatcher": {}, "data_worker": {"replicas": 2}}),
        ("parameter_server", {"chief": {}, "worker": {}, "ps": {}, "data_dispatcher": {}, "data_worker": {}}),
        ("single", {"chief": {}, "data_dispatcher": {"replicas": 0}, "data_worker": {"replicas": 0}}),
    ],
)
def test_strategies_and_the_roles_they_take(strategy, roles):
    assert cluster(strategy, **roles).strategy == strategy


@pytest.mark.parametrize(
    ("strategy", "roles", "problems"),
    [
        ("parameter_server", {}, {("roles", role): "missing-role" for role in ("chief", "worker", "ps")}),
        ("parameter_server", {"chief": {"replicas": 2}, **PS}, {("roles", "chief"): "too-many-tasks"}),
        ("multi_worker_mirrored", {"chief": {}}, {("roles", "worker"): "missing-role"}),
        ("mirrored", {"worker": {"replicas": 2}}, {("strategy",): "not-one-process"}),
        ("single", {}, {("strategy",): "not-one-process"}),
        ("single", {"chief": {}, "ps": {}}, {("roles", "ps"): "role-not-used"}),
        ("parameter_server", {"chief": {}, **PS, "ps": {"gpus": 1}}, {("roles", "ps", "gpus"): "gpus-not-used"}),
        ("single", {"chief": {}, "data_worker": {}}, {("roles", "data_worker"): "missing-role"}),
        ("single", {"chief": {}, "data_dispatcher": {}}, {("roles", "data_dispatcher"): "missing-role"}),
        (
            "single",
            {"chief": {}, "data_dispatcher": {"replicas": 2}, "data_worker": {}},
            {("roles", "data_dispatcher"): "too-many-tasks"},
        ),
        (
            "single",
            {"chief": {}, "data_dispatcher": {}, "data_worker": {"gpus": 1}},
            {("roles", "data_worker", "gpus"): "gpus-not-used"},
        ),
    ],
)
def test_roles_that_do_not_fit_are_told_with_their_keys(strategy, roles, problems):
    with pytest.raises(ValidationError) as caught:
        cluster(strategy, **roles)
    [details] = caught.value.errors()
    reason = details["ctx"]["error"]
    assert isinstance(reason, Inconsistent)
    assert {problem.keys: problem.code for problem in reason.problems} == problems


def test_only_mirrored_workers_have_a_communication():
    roles = {"worker": {"replicas": 2}}
    spec = Cluster.model_validate({"strategy": "multi_worker_mirrored", "communication": "ring", "roles": roles})
    assert spec.communication == "ring"
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate({"strategy": "single", "communication": "nccl", "roles": {"chief": {}}})
    [details] = caught.value.errors()
    assert [problem.code for problem in details["ctx"]["error"].problems] == ["communication-not-used"]
