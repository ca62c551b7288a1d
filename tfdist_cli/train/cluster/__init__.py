"""Joins a cluster: rendezvous, TensorFlow's server, GPUs, tf.data's service, liveness of peers."""
