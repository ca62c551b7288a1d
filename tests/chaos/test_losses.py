"""Tasks that are killed or stopped at any time of a training: it continues, and its report is correct."""

import os
import random
import signal
import threading
import time

import pytest

from tests.support.chaos import (
    MIRRORED,
    RECIPE_IN_TWO_LAYERS,
    SERVERS,
    STAGES,
    UNDISTURBED,
    Fault,
    accuracy,
    check_metrics,
    moment,
)
from tests.support.codes import codes_in
from tests.support.launching import left_of

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

TRIALS = int(os.environ.get("TFDIST_TEST_TRIALS", "1"))
"""Trials at random beside those that are always made; trial N is the same each time."""
ALWAYS_RUNNING = 300
"""A step at which every training is still under way, and a fault can be injected."""
NOTICED = 2.0
"""Seconds within which the launcher notices the exit of a process on a busy machine; otherwise it is a fifth."""


def survive(training, *faults, timeout=200):
    """Injects the faults, and checks the result."""
    moments = [training.inject(fault) for fault in faults]
    done = training.finish(timeout)
    assert done.code == 0, done.stderr[-5000:]
    assert done.processes_left == []
    assert abs(accuracy(done) - UNDISTURBED) <= 0.01
    trained = check_metrics(done.run_dir)
    assert trained[-1]["step"] == done.report["step"]
    assert all(injected for fault, injected in zip(faults, moments, strict=True) if fault.step <= ALWAYS_RUNNING)
    applied = [(fault, injected) for fault, injected in zip(faults, moments, strict=True) if injected]
    for fault, injected in applied:
        ended = next(line for line in training.events("exited", fault.task) if moment(line) > injected)
        if fault.signum == signal.SIGKILL:
            assert moment(ended) - injected < NOTICED
            assert "SIGKILL" in ended["cause"]
    return done


def lost_tasks(done):
    """The lost tasks, and whether the task or the whole job was restarted."""
    return [(loss["task"], loss["restarts"]) for loss in done.report["losses"]]


@pytest.mark.rotates(5, 0)
def test_servers_lose_a_worker_the_evaluator_and_a_ps(train):
    training = train(SERVERS, "--max-restarts", 5)
    done = survive(
        training,
        Fault("worker:1", 100),
        Fault("worker:0", 200, doing="evaluating"),
        Fault("evaluator:0", 300, signal.SIGHUP),
        Fault("ps:0", 600),
    )
    assert lost_tasks(done) == [("worker:1", "task"), ("worker:0", "task"), ("evaluator:0", "task"), ("ps:0", "job")]
    assert done.report["attempts"] == 2
    restarts = {task["task"]: task["restarts"] for task in done.report["tasks"]}
    assert restarts == {"chief:0": 1, "ps:0": 1, "worker:0": 2, "worker:1": 2, "evaluator:0": 2}
    assert "lost: ps:0 after" in done.stderr


@pytest.mark.rotates(5, 4)
def test_workers_that_take_steps_of_their_own_may_be_lost(train):
    """With what they have not handed in yet; others take these steps."""
    training = train(SERVERS, "--max-restarts", 5, "--set", "updates.local_steps=10")
    done = survive(training, Fault("worker:1", 100), Fault("ps:0", 300))
    assert lost_tasks(done) == [("worker:1", "task"), ("ps:0", "job")]


@pytest.mark.rotates(5, 4)
def test_servers_lose_their_chief_and_a_worker_that_is_stopped(train):
    """The chief sends the worker a new function just then, and its interpreter waits with it."""
    training = train(SERVERS, "--max-restarts", 5, "--stall-timeout", 15)
    done = survive(training, Fault("chief:0", 100), Fault("worker:0", 200, signal.SIGSTOP, doing="evaluating"))
    assert lost_tasks(done) == [("chief:0", "job"), ("worker:0", "task")]
    assert "no heartbeat" in done.report["losses"][1]["cause"]


@pytest.mark.rotates(5, 4)
def test_mirrored_workers_lose_one(train):
    done = survive(train(MIRRORED, "--max-restarts", 5), Fault("worker:1", 100))
    assert lost_tasks(done) == [("worker:1", "job")]


@pytest.mark.rotates(5, 1)
def test_stages_lose_a_worker_and_one_that_is_stopped(train):
    training = train(STAGES, "--max-restarts", 5, "--stall-timeout", 15, module=RECIPE_IN_TWO_LAYERS)
    done = survive(training, Fault("worker:1", 100), Fault("worker:0", 300, signal.SIGSTOP), timeout=300)
    assert lost_tasks(done) == [("worker:1", "job"), ("worker:0", "job")]
    assert "no heartbeat" in done.report["losses"][1]["cause"]


@pytest.mark.rotates(5, 1)
def test_a_stopped_ps_without_restarts_ends_the_job_and_is_named(train):
    training = train(SERVERS, "--max-restarts", 0, "--stall-timeout", 12)
    training.inject(Fault("ps:0", 100, signal.SIGSTOP))
    done = training.finish()
    assert done.code == 124
    assert done.processes_left == []
    assert codes_in(done.stderr)[-1] == done.report["code"] == "task-stalled"
    assert "ps:0 failed" in done.report["headline"]
    assert "no heartbeat" in done.report["headline"]


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("cluster", "stopped"),
    [(SERVERS, [("evaluator:0", "task"), ("chief:0", "job")]), (MIRRORED, [("worker:1", "job"), ("worker:0", "job")])],
    ids=["servers", "mirrored"],
)
def test_any_task_is_stopped_is_named_and_lost(train, cluster, stopped):
    training = train(cluster, "--max-restarts", 5, "--stall-timeout", 15)
    faults = [Fault(task, 100 + 300 * number, signal.SIGSTOP) for number, (task, _) in enumerate(stopped)]
    done = survive(training, *faults, timeout=300)
    assert lost_tasks(done) == stopped
    assert all("no heartbeat" in lost["cause"] for lost in done.report["losses"])


@pytest.mark.rotates(5, 4)
def test_no_task_survives_the_launcher_not_even_one_that_was_started_again(train):
    training = train(SERVERS, "--max-restarts", 5)
    training.inject(Fault("worker:1", 50))
    training.until(lambda: len(training.events("started", "worker:1")) == 2)
    lose_the_launcher(training, 60)


def lose_the_launcher(training, step):
    """Kills the launcher, and checks that all tasks exit; returns whether the training was still running."""
    if training.inject(Fault("launcher", step)):
        training.process.wait()
        assert eventually(lambda: not left_of(training.process.pid), seconds=5)
        return True
    return False


def eventually(condition, seconds):
    """Whether a condition without an event becomes true in time."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.1)
    return True


@pytest.mark.rotates(5, 3)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_anything_may_be_lost_at_any_time(train, trial):
    """In one of four trials the launcher is killed, too; the next launch resumes from the last checkpoint."""
    chance = random.Random(trial)
    cluster = chance.choice([SERVERS, SERVERS, MIRRORED])
    tasks = ["worker:0", "worker:1", *(["chief:0", "ps:0", "evaluator:0"] if cluster is SERVERS else [])]
    steps = sorted(chance.sample(range(1, 800), chance.randint(1, 3)))
    signals = [signal.SIGKILL] * 4 + [signal.SIGSTOP]
    faults = [Fault(chance.choice(tasks), step, chance.choice(signals)) for step in steps]
    training = train(cluster, "--max-restarts", 20, "--stall-timeout", 20)
    if chance.random() < 0.25 and lose_the_launcher(training, chance.randint(0, ALWAYS_RUNNING)):
        training.relaunch()
    survive(training, *faults, timeout=300)
