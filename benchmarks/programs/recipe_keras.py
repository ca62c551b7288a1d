"""Keras 3's own `Model.fit` of a recipe in one process: `python -m benchmarks.programs.recipe_keras RECIPE STEPS FILE`.

It appends a line to FILE after each STEPS steps: their number, and the metrics of the test data.
"""

import json
import sys
from pathlib import Path

import keras

import tfdist_cli as tfdist
from benchmarks.workload import FOREVER
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.task.module import RecipeModule

recipe, steps, file = load_recipe(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
module, batch_size = RecipeModule.load(recipe), recipe.train.batch_size


def ended(epoch: int, logs: dict[str, float]) -> None:
    """Writes the line of an epoch."""
    values = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
    with file.open("a", encoding="utf-8") as output:
        print(json.dumps({"step": (epoch + 1) * steps, "split": "test", "values": values}), file=output)


module.model().fit(
    module.dataset("train", tfdist.Shard()).repeat().batch(batch_size).prefetch(2),
    epochs=FOREVER,
    steps_per_epoch=steps,
    validation_data=module.dataset("test", tfdist.Shard()).batch(batch_size),
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=ended)],
    verbose=0,
)
