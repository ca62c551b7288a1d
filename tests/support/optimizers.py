"""All optimizers of Keras, and all options that change an update."""

import keras

optimizers, schedules = keras.optimizers, keras.optimizers.schedules

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: optimizers.Lion(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "global clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.02),
    "weight decay": lambda: optimizers.SGD(0.1, weight_decay=0.05),
    "average": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "average now and then": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "loss scale": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
    "dynamic loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=4
    ),
    "exponential decay": lambda: optimizers.Adam(schedules.ExponentialDecay(0.05, 3, 0.5, staircase=True)),
    "cosine with warm-up": lambda: optimizers.SGD(schedules.CosineDecay(0.0, 10, warmup_target=0.2, warmup_steps=3)),
    "rate by a function": lambda: optimizers.SGD(lambda: 0.05),
}
if hasattr(optimizers, "MultiOptimizer"):  # newer than Keras 3.12
    OPTIMIZERS["several"] = lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Adam(0.01, clipnorm=0.1), {".*kernel": optimizers.SGD(0.1, momentum=0.9, use_ema=True)}
        )
    )
if keras.__version__.startswith("3.12."):
    del OPTIMIZERS["muon"]  # this version, the last one for Python 3.10, cannot train with it on TensorFlow
