"""Clusters whose tasks see GPUs (simulated ones) compute on them, and train as one process on the CPU does."""

import re
import sys
from functools import cache

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.lab import gpus
from tests.support.running import ROOT
from tests.support.tasks import alone, program

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(700),
    pytest.mark.skipif(gpus.missing() is not None, reason=str(gpus.missing())),
]

EXACT, ROUNDED = ("plain adam", "plain clipped"), "plain on bfloat16"
ON_PS = (*EXACT, "plain local")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return gpus.environment(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The results of one process with batches of a size."""

    @cache
    def with_batches(size):
        folder = tmp_path_factory.mktemp("alone")
        ended = alone(folder, program("equivalence.py", "out", size, *(ON_PS if size == 8 else EXACT)))
        assert ended.code == 0, ended.err
        return np.load(folder / "out.npz")

    return with_batches


def trained(tasks, simulated, visible, batch, *names):
    """What each task that runs the program to its end came to; and what ran on GPUs."""
    for task in tasks.tasks:
        env = simulated | {"CUDA_VISIBLE_DEVICES": visible.get(task, "-1")}
        tasks.start(program("equivalence.py", task.replace(":", "-"), batch, *names), task, env=env, fresh=True)
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return [np.load(file) for file in sorted(tasks.folder.glob("*.npz"))], gpus.placed(simulated)


def devices_of(placed, operation):
    return {device for device, kind, _ in placed if kind == operation}


@pytest.mark.rotates(5, 0)
def test_workers_of_parameter_servers_compute_on_their_gpus(module_cluster, simulated, single):
    tasks = module_cluster(chief=1, ps=1, worker=1)
    (chief,), placed = trained(tasks, simulated, {"worker:0": "2"}, 8, *ON_PS)
    for name in ON_PS:
        worst = differences(chief, single(8), name)
        assert max(worst.values()) < 1e-5, name
    own = "/job:worker/replica:0/task:0/device:GPU:0"
    assert devices_of(placed, "MatMul") == {own}  # forward and backward
    assert {device for device, *_ in placed} == {own}  # neither chief nor ps
    assert devices_of(placed, "ResourceApplyAdam") == {own}  # of the steps that a worker takes on its own copy


@pytest.fixture(scope="module")
def two_by_two(module_cluster, simulated):
    """Two workers with two GPUs each."""
    visible = {"worker:0": "0,1", "worker:1": "2,3"}
    return trained(module_cluster(worker=2), simulated, visible, 4, *EXACT, ROUNDED)


@pytest.mark.rotates(5, 0)
@pytest.mark.parametrize("name", EXACT)
def test_two_workers_with_two_gpus_each_train_as_one_process(name, two_by_two, single):
    (first, second), _ = two_by_two
    assert max(differences(first, single(16), name).values()) < 1e-5
    assert differences(first, second, name)["variables"] == 0


@pytest.mark.rotates(5, 0)
def test_a_narrow_wire_keeps_the_copies_on_all_gpus_alike(two_by_two):
    (first, second), _ = two_by_two
    assert differences(first, second, ROUNDED)["variables"] == 0


@pytest.mark.rotates(5, 0)
def test_gradients_and_updates_of_mirrored_workers_stay_on_the_gpus(two_by_two):
    _, placed = two_by_two
    all_four = {f"/job:worker/replica:0/task:{task}/device:GPU:{gpu}" for task in (0, 1) for gpu in (0, 1)}
    assert devices_of(placed, "MatMul") == all_four
    assert devices_of(placed, "ResourceApplyAdam") == all_four


@pytest.mark.rotates(5, 0)
def test_the_changed_rows_of_a_dynamic_table_on_a_gpu_are_pushed(simulated, tmp_path):
    files = ROOT / "tests" / "train"
    tests = (
        f"{files}/variables/test_changed_rows.py",
        f"{files}/checkpoint/tables/test_push.py::test_the_files_can_be_read_by_numpy_alone",
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    env = simulated | {"CUDA_VISIBLE_DEVICES": "0", "TFDIST_TEST_LONG": "1", "TFDIST_TEST_GPUS": "1"}
    ended = alone(tmp_path, command, env=env, fresh=True)
    assert "2 passed" in ended.out, ended.out + ended.err
    own = "/job:localhost/replica:0/task:0/device:GPU:0"
    assert devices_of(gpus.placed(simulated), "ResourceScatterNdUpdate") == {own}


def test_mirrored_workers_with_unequal_gpus_are_refused(module_cluster, simulated):
    tasks = module_cluster(worker=2)
    for task, visible in (("worker:0", "0"), ("worker:1", "-1")):
        tasks.start(program("endless.py"), task, env=simulated | {"CUDA_VISIBLE_DEVICES": visible}, fresh=True)
    ended = tasks.finish()
    assert re.search(r"worker:1 .* 0 GPUs.* worker:0 .* 1", ended["worker:1"].err), tasks.outputs()
    assert {one.code for one in ended.values()} == {1}
