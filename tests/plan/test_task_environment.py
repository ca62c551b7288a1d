"""The environment of a task, which is decided in one place."""

from pathlib import Path

import pytest

from tfdist_cli.plan import task_environment, tf_config
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.plan.resources import allocate
from tfdist_cli.plan.task_environment import MALLOC, planned_environment, start_environment
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

ROOT = Path(__file__).parents[2]


def planned(launcher="local", machine=Machine(8, ("3", "5")), environ=(), **chief):  # noqa: B008 a frozen value
    cluster = Cluster.model_validate({"strategy": "mirrored", "launcher": launcher, "roles": {"chief": chief}})
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    share = allocate(cluster, addresses, machine)[TaskId("chief")]
    return planned_environment(cluster, TaskId("chief"), addresses, share, Path("/run"), machine, dict(environ))


def test_resources_in_the_environment():
    env = planned(gpus=[5], gpu_memory="4096MiB", memory="2GiB", cpus=3, threads={"inter": 2})
    assert {name: env[name] for name in env if name.startswith(("TF_NUM", "OMP", "CUDA", "TFDIST_GPU"))} == {
        "TF_NUM_INTRAOP_THREADS": "3",
        "TF_NUM_INTEROP_THREADS": "2",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "5",
        "TFDIST_GPUS": "1",
        "TFDIST_GPU_MEMORY": "4 GiB",
    }


@pytest.mark.parametrize(
    ("launcher", "gpus", "visible", "number"),
    [
        ("local", None, "3,5", "2"),
        ("local", 1, "3", "1"),
        ("local", [5], "5", "1"),
        ("local", "all", None, "all"),
        ("local", 0, "-1", None),
        ("compose", None, "0,1", "2"),
        ("compose", [5], "0", "1"),
        ("compose", "all", None, "all"),
        ("compose", 0, "-1", None),
        ("kubernetes", 2, "0,1", "2"),
        ("kubernetes", None, "-1", None),
    ],
)
def test_gpus_as_cuda_counts_them_where_the_task_runs(launcher, gpus, visible, number):
    env = planned(launcher, **({} if gpus is None else {"gpus": gpus}))
    assert (env.get("CUDA_VISIBLE_DEVICES"), env.get("TFDIST_GPUS")) == (visible, number)
    told = {name: value for name, value in env.items() if name == "TFDIST_GPUS"}
    assert Environment.read(told).gpus == (1 if number == "all" else int(number or 0))


def test_growth_is_tensorflows_own_variable():
    env = planned(gpu_memory="grow")
    assert env["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert "TFDIST_GPU_MEMORY" not in env
    env = planned(gpu_memory=0.5)
    assert env["TFDIST_GPU_MEMORY"] == "0.5"
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in env


def test_the_threads_of_a_machine_that_is_not_known_are_left_to_tensorflow():
    assert not [name for name in planned("kubernetes") if name.endswith("_THREADS")]
    env = planned("kubernetes", threads={"intra": 2})
    assert (env["TF_NUM_INTRAOP_THREADS"], env["TF_NUM_INTEROP_THREADS"]) == ("2", "4")


def test_a_container_has_a_home_that_it_can_write_to():
    assert [planned(launcher).get("HOME") for launcher in ("local", "slurm", "compose", "kubernetes")] == [
        None, None, "/tmp", "/tmp"
    ]  # fmt: skip
    assert planned("compose", env={"HOME": "/home/me"})["HOME"] == "/home/me"


def test_what_the_user_sets_is_joined_to_lists_and_else_holds():
    machine = Machine(1, no_proxy={"no_proxy": "machine", "NO_PROXY": "other"})
    own = {"no_proxy": "mine", "GLIBC_TUNABLES": "a=1", "OMP_NUM_THREADS": "9", "TF_CPP_MIN_LOG_LEVEL": "0"}
    env = planned(machine=machine, env=own)
    assert env["no_proxy"] == "mine,127.0.0.1,::1,localhost"
    assert env["NO_PROXY"] == "other,127.0.0.1,::1,localhost"
    assert env["GLIBC_TUNABLES"] == f"{MALLOC}:a=1"
    assert (env["OMP_NUM_THREADS"], env["TF_CPP_MIN_LOG_LEVEL"]) == ("9", "0")
    shell = {"GLIBC_TUNABLES": "b=2", "TF_CPP_MIN_LOG_LEVEL": "1", "no_proxy": "of another machine"}
    env = planned(machine=machine, environ=shell)
    assert (env["GLIBC_TUNABLES"], env["TF_CPP_MIN_LOG_LEVEL"]) == (f"{MALLOC}:b=2", "1")
    assert env["no_proxy"] == "machine,127.0.0.1,::1,localhost"


def test_names_that_kubernetes_gives_to_pods_need_no_proxy():
    assert {".svc", ".cluster.local"} <= set(planned("kubernetes")["no_proxy"].split(","))


def test_secrets_are_named_without_their_values():
    assert planned(secrets={"A": {"env": "B"}, "C": {"file": "/d"}})["TFDIST_SECRETS"] == "A,C"


def test_the_documentation_names_every_variable():
    text = (ROOT / "docs" / "reference" / "task-environment.md").read_text(encoding="utf-8")
    every = {*planned("compose", gpu_memory=0.5, secrets={"A": {"env": "B"}}), *start_environment(Path("/x"), 1.0, {})}
    assert not [name for name in sorted(every) if f"`{name}`" not in text]


@pytest.mark.parametrize(("communication", "read"), [(None, "auto"), ("ring", "ring")])
def test_the_communication_of_mirrored_workers(communication, read):
    roles = {"worker": {"replicas": 2}}
    cluster = Cluster.model_validate(
        {"strategy": "multi_worker_mirrored", "communication": communication, "roles": roles}
    )
    addresses, machine = {task: Address("a", 2222 + task.index) for task in cluster.tasks}, Machine(8, ())
    shares = allocate(cluster, addresses, machine)
    for task in cluster.tasks:
        env = planned_environment(cluster, task, addresses, shares[task], Path("/run"), machine, {})
        assert env.get("TFDIST_COMMUNICATION") == communication
        assert Environment.read(env).communication == read


def test_what_follows_from_the_cluster_is_computed_once(monkeypatch):
    """A plan of many tasks would take quadratic time otherwise."""
    calls = []

    def counted(module, name):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: (calls.append(name), whole(*given))[1])

    counted(task_environment, "join_address")
    counted(task_environment, "_proxyless")
    counted(tf_config, "_served")
    roles = {"chief": {}, "ps": {}, "worker": {"replicas": 30, "max": 40}}
    cluster = Cluster.model_validate({"strategy": "parameter_server", "roles": roles})
    addresses = {task: Address("127.0.0.1", 2000 + number) for number, task in enumerate(cluster.possible_tasks)}
    plan = make_plan(cluster, None, addresses=addresses, run_dir=Path("/run"), machine=Machine(8), command=("true",))
    assert sorted(calls) == ["_proxyless", *["_served"] * len(roles), "join_address"]
    for each in plan.tasks:
        own = planned_environment(cluster, each.task, addresses, each.resources, Path("/run"), Machine(8))
        assert each.env == own
