"""A training whose workers change: each task of a parameter server cluster, started by itself.

Arguments: a file, which ends the training at the end of an epoch once it exists; and JSON of the update rule.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist_cli as tfdist


class StopAtFile(keras.callbacks.Callback):
    """Ends the training when a file exists."""

    def __init__(self, path):
        super().__init__()
        self._path = Path(path)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self._path.exists()


def main(file, updates):
    with tfdist.scope():
        hidden = [keras.layers.Dense(100, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input([32]), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    # Full batches only, for two, three and four workers.
    x, y = random.normal(size=[9600, 32]).astype("float32"), random.integers(0, 10, 9600)
    tfdist.fit(
        model,
        (x, y),
        batch_size=16,
        epochs=2000,
        callbacks=[StopAtFile(file)],
        updates=tfdist.Updates(**json.loads(updates)),
    )
    print(int(model.optimizer.iterations.numpy()))


if __name__ == "__main__":
    main(*sys.argv[1:])
