"""Two trainings of one model whose workers change between them: each task of a cluster, started by itself.

Arguments: the mode of updates, and a file, for which the program waits between the trainings.
"""

import sys
import threading
from pathlib import Path

import keras
import numpy as np

import tfdist_cli as tfdist


def main(mode, file):
    with tfdist.scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=[480, 8]).astype("float32")
    for number in range(2):
        if number:
            print("trained", flush=True)
            pause = threading.Event()
            while not Path(file).exists():
                pause.wait(0.05)  # no event announces that another process makes a file
        tfdist.fit(model, x, x[:, :1], 16, epochs=2, updates=tfdist.Updates(mode=mode))
    print(int(model.optimizer.iterations.numpy()), tfdist.evaluate(model, x, x[:, :1])["loss"] > 0)


main(*sys.argv[1:])
