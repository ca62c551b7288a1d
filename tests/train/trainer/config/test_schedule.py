"""Global steps of epochs, passes and trainings."""

from dataclasses import replace

import pytest
import tensorflow as tf

from tfdist_cli.train.trainer.config.schedule import Schedule
from tfdist_cli.train.trainer.config.training import OPEN_END, TrainingConfig


def batches(count):
    return lambda _: tf.data.Dataset.range(count)


def test_an_open_schedule_is_closed_by_the_end_of_the_data():
    config = TrainingConfig(batches(1), OPEN_END, epochs=4)
    schedule = Schedule(OPEN_END, config.last_step(), steps_per_execution=1)
    assert schedule.is_open
    assert schedule.epochs == 4
    schedule, config = schedule.with_pass(6, 0, config)
    assert not schedule.is_open
    assert (schedule.total, schedule.epochs, config.steps_per_pass) == (24, 4, 6)
    later = Schedule(OPEN_END, config.last_step(), 1, origin=6 - 2 * OPEN_END)  # two epochs of other workers were done
    closed, _ = later.with_pass(10, 2, replace(config, steps_per_epoch=OPEN_END))
    assert (closed.first_step(2), closed.last_step(2), closed.total) == (6, 10, 14)


@pytest.mark.parametrize(
    ("given", "origin", "last"),
    [
        ({}, 0, 8),
        ({"epochs": 3}, 0, 24),
        ({"epochs": 3, "max_steps": 20}, 0, 20),
        ({"epochs": 3, "max_steps": 30}, 0, 24),
        ({"max_steps": 30}, 0, 30),
        ({"epochs": 3}, -4, 20),
        ({"epochs": 0}, 0, 0),
    ],
)
def test_the_last_step(given, origin, last):
    assert TrainingConfig(batches(1), 8, **given).last_step(origin) == last


def test_epochs_of_a_schedule():
    schedule = Schedule(steps_per_epoch=8, total=20, steps_per_execution=1, origin=-4)
    assert schedule.epochs == 3
    assert [schedule.first_step(epoch) for epoch in range(3)] == [-4, 4, 12]
    assert [schedule.last_step(epoch) for epoch in range(3)] == [4, 12, 20]
    assert [schedule.epoch(step) for step in (0, 3, 4, 12, 19)] == [0, 0, 1, 2, 2]


def test_epochs_end_with_a_pass():
    schedule = Schedule(steps_per_epoch=4, total=25, steps_per_execution=1, origin=2, steps_per_pass=10)
    assert schedule.epochs == 7
    assert [schedule.first_step(epoch) for epoch in range(7)] == [2, 6, 10, 12, 16, 20, 22]
    assert [schedule.last_step(epoch) for epoch in range(7)] == [6, 10, 12, 16, 20, 22, 25]
    assert [schedule.epoch(step) for step in (2, 9, 10, 11, 12, 21, 24)] == [0, 1, 2, 2, 3, 5, 6]
    assert TrainingConfig(batches(1), 12, epochs=3, steps_per_pass=10).last_step() == 30


def test_an_epoch_whose_length_changes_within_it_keeps_its_place():
    schedule = Schedule(steps_per_epoch=300, total=900, steps_per_execution=20, origin=0)
    config = TrainingConfig(batches(600), steps_per_epoch=200, epochs=3)
    resized = schedule.resized(450, 1, 100, config)  # half of the second epoch is done
    assert (resized.first_step(1), resized.last_step(1), resized.epoch(450)) == (350, 550, 1)
    assert (resized.total, resized.epochs) == (750, 3)
    back = resized.resized(500, 1, 225, TrainingConfig(batches(600), steps_per_epoch=300, epochs=3, max_steps=600))
    assert (back.last_step(1), back.total) == (575, 600)
