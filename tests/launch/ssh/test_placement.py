"""Which host takes which task."""

import pytest

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.placement import place


def names(cluster):
    return {str(task): host.address for task, host in place(cluster).items()}


def test_a_ps_and_workers_have_hosts_of_their_own_as_long_as_there_are_some(make_cluster):
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


def test_slots_bound_a_host_and_are_its_weight(make_cluster):
    hosts = ({"address": "big", "slots": 4}, {"address": "small", "slots": 1})
    placed = names(make_cluster("multi_worker_mirrored", hosts=hosts, worker=5))
    assert list(placed.values()).count("big") == 4
    with pytest.raises(UsageError, match="there is no slot for worker:5: the hosts have 5"):
        place(make_cluster("multi_worker_mirrored", hosts=hosts, worker=6))


def test_cores_and_gpus_bound_a_host_for_the_tasks_that_are_to_have_some(make_cluster):
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
    with pytest.raises(UsageError, match="no host has the 1 gpus of worker:2 left: small 0 of 0, big 0 of 2") as caught:
        place(make_cluster(hosts=hosts, chief=1, ps=1, worker=worker | {"replicas": 3}))
    assert "lower roles.worker.gpus" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no host has the 5 cpus of worker:3 left: small 4 of 4, big 1 of 16"):
        place(make_cluster("multi_worker_mirrored", hosts=hosts, worker={"replicas": 5, "cpus": 5}))


def test_what_has_an_address_takes_of_its_host_too(make_cluster):
    hosts = ({"address": "h1", "slots": 9, "cpus": 4}, {"address": "h2", "cpus": 4})
    worker = {"hosts": ["h1:2222"], "cpus": 4}
    placed = names(make_cluster(hosts=hosts, chief=1, ps={"cpus": 1}, worker=worker))
    assert (placed["worker:0"], placed["ps:0"]) == ("h1", "h2")


def test_a_chief_of_parameter_servers_and_a_dispatcher_take_no_slot(make_cluster):
    hosts = ({"address": "a", "slots": 1}, {"address": "b", "slots": 1}, {"address": "c", "slots": 1})
    placed = names(make_cluster(hosts=hosts, chief=1, ps=1, worker=1, data_dispatcher=1, data_worker=1))
    assert placed["chief:0"] == "a"
    assert {placed["ps:0"], placed["worker:0"], placed["data_worker:0"]} == {"a", "b", "c"}


def test_the_evaluator_is_where_checkpoints_are_written(make_cluster):
    cluster = make_cluster("multi_worker_mirrored", worker={"hosts": ["h2:2222", "h3:2222"]}, evaluator=1)
    assert names(cluster)["evaluator:0"] == "h2"


def test_a_role_with_addresses_is_there_and_its_host_has_what_hosts_says(make_cluster):
    hosts = ("h1", {"address": "alias", "reachable_as": "10.0.0.2", "user": "me", "python": "/opt/python"})
    placed = place(make_cluster(hosts=hosts, chief=1, ps=1, worker={"hosts": ["10.0.0.2:2222", "other:2222"]}))
    given = {str(task): host for task, host in placed.items()}
    assert (given["worker:0"].address, given["worker:0"].user) == ("alias", "me")
    assert (given["worker:1"].address, given["worker:1"].user) == ("other", None)
    assert given["ps:0"].address == "h1"


def test_what_holds_for_all_hosts_is_filled_in(make_cluster):
    cluster = make_cluster(
        "single", hosts=("h1", {"address": "h2", "user": "you"}), ssh={"user": "me", "python": "python3.12"}, chief=1
    )
    assert [(host.user, host.python) for host in cluster.machines] == [("me", "python3.12"), ("you", "python3.12")]


def test_without_hosts_there_is_nowhere_to_go(make_cluster):
    with pytest.raises(UsageError, match="chief:0 has no host to run on") as caught:
        place(make_cluster("single", hosts=None, chief=1))
    assert "hosts: [gpu01, gpu02]" in str(caught.value.hint)
