"""Tasks that stay on their cores, and what ends that: real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist_cli.launch.local.affinity import BoundTasks, bind
from tfdist_cli.plan.plan import Plan, PlannedTask
from tfdist_cli.plan.resources import Resources
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

HERE = sorted(os.sched_getaffinity(0))
ONE, ALL = {HERE[0]}, set(HERE)
pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="this machine has one core")
PROGRAM = """
import subprocess, sys, threading, time
forever = threading.Event()
for _ in range(3):
    threading.Thread(target=forever.wait, daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.communicate()
"""


@pytest.fixture
def process():
    """A process with four threads, and its child's id."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        yield popen.pid, int(popen.stdout.readline())
        popen.communicate(b"\n")


def cores_of(pid):
    threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    found = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
    assert len(found) == 1, "its threads differ"
    return set(found.pop())


def task(name, *cores):
    return PlannedTask(TaskId.parse(name), Address("127.0.0.1"), (), {}, Resources(1, 4, cores=cores))


def plan(*tasks):
    roles = {"chief": {}, "ps": {}, "worker": {}}
    cluster = Cluster.model_validate({"strategy": "parameter_server", "roles": roles})
    return Plan(cluster, None, Path("run"), tasks)


def test_all_threads_of_a_process_are_bound(process):
    pid, _ = process
    bind(pid, HERE[:1])
    assert cores_of(pid) == ONE
    bind(pid, ())
    assert cores_of(pid) == ONE


def test_a_process_that_has_ended_and_cores_that_are_not_there(process):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    bind(done.pid, HERE[:1])
    pid, _ = process
    bind(pid, [10_000])
    assert cores_of(pid) == ALL


def test_a_task_is_bound_as_planned(process):
    pid, _ = process
    bound = BoundTasks()
    bound.start(task("ps:0"), pid)
    assert cores_of(pid) == ALL
    bound.start(task("worker:0", HERE[0]), pid)
    assert cores_of(pid) == ONE


def test_another_plan_with_the_same_cores_changes_nothing(process):
    pid, _ = process
    bound = BoundTasks()
    bound.start(task("worker:0", HERE[0]), pid)
    bound.follow(plan(task("worker:0", HERE[0]), task("evaluator:0")))
    assert cores_of(pid) == ONE


def test_tasks_use_all_cores_while_these_are_divided_anew(process):
    pid, child = process
    bound, planned = BoundTasks(), task("worker:0", HERE[0])
    bound.start(planned, pid)
    bind(child, HERE[:1])
    bound.follow(plan(task("worker:0"), task("worker:1")))
    assert (cores_of(pid), cores_of(child)) == (ALL, ALL)
    bound.follow(plan(planned))
    assert (cores_of(pid), cores_of(child)) == (ONE, ONE)


def test_a_task_that_has_started_with_other_threads_keeps_all_from_their_cores(process):
    pid, child = process
    bound, planned = BoundTasks(), [task("worker:0", HERE[0]), task("worker:1", HERE[1])]
    bound.start(planned[0], pid)
    bound.follow(plan(*(task(f"worker:{index}") for index in range(3))))
    bound.start(task("worker:1"), child)
    bound.follow(plan(*planned))
    assert (cores_of(pid), cores_of(child)) == (ALL, ALL), "worker:1 has the threads of three workers"
    for each in planned:
        bound.end(each.task)
    bound.start(planned[0], pid)
    assert cores_of(pid) == ONE
