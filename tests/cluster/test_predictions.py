"""A cluster predicts each example once, in order, with the values of Keras's `predict` in one process."""

import os

import pytest

from tests.support.tasks import program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CLUSTERS = {"mirrored": {"worker": 2}, "parameter servers": {"chief": 1, "ps": 2, "worker": 2}}
SAME = {"arrays", "a dataset", "some batches", "few examples", "none", "several outputs", "padded", "after"}
SAME |= {"others' weights differ", "the chief's weights differ"}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("kind", CLUSTERS)
def test_predictions_are_those_of_one_process(kind, cluster):
    tasks = cluster(**CLUSTERS[kind])
    ended = tasks.start(program("predictions.py")).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    results = [one.result for one in ended.values() if one.out]
    assert len(results) == (2 if kind == "mirrored" else 1)
    for found in results:
        assert {case: value for case, value in found.items() if case in SAME} == pytest.approx(
            dict.fromkeys(SAME, 0), abs=1e-5
        )
        assert found["shuffled"] == "prediction-data-shuffled"
    nested = "call-needs-all-tasks" if kind == "mirrored" else pytest.approx(0, abs=1e-5)
    assert results[0]["nested"] == [nested]


@pytest.mark.rotates(5)
@pytest.mark.parametrize("returns", [False, True])
def test_a_worker_that_is_lost_is_replaced_by_the_others_or_itself(returns, cluster):
    tasks = cluster(chief=1, ps=1, worker=2)
    argv = program("predicts_meanwhile.py", tasks.folder)
    os.mkfifo(tasks.folder / "go")
    tasks.start(argv)
    tasks.await_path("chief:0", tasks.folder / "waiting")
    lost = tasks.processes["worker:1"]
    lost.kill()
    lost.wait()
    if returns:
        tasks.start(argv, "worker:1")
    (tasks.folder / "go").write_text("")
    ended = tasks.finish()
    expected = dict.fromkeys(tasks.tasks, 0) | ({} if returns else {"worker:1": -9})
    assert {task: one.code for task, one in ended.items()} == expected, tasks.outputs()
    assert ended["chief:0"].result == [997, pytest.approx(0, abs=1e-5), 4]
