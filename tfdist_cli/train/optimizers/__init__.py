"""Updates of variables by the model's own optimizer, with TensorFlow's fused kernels where possible."""
