"""How much of its GPUs' memory a process takes: settled before TensorFlow makes its context or its server."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.resources import Size


def limit_gpu_memory(wanted: float | Size | None) -> tf.compat.v1.ConfigProto | None:
    """Holds this process to its part of each GPU that it sees.

    Args:
        wanted: a fraction of a GPU's memory, or an amount; None leaves TensorFlow its own way.

    Returns:
        The same for a `tf.distribute.Server`, which has devices of its own and doesn't ask the context; None when
        there is nothing to say.

    Raises:
        TrainingError: TensorFlow is in use already.
    """
    if wanted is None:
        return None
    if context.context()._context_handle is not None:
        raise TrainingError(
            "TensorFlow was in use before the memory of its GPUs was limited",
            hint="enter tfdist.scope(), or call tfdist.is_chief(), before anything makes a tensor, dataset or variable",
        )
    if isinstance(wanted, float):
        # tf.config knows no fraction, and does not say how much memory a GPU has. The context keeps what it is given.
        fraction = tf.compat.v1.GPUOptions(per_process_gpu_memory_fraction=wanted)
        context.context()._config = tf.compat.v1.ConfigProto(gpu_options=fraction)
    else:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(wanted.mib)])
    return tf.compat.v1.ConfigProto(gpu_options=context.context().config.gpu_options)
