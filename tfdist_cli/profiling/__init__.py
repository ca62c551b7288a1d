"""Reads the profiles of TensorFlow's profiler, without TensorFlow."""
