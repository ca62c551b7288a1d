"""The host of each task."""

import re

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.placement import place


def names(cluster):
    return {str(task): host.address for task, host in place(cluster).items()}


def test_ps_and_workers_get_different_hosts_while_some_are_free(make_cluster):
    assert names(make_cluster(chief=1, ps=1, worker=2)) == {
        "chief:0": "h1",
        "worker:0": "h2",
        "worker:1": "h3",
        "ps:0": "h1",
    }
    four = make_cluster(hosts=("a", "b", "c", "d"), chief=1, ps=2, worker=4, evaluator=1)
    assert names(four) == {
        "chief:0": "a",
        "worker:0": "c",
        "worker:1": "d",
        "worker:2": "a",
        "worker:3": "b",
        "ps:0": "a",
        "ps:1": "b",
        "evaluator:0": "a",
    }


def test_slots_are_a_hosts_limit_and_its_weight(make_cluster):
    hosts = ({"address": "big", "slots": 4}, {"address": "small", "slots": 1})
    placed = names(make_cluster("multi_worker_mirrored", hosts=hosts, worker=5))
    assert list(placed.values()).count("big") == 4
    with raises(UsageError, "no-slot-left") as caught:
        place(make_cluster("multi_worker_mirrored", hosts=hosts, worker=6))
    assert re.search(r"worker:5\b.*\b5 slots", caught.value.message)


def test_cores_and_gpus_are_limits_for_tasks_that_need_some(make_cluster):
    hosts = ({"address": "small", "cpus": 4, "gpus": 0}, {"address": "big", "cpus": 16, "gpus": 2})
    worker = {"replicas": 2, "cpus": 4, "gpus": 1}
    placed = names(
        make_cluster(hosts=hosts, chief=1, ps={"replicas": 2, "cpus": 2}, worker=worker, evaluator={"cpus": 99})
    )
    assert placed == {
        "chief:0": "small",
        "ps:0": "big",  # it weighs four times as much
        "ps:1": "big",
        "worker:0": "big",
        "worker:1": "big",
        "evaluator:0": "small",
    }
    with raises(UsageError, "host-capacity-exceeded") as caught:
        place(make_cluster(hosts=hosts, chief=1, ps=1, worker=worker | {"replicas": 3}))
    assert caught.value.message.startswith("worker:2 ")
    assert re.findall(r"\d+ gpus|\d+ of \d+", caught.value.message) == ["1 gpus", "0 of 0", "0 of 2"]
    assert "roles.worker.gpus" in str(caught.value.hint)
    with raises(UsageError, "host-capacity-exceeded") as caught:
        place(make_cluster("multi_worker_mirrored", hosts=hosts, worker={"replicas": 5, "cpus": 5}))
    assert caught.value.message.startswith("worker:3 ")
    assert re.findall(r"\d+ cpus|\d+ of \d+", caught.value.message) == ["5 cpus", "4 of 4", "1 of 16"]


def test_tasks_with_addresses_use_capacity_too(make_cluster):
    hosts = ({"address": "h1", "slots": 9, "cpus": 4}, {"address": "h2", "cpus": 4})
    worker = {"hosts": ["h1:2222"], "cpus": 4}
    placed = names(make_cluster(hosts=hosts, chief=1, ps={"cpus": 1}, worker=worker))
    assert (placed["worker:0"], placed["ps:0"]) == ("h1", "h2")


def test_a_chief_of_parameter_servers_and_a_dispatcher_need_no_slot(make_cluster):
    hosts = ({"address": "a", "slots": 1}, {"address": "b", "slots": 1}, {"address": "c", "slots": 1})
    placed = names(make_cluster(hosts=hosts, chief=1, ps=1, worker=1, data_dispatcher=1, data_worker=1))
    assert placed["chief:0"] == "a"
    assert {placed["ps:0"], placed["worker:0"], placed["data_worker:0"]} == {"a", "b", "c"}


def test_the_evaluator_runs_where_checkpoints_are_written(make_cluster):
    cluster = make_cluster("multi_worker_mirrored", worker={"hosts": ["h2:2222", "h3:2222"]}, evaluator=1)
    assert names(cluster)["evaluator:0"] == "h2"


def test_tasks_with_addresses_run_there_with_the_settings_of_that_host(make_cluster):
    hosts = ("h1", {"address": "alias", "reachable_as": "10.0.0.2", "user": "me", "python": "/opt/python"})
    placed = place(make_cluster(hosts=hosts, chief=1, ps=1, worker={"hosts": ["10.0.0.2:2222", "other:2222"]}))
    given = {str(task): host for task, host in placed.items()}
    assert (given["worker:0"].address, given["worker:0"].user) == ("alias", "me")
    assert (given["worker:1"].address, given["worker:1"].user) == ("other", None)
    assert given["ps:0"].address == "h1"


def test_settings_of_all_hosts_are_the_default(make_cluster):
    cluster = make_cluster(
        "single", hosts=("h1", {"address": "h2", "user": "you"}), ssh={"user": "me", "python": "python3.12"}, chief=1
    )
    assert [(host.user, host.python) for host in cluster.machines] == [("me", "python3.12"), ("you", "python3.12")]


def test_a_cluster_without_hosts(make_cluster):
    with raises(UsageError, "no-hosts") as caught:
        place(make_cluster("single", hosts=None, chief=1))
    assert caught.value.message.startswith("chief:0 ")
    assert "hosts: [" in str(caught.value.hint)
