"""The memory of tasks, and what there is."""

import pytest

from tfdist_cli.check.memory import memory_findings, shown
from tfdist_cli.spec.sections.cluster import Cluster

GB = 10**9
FACTS = {
    "model": {},
    "task chief:0": {"variables_bytes": 0, "memory_bytes": GB, "base_bytes": GB // 2},
    "task ps:0": {"variables_bytes": 3 * GB, "memory_bytes": 4 * GB, "base_bytes": GB // 2},
    "task worker:0": {"variables_bytes": 0, "memory_bytes": 2 * GB, "base_bytes": GB // 2},
}


def cluster(**ps):
    return Cluster.model_validate({"strategy": "parameter_server", "roles": {"chief": {}, "ps": ps, "worker": {}}})


def found(machine, **ps):
    return [(each.code, each.level, each.place) for each in memory_findings(cluster(**ps), FACTS, machine)]


@pytest.mark.parametrize("machine", [None, 6 * GB])
def test_there_is_enough(machine):
    assert not found(machine)


def test_python_and_tensorflow_are_shared_by_the_tasks_of_a_machine():
    assert not found(6 * GB)  # 0.5 once, and 0.5 + 3.5 + 1.5
    assert found(6 * GB - 1) == [("machine-memory", "warning", "this machine")]


def test_variables_that_cannot_be_stored_are_an_error():
    assert found(2 * GB) == [("machine-memory", "error", "this machine")]


@pytest.mark.parametrize(("limit", "level"), [("3500MB", "warning"), ("2GB", "error")])
def test_a_limit(limit, level):
    limit = limit.replace("MB", "MiB").replace("GB", "GiB")
    assert found(None, memory=limit) == [("task-memory", level, "ps:0")]


def test_tasks_on_other_machines_are_not_added_up():
    hosts = {role: {"hosts": [f"10.0.0.{n}"]} for n, role in enumerate(("chief", "ps", "worker"), 1)}
    remote = Cluster.model_validate({"strategy": "parameter_server", "roles": hosts})
    assert not list(memory_findings(remote, FACTS, 4 * GB))


def test_bytes_for_people():
    assert [shown(number) for number in (0, 999, 1500, 2 * 10**6, 3 * GB, 4 * 10**12)] == [
        *("0 bytes", "999 bytes", "1.5 kB"),
        *("2.0 MB", "3.0 GB", "4.0 TB"),
    ]
