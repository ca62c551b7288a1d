"""A TensorFlow server that runs what another process asks for: `python -m benchmarks.programs.server SPEC JOB`."""

import json
import sys

import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory import tensors

if __name__ == "__main__":
    spec, job = sys.argv[1:]
    tensors.register()
    tf.distribute.Server(json.loads(spec), job_name=job, task_index=0, protocol="grpc").join()
