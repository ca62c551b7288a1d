"""The coordination service of a `MultiWorkerMirroredStrategy` with one task."""

import json
import os
import socket

import tensorflow as tf

from tfdist_cli.train.tf_compat import eager_context

OWN = "/job:chief/replica:0/task:0"

with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"chief": [address]}, "task": {"type": "chief", "index": 0}})
before = tf.constant(3.0)
try:
    tf.distribute.MultiWorkerMirroredStrategy()
except RuntimeError:
    eager_context.configure_late_collectives("/job:chief/task:0", OWN)
else:
    raise AssertionError("TensorFlow accepts a runtime that has started")
eager_context.configure_coordination_service(OWN, {"chief": 1}, 30)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.reduce("sum", strategy.run(lambda: before + 1.0), axis=None).numpy() == 4.0
eager_context.set_shared_value("tfdist/test", "yes")
assert eager_context.shared_value("tfdist/test", 10) == "yes"
try:
    eager_context.shared_value("tfdist/nobody", 0.2)
except tf.errors.OpError:
    pass
else:
    raise AssertionError("a value that nobody stores")
assert eager_context.answers(OWN, 5)
print("done", flush=True)
os._exit(0)  # the service would wait for a task that has left
