"""How TensorFlow sums between GPUs, and what that needs."""

import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.train.cluster import tensorflow_setup


@pytest.mark.parametrize(
    ("gpus", "installed", "way"), [(0, False, "AUTO"), (1, True, "AUTO"), (1, False, "RING"), (2, False, "RING")]
)
def test_gpus_are_summed_by_tensorflows_ring_without_nccl(gpus, installed, way, monkeypatch, log):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["gpu"] * gpus)
    monkeypatch.setattr(tensorflow_setup, "has_library", lambda name: installed and name == "nccl")
    assert tensorflow_setup.communication_options().implementation.name == way
    assert len(log) == (way == "RING")
    assert all("NCCL" in line for line in log)


@pytest.mark.parametrize(("gpus", "code"), [(0, "nccl-without-gpu"), (1, "nccl-not-installed")])
def test_nccl_needs_gpus_and_its_library(gpus, code, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["gpu"] * gpus)
    monkeypatch.setattr(tensorflow_setup, "has_library", lambda name: False)
    with raises(UsageError, code):
        tensorflow_setup.configure(Environment("multi_worker_mirrored", communication="nccl"))
