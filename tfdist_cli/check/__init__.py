"""Checks of a job before it starts that need no TensorFlow: the source of the recipe's module, and Keras's backend."""
