"""The coordinator's private names are there; its state after a failure is renewed, and its table of functions grown."""

import threading
import time

import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl

from tests.support.running import output_of
from tfdist_cli.train.tf_compat import coordinator
from tfdist_cli.train.tf_compat.coordinator import error_of, failure_of, is_aborted, wait_for


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("ps", [1, 2, 3])
def test_more_entries_than_half_of_the_table_are_made(workers, ps, monkeypatch):
    entries = []
    monkeypatch.setattr(coordinator, "_register_on", entries.extend)
    devices = [f"ps:{number}" for number in range(ps)]
    coordinator.reserve_function_table(devices, workers)
    size = 1 << (len(entries) - 1).bit_length()  # what a table that doubles has grown to
    assert size - len(entries) >= coordinator._FUNCTIONS_PER_WORKER * workers - ps
    assert set(entries) == set(devices)


def remote():
    return RemoteValueImpl(None, None)


def test_a_value_that_is_still_to_come():
    value = remote()
    assert not wait_for(value, 0)
    assert (error_of(value), failure_of(value), is_aborted(value)) == (None, None, False)
    threading.Timer(0.05, value._set_values, [1]).start()
    assert wait_for(value, 10)
    assert failure_of(value) is None
    assert not {"error", "status", "wait"} & set(dir(value)), "the state of a value is public now"


def test_a_function_that_failed_and_one_that_lost_its_worker():
    failed, aborted = remote(), remote()
    error = tf.errors.InvalidArgumentError(None, None, "own")
    failed._set_error(error)
    aborted._set_aborted(error)
    assert wait_for(failed, 0)
    assert wait_for(aborted, 0)
    assert (failure_of(failed), is_aborted(failed)) == (error, False)
    assert (failure_of(aborted), is_aborted(aborted), error_of(aborted)) == (None, True, error)


@pytest.mark.slow
def test_a_coordinator_of_one_worker():
    assert output_of("tf_compat_coordinator") == "done"


@pytest.mark.slow
@pytest.mark.rotates(5, 2)
def test_a_process_exits_while_functions_of_workers_run():
    began = time.monotonic()
    assert output_of("tf_compat_exit") == "exits"
    assert time.monotonic() - began < 50, "the exit has waited for a function"


def test_iterators_of_their_own_and_a_shared_one():
    data = tf.data.Dataset.range(3)
    own = coordinator.per_worker_iterators({0: remote(), 2: remote()}, data.element_spec)
    assert coordinator.are_per_worker(own)
    assert not coordinator.are_per_worker(iter(data))
