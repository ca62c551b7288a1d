"""Trainings in a real Ray cluster of two nodes, on this machine."""

import signal
from pathlib import Path

import pytest

from tests.cluster.test_spark import LONG, PATIENCE, await_event, started_in
from tests.support.lab.ray import ray_cluster  # noqa: F401 - a fixture
from tests.support.launching import MIRRORED, finish, project, start

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.rotates(5, 3)
def test_the_training_survives_a_node_and_ends_with_ctrl_c(ray_cluster, tmp_path):  # noqa: F811 - the fixture above
    folder = project(tmp_path, cluster=MIRRORED, recipe_yaml=LONG)
    node = ray_cluster.add_node(num_cpus=2)
    process = start(folder, "--on", "ray", "--set", f"ray.address={ray_cluster.address}", "--run-dir", "run")
    await_event(process, folder, "checkpoint")
    ray_cluster.remove_node(node, allow_graceful=False)
    ray_cluster.add_node(num_cpus=2)
    resumed = await_event(process, folder, "resumed")
    assert resumed["attempt"] == 2
    assert resumed["step"] >= 200
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert done.report["attempts"] == 2
    assert Path(done.report["checkpoints"][-1]["path"]).is_dir()
    assert not started_in(folder)  # drivers, agents and tasks of both attempts
