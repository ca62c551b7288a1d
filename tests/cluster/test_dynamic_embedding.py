"""Workers of a cluster create rows of the same table, and a checkpoint of it is restored on any number of ps."""

import signal

import pytest

from tests.support.tasks import alone, program
from tfdist_cli.train.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

SHARDED = 1000
"""Tables of so many bytes are sharded."""


@pytest.mark.rotates(5, 3)
def test_no_update_is_lost_and_checkpoints_move_to_other_ps(cluster, tmp_path):
    for servers, steps in ((2, 12), (3, 20)):
        tasks = cluster(chief=1, ps=servers, worker=2)
        ended = tasks.start(program("dynamic_ids.py", tmp_path, steps, SHARDED)).finish()
        assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
        assert CheckpointFolder(tmp_path).find(steps).state.deltas == steps // 4 - 1
        check(ended["chief:0"], shards=servers)
    single = alone(tmp_path, program("dynamic_ids.py", tmp_path, 24, SHARDED))
    assert single.code == 0, single.err
    check(single, shards=1)


def check(ended, *, shards):
    found = ended.result
    assert (found["ids"], found["all"], found["shards"]) == (3000, True, shards)
    assert found["worst"] < 1e-5
    assert abs(found["loss"]) < 1e-5


@pytest.mark.rotates(5, 1)
def test_strings_survive_a_killed_worker_and_move_to_other_ps(cluster, tmp_path):
    saved, steps = tmp_path / "saved", 200
    tasks = cluster(chief=1, ps=2, worker=2)
    tasks.start(program("dynamic_words.py", saved, steps, "async", "none"))
    tasks.await_that("chief:0", lambda: any(saved.glob("step-*")))
    tasks.processes["worker:1"].send_signal(signal.SIGKILL)
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == {
        **dict.fromkeys(tasks.tasks, 0),
        "worker:1": -signal.SIGKILL,
    }, tasks.outputs()
    found = ended["chief:0"].result
    assert (found["wrong"], found["long"], found["shards"]) == ([], 2, 2)
    tasks = cluster(chief=1, ps=3, worker=2)
    ended = tasks.start(program("dynamic_words.py", saved, steps + 4, "sync", "none")).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    again = ended["chief:0"].result
    assert (again["wrong"], again["shards"]) == ([], 3)
    assert again["ids"] >= found["ids"]
    single = alone(tmp_path, program("dynamic_words.py", saved, steps + 8, "async", "none"))
    assert single.code == 0, single.err
    assert (single.result["wrong"], single.result["shards"]) == ([], 1)


@pytest.mark.rotates(5, 0)
def test_rows_that_are_replaced_have_the_strings_of_their_new_ids(cluster, tmp_path):
    tasks = cluster(chief=1, ps=2, worker=2)
    ended = tasks.start(program("dynamic_words.py", tmp_path / "saved", 300, "async", "lru")).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert ended["chief:0"].result["wrong"] == []
