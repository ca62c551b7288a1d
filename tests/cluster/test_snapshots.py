"""Tests of checkpoints on ps that are written while training continues: they have the values of the pause."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support.tasks import program
from tfdist_cli.train.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]


def test_a_checkpoint_written_in_the_background_equals_one_written_at_once(cluster):
    tasks = cluster(chief=1, ps=2, worker=1)
    ended = tasks.start(program("snapshots.py", tasks.folder)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    # The last checkpoint is written after the training.
    assert [steps >= 3 for steps in ended["chief:0"].result] == [True, True, True]
    readers = {}
    for kind in ("True", "False"):
        folder = CheckpointFolder(tasks.folder / kind)
        assert folder.steps() == [6, 12, 18, 24]
        for step in folder.steps():
            readers[kind, step] = tf.train.load_checkpoint(str(folder.find(step).path / "variables"))
    for step in (6, 12, 18, 24):
        background, once = readers["True", step], readers["False", step]
        names = once.get_variable_to_shape_map()
        assert len(names) > 20
        assert names == background.get_variable_to_shape_map()
        for name in names:
            np.testing.assert_array_equal(background.get_tensor(name), once.get_tensor(name), err_msg=f"{step} {name}")
    first, second = (readers["True", step].get_tensor("parameters/0/.ATTRIBUTES/VARIABLE_VALUE") for step in (6, 12))
    assert not np.array_equal(first, second)


@pytest.mark.rotates(5, 3)
def test_a_worker_fails_and_restarts_while_a_checkpoint_is_written(cluster):
    tasks = cluster(chief=1, ps=2, worker=2)
    os.mkfifo(tasks.folder / "go")
    command = program("lost_meanwhile.py", tasks.folder)
    tasks.start(command).await_path("chief:0", tasks.folder / "reading")
    tasks.processes["worker:1"].kill()
    tasks.processes["worker:1"].wait()
    (tasks.folder / "killed").touch()
    tasks.start(command, "worker:1").await_path("chief:0", tasks.folder / "back")
    (tasks.folder / "go").write_text("on")
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert ended["chief:0"].result == [20, True]
