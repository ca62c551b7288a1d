"""When gradients of several workers are applied: one module per update rule."""
