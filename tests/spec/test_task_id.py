"""Task names."""

import pytest

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.task_id import TaskId


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("worker:1", TaskId("worker", 1)),
        ("chief", TaskId("chief", 0)),
        ("ps:12", TaskId("ps", 12)),
        ("evaluator", TaskId("evaluator")),
    ],
)
def test_reads(text, task):
    assert TaskId.parse(text) == task
    assert TaskId.parse(str(task)) == task


@pytest.mark.parametrize(
    "text",
    ["", ":", "master:0", "Worker:0", "worker:", "worker:-1", "worker:x", "worker:²", "worker:1:2", "worker:1_0"],
)
def test_refuses(text):
    with pytest.raises(InvalidValue) as caught:
        TaskId.parse(text)
    assert caught.value.code == "unknown-task"


def test_has_a_name_for_paths():
    assert TaskId("worker", 1).slug == "worker-1"
