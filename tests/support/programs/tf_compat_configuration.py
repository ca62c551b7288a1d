"""The configuration of TensorFlow's context, before it has devices."""

import tensorflow as tf

from tfdist_cli.train.tf_compat import eager_context

assert not eager_context.is_initialized()
config = tf.compat.v1.ConfigProto()
config.experimental.disable_thread_spinning = True
config.gpu_options.per_process_gpu_memory_fraction = 0.25
eager_context.set_config(config)
assert eager_context.gpu_options().per_process_gpu_memory_fraction == 0.25
tf.constant(1)
assert eager_context.is_initialized()
print("done")
