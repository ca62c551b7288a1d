"""What a slot starts: the task of the plan, with the GPUs and the hosts of now."""

import pytest

from tfdist_cli.launch.slots.launcher import placed


def task(*gpus):
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1", "no_proxy": "a,localhost", "A": "b"}
    return {"task": "worker:0", "gpus": list(gpus), "env": env}


def test_a_task_in_another_slot_has_its_gpus_and_hosts():
    moved = placed(task("0"), ("1",), ["b", "c"])
    assert moved["gpus"] == ["1"]
    assert moved["env"] == {
        "CUDA_VISIBLE_DEVICES": "1",
        "A": "b",
        "no_proxy": "a,localhost,b,c",
        "NO_PROXY": "b,c",
        "no_grpc_proxy": "b,c",
    }


@pytest.mark.parametrize(
    ("planned", "shown"), [((), ("0",)), (("all",), ("0",)), (("1",), ("0", "1")), (("0", "1"), ()), (("0",), ("0",))]
)
def test_an_engine_that_shows_other_numbers_of_gpus_leaves_the_plan(planned, shown):
    same = task(*planned)
    assert placed(same, shown, ["a"])["gpus"] == same["gpus"]
    assert placed(same, shown, ["a"])["env"]["CUDA_VISIBLE_DEVICES"] == same["env"]["CUDA_VISIBLE_DEVICES"]
