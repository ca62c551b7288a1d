"""Where a kernel fails on a cluster, training goes on without, from what the variables were, whatever the rule."""

import pytest

from tests.support.tasks import program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CASES = [f"{rule}/{fails}" for rule in ("async", "push_every", "sync", "quorum") for fails in ("tracing", "running")]


@pytest.fixture(scope="module")
def facts(module_cluster):
    """What one worker and two ps came to: one worker's training is exact by every rule."""
    tasks = module_cluster(chief=1, ps=2, worker=1)
    ended = tasks.start(program("failing_kernels.py", *CASES)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return ended["chief:0"].result


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_that_fails_is_done_without(case, facts):
    found = facts[case]
    assert found["iterations"][0] == found["iterations"][1] > 0
    assert found["difference"] < 1e-6
    (told,) = found["told"]
    assert "this kernel cannot be" in told
