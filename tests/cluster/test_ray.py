"""Trainings in a real Ray cluster of two nodes, on this machine."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.lab.ray import ray_cluster  # noqa: F401 - a fixture
from tests.support.launching import (
    LONG,
    MIRRORED,
    PATIENCE,
    await_event,
    finish,
    interrupt_program,
    project,
    start,
    start_program,
    started_in,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.rotates(5, 3)]


@pytest.fixture
def replace_node(ray_cluster):  # noqa: F811 - the fixture above
    """Kills the node that has cores, and adds another one."""
    ray_cluster.add_node()
    yield ray_cluster.replace_node
    ray_cluster.remove_node()


def test_the_training_survives_a_node_and_ends_with_ctrl_c(ray_cluster, replace_node, tmp_path):  # noqa: F811
    folder = project(tmp_path, cluster=MIRRORED, recipe_yaml=LONG)
    process = start(folder, "--on", "ray", "--set", f"ray.address={ray_cluster.address}", "--run-dir", "run")
    await_event(process, "run", "checkpoint")
    replace_node()
    resumed = await_event(process, "run", "resumed")
    assert resumed["attempt"] == 2
    assert resumed["step"] >= 200
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert done.report["attempts"] == 2
    assert Path(done.report["checkpoints"][-1]["path"]).is_dir()
    assert not started_in(folder)  # drivers, agents and tasks of both attempts


def program(ray_cluster, folder, epochs):  # noqa: F811
    pytest.importorskip("pandas", reason="ray.data needs pandas: pip install 'tfdist-cli[ray]'")
    return start_program("ray_fit.py", folder, ray_cluster.address, folder / "store", epochs)


def test_a_dataset_s_training_survives_a_node(ray_cluster, replace_node, tmp_path):  # noqa: F811
    process = program(ray_cluster, tmp_path, 30)
    await_event(process, "store/*/run", "checkpoint")
    replace_node()
    out, err = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, err[-5000:]
    found = json.loads(out.splitlines()[-1])  # after what Ray says of the lost node
    assert found["refused"] == {
        "none": "no-such-column",
        "name": "column-not-numbers",
        "null": "empty-values",
        "ragged": "unequal-lists",
    }
    assert found["accuracy"] > 0.9
    (folder,) = (tmp_path / "store").iterdir()
    assert [path.name for path in folder.iterdir()] == ["run"]  # the copies of rows are gone
    assert '"resumed"' in (folder / "run" / "events.jsonl").read_text()
    assert not started_in(tmp_path)


def test_ctrl_c_in_a_program(ray_cluster, replace_node, tmp_path):  # noqa: F811
    result = interrupt_program(program(ray_cluster, tmp_path, 100_000))
    assert (result["code"], result["losses"]) == ("stopped-by-signal", [])
    assert result["checkpoints"][-1]["step"] > 100  # that of the end


def test_ray_client(ray_cluster, replace_node, tmp_path):  # noqa: F811
    """From a machine outside of the cluster, as far as Ray knows."""
    address = ray_cluster.client_address
    folder = project(tmp_path / "launch", cluster=MIRRORED)
    process = start(folder, "--on", "ray", "--set", f"ray.address={address}", "--run-dir", "run")
    done = finish(process, PATIENCE)
    assert done.code == 0, done.stderr
    assert not started_in(folder)
    (folder := tmp_path / "fit").mkdir()
    process = start_program("ray_client_fit.py", folder, address, folder / "store")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err[-5000:]
    found = json.loads(out.splitlines()[-1])
    assert found == {"refused": ["ray-client-address", "ray-client-dataset"], "outputs": [512, 4]}
    assert not started_in(folder)
