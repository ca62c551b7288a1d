"""Workers of parameter servers compute on their GPUs, where they have some."""

from contextlib import nullcontext

import pytest
import tensorflow as tf

from tfdist_cli.train.model.compute_device import device_scope_of_workers, on_gpu

WORKER = "/job:worker/replica:0/task:{}/device:GPU:{}"


@pytest.fixture
def gpus(monkeypatch):
    """Has a cluster with these GPUs: `gpus("/job:worker/replica:0/task:0/device:GPU:0")`."""

    def have(*names):
        found = [tf.config.LogicalDevice(name, "GPU") for name in names]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: found)

    return have


@pytest.mark.parametrize("names", [(), ("/job:chief/replica:0/task:0/device:GPU:0",)])
def test_without_gpus_of_workers_nothing_is_said_of_devices(names, gpus, log):
    gpus(*names)
    assert device_scope_of_workers() is nullcontext
    assert not log


def test_operations_go_to_the_first_gpu_of_the_worker_that_runs_them(gpus, log):
    gpus(WORKER.format(0, 0), WORKER.format(3, 0))
    assert device_scope_of_workers() is on_gpu
    with tf.Graph().as_default(), on_gpu():
        assert tf.constant(1.0).device == "/device:GPU:0"  # no task: each worker's own
    assert not log


def test_gpus_that_stay_idle_are_named(gpus, log):
    gpus(WORKER.format(0, 0), WORKER.format(1, 0), WORKER.format(1, 1))
    assert device_scope_of_workers() is on_gpu
    assert log == [
        "worker:1 sees 2 GPUs and computes on the first of them: start a worker for each GPU (roles.worker.replicas)"
    ]
