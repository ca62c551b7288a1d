"""Workers of a cluster create rows of the same table, and a checkpoint of it is restored on any number of ps."""

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
