"""Workers of a parameter server cluster compute on their first GPU."""

from contextlib import nullcontext

import pytest
import tensorflow as tf

from tfdist_cli.train.model.compute_device import on_gpu, worker_device_scope

WORKER = "/job:worker/replica:0/task:{}/device:GPU:{}"


@pytest.fixture
def gpus(monkeypatch):
    """Gives the cluster some GPUs: `gpus("/job:worker/replica:0/task:0/device:GPU:0")`."""

    def have(*names):
        found = [tf.config.LogicalDevice(name, "GPU") for name in names]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: found)

    return have


@pytest.mark.parametrize("names", [(), ("/job:chief/replica:0/task:0/device:GPU:0",)])
def test_without_gpus_of_workers_devices_are_not_set(names, gpus, log):
    gpus(*names)
    assert worker_device_scope() is nullcontext
    assert not log


def test_operations_go_to_the_first_gpu_of_the_worker_that_runs_them(gpus, log):
    gpus(WORKER.format(0, 0), WORKER.format(3, 0))
    assert worker_device_scope() is on_gpu
    with tf.Graph().as_default(), on_gpu():
        assert tf.constant(1.0).device == "/device:GPU:0"  # no task: each worker's own
    assert not log


def test_unused_gpus_are_logged(gpus, log):
    gpus(WORKER.format(0, 0), WORKER.format(1, 0), WORKER.format(1, 1))
    assert worker_device_scope() is on_gpu
    (line,) = log
    assert line.startswith("worker:1 has 2 GPUs")
