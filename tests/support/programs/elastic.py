"""A training whose workers change: each task of a parameter server cluster, started by itself.

Arguments: the epochs, the examples, and JSON of the update rule.
"""

import json
import logging
import sys

import keras
import numpy as np

import tfdist_cli as tfdist

logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")


class Batches(keras.callbacks.Callback):
    """Prints the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch} done", file=sys.stderr, flush=True)


def main(epochs, examples, updates):
    with tfdist.scope():
        model = keras.Sequential(
            [
                keras.Input([64]),
                keras.layers.Dense(500, activation="relu"),
                keras.layers.Dense(500, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    x, y = random.normal(size=[examples, 64]).astype("float32"), random.integers(0, 10, examples)
    history = tfdist.fit(
        model,
        (x, y),
        batch_size=64,
        epochs=epochs,
        callbacks=[Batches()],
        updates=tfdist.Updates(**json.loads(updates)),
    )
    iterations = int(model.optimizer.iterations.numpy())
    print(json.dumps({"iterations": iterations, "loss": history.history["loss"]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
