"""Each update rule on parameter servers trains as its definition says, and counts exactly."""

import importlib.util
import signal

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.descriptors import opened
from tests.support.selected import selected
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

STEPS, BATCH = 36, 8
"""As in `programs/rules.py`."""


class Trained:
    """The results of one process, with or without a cluster: `written` to compare, and `facts` by case."""

    def __init__(self, folder, ended):
        assert ended.code == 0, ended.err
        self.written, self.facts = np.load(folder / "out.npz"), ended.result

    def is_close_to(self, case, other, of, tolerance=1e-5):
        worst = differences(self.written, other.written, case, of)
        assert worst["variables"] < tolerance, worst
        assert worst["history"] < tolerance, worst
        return True


def trained(tasks, *cases):
    """The results of the chief of a cluster."""
    ended = tasks.start(program("rules.py", "out", *cases)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    return Trained(tasks.folder, ended["chief:0"])


ONE_WORKER = {
    "async/dense/adam/1": "async/dense/adam/1",
    "async/dense/decaying/1": "async/dense/decaying/1",
    "async/dropping/adam/1": "async/dropping/adam/1",
    "compensated/dense/adam/1": "async/dense/adam/1",
    "push 4/dense/adam/4": "async/dense/adam/4",
    "async/wide/sgd/1": "async/wide/sgd/1",
    "compensated/wide/sgd/1": "async/wide/sgd/1",
    "local 3/wide/momentum/1": "async/wide/momentum/1",
    "local 3/dropping/adam/1": "async/dropping/adam/1",
    "local 3/dense/clipped/1/spread": "async/dense/clipped/1",
    "local 3/gradients/sgd/1": "async/gradients/sgd/1",
    "sync/gradients/sgd/1": "async/gradients/sgd/1",
    "async/looked/sgd/1/rows": "async/looked/sgd/1",
    "local 3/looked/sgd/1/rows/spread": "async/looked/sgd/1",
    "local 3/tables/sgd/1/rows/spread": "async/tables/sgd/1",
    "local 3/frozen/sgd/1/spread": "async/frozen/sgd/1",
    "sync/frozen/sgd/1/spread": "async/frozen/sgd/1",
    "async/frozen/sgd/1/spread": "async/frozen/sgd/1",
    "sync/dropping/adam/1": "async/dropping/adam/1",
    "sync/dense/decaying/1": "async/dense/decaying/1",
    "async/dense/clipped/1/spread": "async/dense/clipped/1",
    "async/dense/nadam/1/spread": "async/dense/nadam/1",
    "async/tables/sgd/1/rows": "async/tables/sgd/1",
    "async/tables/adagrad/1/rows": "async/tables/adagrad/1",
    "async/tables/adagrad/1/rows/spread": "async/tables/adagrad/1",
    "sync/tables/adagrad/1/rows/spread": "async/tables/adagrad/1",
    "local 3/tables/adagrad/1/rows/spread": "async/tables/adagrad/1",
    "push 4/tables/adagrad/4/rows/spread": "async/tables/adagrad/4",
    "push 4/tables/adam/4/whole": "async/tables/adam/4",
    "async/tables/adam/1/whole/spread": "async/tables/adam/1",
    "local 3/tables/adam/1/whole": "async/tables/adam/1",
    "async/tables/normed/1/whole/spread": "async/tables/normed/1",
    "async/tables/nadam/1/whole/spread": "async/tables/nadam/1",
    "async/tables/clipped/1/whole/spread": "async/tables/clipped/1",
    "push 4/tables/sgd/4/rows/spread": "async/tables/sgd/4",
    "compensated/tables/sgd/1/rows/spread": "async/tables/sgd/1",
}
"""Cases of one worker, and the cases of one process that they equal; the number is how many batches it takes as one."""
TWO_WORKERS = {
    "sync/dense/sgd/2": "async/dense/sgd/2",
    "sync/wide/sgd/2": "async/wide/sgd/2",
    "sync/factored/adam/2": "async/factored/adam/2",
    "sync/factored/momentum/2": "async/factored/momentum/2",
    "bounded 0/wide/sgd/2": "async/wide/sgd/2",
    "sync/dense/momentum/2": "async/dense/momentum/2",
    "sync/dense/adam/2": "async/dense/adam/2",
    "sync/dense/adagrad/2": "async/dense/adagrad/2",
    "sync/dense/decaying/2": "async/dense/decaying/2",
    "sync/dense/nadam decaying/2": "async/dense/nadam decaying/2",
    "scaled sync/dense/steady/2": "async/dense/steady doubled/2",
    "bounded 0/dense/adam/2": "async/dense/adam/2",
    "sync/gradients/sgd/2": "async/gradients/sgd/2",
    "sync/dense/clipped/2/spread": "async/dense/clipped/2",
    "bounded 0/tables/sgd/2/rows": "async/tables/sgd/2",
    "sync/tables/adagrad/2/rows/spread": "async/tables/adagrad/2",
    "sync/tables/adam/2/whole": "async/tables/adam/2",
    "bounded 0/tables/rmsprop/2/whole/spread": "async/tables/rmsprop/2",
    "sync/tables/momentum/2/whole": "async/tables/momentum/2",
}
if importlib.util.find_spec("keras_rs"):  # needs Python 3.11
    ONE_WORKER["async/features/sgd/1/rows/spread"] = "async/features/sgd/1"
    TWO_WORKERS["sync/features/sgd/2/rows/spread"] = "async/features/sgd/2"
    TWO_WORKERS["sync/features/adagrad/2/rows/spread"] = "async/features/adagrad/2"
ONE_APART = {case: ONE_WORKER[case] for case in ("async/dense/adam/1", "async/wide/sgd/1", "push 4/dense/adam/4")}
APART = {
    case: TWO_WORKERS[case]
    for case in ("sync/dense/adam/2", "sync/wide/sgd/2", "sync/factored/adam/2", "sync/dense/clipped/2/spread")
}
"""Their tasks share no memory; the first ones have one worker."""
BY_SPEED = {
    "proportional/dense/adam/2": "async/dense/adam/2",
    "proportional/tables/sgd/2/rows/spread": "async/tables/sgd/2",
    "proportional/tables/adagrad/2/rows/spread": "async/tables/adagrad/2",
}
"""Their workers have batches of different sizes."""
BACKUP, BEHIND = "sync 1/indexed/adam/1/slow", "bounded 2/dense/sgd/1/slow"
FAILS, ENDS = "sync/dense/sgd/1/fails", "sync/dense/sgd/1/ends"
PREFETCHED, BY_KERAS = "prefetch/dense/adam/1", "local 3/dense/nadam/1"
ROUNDED = {
    "bfloat16/dense/adam/1": ("async/dense/adam/1", 2.0**-8),
    "float16/dense/adam/1": ("async/dense/adam/1", 2.0**-11),
    "bfloat16/wide/sgd/1": ("async/wide/sgd/1", 2.0**-8),
}
"""Cases of one worker, those of one process that they come close to, and the rounding of their wire."""


def on(day, case):
    """Runs a test of one case, which its cluster then trains, on one day of five."""
    return lambda test: pytest.mark.rotates(5, day)(pytest.mark.parametrize("case", [case])(test))


@pytest.fixture(scope="module")
def one_process(request, tmp_path_factory):
    """The results of one process."""
    folder = tmp_path_factory.mktemp("alone")
    cases = selected(request, "same")
    return Trained(folder, alone(folder, program("rules.py", "out", *cases)))


@pytest.fixture(scope="module")
def one_worker(request, module_cluster):
    """The results of 1 worker and 2 ps."""
    known = {*ONE_WORKER, PREFETCHED, BY_KERAS}
    cases = [case for case in selected(request, "case", "same") if case in known]
    return trained(module_cluster(chief=1, ps=2, worker=1), *cases)


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("case", "same"), ONE_WORKER.items())
def test_one_worker_equals_one_process(case, same, one_worker, one_process):
    assert one_worker.is_close_to(case, one_process, same)
    fold = int(case.split("/")[3])
    facts = one_worker.facts[case]
    assert (facts["iterations"], facts["losses"]) == (STEPS, STEPS * fold)
    assert facts["examples"] == facts["workers"]["worker:0"]["examples"] == STEPS * fold * BATCH
    assert facts["workers"]["worker:0"]["staleness"] == [0] * STEPS


@pytest.fixture(scope="module")
def one_worker_apart(request, module_cluster):
    """The results of 1 worker and 2 ps that share no memory."""
    return trained(module_cluster(chief=1, ps=2, worker=1, apart=True), *selected(request, "elsewhere"))


@pytest.mark.rotates(5, 4)
@pytest.mark.parametrize(("elsewhere", "same"), ONE_APART.items())
def test_one_worker_of_another_host_equals_one_process(elsewhere, same, one_worker_apart, one_process):
    assert one_worker_apart.is_close_to(elsewhere, one_process, same)
    facts = one_worker_apart.facts[elsewhere]
    assert (facts["iterations"], facts["losses"]) == (STEPS, STEPS * int(elsewhere.split("/")[3]))
    assert facts["workers"]["worker:0"]["staleness"] == [0] * STEPS


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("elsewhere", "same", "rounding"), [(case, *known) for case, known in ROUNDED.items()])
def test_a_narrow_wire_changes_no_more_than_its_rounding(elsewhere, same, rounding, one_worker_apart, one_process):
    worst = differences(one_worker_apart.written, one_process.written, elsewhere, same)
    assert worst["variables"] > 0
    assert worst["history"] < 4 * rounding


@on(1, PREFETCHED)
def test_prefetched_parameters_are_one_update_old(case, one_worker):
    facts = one_worker.facts[case]
    assert facts["iterations"] == STEPS
    assert facts["workers"]["worker:0"]["staleness"] == [0, 1, 1, 1, 1, 1] * (STEPS // 6)


@on(3, BY_KERAS)
def test_local_steps_need_an_optimizer_with_kernels(case, one_worker):
    facts = one_worker.facts[case]
    assert facts["code"] == "optimizer-without-kernels"
    assert "Nadam" in facts["error"]


@pytest.fixture(scope="module")
def two_workers(request, module_cluster):
    """The results of 2 workers and 2 ps; after a training that fails, the same cluster continues with the next."""
    known = {*TWO_WORKERS, *BY_SPEED, FAILS, ENDS, BACKUP, BEHIND}
    cases = [case for case in selected(request, "case", "same") if case in known]
    cases.sort(key=lambda case: case not in (FAILS, ENDS))
    return trained(module_cluster(chief=1, ps=2, worker=2), *cases)


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("case", "same"), BY_SPEED.items())
def test_batches_of_different_sizes_equal_one_process_with_twice_the_batch(case, same, two_workers, one_process):
    assert two_workers.is_close_to(case, one_process, same)
    facts = two_workers.facts[case]
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (STEPS, STEPS, STEPS * 2 * BATCH)
    assert sum(worker["examples"] for worker in facts["workers"].values()) == STEPS * 2 * BATCH
    assert {worker["steps"] for worker in facts["workers"].values()} == {STEPS}


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("case", "same"), TWO_WORKERS.items())
def test_two_workers_equal_one_process_with_twice_the_batch(case, same, two_workers, one_process):
    assert two_workers.is_close_to(case, one_process, same)
    facts = two_workers.facts[case]
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (STEPS, STEPS, STEPS * 2 * BATCH)
    for worker in facts["workers"].values():
        assert (worker["steps"], worker["batches"], worker["examples"]) == (STEPS, STEPS, STEPS * BATCH)
        assert worker["staleness"] == [0] * STEPS
    assert facts["validated"] == 61


@pytest.fixture(scope="module")
def two_workers_apart(request, module_cluster):
    """The results of 2 workers and 2 ps that share no memory; the first training may fail."""
    cases = sorted(selected(request, "apart"), key=lambda case: case != FAILS)
    return trained(module_cluster(chief=1, ps=2, worker=2, apart=True), *cases)


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("apart", "same"), APART.items())
def test_two_workers_of_other_hosts_equal_one_process_with_twice_the_batch(apart, same, two_workers_apart, one_process):
    assert two_workers_apart.is_close_to(apart, one_process, same)
    facts = two_workers_apart.facts[apart]
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (STEPS, STEPS, STEPS * 2 * BATCH)
    assert facts["validated"] == 61


@pytest.mark.rotates(5, 2)
@pytest.mark.parametrize("apart", [FAILS])
def test_an_error_on_a_worker_of_another_host_is_raised_unchanged(apart, two_workers_apart):
    assert "my own mistake" in two_workers_apart.facts[apart]["error"]


@on(0, BACKUP)
def test_with_a_backup_worker_a_slow_one_delays_no_update(case, two_workers):
    facts = two_workers.facts[case]
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (STEPS, STEPS, STEPS * BATCH)
    fast, slow = facts["workers"]["worker:0"], facts["workers"]["worker:1"]
    assert fast["batches"] + slow["batches"] == STEPS
    assert fast["batches"] > slow["batches"]
    assert slow["dropped"] > 0
    for worker in (fast, slow):
        assert worker["steps"] == worker["batches"] + worker["dropped"]
        assert worker["examples"] == worker["batches"] * BATCH
        assert worker["staleness"] == [0] * worker["batches"]


@on(4, BEHIND)
def test_a_worker_is_not_further_ahead_than_its_staleness(case, two_workers):
    facts = two_workers.facts[case]
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (STEPS, STEPS, 2 * STEPS * BATCH)
    fast, slow = facts["workers"]["worker:0"], facts["workers"]["worker:1"]
    assert fast["batches"] == slow["batches"] == STEPS
    assert 0 < max(fast["staleness"]) <= 2
    assert max(slow["staleness"]) <= 2  # it may have started first
    assert sum(slow["staleness"]) < sum(fast["staleness"])


@on(1, FAILS)
def test_an_error_on_a_worker_is_raised_unchanged(case, two_workers):
    assert "my own mistake" in two_workers.facts[case]["error"]


@on(3, ENDS)
def test_data_that_ends_early_names_the_worker(case, two_workers):
    facts = two_workers.facts[case]
    assert facts["code"] == "data-ended-early"
    assert "worker:1" in facts["error"]


ASYNCHRONOUS = {"async": 37, "push 4": 10, "local 3": 37, "compensated": 37, "prefetch": 37, "float16": 37}
"""Updates in 37 steps."""


@pytest.fixture(scope="module")
def three_workers(request, module_cluster):
    """The results of 3 workers."""
    cases = [f"{rule}/tables/adam/1/rows/odd" for rule in (*selected(request, "rule"), "sync 2")]
    return trained(module_cluster(chief=1, ps=1, worker=3), *cases)


@pytest.mark.rotates(5)  # two each day, of which one at least is stale
@pytest.mark.parametrize(("rule", "updates"), ASYNCHRONOUS.items())
def test_asynchronous_workers_count_exactly(rule, updates, three_workers):
    facts = three_workers.facts[f"{rule}/tables/adam/1/rows/odd"]
    workers = facts["workers"].values()
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (updates, STEPS + 1, (STEPS + 1) * BATCH)
    assert sum(worker["steps"] for worker in workers) == sum(worker["batches"] for worker in workers) == STEPS + 1
    assert sum(worker["examples"] for worker in workers) == (STEPS + 1) * BATCH
    assert sum(len(worker["staleness"]) for worker in workers) == updates
    assert min(min(worker["staleness"]) for worker in workers) >= 0
    assert facts["validated"] == 61


def test_staleness_counts_the_updates_of_other_workers(three_workers):
    workers = [worker for facts in three_workers.facts.values() for worker in facts["workers"].values()]
    assert 1 < max(number for worker in workers for number in worker["staleness"]) <= STEPS


def test_two_of_three_workers_make_an_update(three_workers):
    facts = three_workers.facts["sync 2/tables/adam/1/rows/odd"]
    workers = facts["workers"].values()
    assert (facts["iterations"], facts["losses"], facts["examples"]) == (STEPS + 1, STEPS + 1, 2 * (STEPS + 1) * BATCH)
    assert sum(worker["batches"] for worker in workers) == 2 * (STEPS + 1)
    for worker in workers:
        assert worker["steps"] == worker["batches"] + worker["dropped"]


LONG = 10 * STEPS
"""Steps of a training in which a worker is killed."""
EXECUTION = 6
"""Steps of an execution in it."""


def shared_files(process):
    """The descriptors of memory that a process shares: two of what identifies it, more if it has sent something."""
    return sum(count for file, count in opened(process).items() if file.startswith("/memfd:tfdist"))


@pytest.mark.chaos
@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("mode", "model", "together", "separate"),
    [
        ("async", "dense/adam", 1, False),
        ("sync 1", "dense/adam", 1, False),
        ("sync", "dense/adam", 2, False),
        ("sync", "dense/adam", 2, True),
        ("sync", "wide/adagrad", 2, False),
        ("proportional", "dense/adam", 2, False),
    ],
)
def test_a_worker_may_be_killed(mode, model, together, separate, cluster, tmp_path):
    """With a backup worker, or asynchronous ones, the training continues; else all wait until it has been restarted.

    The worker then takes each step with the batch that it would have had. The steps of an asynchronous worker's
    execution are taken again, those included whose updates it has made.
    """
    tasks, case = cluster(chief=1, ps=2, worker=2, apart=separate), f"{mode}/{model}/1/long"
    command = program("rules.py", "out", case)
    tasks.start(command)
    tasks.await_text("chief:0", "epoch 2/20")
    killed = tasks.processes["worker:1"]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    if together == 2:
        tasks.start(command, "worker:1")
    if mode in ("sync", "async"):  # a new worker's memory is shared, too
        tasks.await_text("chief:0", "epoch 18/20")
        left = ["worker:0", "ps:0", "ps:1", *(["worker:1"] if together == 2 else [])]
        files = [shared_files(tasks.processes[task].pid) for task in left]
        assert max(files) == 0 if separate else min(files) > 2, files
    ended = tasks.finish()
    codes = dict.fromkeys(tasks.tasks, 0) | ({"worker:1": -signal.SIGKILL} if together == 1 else {})
    assert {task: one.code for task, one in ended.items()} == codes, tasks.outputs()
    facts = ended["chief:0"].result[case]
    made_again = facts["iterations"] - LONG
    assert 0 <= made_again < (EXECUTION + 1 if mode == "async" else 1)
    assert (facts["losses"], facts["examples"]) == (LONG, LONG * together * BATCH)
    assert sum(worker["batches"] for worker in facts["workers"].values()) == LONG * together
    if together == 2:
        same = f"async/{model}/2/long"
        one_process = Trained(tmp_path, alone(tmp_path, program("rules.py", "out", same)))
        assert Trained(tasks.folder, ended["chief:0"]).is_close_to(case, one_process, same)
