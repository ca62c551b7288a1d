"""Workers that join a training that runs, and leave it; each task is started by itself."""

import json
import signal
import time

import pytest

from tests.support.ports import free_address
from tests.support.tasks import TIMEOUT, program
from tfdist_cli.protocol.records import split
from tfdist_cli.spec.task_id import TaskId

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLES = 16
"""In a batch."""


class Elastic:
    """A chief, a ps and two workers that train until they are told to stop; others join.

    Args:
        tasks: a cluster of four workers.
        folder: for the file that ends the training.
        each_batch: whether a callback acts on each batch.
        argv: another program to run.
        updates: the update rule.
    """

    def __init__(self, tasks, folder, *, each_batch=False, argv=None, **updates):
        self.tasks = tasks
        self._file = folder / "enough"
        own = program("elastic.py", self._file, json.dumps(updates), *["each batch"] * each_batch)
        self._argv = argv or own
        threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4"}
        self._env = threads | {
            "TFDIST_RECORDS": "1",
            "TFDIST_JOIN_ADDRESS": str(free_address()),
            "TFDIST_MAX_WORKERS": "4",
        }
        ps = [task for task in tasks.tasks if task.startswith("ps:")]
        self.start("chief:0", *ps, "worker:0", "worker:1", workers=2)
        self.await_record("elastic", joins=True)

    def start(self, *names, workers, places=None, **env):
        """Starts tasks whose TF_CONFIG has so many workers, with more variables."""
        every = self.tasks.addresses | (places or {})
        among = {task: place for task, place in every.items() if task.role != "worker" or task.index < workers}
        self.tasks.start(self._argv, *names, env=self._env | env, among=among)

    def records(self, kind, **fields):
        """The chief's records of a kind."""
        *lines, _ = self.tasks.result_of("chief:0").err.split("\n")  # the last one may not be complete
        found = [each for line in lines for each in split(line) if isinstance(each, dict)]
        return [record for record in found if {"kind": kind, **fields}.items() <= record.items()]

    def await_record(self, kind, number=1, **fields):
        """Waits for so many records of the chief."""
        deadline = time.monotonic() + TIMEOUT
        while len(found := self.records(kind, **fields)) < number:
            assert time.monotonic() < deadline, self.tasks.outputs()
            assert self.tasks.processes["chief:0"].poll() is None, self.tasks.outputs()
            time.sleep(0.02)  # there is no event to wait for
        return found[-1]

    def await_steps(self, worker):
        """Waits until a worker has taken steps that were not reported yet."""
        before = len(self.records("progress"))
        deadline = time.monotonic() + TIMEOUT
        while not any(record["workers"].get(worker) for record in self.records("progress")[before + 1 :]):
            assert time.monotonic() < deadline, self.tasks.outputs()
            time.sleep(0.05)  # there is no event to wait for

    def ends(self, worker, number=signal.SIGTERM):
        """Sends a signal to a worker, and returns its exit code."""
        self.tasks.processes[worker].send_signal(number)
        return self.tasks.code_of(worker)

    def finish(self):
        """Ends the training.

        Returns:
            The optimizer's iterations, the global steps, the steps of each worker, and the batches that count.
        """
        self._file.touch()
        ended = self.tasks.finish()
        assert ended["chief:0"].code == 0, self.tasks.outputs()
        counted = {name: counts for record in self.records("workers") for name, counts in record["workers"].items()}
        (result,) = self.records("result")
        assert result["examples"] == sum(own for _, own, *_ in counted.values())
        steps = {name: own for name, (own, *_) in counted.items()}
        return int(ended["chief:0"].out), result["step"], steps, result["examples"] / EXAMPLES


ASYNCHRONOUS = [
    {},
    pytest.param({"push_every": 2}, marks=pytest.mark.rotates(5, 2)),
    pytest.param({"local_steps": 2}, marks=pytest.mark.rotates(5, 3)),
]


@pytest.mark.parametrize("updates", ASYNCHRONOUS, ids=str)
def test_workers_join_and_leave_and_every_step_counts_once(cluster, tmp_path, updates):
    training = Elastic(cluster(chief=1, ps=1, worker=4), tmp_path, **updates)
    training.start("worker:2", workers=3)
    joined = training.await_record("joined", worker="worker:2")
    training.start("worker:3", workers=4, TFDIST_LEAVE_CODE="143")
    training.await_record("joined", worker="worker:3")
    assert training.ends("worker:3") == 143, "it may have done more than the chief has fetched"
    training.start("worker:3", workers=4)
    training.await_record("joined", 2, worker="worker:3")
    assert training.ends("worker:2") == training.ends("worker:0") == 0
    left = training.await_record("left", worker="worker:0")
    assert joined["step"] < left["step"]
    training.start("worker:2", workers=3)  # at the same place
    training.await_record("joined", 2, worker="worker:2")
    iterations, step, steps, counted = training.finish()
    assert step == sum(steps.values()) == counted == iterations * updates.get("push_every", 1)
    assert all(steps[f"worker:{index}"] > 0 for index in range(4))
    assert {task: result.code for task, result in training.tasks.finish().items() if result.code} == {}


SYNCHRONOUS = [
    pytest.param({"mode": "sync"}, marks=pytest.mark.rotates(5, 1)),
    pytest.param({"mode": "sync", "each_batch": True}, marks=pytest.mark.rotates(5, 0)),
    pytest.param({"mode": "sync", "aggregate": 2}, marks=pytest.mark.rotates(5, 4)),
    pytest.param({"mode": "bounded", "staleness": 2}, marks=pytest.mark.rotates(5, 2)),
]


@pytest.mark.parametrize("updates", SYNCHRONOUS, ids=str)
def test_workers_that_step_together_join_and_leave_too(cluster, tmp_path, updates):
    training = Elastic(cluster(chief=1, ps=2, worker=4), tmp_path, **updates)
    training.start("worker:2", workers=3)
    joined = training.await_record("joined", worker="worker:2")
    training.await_steps("worker:2")
    assert training.ends("worker:0") == 0
    left = training.await_record("left", worker="worker:0")
    assert 0 < joined["step"] < left["step"]
    training.await_steps("worker:2")
    iterations, step, steps, counted = training.finish()
    assert iterations == step
    assert set(steps) == {"worker:0", "worker:1", "worker:2"}
    if "aggregate" in updates:
        assert sum(steps.values()) >= counted == updates["aggregate"] * step  # the others are dropped
    else:
        assert 2 * step < sum(steps.values()) == counted < 3 * step


@pytest.mark.rotates(5, 4)
def test_a_worker_that_has_joined_is_lost_and_found_like_any_other(cluster, tmp_path):
    training = Elastic(cluster(chief=1, ps=1, worker=4), tmp_path)
    training.start("worker:2", workers=3)
    training.await_record("joined", worker="worker:2")
    training.await_steps("worker:2")
    assert training.ends("worker:2", signal.SIGKILL) == -signal.SIGKILL
    training.start("worker:3", workers=4)  # while there is no worker 2
    training.await_record("joined", worker="worker:3")
    training.start("worker:2", workers=3)
    training.await_steps("worker:2")
    assert training.ends("worker:3") == 0
    iterations, step, steps, _ = training.finish()
    assert iterations >= step == sum(steps.values())  # half-done executions are repeated


def test_who_is_not_taken_is_told_why(cluster, tmp_path):
    training = Elastic(cluster(chief=1, ps=1, worker=4), tmp_path)
    elsewhere = {TaskId("worker", 1): free_address(), TaskId("worker", 4): free_address()}
    training.tasks.processes["first worker:1"] = training.tasks.processes.pop("worker:1")
    for worker, code in {"worker:4": "cluster-full", "worker:1": "task-exists"}.items():
        training.start(worker, workers=5, places=elsewhere)
        assert training.tasks.code_of(worker) == 1
        assert training.tasks.result_of(worker).out.split() == [code]  # the first one writes to the same files
    training.tasks.processes["worker:1"] = training.tasks.processes.pop("first worker:1")
    assert training.ends("worker:1") == 0
    assert training.ends("worker:0") not in (0, 1), "the last one stays, and ends as without a chief"
    training.start("worker:0", workers=2)
    iterations, step, steps, counted = training.finish()
    assert iterations >= step == sum(steps.values()) == counted


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.rotates(5, 1))])
def test_a_worker_that_leaves_between_two_trainings_is_not_waited_for(mode, cluster, tmp_path):
    file = tmp_path / "go on"
    training = Elastic(cluster(chief=1, ps=1, worker=4), tmp_path, argv=program("elastic_fits.py", mode, file))
    training.tasks.await_text("chief:0", "trained")
    assert training.ends("worker:1") == 0
    file.touch()
    ended = training.tasks.finish()
    assert {task: one.code for task, one in ended.items() if one.code} == {}, training.tasks.outputs()
    steps = 2 * 480 // 16
    assert ended["chief:0"].out.split() == [
        "trained",
        str(2 * steps if mode == "async" else steps // 2 + steps),
        "True",
    ]
    assert list(training.records("workers")[-1]["workers"]) == ["worker:0"]
