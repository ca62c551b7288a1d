"""Configures TensorFlow's runtime before it creates its context or server: memory of GPUs, and threads."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.resources import MIN_INTER_OP_THREADS, Size
from tfdist_cli.train.tf_compat.eager_context import gpu_options, is_initialized, set_config


def configure_runtime(gpu_memory: float | Size | None, *, exchanges: bool = False) -> tf.compat.v1.ConfigProto:
    """Limits this process to its share of the GPUs' memory and of the processor.

    TensorFlow's idle threads spin before they sleep. If several tasks share the cores, so that this one has a single
    thread per operation (`TF_NUM_INTRAOP_THREADS`), spinning takes a tenth of the time from threads with work.

    Args:
        gpu_memory: a fraction of a GPU's memory, or an amount; None sets no limit.
        exchanges: whether this is a task of a parameter server cluster. With one inter-op thread it would deadlock;
            by default, TensorFlow uses one on a machine with one core.

    Returns:
        The configuration for a `tf.distribute.Server`, which has its own devices and ignores the context's.

    Raises:
        TrainingError: TensorFlow is initialized, so that the memory cannot be limited any more.
    """
    config = tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = os.environ.get("TF_NUM_INTRAOP_THREADS") == "1"
    if exchanges and "TF_NUM_INTEROP_THREADS" not in os.environ:
        config.inter_op_parallelism_threads = max(MIN_INTER_OP_THREADS, os.cpu_count() or 1)
    if exchanges:
        # TensorFlow's memory optimizer takes a CPU to have 256 MiB. If a function needs more, it computes sums in
        # temporary variables. In a loop on a worker, these still exist at the next run of the function, which fails.
        options = config.graph_options.rewrite_options
        options.memory_optimization = options.NO_MEM_OPT
    in_use = is_initialized()
    if gpu_memory is not None and in_use:
        raise TrainingError(
            "the memory of GPUs cannot be limited, since TensorFlow is initialized already",
            code="tensorflow-already-initialized",
            hint="enter tfdist.scope(), or call tfdist.is_chief(), before you create any tensor, dataset or variable",
        )
    if isinstance(gpu_memory, float):
        # tf.config takes no fraction, and does not return how much memory a GPU has.
        config.gpu_options.per_process_gpu_memory_fraction = gpu_memory
    elif gpu_memory is not None:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(gpu_memory.mib)])
    if in_use:
        return config
    set_config(config)
    server = tf.compat.v1.ConfigProto()
    server.CopyFrom(config)
    if gpu_memory is not None:
        server.gpu_options.CopyFrom(gpu_options())
    return server
