"""Plans: what each task would run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import fixed_addresses, make_plan, plan_task
from tfdist_cli.plan.resources import Resources
from tfdist_cli.plan.task_environment import MALLOC
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

ROLES = {"chief": {}, "worker": {"replicas": 2, "env": {"A": "b", "OMP_NUM_THREADS": "9"}}, "ps": {}, "evaluator": {}}


def cluster(strategy="parameter_server", **roles):
    return Cluster.model_validate({"strategy": strategy, "roles": roles or ROLES})


def plan(spec=None, **changes):
    spec = spec or cluster()
    given: dict[str, Any] = {
        "addresses": fixed_addresses(spec),
        "run_dir": Path("/run"),
        "machine": Machine(4, ("0", "1")),
    }
    return make_plan(spec, Recipe(module="m"), **(given | changes))


def test_every_task_in_order():
    made = plan()
    assert [str(task.task) for task in made.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
    assert made[TaskId("worker", 1)].task == TaskId("worker", 1)
    assert (made.name, made.strategy) == ("cluster", "parameter_server")
    with pytest.raises(KeyError):
        made[TaskId("worker", 2)]


def test_a_task_runs_its_role():
    options = ("--task", "worker:1", "--cluster", "/run/cluster.yaml", "--planned")
    assert plan()[TaskId("worker", 1)].argv == (sys.executable, "-m", "tfdist_cli", "role", *options)


def test_or_a_users_program():
    assert {task.argv for task in plan(command=("python", "train.py")).tasks} == {("python", "train.py")}


def test_environment():
    env = plan()[TaskId("worker", 1)].env
    assert json.loads(env["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert env["TFDIST_STRATEGY"] == "parameter_server"
    assert env["TFDIST_RUN_DIR"] == "/run"
    assert env["TF_NUM_INTRAOP_THREADS"] == "2"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert env["A"] == "b"
    assert env["OMP_NUM_THREADS"] == "9"  # the file has the last word
    assert plan()[TaskId("ps")].env["CUDA_VISIBLE_DEVICES"] == "-1"


def test_malloc_asks_for_huge_pages_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert plan()[TaskId("ps")].env["GLIBC_TUNABLES"] == MALLOC
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert plan()[TaskId("ps")].env["GLIBC_TUNABLES"] == f"{MALLOC}:glibc.malloc.hugetlb=0"


def test_tasks_use_no_proxy_between_them():
    spec = cluster(chief={"hosts": ["a"]}, worker={"hosts": ["b", "c"]}, ps={"hosts": ["d"]})
    env = plan(spec, machine=Machine(4, no_proxy={"no_proxy": "internal"}))[TaskId("chief")].env
    assert env["no_proxy"] == "internal,127.0.0.1,::1,a,b,c,d,localhost"
    assert env["NO_PROXY"] == env["no_grpc_proxy"] == "127.0.0.1,::1,a,b,c,d,localhost"


def test_as_json():
    data = json.loads(json.dumps(plan().as_json()))
    assert {key: data[key] for key in ("name", "strategy", "run_dir")} == {
        "name": "cluster",
        "strategy": "parameter_server",
        "run_dir": "/run",
    }
    assert data["tasks"][1]["task"] == "worker:0"
    assert data["tasks"][1]["address"] == "127.0.0.1:2223"
    assert data["tasks"][1]["gpus"] == ["0"]


def test_fixed_addresses_are_the_same_in_every_process():
    spec = cluster(chief={}, worker={"hosts": ["127.0.0.1:2223", "127.0.0.1:9"]}, ps={"replicas": 2})
    assert {str(task): str(address) for task, address in fixed_addresses(spec).items()} == {
        "chief:0": "127.0.0.1:2222",
        "worker:0": "127.0.0.1:2223",
        "worker:1": "127.0.0.1:9",
        "ps:0": "127.0.0.1:2224",
        "ps:1": "127.0.0.1:2225",
    }
    assert fixed_addresses(spec)[TaskId("ps")] == Address("127.0.0.1", 2224)


def test_a_task_whose_host_the_launcher_chooses_has_no_fixed_address():
    def over_ssh(**worker):
        roles = {"chief": {"hosts": ["h1:1"]}, "worker": worker, "ps": {"hosts": ["h2:2"]}}
        spec = {"strategy": "parameter_server", "launcher": "ssh", "hosts": ["h1", "h2"], "roles": roles}
        return Cluster.model_validate(spec)

    with raises(UsageError, "address-not-known"):
        fixed_addresses(over_ssh())
    assert len(fixed_addresses(over_ssh(hosts=["h2:1"]))) == 3


def test_secrets_are_planned_by_their_source():
    spec = cluster("single", chief={"secrets": {"A": {"env": "B"}, "C": {"file": "/d"}}, "env": {"E": "f"}})
    task = plan(spec)[TaskId("chief")]
    assert not {"A", "C"} & set(task.env)
    assert task.as_json()["secrets"] == {"A": {"env": "B"}, "C": {"file": "/d"}}


def test_the_join_address_is_the_first_free_port_after_the_chiefs():
    roles = {"chief": {}, "worker": {"replicas": 1, "max": 3}, "ps": {}}
    made = plan(cluster(**roles))
    chief, worker = made[TaskId("chief")], made[TaskId("worker")]
    assert chief.address.port == 2222
    assert {one.env["TFDIST_JOIN_ADDRESS"] for one in (chief, worker)} == {"127.0.0.1:2227"}
    assert chief.env["TFDIST_MAX_WORKERS"] == "3"
    assert len(json.loads(chief.env["TF_CONFIG"])["cluster"]["worker"]) == 1
    assert made.spare_ports == (2224, 2225, 2227)
    environment = Environment.read(chief.env)
    assert (environment.join_address, environment.max_workers) == (Address("127.0.0.1", 2227), 3)


@pytest.mark.parametrize(("spec", "most"), [({"replicas": 1, "max": 3}, 3), ({"replicas": 2}, 0)])
def test_every_task_knows_how_many_data_workers_there_may_be(spec, most):
    made = plan(cluster(chief={}, worker={}, ps={}, data_dispatcher={}, data_worker=spec))
    assert Environment.read(made[TaskId("chief")].env).max_data_workers == most


@pytest.mark.parametrize("launcher", ["spark", "ray"])
def test_nothing_waits_for_workers_that_the_launcher_cannot_start(launcher):
    given = {"strategy": "parameter_server", "roles": {"chief": {}, "worker": {"replicas": 1, "max": 3}, "ps": {}}}
    made = plan(Cluster.model_validate({**given, "launcher": launcher}))
    assert not {"TFDIST_JOIN_ADDRESS", "TFDIST_MAX_WORKERS"} & set(made[TaskId("chief")].env)


def test_a_task_that_joins_is_planned_with_the_addresses_of_the_others():
    spec = cluster(chief={}, worker={"replicas": 1, "max": 3}, ps={})
    addresses = fixed_addresses(spec)
    task = TaskId("worker", 2)
    own = plan_task(spec, task, addresses, Resources(1, 2, ()), Path("/run"), Machine(4))
    config = json.loads(own.env["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 2}
    assert config["cluster"]["worker"] == [str(addresses[TaskId("worker", index)]) for index in range(3)]
    assert own.env["TFDIST_JOIN_ADDRESS"] == plan(spec)[TaskId("chief")].env["TFDIST_JOIN_ADDRESS"]


def test_no_worker_joins_mirrored_ones():
    made = plan(cluster("multi_worker_mirrored", worker={"replicas": 2}))
    assert made.spare_ports == ()
    assert not {name for name in made[TaskId("worker")].env if name.startswith("TFDIST_JOIN")}
