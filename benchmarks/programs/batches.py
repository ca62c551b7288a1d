"""The data as TensorFlow's datasets."""

import json
import os
from typing import Any

import tensorflow as tf

from benchmarks.data import fields
from benchmarks.sizes import BATCHES
from benchmarks.workload import Workload


def batches(workload: Workload) -> tf.data.Dataset:
    """Returns whole batches in memory, repeated forever: reading them costs next to nothing.

    With parameter servers each worker takes all batches in orders of its own. Mirrored workers take turns: a batch of
    each is together what one process takes with batches of twice the size. A chief without ps takes all batches.
    """
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
    size = workload.size
    tensors = {}
    for name, (dtype, shape) in fields(size).items():
        # Operations of the dataset, which run where it is read: its content is not part of any graph.
        values = tf.io.decode_raw(tf.io.read_file(f"{workload.data}/{name}"), dtype)
        count = size.batch * BATCHES // workload.batch_size
        tensors[name] = tf.reshape(values, [count, workload.batch_size, *shape])
    *inputs, target = tensors
    examples: Any = tensors[inputs[0]] if len(inputs) == 1 else {name: tensors[name] for name in inputs}
    data = tf.data.Dataset.from_tensor_slices((examples, tensors[target]))
    if cluster.get("cluster", {}).get("ps"):
        data = data.shuffle(BATCHES)
    elif cluster and not cluster["cluster"].get("chief"):
        data = data.shard(len(cluster["cluster"]["worker"]), cluster["task"]["index"])
    return data.repeat().prefetch(tf.data.AUTOTUNE)
