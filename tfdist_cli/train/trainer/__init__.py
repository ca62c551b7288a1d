"""`fit` and `evaluate`: configuration, the training loop, resuming, reporting."""
