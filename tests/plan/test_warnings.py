"""What is told before a start."""

import pytest

from tfdist_cli.plan.resources import Machine
from tfdist_cli.plan.warnings import recipe_warnings, warnings_of
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

GIB = 2**30
MACHINE = Machine(8, memory=16 * GIB)


def told(machine=MACHINE, strategy="parameter_server", **roles):
    return list(warnings_of(Cluster.model_validate({"strategy": strategy, "roles": roles}), machine))


def test_nothing_is_said_of_a_cluster_that_fits():
    assert not told(chief={}, worker={"replicas": 4, "memory": "3GiB", "cpus": 8}, ps={"memory": "4GiB"})
    assert not told(Machine(8), chief={"memory": "1TiB"}, worker={}, ps={})


def test_more_memory_than_the_machine_has():
    [caution] = told(chief={}, worker={"replicas": 4, "memory": "4GiB"}, ps={"memory": "512MiB"})
    assert caution.message == "the tasks are to have 16.5 GiB of memory, and this machine has 16.0 GiB"
    assert "lower memory or replicas" in caution.hint


@pytest.mark.parametrize(
    ("gpus", "workers", "message"),
    [
        (2, {"replicas": 4}, "2 of this machine's 2 GPUs stay idle: 4 tasks share them evenly"),
        (4, {"replicas": 3}, "1 of this machine's 4 GPUs stay idle: 3 tasks share them evenly"),
        (4, {"replicas": 2}, None),
        (4, {"replicas": 3, "gpus": 1}, None),  # as the file says
        (4, {"replicas": 3, "gpus": 0}, None),
        (2, {"replicas": 4, "gpus": "all"}, None),
        (0, {"replicas": 3}, None),
    ],
)
def test_gpus_that_nobody_uses(gpus, workers, message):
    machine = Machine(8, tuple(map(str, range(gpus))))
    found = told(machine, "multi_worker_mirrored", worker=workers)
    assert [(caution.code, caution.message) for caution in found] == ([("idle-gpus", message)] if message else [])


def test_other_machines_have_memory_of_their_own():
    hosts = {name: {"hosts": [f"10.0.0.{index}"], "memory": "16GiB"} for index, name in enumerate(("chief", "ps"), 1)}
    assert not told(worker={"hosts": ["10.0.0.3", "10.0.0.4"], "memory": "16GiB"}, **hosts)


def test_more_cores_than_the_machine_has():
    [caution] = told(chief={}, worker={"cpus": 9}, ps={"cpus": 8})
    assert caution.message == "a worker is to compute on 9 cores, and this machine has 8"


def test_more_tasks_than_cores():
    assert not told(Machine(2), chief={}, worker={"replicas": 2}, ps={"replicas": 5})
    [caution] = told(Machine(2), chief={}, worker={"replicas": 3}, ps={})
    assert caution.message == "3 tasks train on this machine, which has 2 cores"
    [caution] = told(Machine(2), strategy="multi_worker_mirrored", chief={}, worker={"replicas": 2})
    assert caution.code == "more-tasks-than-cores"
    assert not told(Machine(2, ("0", "1", "2")), chief={}, worker={"replicas": 3}, ps={}), "GPUs compute"
    elsewhere = {"hosts": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}
    assert not told(Machine(2), strategy="multi_worker_mirrored", worker=elsewhere)


def test_more_tasks_than_anybody_means():
    found = told(Machine(8000), chief={}, worker={"replicas": 5000}, ps={})
    assert [(caution.code, caution.message) for caution in found] == [
        ("many-tasks", "there are to be 5000 tasks of worker")
    ]
    assert "roles.worker.replicas" in found[0].hint


def test_a_run_directory_of_another_recipe(tmp_path):
    kept = tmp_path / "recipe.yaml"
    one, other = Recipe(module="one", params={"hidden": 3}), Recipe(module="other")
    assert list(recipe_warnings(kept, one)) == []
    kept.write_text("module: one\n")
    assert list(recipe_warnings(kept, one)) == []
    for recipe, what in ((other, "the recipe of module 'other'"), (None, "a program")):
        [caution] = recipe_warnings(kept, recipe)
        assert caution.code == "other-recipe"
        assert f"it has trained module 'one', and this launch runs {what}" in caution.message
    kept.write_text("module: [")
    assert list(recipe_warnings(kept, other)) == []


@pytest.mark.parametrize("host", ["8.8.8.8", "[2a00:1450:4001::1]"])
def test_a_public_address(host):
    [caution] = told(
        chief={"hosts": ["10.0.0.1"]},
        worker={"hosts": [f"{host}:2222", f"{host}:2223"]},
        ps={"hosts": ["10.0.0.2"]},
    )
    assert caution.message.startswith(f"worker:0 ({host}:2222) and 1 more listen on public addresses: anyone")
    assert "firewall" in caution.hint


@pytest.mark.parametrize("host", ["10.85.125.168", "192.168.0.4", "100.64.0.1", "fd00::1", "gpu01", "169.254.0.3"])
def test_addresses_of_private_networks_and_names(host):
    host = f"[{host}]" if ":" in host else host
    assert not told(strategy="single", chief={"hosts": [host]})
