"""A compiled Keras model as pure functions: train step, losses, metrics, evaluation, random numbers."""
