"""What TensorFlow would tell its runtime of GPUs; the devices are made up, the translation is TensorFlow's own."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.resources import Size
from tfdist_cli.train.gpu_memory import limit_gpu_memory


@pytest.fixture
def gpus(monkeypatch):
    """A context that has made nothing yet, on a machine with two GPUs."""
    fresh = context.Context()
    monkeypatch.setattr(context, "_context", fresh)
    fresh._initialize_physical_devices()
    for number in range(2):
        gpu = context.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU")
        fresh._physical_devices.append(gpu)
        fresh._visible_device_list.append(gpu)
        fresh._memory_growth_map[gpu] = None
    return fresh


def test_a_fraction(gpus):
    config = limit_gpu_memory(0.25)
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.25
    assert context.context().config.gpu_options.per_process_gpu_memory_fraction == 0.25
    assert context.context().config.device_count["GPU"] == 2


def test_an_amount_of_each_gpu(gpus):
    config = limit_gpu_memory(Size.parse("4GiB"))
    for options in (config.gpu_options, context.context().config.gpu_options):
        limits = [list(device.memory_limit_mb) for device in options.experimental.virtual_devices]
        assert limits == [[4096.0], [4096.0]]
        assert options.visible_device_list == "0,1"
    assert not config.gpu_options.per_process_gpu_memory_fraction


def test_nothing_is_said_where_nothing_is_wanted(gpus):
    assert limit_gpu_memory(None) is None
    assert not context.context().config.gpu_options.per_process_gpu_memory_fraction


@pytest.mark.parametrize("wanted", [0.5, Size(2**30)])
def test_it_comes_before_anything_else(wanted):
    tf.constant(1)
    with pytest.raises(TrainingError, match="in use before the memory of its GPUs was limited"):
        limit_gpu_memory(wanted)


def test_without_a_gpu_it_does_nothing(monkeypatch):
    monkeypatch.setattr(context, "_context", context.Context())
    assert not limit_gpu_memory(Size(2**30)).gpu_options.experimental.virtual_devices
