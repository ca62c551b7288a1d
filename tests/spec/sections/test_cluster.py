"""What a cluster says of its tasks."""

import pytest
from pydantic import ValidationError

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.model import Inconsistent
from tfdist_cli.spec.task_id import TaskId


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
    for text, message in (
        ("worker:1", "the cluster 'cluster' has no task worker:1"),
        ("wrker", "'wrker' names no task"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            spec.task(text)
        assert caught.value.hint == "its tasks are chief:0, worker:0, ps:0"


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
    ("strategy", "roles", "keys"),
    [
        ("parameter_server", {}, {("roles", "chief"), ("roles", "worker"), ("roles", "ps")}),
        ("parameter_server", {"chief": {"replicas": 2}, "worker": {}, "ps": {}}, {("roles", "chief")}),
        ("multi_worker_mirrored", {"chief": {}}, {("roles", "worker")}),
        ("mirrored", {"worker": {"replicas": 2}}, {("strategy",)}),
        ("single", {}, {("strategy",)}),
        ("single", {"chief": {}, "ps": {}}, {("roles", "ps")}),
        ("parameter_server", {"chief": {}, "worker": {}, "ps": {"gpus": 1}}, {("roles", "ps", "gpus")}),
        ("single", {"chief": {}, "data_worker": {}}, {("roles", "data_worker")}),
        ("single", {"chief": {}, "data_dispatcher": {}}, {("roles", "data_dispatcher")}),
        (
            "single",
            {"chief": {}, "data_dispatcher": {"replicas": 2}, "data_worker": {}},
            {("roles", "data_dispatcher")},
        ),
        (
            "single",
            {"chief": {}, "data_dispatcher": {}, "data_worker": {"gpus": 1}},
            {("roles", "data_worker", "gpus")},
        ),
    ],
)
def test_roles_that_do_not_fit_are_told_with_their_keys(strategy, roles, keys):
    with pytest.raises(ValidationError) as caught:
        cluster(strategy, **roles)
    [details] = caught.value.errors()
    reason = details["ctx"]["error"]
    assert isinstance(reason, Inconsistent)
    assert {key for key, _ in reason.problems} == keys
