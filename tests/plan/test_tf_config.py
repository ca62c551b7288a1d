"""TF_CONFIG, key by key."""

import json

import pytest

from tfdist_cli.plan.tf_config import TfConfigs, tf_config, tf_config_json
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

ADDRESSES = {
    TaskId("chief"): Address("c", 1),
    TaskId("worker", 1): Address("w1", 3),
    TaskId("worker", 0): Address("w0", 2),
    TaskId("ps"): Address("::1", 4),
    TaskId("evaluator"): Address("e", 5),
}
SERVING = {"chief": ["c:1"], "worker": ["w0:2", "w1:3"], "ps": ["[::1]:4"]}


@pytest.mark.parametrize("task", [task for task in ADDRESSES if task.role != "evaluator"], ids=str)
def test_the_evaluator_is_in_no_other_tasks_cluster(task):
    assert tf_config(ADDRESSES, task) == {"cluster": SERVING, "task": {"type": task.role, "index": task.index}}


def test_the_evaluator_knows_all():
    assert tf_config(ADDRESSES, TaskId("evaluator")) == {
        "cluster": {**SERVING, "evaluator": ["e:5"]},
        "task": {"type": "evaluator", "index": 0},
    }


def test_roles_without_tasks_are_left_out():
    assert tf_config({TaskId("worker"): Address("a", 1)}, TaskId("worker"))["cluster"] == {"worker": ["a:1"]}


def test_the_data_service_has_its_own_key():
    served = {TaskId("data_dispatcher"): Address("d", 6), TaskId("data_worker"): Address("e", 7)}
    for task in (TaskId("ps"), TaskId("data_worker")):
        assert tf_config(ADDRESSES | served, task) == {
            "cluster": SERVING,
            "data_service": {"data_dispatcher": ["d:6"], "data_worker": ["e:7"]},
            "task": {"type": task.role, "index": 0},
        }


def test_as_text():
    addresses = ADDRESSES | {TaskId("data_worker"): Address("d", 7)}
    texts = TfConfigs(addresses)
    for task in addresses:
        expected = json.dumps(tf_config(addresses, task), separators=(",", ":"))
        assert texts.text(task) == tf_config_json(addresses, task) == expected
    with pytest.raises(KeyError):
        texts.text(TaskId("worker", 2))


def test_no_such_task():
    with pytest.raises(KeyError, match="ps:1"):
        tf_config(ADDRESSES, TaskId("ps", 1))
