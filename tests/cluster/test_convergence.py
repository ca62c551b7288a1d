"""Every update rule learns as well as one process does."""

import json

import pytest

from tests.support.launching import launch
from tests.support.selected import selected
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

RULES = ("async", "push 4", "local 20", "compensated", "prefetch", "bfloat16", "float16",
         "sync 2 of 2", "sync 1 of 2", "bounded 2")  # fmt: skip
NOISE = 0.02
"""The accuracies of two rules may differ by this on 360 test digits: the standard error of each is 0.007."""
CLUSTER = "strategy: parameter_server\nroles: {chief: {}, ps: {replicas: 2}, worker: {replicas: 2}}\n"


@pytest.fixture(scope="module")
def accuracies(request, tmp_path_factory):
    """The accuracies of one process, and of 2 workers and 2 ps by each rule."""
    folder = tmp_path_factory.mktemp("digits")
    single = alone(folder, program("convergence.py", "async"))
    assert single.code == 0, single.err
    (folder / "cluster.yaml").write_text(CLUSTER)
    done = launch(folder, "--", *program("convergence.py", *selected(request, "rule")), timeout=800)
    assert done.code == 0, done.stderr
    found = json.loads((done.run_dir / "attempt_1" / "chief-0" / "stdout.log").read_text())
    return {"one process": single.result["async"], **found}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_learns_as_well_as_one_process(rule, accuracies):
    assert accuracies["one process"] > 0.96
    assert accuracies[rule] > accuracies["one process"] - NOISE
