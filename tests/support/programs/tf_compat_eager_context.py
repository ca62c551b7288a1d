"""The coordination service of a `MultiWorkerMirroredStrategy` with one task, and what is older than the cluster."""

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from tfdist_cli.train.tf_compat import eager_context
from tfdist_cli.train.tf_compat.data import recreated_on, replace_older_datasets
from tfdist_cli.train.tf_compat.op_errors import is_of_older_resource

OWN = "/job:chief/replica:0/task:0"

with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"chief": [address]}, "task": {"type": "chief", "index": 0}})
before = tf.constant(3.0)
shared = tf.data.Dataset.range(6).map(lambda number: 3 * number)
numbers = tf.data.Dataset.range(6).shuffle(6).map(lambda number: 2 * number)
variable = tf.Variable(1.0)
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), -1)
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
assert eager_context.cluster_addresses() == []  # mirrored workers drive no cluster

replace_older_datasets(lambda older: recreated_on(older, "/device:CPU:0"))
assert sorted(numbers.map(lambda number: number + 1).prefetch(1).as_numpy_iterator()) == [1, 3, 5, 7, 9, 11]
assert sorted(numbers.as_numpy_iterator()) == [0, 2, 4, 6, 8, 10]

begun, used = threading.Event(), threading.Event()


def made_again(older):
    begun.set()
    used.wait(0.5)  # another thread uses the dataset meanwhile, and waits until it is made
    return recreated_on(older, "/device:CPU:0")


def use_meanwhile():
    begun.wait()
    try:
        return list(shared.as_numpy_iterator())
    finally:
        used.set()


replace_older_datasets(made_again)
with ThreadPoolExecutor(1) as thread:
    meanwhile = thread.submit(use_meanwhile)
    assert list(shared.as_numpy_iterator()) == meanwhile.result() == [0, 3, 6, 9, 12, 15]
for use in (variable.read_value, table.size):
    with pytest.raises(tf.errors.OpError) as failed:
        use()
    assert is_of_older_resource(failed.value)
print("done", flush=True)
os._exit(0)  # the service would wait for a task that has left
