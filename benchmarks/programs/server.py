"""A TensorFlow server that runs what another process asks for: `python -m benchmarks.programs.server SPEC JOB`."""

import json
import sys

import tensorflow as tf

if __name__ == "__main__":
    spec, job = sys.argv[1:]
    tf.distribute.Server(json.loads(spec), job_name=job, task_index=0, protocol="grpc").join()
