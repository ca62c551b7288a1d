"""Reading TF_CONFIG, as tfdist, a scheduler or a user writes it."""

import json
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.environment import Environment, run_dir
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.resources import Size
from tfdist_cli.spec.task_id import TaskId

HOSTS = {
    "chief": ["a:1"],
    "worker": ["b:1", "c:1"],
    "ps": ["d:1"],
}


def read(cluster, role="chief", index=0, **more):
    config = {"cluster": cluster, "task": {"type": role, "index": index}}
    return Environment.read({"TF_CONFIG": json.dumps(config), **more})


@pytest.mark.parametrize("text", [None, "", "  "])
def test_without_tf_config_there_is_one_process(text):
    environment = Environment.read({} if text is None else {"TF_CONFIG": text})
    assert environment == Environment("single", TaskId("chief"), {}, None, 120.0)
    assert environment.is_chief
    assert environment.members == (TaskId("chief"),)


def test_parameter_servers():
    environment = read(HOSTS, "worker", "1", TFDIST_RUN_DIR="/runs/a", TFDIST_START_TIMEOUT="2.5")
    assert (environment.strategy, environment.task) == ("parameter_server", TaskId("worker", 1))
    assert environment.addresses[TaskId("worker", 1)] == Address("c", 1)
    assert (environment.run_dir, environment.start_timeout) == (Path("/runs/a"), 2.5)
    assert environment.chief == TaskId("chief")
    assert environment.serves
    assert not environment.is_chief


@pytest.mark.parametrize(
    ("cluster", "role", "strategy", "chief"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", "multi_worker_mirrored", "worker:0"),
        ({"worker": ["b:1"], "chief": ["a:1"]}, "worker", "multi_worker_mirrored", "chief:0"),
        ({"worker": ["a:1"]}, "worker", "single", "worker:0"),
        ({"chief": ["a:1"]}, "chief", "single", "chief:0"),
        (HOSTS, "chief", "parameter_server", "chief:0"),
        (HOSTS, "evaluator", "parameter_server", "chief:0"),
        ({"worker": ["a:1", "b:1"]}, "evaluator", "multi_worker_mirrored", "worker:0"),
        ({"chief": ["a:1"], "evaluator": ["b:1"]}, "evaluator", "single", "chief:0"),
    ],
)
def test_strategy_and_chief_follow_from_the_roles(cluster, role, strategy, chief):
    environment = read(cluster, role)
    assert environment.strategy == strategy
    assert str(environment.chief) == chief
    assert environment.is_chief == (str(environment.task) == chief)


def test_an_evaluator_alone_is_no_chief():
    environment = read({}, "evaluator")
    assert not environment.is_chief


def test_a_strategy_that_is_named_counts():
    assert read({"worker": ["a:1"]}, "worker", TFDIST_STRATEGY="mirrored").strategy == "mirrored"
    assert read({"worker": ["a:1"]}, "worker", TFDIST_STRATEGY="multi_worker_mirrored").strategy == (
        "multi_worker_mirrored"
    )


def served(cluster, service, role="data_worker"):
    config = {"cluster": cluster, "data_service": service, "task": {"type": role, "index": 0}}
    return Environment.read({"TF_CONFIG": json.dumps(config)})


@pytest.mark.parametrize("cluster", [HOSTS, {"chief": ["a:1"]}, {"worker": ["a:1", "b:1"]}])
def test_data_workers_serve_and_train_with_no_process(cluster):
    service = {"data_dispatcher": ["x:1"], "data_worker": ["x:2", "x:3"]}
    environment = served(cluster, service)
    assert environment.serves
    assert not environment.is_chief
    assert {task.role for task in environment.members} <= {"chief", "worker"}
    assert [str(task) for task in environment.data_service] == ["data_dispatcher:0", "data_worker:0", "data_worker:1"]
    assert environment.strategy == read(cluster, next(iter(cluster))).strategy
    assert not read(cluster, next(iter(cluster))).data_service


@pytest.mark.parametrize(
    ("cluster", "service", "reason"),
    [
        (HOSTS | {"data_worker": ["x:1"]}, {}, "'data_worker' in 'cluster'"),
        (HOSTS, {"worker": ["x:1"]}, "'worker' is not"),
        (HOSTS, {"data_worker": ["a:1"]}, "a:1 is"),
        (HOSTS, [], "TF_CONFIG"),
    ],
)
def test_a_data_service_that_cannot_be(cluster, service, reason):
    with raises(UsageError, "invalid-tf-config") as caught:
        served(cluster, service)
    assert reason in caught.value.message


def test_other_keys_are_left_alone():
    config = {"cluster": HOSTS, "task": {"type": "ps", "index": 0}, "environment": "cloud", "rpc_layer": "grpc"}
    assert Environment.read({"TF_CONFIG": json.dumps(config)}).task == TaskId("ps")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "TF_CONFIG"),
        ("[]", "TF_CONFIG"),
        ("null", "TF_CONFIG"),
        ("{}", "no 'cluster'"),
        ('{"cluster": {"chief": ["a:1"]}}', "no 'task'"),
        ('{"cluster": null, "task": {"type": "chief", "index": 0}}', "TF_CONFIG"),
        ('{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief"}}', "no 'index'"),
        ('{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": "x"}}', "TF_CONFIG"),
        ('{"cluster": {"chief": ["a:1"]}, "task": {"type": "boss", "index": 0}}', "'boss:0'"),
        ('{"cluster": {"master": ["a:1"]}, "task": {"type": "chief", "index": 0}}', "'master:0'"),
        ('{"cluster": {"worker": ["a:99999"]}, "task": {"type": "worker", "index": 0}}', "port 99999"),
        ('{"cluster": {"worker": "host"}, "task": {"type": "worker", "index": 0}}', "'worker' is 'host', not a list"),
        ('{"cluster": {"worker": [2222]}, "task": {"type": "worker", "index": 0}}', "TF_CONFIG"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "worker:1"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}', "TF_CONFIG"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0.5}}', "'worker:0.5'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}', "'worker:inf'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": true}}', "TF_CONFIG"),
        ('{"cluster": ' + "[" * 100_000, "nested too deep"),
        ("[" * 100_000, "nested too deep"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 1}}', "a:1 is"),
    ],
)
def test_what_cannot_be_meant_is_named(text, reason):
    with raises(UsageError, "invalid-tf-config") as caught:
        Environment.read({"TF_CONFIG": text})
    assert reason in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["TFDIST_STRATEGY", "TFDIST_COMMUNICATION", "TFDIST_START_TIMEOUT"])
def test_a_variable_of_ours_that_cannot_be_meant_is_named(name):
    with raises(UsageError, "invalid-environment-variable") as caught:
        Environment.read({name: "x"})
    assert name in caught.value.message


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0"])
def test_a_timeout_is_a_number_of_seconds(seconds):
    with raises(UsageError, "invalid-environment-variable"):
        Environment.read({"TFDIST_START_TIMEOUT": seconds})


def test_gpu_memory():
    wanted = {
        text: Environment.read({"TFDIST_GPU_MEMORY": text}).gpu_memory for text in ("0.25", "4 GiB", "4096MiB", "")
    }
    assert wanted == {"0.25": 0.25, "4 GiB": Size(2**32), "4096MiB": Size(2**32), "": None}


@pytest.mark.parametrize("text", ["0", "1.5", "grow", "4", "nan", "-1GiB"])
def test_gpu_memory_that_means_nothing(text):
    with raises(UsageError, "invalid-environment-variable"):
        Environment.read({"TFDIST_GPU_MEMORY": text})


def test_the_run_directory_is_reported_to_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_dir({"TFDIST_RUN_DIR": "/runs/digits"}) == Path("/runs/digits")
    assert run_dir({}) == tmp_path
