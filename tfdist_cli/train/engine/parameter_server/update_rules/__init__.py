"""When gradients of several workers are applied: one module per rule, and what rules share."""
