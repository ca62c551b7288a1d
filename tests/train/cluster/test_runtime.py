"""What TensorFlow would tell its runtime; the GPUs are made up, the translation is TensorFlow's own."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.resources import Size
from tfdist_cli.train.cluster.runtime import configure_runtime


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
    config = configure_runtime(0.25)
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.25
    assert context.context().config.gpu_options.per_process_gpu_memory_fraction == 0.25
    assert context.context().config.device_count["GPU"] == 2


def test_an_amount_of_each_gpu(gpus):
    config = configure_runtime(Size.parse("4GiB"))
    for options in (config.gpu_options, context.context().config.gpu_options):
        limits = [list(device.memory_limit_mb) for device in options.experimental.virtual_devices]
        assert limits == [[4096.0], [4096.0]]
        assert options.visible_device_list == "0,1"
    assert not config.gpu_options.per_process_gpu_memory_fraction


def test_nothing_is_said_where_nothing_is_wanted(gpus):
    assert not configure_runtime(None).HasField("gpu_options")
    assert not context.context().config.gpu_options.per_process_gpu_memory_fraction


@pytest.mark.parametrize("wanted", [0.5, Size(2**30)])
def test_it_comes_before_anything_else(wanted):
    tf.constant(1)
    with raises(TrainingError, "tensorflow-already-initialized"):
        configure_runtime(wanted)


def test_without_a_gpu_it_does_nothing(monkeypatch):
    monkeypatch.setattr(context, "_context", context.Context())
    assert not configure_runtime(Size(2**30)).gpu_options.experimental.virtual_devices


@pytest.mark.parametrize(("threads", "sleep"), [("1", True), ("4", False), (None, False)])
def test_idle_threads_sleep_where_tasks_share_the_cores(monkeypatch, threads, sleep):
    monkeypatch.setattr(context, "_context", context.Context())
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", threads)
    assert configure_runtime(None).experimental.disable_thread_spinning is sleep
    assert context.context().config.experimental.disable_thread_spinning is sleep


@pytest.mark.parametrize(("exchanges", "planned", "least"), [(True, None, 4), (True, "2", 0), (False, None, 0)])
def test_a_task_of_parameter_servers_never_has_one_inter_op_thread(monkeypatch, exchanges, planned, least):
    """TensorFlow takes a thread for each core, and with one such a task waits for itself for ever."""
    monkeypatch.setattr(context, "_context", context.Context())
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)
    if planned:
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", planned)
    assert configure_runtime(None, exchanges=exchanges).inter_op_parallelism_threads == least
    assert context.context().config.inter_op_parallelism_threads == least


@pytest.mark.parametrize("exchanges", [True, False])
def test_sums_in_loops_of_parameter_servers_are_not_computed_in_temporary_variables(monkeypatch, exchanges):
    monkeypatch.setattr(context, "_context", context.Context())
    options = configure_runtime(None, exchanges=exchanges).graph_options.rewrite_options
    assert (options.memory_optimization == options.NO_MEM_OPT) == exchanges


def test_a_runtime_that_is_in_use_stays_as_it_is(monkeypatch):
    tf.constant(1)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    configure_runtime(None)
    assert not context.context().config.experimental.disable_thread_spinning
