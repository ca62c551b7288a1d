"""Applies gradients with the model's own optimizer, by TensorFlow's kernels where one fits."""
