"""Trains on digits by one update rule after the other on its cluster, and prints test accuracies.

convergence.py RULE...
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import keras

import tfdist_cli as tfdist
from tfdist_cli.datasets import digits
from tfdist_cli.spec.sections.updates import LearningRate, Updates
from tfdist_cli.train.data.pipeline import Pipeline

BATCH, BATCHES = 32, 44
RULES = {
    "async": {},
    "push 4": {"updates": Updates(push_every=4), "learning_rate": LearningRate(scale="sqrt")},
    "local 20": {"updates": Updates(local_steps=20)},
    "compensated": {"updates": Updates(delay_compensation=0.1)},
    "prefetch": {"updates": Updates(prefetch=True)},
    "bfloat16": {"wire": "bfloat16"},
    "float16": {"wire": "float16"},
    "sync 2 of 2": {"updates": Updates(mode="sync"), "learning_rate": LearningRate(scale="sqrt")},
    "sync 1 of 2": {"updates": Updates(mode="sync", aggregate=1)},
    "bounded 2": {"updates": Updates(mode="bounded", staleness=2), "learning_rate": LearningRate(scale="sqrt")},
}
TOGETHER = {"push 4": 4, "sync 2 of 2": 2, "bounded 2": 2}
"""Batches in an update."""
EPOCHS = {"push 4": 25, "sync 1 of 2": 25, "sync 2 of 2": 20, "bounded 2": 20}
"""Epochs for rules that make fewer updates of the same examples, or use older parameters; 15 for the others."""
recipe = Path(__file__).parents[3] / "recipes" / "mlp.py"
spec = importlib.util.spec_from_file_location("mlp", recipe)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def data(shard):
    return Pipeline(BATCH).batches(module.dataset({"mnist": None}, "train", shard), shard)


accuracies = {}
for rule in sys.argv[1:]:
    together = TOGETHER.get(rule, 1)
    steps = EPOCHS.get(rule, 15) * BATCHES
    updates = steps // together
    params: dict[str, Any] = {"mnist": None, "hidden": [500, 500], "dropout": 0.3, "optimizer": "adam"}
    params |= {"learning_rate": 0.002, "decay_steps": updates}
    with tfdist.scope():
        keras.utils.set_random_seed(5)
        model = module.model(params)
    if rule != "push 4":  # a global step of the others is an update
        steps = updates
    history = tfdist.fit(
        model, data, steps_per_epoch=steps, steps_per_execution=10, validation_data=digits.load("test"), **RULES[rule]
    )
    accuracies[rule] = history.history["val_accuracy"][-1]
print(json.dumps(accuracies))
