"""Makes a model whose tables are sharded over the ps, saves and exports it, and prints the devices of its variables.

spread.py OUT [CHECKPOINT]

The initial values of its variables are written to OUT/begun.npz, and the saved values to OUT/values.npz: other numbers,
or those of the checkpoint that it starts from.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.variables.sharding import parts

out, *given = map(Path, sys.argv[1:])


def build():
    keras.utils.set_random_seed(3)
    table = keras.layers.Embedding(1001, 6, embeddings_initializer="truncated_normal")
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(50), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.Adagrad(0.1, use_ema=True), "mse")
    return model


with tfdist.scope(placement="greedy", shard=tfdist.ShardRule(min_bytes=1000)):
    step = ModelStep(build())
    step.build((tf.TensorSpec((8, 4), tf.int32), tf.TensorSpec((8, 3), tf.float32)))
    variables = {one.path: one for one in [*step.model.variables, *step.model.optimizer.variables]}
    for folder in given:
        CheckpointFolder(folder).restore(CheckpointFolder(folder).find(1), step)


def write(name):
    np.savez(out / name, **{path: variable.numpy() for path, variable in variables.items()})


out.mkdir(exist_ok=True)
write("begun.npz")
if not given:
    numbers = np.random.default_rng(0)
    for variable in variables.values():
        variable.assign(numbers.integers(0, 1000, variable.shape))
write("values.npz")
CheckpointFolder(out / "checkpoints").save(step, TrainingState(1, 0))
for form in ("saved_model", "keras"):
    tfdist.export(step.model, out / form, format=form, rebuild=build)
print(json.dumps({path: [part.device for part in parts(variable)] for path, variable in variables.items()}))
