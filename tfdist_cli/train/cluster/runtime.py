"""What TensorFlow's runtime is told before it makes its context or its server: the GPUs' memory, and idle threads."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.resources import MIN_INTER_OP_THREADS, Size
from tfdist_cli.train.tf_compat.eager_context import gpu_options, is_initialized, set_config


def configure_runtime(gpu_memory: float | Size | None, *, exchanges: bool = False) -> tf.compat.v1.ConfigProto:
    """Holds this process to its part of each GPU that it sees, and of the processor.

    TensorFlow's threads look for work for a while before they sleep. Where several tasks share the cores, so that
    this one has a single thread for an operation (`TF_NUM_INTRAOP_THREADS`), that takes a tenth of the time from
    threads which have work.

    Args:
        gpu_memory: a fraction of a GPU's memory, or an amount; None leaves TensorFlow its own way.
        exchanges: whether this is a task of parameter servers: with one inter-op thread it would wait for itself, and
            where nobody has planned the threads TensorFlow takes one on a machine with one core.

    Returns:
        The same for a `tf.distribute.Server`, which has devices of its own and doesn't ask the context.

    Raises:
        TrainingError: TensorFlow is in use already, too late to limit the memory.
    """
    config = tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = os.environ.get("TF_NUM_INTRAOP_THREADS") == "1"
    if exchanges and "TF_NUM_INTEROP_THREADS" not in os.environ:
        config.inter_op_parallelism_threads = max(MIN_INTER_OP_THREADS, os.cpu_count() or 1)
    in_use = is_initialized()
    if gpu_memory is not None and in_use:
        raise TrainingError(
            "TensorFlow was in use before the memory of its GPUs was limited",
            hint="enter tfdist.scope(), or call tfdist.is_chief(), before anything makes a tensor, dataset or variable",
        )
    if isinstance(gpu_memory, float):
        # tf.config knows no fraction, and does not say how much memory a GPU has.
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
