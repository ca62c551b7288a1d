"""If a kernel fails on a cluster, training continues without it from the restored variables, whatever the rule."""

import pytest

from tests.support.tasks import program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.rotates(5, 0)]

CASES = [f"{rule}/{fails}" for rule in ("async", "push_every", "sync", "quorum") for fails in ("tracing", "running")]


@pytest.fixture(scope="module")
def facts(module_cluster):
    """The results of one worker and two ps: one worker's training is exact by every rule."""
    tasks = module_cluster(chief=1, ps=2, worker=1)
    ended = tasks.start(program("failing_kernels.py", *CASES)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return ended["chief:0"].result


@pytest.mark.parametrize("case", CASES)
def test_training_continues_without_a_kernel_that_fails(case, facts):
    found = facts[case]
    assert found["iterations"][0] == found["iterations"][1] > 0
    assert found["difference"] < 1e-6
    (line,) = found["logged"]
    assert "this kernel" in line
