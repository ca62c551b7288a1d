"""Data that only one process can read trains a cluster as it trains one process with the workers' batches together."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

ENGINES = {
    "mirrored": ({"worker": 2}, (2,)),
    "sync": ({"chief": 1, "ps": 1, "worker": 2}, (2, "sync")),
    "one": ({"chief": 1, "ps": 1, "worker": 1}, (1,)),
    "async": ({"chief": 1, "ps": 1, "worker": 2}, (2, "async")),
}


@pytest.mark.parametrize(
    "engine",  # none on the day of Spark, the longest
    [
        pytest.param(engine, marks=pytest.mark.rotates(5, day))
        for day, engine in zip((0, 1, 3, 4), ENGINES, strict=True)
    ],
)
def test_each_batch_is_trained_on_once_and_in_order(engine, cluster, tmp_path):
    roles, arguments = ENGINES[engine]
    tasks = cluster(**roles)
    ended = tasks.start(program("inputs.py", 16, *arguments)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    kerass = alone(tmp_path, program("inputs.py", 16, 1, *arguments[1:]))
    assert kerass.code == 0, kerass.err
    ours = ended[tasks.tasks[0]].result
    assert ours.keys() == kerass.result.keys()
    for case, expected in kerass.result.items():
        assert ours[case]["history"].keys() == expected["history"].keys()
        for one, other in zip(tf.nest.flatten(ours[case]), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=case)


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        pytest.param("async", False, marks=pytest.mark.rotates(5, 0)),
        pytest.param("sync", False, marks=pytest.mark.rotates(5, 4)),
        pytest.param("sync", True, marks=pytest.mark.rotates(5, 0)),
        pytest.param("mirrored", False, marks=pytest.mark.rotates(5, 1)),
    ],
)
def test_each_example_of_a_dataset_with_python_code_is_seen_once_in_each_pass(mode, lost, cluster):
    tasks = cluster(worker=2) if mode == "mirrored" else cluster(chief=1, ps=1, worker=2)
    command = program("python_datasets.py", mode, *([tasks.folder] if lost else []))
    os.mkfifo(tasks.folder / "go")
    tasks.start(command)
    if lost:
        tasks.await_path("chief:0", tasks.folder / "waiting")
        tasks.processes["worker:1"].kill()
        tasks.processes["worker:1"].wait()
        tasks.start(command, "worker:1")
        (tasks.folder / "go").write_text("on")
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    whole = {"count": 96, "sum": sum(range(96)), "squares": sum(number**2 for number in range(96))}
    expected = {name: [value] * 3 for name, value in whole.items()}
    chief = "worker:0" if mode == "mirrored" else "chief:0"
    assert ended[chief].result == {**expected, **{f"val_{name}": value for name, value in expected.items()}}
