"""Warnings about a cluster, before it starts."""

import re

import pytest

from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.warnings import recipe_warnings, warnings_of
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

GIB = 2**30
MACHINE = Machine(8, memory=16 * GIB)


def found(machine=MACHINE, strategy="parameter_server", **roles):
    return list(warnings_of(Cluster.model_validate({"strategy": strategy, "roles": roles}), machine))


def test_a_cluster_that_fits_has_no_warning():
    assert not found(chief={}, worker={"replicas": 4, "memory": "3GiB", "cpus": 8}, ps={"memory": "4GiB"})
    assert not found(Machine(8), chief={"memory": "1TiB"}, worker={}, ps={})


def test_more_memory_than_the_machine_has():
    [warning] = found(chief={}, worker={"replicas": 4, "memory": "4GiB"}, ps={"memory": "512MiB"})
    assert warning.code == "too-much-memory"
    assert "16.5 GiB" in warning.message
    assert "16.0 GiB" in warning.message


@pytest.mark.parametrize(
    ("gpus", "workers", "numbers"),
    [
        (2, {"replicas": 4}, ["2", "2", "4"]),  # 2 of 2 GPUs, 4 tasks
        (4, {"replicas": 3}, ["1", "4", "3"]),
        (4, {"replicas": 2}, None),
        (4, {"replicas": 3, "gpus": 1}, None),  # as the file says
        (4, {"replicas": 3, "gpus": 0}, None),
        (2, {"replicas": 4, "gpus": "all"}, None),
        (0, {"replicas": 3}, None),
    ],
)
def test_gpus_that_no_task_uses(gpus, workers, numbers):
    machine = Machine(8, tuple(map(str, range(gpus))))
    warnings = found(machine, "multi_worker_mirrored", worker=workers)
    assert [warning.code for warning in warnings] == (["idle-gpus"] if numbers else [])
    assert [re.findall(r"\d+", warning.message) for warning in warnings] == ([numbers] if numbers else [])


def test_other_machines_have_memory_of_their_own():
    hosts = {name: {"hosts": [f"10.0.0.{index}"], "memory": "16GiB"} for index, name in enumerate(("chief", "ps"), 1)}
    assert not found(worker={"hosts": ["10.0.0.3", "10.0.0.4"], "memory": "16GiB"}, **hosts)


def test_more_cores_than_the_machine_has():
    [warning] = found(chief={}, worker={"cpus": 9}, ps={"cpus": 8})
    assert warning.code == "too-many-cores"
    assert re.findall(r"\d+", warning.message) == ["9", "8"]


def test_more_tasks_than_cores():
    assert not found(Machine(2), chief={}, worker={"replicas": 2}, ps={"replicas": 5})
    [warning] = found(Machine(2), chief={}, worker={"replicas": 3}, ps={})
    assert warning.code == "more-tasks-than-cores"
    assert re.findall(r"\d+", warning.message) == ["3", "2"]
    [warning] = found(Machine(2), strategy="multi_worker_mirrored", chief={}, worker={"replicas": 2})
    assert warning.code == "more-tasks-than-cores"
    assert not found(Machine(2, ("0", "1", "2")), chief={}, worker={"replicas": 3}, ps={}), "GPUs compute"
    elsewhere = {"hosts": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}
    assert not found(Machine(2), strategy="multi_worker_mirrored", worker=elsewhere)


def test_more_tasks_than_anybody_means():
    [warning] = found(Machine(8000), chief={}, worker={"replicas": 5000}, ps={})
    assert warning.code == "many-tasks"
    assert "5000" in warning.message
    assert "roles.worker.replicas" in warning.hint


def test_a_run_directory_of_another_recipe(tmp_path):
    kept = tmp_path / "recipe.yaml"
    one, other = Recipe(module="one", params={"hidden": 3}), Recipe(module="other")
    assert list(recipe_warnings(kept, one)) == []
    kept.write_text("module: one\n")
    assert list(recipe_warnings(kept, one)) == []
    for recipe, what in ((other, "'other'"), (None, "a program")):
        [warning] = recipe_warnings(kept, recipe)
        assert warning.code == "other-recipe"
        assert "'one'" in warning.message
        assert what in warning.message
    kept.write_text("module: [")
    assert list(recipe_warnings(kept, other)) == []


@pytest.mark.parametrize("host", ["8.8.8.8", "[2a00:1450:4001::1]"])
def test_a_public_address(host):
    [warning] = found(
        chief={"hosts": ["10.0.0.1"]},
        worker={"hosts": [f"{host}:2222", f"{host}:2223"]},
        ps={"hosts": ["10.0.0.2"]},
    )
    assert warning.code == "exposed-port"
    assert warning.message.startswith(f"worker:0 ({host}:2222) and 1 more")
    assert "firewall" in warning.hint


@pytest.mark.parametrize("host", ["10.85.125.168", "192.168.0.4", "100.64.0.1", "fd00::1", "gpu01", "169.254.0.3"])
def test_addresses_of_private_networks_and_names(host):
    host = f"[{host}]" if ":" in host else host
    assert not found(strategy="single", chief={"hosts": [host]})
