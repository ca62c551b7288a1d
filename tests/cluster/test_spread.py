"""Variables sharded over ps: the same values, saved, restored and exported with any number of ps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.tasks import alone, program
from tfdist_cli.train.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

TABLE = "sequential/embedding/embeddings"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The folder of one process."""
    folder = tmp_path_factory.mktemp("alone")
    ended = alone(folder, program("spread.py", folder))
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def two(module_cluster):
    """The folder of 2 ps, and the devices of its variables."""
    return run(module_cluster(chief=1, ps=2, worker=1))


def run(tasks, *given):
    ended = tasks.start(program("spread.py", tasks.folder, *given)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return tasks.folder, ended["chief:0"].result


def assert_equal(some, others):
    some, others = np.load(some), np.load(others)
    assert some.files == others.files
    for name in some.files:
        np.testing.assert_array_equal(some[name], others[name], err_msg=name)


def test_a_sharded_model_starts_with_the_values_of_one_process(two, single):
    folder, devices = two
    assert_equal(folder / "begun.npz", single / "begun.npz")
    both = [f"/job:ps/replica:0/task:{number}/device:CPU:0" for number in range(2)]
    assert devices[TABLE] == both
    slots = [name for name in devices if name.startswith("adagrad/sequential_embedding")]
    assert len(slots) == 2
    assert all(devices[slot] == both for slot in slots)
    assert len(devices["sequential/dense/bias"]) == 1


def test_it_is_exported_whole(two):
    folder, _ = two
    ids = np.array([[0, 500, 501, 1000], [3, 700, 3, 4]], np.int32)
    loaded, served = keras.saving.load_model(folder / "keras.keras"), tf.saved_model.load(folder / "saved_model")
    values = np.load(folder / "values.npz")
    np.testing.assert_array_equal(loaded.layers[0].get_weights()[0], values[TABLE])
    np.testing.assert_allclose(served.serve(ids), loaded(ids), rtol=1e-6)


def test_it_is_restored_from_two_ps_on_one_process_and_on_three(two, cluster, tmp_path):
    folder, _ = two
    ended = alone(tmp_path, program("spread.py", tmp_path / "alone", folder / "checkpoints"))
    assert ended.code == 0, ended.err
    assert_equal(tmp_path / "alone" / "begun.npz", folder / "values.npz")
    three, devices = run(cluster(chief=1, ps=3, worker=1), tmp_path / "alone" / "checkpoints")
    assert len(devices[TABLE]) == 3
    assert_equal(three / "begun.npz", folder / "values.npz")
    found = CheckpointFolder(three / "checkpoints").find(1)
    reader = tf.train.load_checkpoint(str(found.path / "variables"))
    values = np.load(three / "values.npz")
    for number, (path, _, _) in enumerate(found.state.shapes[:3]):
        np.testing.assert_array_equal(
            reader.get_tensor(f"parameters/{number}/.ATTRIBUTES/VARIABLE_VALUE"), values[path]
        )
