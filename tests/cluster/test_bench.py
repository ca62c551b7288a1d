"""Tests of `tfdist bench` with real trainings."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import MIRRORED, PARAMETER_SERVER, launch, left_of, project
from tfdist_cli.bench.measure import read_split

pytestmark = pytest.mark.cluster

CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4
"""Parameters of the recipe in `launching`."""
RECIPE_YAML = "module: four_classes\ntrain: {epochs: 2, steps_per_epoch: 80, batch_size: 16}\nevaluate: null\n%s"
SYNC = "updates: {mode: sync}\n"


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("cluster", "more", "phases", "traffic"),
    [
        (PARAMETER_SERVER % "", "", "data pull compute update", {}),
        (PARAMETER_SERVER % "", SYNC, "wait data pull compute push update", {"pulled": 4, "pushed": 4}),
        (MIRRORED, "wire: bfloat16\n", "data compute all_reduce update", {"reduced": 2}),
    ],
    ids=["async", "sync", "mirrored"],
)
def test_the_phases_of_a_step_fill_it(tmp_path, cluster, more, phases, traffic):
    cluster = cluster.replace("chief: {}", "chief: {env: {TFDIST_PHASES: '1'}}")
    cluster = cluster.replace("replicas: 2", "replicas: 2, env: {TFDIST_PHASES: '1'}")
    done = launch(project(tmp_path, cluster, recipe_yaml=RECIPE_YAML % more))
    assert done.code == 0, done.stderr
    split = read_split(done.run_dir)
    assert list(split.phases) == phases.split()
    assert all(spent > 0 for spent in split.phases.values()), split.phases
    # The rest is the time between two functions of a worker.
    assert 0 < split.rest < 0.7 * split.step
    assert split.traffic == {name: size * PARAMETERS for name, size in traffic.items()}


def start(folder, *arguments):
    """Starts `tfdist bench` with its temporary files in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist_cli", "bench", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
    )


def test_a_training_is_measured_and_leaves_nothing(tmp_path):
    process = start(tmp_path, CONFIGS / "local_single.yaml", "--rounds", 1, "--steps", 60, "--json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["examples_per_second"]["median"] == pytest.approx(32 * row["steps_per_second"]["median"], rel=1e-3)
    assert list(row["split"]["ms_per_step"]) == ["data", "compute", "update", "rest", "step"]
    assert left_of(process.pid) == []
    assert list(tmp_path.glob("tfdist-bench-*")) == []


@pytest.mark.rotates(5, 0)
def test_ctrl_c_stops_all_processes(tmp_path):
    process = start(
        tmp_path, CONFIGS / "local_multi_worker_mirrored.yaml", "--rounds", 1, "--steps", 100_000, "--workers", 2
    )
    while not any(tmp_path.glob("*/run/metrics.jsonl")):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "ended by SIGINT" in err
    assert left_of(process.pid) == []
    assert list(tmp_path.glob("tfdist-bench-*")) == []
