"""A `train_step` or `test_step` of the model's own: the updates of its optimizers, and the logs that it returns."""
