"""Tests of `CheckpointPolicy`: when a checkpoint is saved."""

import numpy as np
import pytest

from tfdist_cli.train.checkpoint.policy import CheckpointPolicy, Decision


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def steps_of(policy, total, epoch):
    """Runs a training of `total` steps in epochs of `epoch`; returns the steps that are saved, and when in the epoch.

    `"within"` is before the end of an epoch is recorded, `"after"` is after that, `"end"` is the end of the training.
    """
    done, saved = 0, []

    def save(decision, when):
        if decision.save:
            saved.append((done, when))
            policy.saved()

    while done < total:
        first = done // epoch * epoch
        target = min(first + epoch, total)
        while done < target:
            done = policy.last_step(done, target, first)
            save(policy.after_steps(done, epoch_complete=done == target), "within")
        save(policy.after_epoch(training_complete=done == total), "after")
    save(policy.after_training(), "end")
    return saved


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        (None, [(10, "end")]),
        (1, [(1, "within"), (2, "within"), (3, "within"), (4, "after"), (5, "within"), (6, "within"), (7, "within"),
             (8, "after"), (9, "within"), (10, "end")]),
        (3, [(3, "within"), (6, "within"), (9, "within"), (10, "end")]),
        (4, [(4, "after"), (8, "after"), (10, "end")]),
        (5, [(5, "within"), (10, "end")]),
        (99, [(10, "end")]),
    ],
)  # fmt: skip
def test_every_steps_and_the_end_of_the_training(every, saved):
    assert steps_of(CheckpointPolicy(enabled=True, every_steps=every), 10, 4) == saved


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        (4, [(6, "within"), (9, "within"), (13, "within"), (16, "within"), (20, "end")]),
        (10, [(10, "after"), (20, "end")]),
        (7, [(9, "within"), (16, "within"), (20, "end")]),
    ],
)
def test_a_checkpoint_waits_for_the_end_of_a_round(every, saved):
    policy = CheckpointPolicy(enabled=True, every_steps=every, steps_per_round=3)
    assert steps_of(policy, 20, 10) == saved


def test_a_training_without_checkpoints_saves_none_and_terminates():
    policy = CheckpointPolicy(enabled=False, every_steps=2, every_seconds=0, termination_requested=lambda: True)
    assert steps_of(policy, 10, 4) == []
    assert policy.last_step(0, 9) == 9
    assert policy.requests().tolist() == [1, 0]
    assert policy.after_steps(3, epoch_complete=False, requests=policy.requests()) == Decision(terminate=True)
    assert policy.after_steps(3, epoch_complete=False, requests=np.array([0, 1])) == Decision()


def test_every_seconds_counts_from_the_last_checkpoint():
    policy = CheckpointPolicy(enabled=True, every_seconds=60, clock=(clock := Clock()))
    assert not policy.wants_pause()
    clock.seconds += 59.9
    assert not policy.wants_pause()
    clock.seconds += 0.1
    assert policy.wants_pause()
    assert policy.requests().tolist() == [0, 1]
    assert policy.after_steps(7, epoch_complete=False, requests=policy.requests()) == Decision(save=True)
    clock.seconds += 5  # saving takes a while
    policy.saved()
    clock.seconds += 59
    assert not policy.wants_pause()


def test_a_checkpoint_because_of_steps_restarts_the_clock():
    policy = CheckpointPolicy(enabled=True, every_steps=2, every_seconds=60, clock=(clock := Clock()))
    clock.seconds += 59
    assert policy.after_steps(2, epoch_complete=False) == Decision(save=True)
    policy.saved()
    clock.seconds += 59
    assert not policy.wants_pause()


def test_any_tasks_request_counts_on_all_tasks():
    asked = CheckpointPolicy(enabled=True, termination_requested=lambda: True)
    other = CheckpointPolicy(enabled=True)
    assert not other.wants_pause()
    requests = asked.requests() + other.requests()
    assert {policy.after_steps(5, epoch_complete=False, requests=requests) for policy in (asked, other)} == {
        Decision(save=True, terminate=True)
    }


def test_sigterm_does_not_wait_for_the_end_of_the_epoch():
    policy = CheckpointPolicy(enabled=True, every_seconds=0, termination_requested=lambda: True)
    assert policy.requests().tolist() == [1, 1]
    decision = policy.after_steps(8, epoch_complete=True, requests=policy.requests())
    assert decision == Decision(save=True, terminate=True)


def test_a_time_that_is_due_at_the_end_of_an_epoch_is_deferred():
    policy = CheckpointPolicy(enabled=True, every_seconds=0)
    assert policy.after_steps(8, epoch_complete=True, requests=policy.requests()) == Decision()
    assert policy.after_epoch(training_complete=False) == Decision(save=True)
    policy.saved()
    assert policy.after_epoch(training_complete=False) == Decision()


@pytest.mark.parametrize("complete", [True, False])
def test_after_a_resume_at_the_end_of_an_epoch_that_end_is_saved(complete):
    policy = CheckpointPolicy(enabled=True)
    policy.after_resume(epoch_complete=complete)
    assert policy.after_epoch(training_complete=False) == Decision(save=complete)


def test_a_deferred_checkpoint_at_the_end_of_the_training_is_its_last_one():
    policy = CheckpointPolicy(enabled=True, every_steps=8)
    assert policy.after_steps(8, epoch_complete=True) == Decision()
    assert policy.after_epoch(training_complete=True) == Decision()
    assert policy.after_training() == Decision(save=True)
