"""What a change of the tasks costs, by the times of steps and the event log."""

from datetime import datetime, timezone

import pytest
import tensorflow as tf

from benchmarks.cluster import RunFailed
from benchmarks.elastic import beginning_of, resize_of
from benchmarks.programs import elastic
from benchmarks.programs.waiting import Wait

START = 1_800_000_000.0


def event(kind, seconds, **fields):
    return {"time": datetime.fromtimestamp(START + seconds, timezone.utc).isoformat(), "event": kind, **fields}


EVENTS = [
    event("phase", 10.1, phase="saving"),
    event("phase", 11.0, phase="paused"),
    event("resumed", 12.0, step=3),
]


def test_a_resize_is_measured_by_the_longest_time_without_a_step():
    times = [START + seconds for seconds in (1.0, 9.9, 10.5, 14.0, 14.1)]
    resize = resize_of(times, START + 10.0, EVENTS, together=1)
    parts = resize.finish, resize.save, resize.start, resize.first
    assert parts == pytest.approx((0.5, 0.5, 1.0, 2.0), abs=1e-5)
    assert resize.pause == pytest.approx(3.5, abs=1e-5)
    assert resize.repeated == 0


def test_steps_after_the_checkpoint_are_repeated_and_those_of_mirrored_workers_are_one():
    times = [START + seconds for seconds in (1.0, 1.0, 9.9, 9.9, 10.2, 10.2, 10.5, 10.5, 14.0)]
    assert resize_of(times, START + 10.0, EVENTS, together=2).repeated == 1


def test_steps_are_counted_from_the_resize_before():
    times = [START + seconds for seconds in (1.0, 20.0, 20.1, 30.0)]
    again = [*EVENTS, event("phase", 21.0, phase="paused"), event("resumed", 22.0, step=5)]
    assert resize_of(times, START + 20.05, again, together=1).repeated == 0


def test_a_training_without_steps_afterwards_was_not_measured():
    with pytest.raises(RunFailed):
        resize_of([START + 9.0], START + 10.0, EVENTS, together=1)


def test_the_longest_pause_of_any_worker_counts_also_if_it_ends_later():
    stamps = {0: [0.0, 1.0, 2.0, 5.0], 1: [0.5, 1.0, 2.5, 2.9]}
    assert beginning_of(stamps, 0.0, 3.0) == (3.0, 7)


def test_steps_are_stamped_and_wait_once_their_parameters_are_there(tmp_path):
    """What depends on the data alone happens for all steps of an execution when it begins."""
    model = elastic.model({"stamps": str(tmp_path / "stamps"), "layers": 2})
    stamp, wait = (next(each for each in model.layers if isinstance(each, kind)) for kind in (elastic.Stamp, Wait))
    assert wait.input[0] is stamp.output
    assert stamp.input[0]._keras_history.operation.trainable_variables


def test_a_step_is_stamped_when_its_values_are_computed(tmp_path):
    stamp = elastic.Stamp(str(tmp_path / "stamps"))
    specs = tf.TensorSpec((2, 3)), tf.TensorSpec((2,), tf.int32)
    graph = tf.function(lambda x, worker: stamp((x, worker))).get_concrete_function(*specs).graph
    [clock] = [operation for operation in graph.get_operations() if operation.type == "Timestamp"]
    assert graph.inputs[0].op in clock.control_inputs
