"""Allocating the cores and GPUs of machines."""

import math
import os
import re
from dataclasses import replace

import pytest

import tfdist_cli.plan.machine as machine_module
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine, _core_ids, _memory, _quota
from tfdist_cli.plan.resources import ALL_GPUS, allocate
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.resources import MIN_INTER_OP_THREADS


def shares(machine, strategy="parameter_server", **roles):
    cluster = Cluster.model_validate({"strategy": strategy, "roles": roles})
    return {str(task): share for task, share in allocate(cluster, _addresses(cluster), machine).items()}


def _addresses(cluster):
    return {task: cluster.address(task) for task in cluster.tasks}


def test_workers_share_the_cores_and_so_do_ps():
    given = shares(Machine(8), chief={}, worker={"replicas": 3}, ps={"replicas": 2}, evaluator={})
    assert {task: share.intra_op_threads for task, share in given.items()} == {
        "chief:0": 1,
        "worker:0": 2,
        "worker:1": 2,
        "worker:2": 2,
        "ps:0": 4,
        "ps:1": 4,
        "evaluator:0": 1,
    }


def test_data_workers_have_the_cores_and_no_gpu():
    for strategy, roles in (("single", {}), ("parameter_server", {"worker": {"replicas": 4}, "ps": {}})):
        given = shares(Machine(8, ("0",)), strategy, chief={}, data_dispatcher={}, data_worker={"replicas": 2}, **roles)
        assert [given[f"data_worker:{index}"].intra_op_threads for index in range(2)] == [4, 4]
        assert given["data_dispatcher:0"].intra_op_threads == 1
        assert not given["data_worker:0"].gpus


def test_every_task_has_a_thread_and_enough_to_receive_and_send():
    for share in shares(Machine(1), chief={}, worker={"replicas": 5}, ps={"replicas": 3}).values():
        assert share.intra_op_threads == 1
        assert share.inter_op_threads >= MIN_INTER_OP_THREADS


def test_the_file_wins():
    given = shares(Machine(8), chief={"cpus": 2}, worker={"cpus": 3, "replicas": 2}, ps={"cpus": 5})
    assert [share.intra_op_threads for share in given.values()] == [2, 3, 3, 5]


def test_the_chief_trains_in_the_mirrored_strategies():
    given = shares(Machine(8, ("0", "1")), "multi_worker_mirrored", chief={}, worker={})
    assert [(share.intra_op_threads, share.gpus) for share in given.values()] == [(4, ("0",)), (4, ("1",))]
    assert shares(Machine(8, ("0", "1")), "mirrored", chief={})["chief:0"].gpus == ("0", "1")


def test_gpus_go_to_workers_without_overlap():
    machine = Machine(8, ("0", "1", "2", "GPU-abc", "4"))
    given = shares(machine, chief={}, worker={"replicas": 2}, ps={"replicas": 2}, evaluator={})
    assert given["worker:0"].gpus == ("0", "1")
    assert given["worker:1"].gpus == ("2", "GPU-abc")
    assert not any(given[task].gpus for task in ("chief:0", "ps:0", "ps:1", "evaluator:0"))
    assert not shares(machine, chief={}, worker={"gpus": 0}, ps={})["worker:0"].gpus


def test_more_gpus_than_there_are():
    with raises(UsageError, "too-few-gpus") as caught:
        shares(Machine(8, ("0", "1", "2")), chief={}, worker={"replicas": 2, "gpus": 2}, ps={})
    assert re.findall(r"worker:1|\d+", str(caught.value)) == ["2", "worker:1", "3", "1"]
    assert "roles.worker.gpus" in str(caught.value.hint)


def test_the_file_may_give_gpus_to_any_task_but_a_ps():
    given = shares(Machine(8, ("0", "1", "2")), chief={}, worker={"replicas": 2}, ps={}, evaluator={"gpus": 1})
    assert [given[task].gpus for task in ("worker:0", "worker:1", "evaluator:0")] == [("1",), ("2",), ("0",)]
    given = shares(Machine(8, ("0", "1", "2")), "multi_worker_mirrored", chief={"gpus": 2}, worker={})
    assert [share.gpus for share in given.values()] == [("0", "1"), ("2",)]


def test_gpus_by_their_ids_and_all_of_them():
    machine = Machine(8, ("0", "1", "2", "GPU-abc"))
    given = shares(machine, chief={"gpus": [2]}, worker={"replicas": 3}, ps={}, evaluator={"gpus": 1})
    assert [given[task].gpus for task in ("chief:0", "evaluator:0", "worker:0", "worker:1", "worker:2")] == [
        ("2",),
        ("0",),
        *[()] * 3,
    ]
    given = shares(machine, "multi_worker_mirrored", worker={"replicas": 2, "gpus": [0, "GPU-abc"]})
    assert {share.gpus for share in given.values()} == {("0", "GPU-abc")}
    given = shares(machine, "multi_worker_mirrored", chief={"gpus": "all"}, worker={})
    assert [share.gpus for share in given.values()] == [ALL_GPUS, ()]


def test_a_gpu_that_is_not_there():
    with raises(UsageError, "no-such-gpu") as caught:
        shares(Machine(8, ("0", "2")), "mirrored", chief={"gpus": [0, 3]})
    assert "GPU 3" in str(caught.value)
    assert "0, 2" in str(caught.value)
    assert "roles.chief.gpus" in str(caught.value.hint)
    with raises(UsageError, "no-such-gpu"):
        shares(Machine(8), "mirrored", chief={"gpus": [0]})


def test_an_unknown_host_has_the_gpus_that_the_file_asks_for():
    asked = {"hosts": ["b:1", "b:2", "c:1"], "gpus": 2}
    given = shares(Machine(8), chief={"hosts": ["a:1"]}, ps={"hosts": ["a:2"]}, worker=asked)
    assert [given[f"worker:{index}"].gpus for index in range(3)] == [("0", "1"), ("2", "3"), ("0", "1")]
    given = shares(Machine(8), chief={"hosts": ["b:9"], "gpus": [1]}, ps={"hosts": ["a:2"]}, worker=asked)
    assert [given[f"worker:{index}"].gpus for index in range(2)] == [("0", "2"), ("3", "4")]


def test_what_another_host_has_counts_where_it_is_known():
    roles = {"worker": {"hosts": ["b:1", "c:1"], "gpus": 1}}
    spec = Cluster.model_validate({"strategy": "multi_worker_mirrored", "roles": roles})
    addresses = _addresses(spec)
    given = allocate(spec, addresses, Machine(2), {"b": Machine(16, ("0",)), "c": Machine(8, ("4", "5"))})
    assert [(share.intra_op_threads, share.gpus) for share in given.values()] == [(16, ("0",)), (8, ("4",))]
    with raises(UsageError, "too-few-gpus"):
        allocate(spec, addresses, Machine(2), {"b": Machine(16, ("0",)), "c": Machine(8)})


def test_a_share_in_plain_types():
    asked = {"gpus": [0], "gpu_memory": "4096MiB", "memory": "2GiB", "cpus": 3, "threads": {"inter": 2}}
    [share] = shares(Machine(8, ("0",)), "single", chief=asked).values()
    assert share.as_json() == {
        "intra_op_threads": 3,
        "inter_op_threads": 2,
        "cpus": 3,
        "memory": "2 GiB",
        "gpus": ["0"],
        "gpu_memory": "4 GiB",
        "cores": [],
    }


CORES = Machine(8, core_ids=(0, 4, 1, 5, 2, 6, 3, 7))
"""Its cores have two hyper-threads each."""


def cores(machine, strategy="parameter_server", **roles):
    return {task: share.cores for task, share in shares(machine, strategy, **roles).items() if share.cores}


def test_each_worker_beside_a_ps_stays_on_its_cores():
    assert cores(CORES, chief={}, worker={"replicas": 2}, ps={}, evaluator={}) == {
        "worker:0": (0, 4, 1, 5),
        "worker:1": (2, 6, 3, 7),
    }
    assert cores(CORES, chief={}, worker={"replicas": 3}, ps={"replicas": 2}) == {
        "worker:0": (0, 4),
        "worker:1": (1, 5),
        "worker:2": (2, 6),
    }
    few = {"replicas": 2, "cpus": 1}
    assert [len(each) for each in cores(CORES, chief={}, worker=few, ps={}).values()] == [4, 4]


@pytest.mark.parametrize(
    ("machine", "worker"),
    [
        (Machine(8), {"replicas": 2}),
        (CORES, {"replicas": 1}),
        (CORES, {"replicas": 9}),
        (CORES, {"replicas": 2, "cpus": 5}),
        (CORES, {"replicas": 2, "threads": {"intra": 5}}),
        (CORES, {"replicas": 2, "threads": {"bind": False}}),
        (replace(CORES, gpus=("0", "1")), {"replicas": 2}),
    ],
    ids=["no affinity", "one worker", "few cores", "few cpus", "many threads", "not wanted", "GPUs"],
)
def test_workers_are_not_bound(machine, worker):
    assert cores(machine, chief={}, worker=worker, ps={}) == {}


def test_a_host_with_its_own_ps_and_a_host_without_one():
    hosts = {"hosts": ["a:3", "a:4", "b:3", "b:4"]}
    given = cores(CORES, chief={"hosts": ["a:1"]}, ps={"hosts": ["a:2"]}, worker=hosts)
    assert given == {"worker:0": (0, 4, 1, 5), "worker:1": (2, 6, 3, 7)}


def test_without_a_ps_no_task_is_bound():
    assert cores(CORES, "multi_worker_mirrored", worker={"replicas": 2}) == {}
    assert cores(CORES, "model_parallel", chief={}, worker={"replicas": 2}) == {}


@pytest.mark.parametrize("launcher", ["compose", "slurm"])
def test_tasks_of_containers_and_schedulers_are_not_bound(launcher):
    spec = {"strategy": "parameter_server", "roles": {"chief": {}, "worker": {"replicas": 2}, "ps": {}}}
    cluster = Cluster.model_validate({**spec, "launcher": launcher})
    assert not any(share.cores for share in allocate(cluster, _addresses(cluster), CORES).values())


def test_cores_are_ordered_by_what_they_share(tmp_path):
    def describe(cpu, socket, core):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")

    here = sorted(os.sched_getaffinity(0))
    assert _core_ids(tmp_path) == tuple(here), "without a description, by their numbers"
    for number, cpu in enumerate(here):
        describe(cpu, 1 - number % 2, number // 4)
    assert sorted(_core_ids(tmp_path)) == here
    assert _core_ids(tmp_path)[: len(here) // 2] == tuple(here[1::2]), "those of one socket first"


@pytest.mark.parametrize(("launcher", "threads"), [("slurm", (1, 4)), ("kubernetes", (None, None))])
def test_a_scheduler_gives_what_is_asked_for(launcher, threads):
    def given(gpus):
        roles = {"worker": {"replicas": 2, "gpus": gpus}, "chief": {"cpus": 6}}
        spec = {"strategy": "multi_worker_mirrored", "launcher": launcher, "roles": roles}
        cluster = Cluster.model_validate(spec)
        return allocate(cluster, _addresses(cluster), Machine(8, ("4", "5"))).values()

    chief, *workers = given(2)
    assert {(share.intra_op_threads, share.inter_op_threads) for share in workers} == {threads}
    assert (chief.intra_op_threads, chief.gpus) == (6, ())
    assert {share.gpus for share in workers} == {("0", "1")}
    assert not any(share.gpus for gpus in (None, 0) for share in given(gpus))
    for gpus in ("all", [4], ["GPU-abc"]):
        with raises(UsageError, "gpus-chosen-by-scheduler"):
            given(gpus)


def test_threads_by_hand():
    given = shares(Machine(8), chief={}, worker={"threads": {"intra": 5}}, ps={"cpus": 2, "threads": {"inter": 6}})
    assert [(share.intra_op_threads, share.inter_op_threads) for share in given.values()] == [(1, 4), (5, 5), (2, 6)]


def test_a_container_has_less_memory_than_its_machine(tmp_path):
    whole = _memory(())
    assert whole
    assert whole > 2**27
    (tmp_path / "none").write_text("max\n")
    (tmp_path / "limit").write_text("100000000\n")
    assert _memory((tmp_path / "none", tmp_path / "not there")) == whole
    assert _memory((tmp_path / "none", tmp_path / "limit")) == 100_000_000


def test_a_container_may_have_the_time_of_fewer_cores_than_it_sees(tmp_path, monkeypatch):
    assert _quota(()) == math.inf
    files = {"max": "max 100000\n", "two": "150000 100000\n", "none": "-1\n", "half": "50000\n", "period": "100000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    one = tmp_path / "max", tmp_path / "not there"
    assert _quota([[each] for each in one]) == math.inf
    assert _quota([[tmp_path / "none", tmp_path / "period"]]) == math.inf
    assert _quota([[tmp_path / "half", tmp_path / "period"]]) == 0.5
    assert _quota([[tmp_path / "max"], [tmp_path / "two"]]) == 1.5
    for quota, cores in ((0.5, 1), (math.inf, len(_core_ids()))):
        monkeypatch.setattr(machine_module, "_quota", lambda quota=quota: quota)
        here = Machine.here({})
        assert (here.cores, len(here.core_ids)) == (cores, 0 if quota < 1 else cores), "no core is its own"


def test_each_host_is_allocated_separately():
    given = shares(
        Machine(8, ("0", "1")),
        chief={"hosts": ["a:1"]},
        ps={"hosts": ["a:2"]},
        worker={"hosts": ["a:3", "b:3", "127.0.0.1:3", "localhost:4"]},
    )
    assert [given[f"worker:{index}"].intra_op_threads for index in range(4)] == [8, 8, 4, 4]
    assert [given[f"worker:{index}"].gpus for index in range(4)] == [("0", "1"), ("0", "1"), ("0",), ("1",)]


def test_a_large_cluster_is_allocated_fast():
    given = shares(Machine(8), chief={}, worker={"replicas": 10_000}, ps={"replicas": 10_000})
    assert len(given) == 20_001


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2, 0", ("2", "0")),
        ("0,-1,1", ("0",)),
        ("GPU-1,GPU-2", ("GPU-1", "GPU-2")),
    ],
)
def test_this_machine_shows_the_gpus_that_it_may(visible, gpus):
    machine = Machine.here({"CUDA_VISIBLE_DEVICES": visible})
    assert machine.gpus == gpus
    assert machine.cores >= 1
