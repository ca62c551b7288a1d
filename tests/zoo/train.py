"""Trains models of the zoo one after another with one engine, and writes the result of each.

train.py ENGINE FOLDER CASE...

It writes `CASE.npz` to the folder, or `CASE.json` with the error. Before that it creates an empty file `CASE`, which
shows that the training of this model has started.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tests.zoo.case import BATCH, EXAMPLES, Case
from tests.zoo.models import CASES
from tfdist_cli.errors import TfdistError

EPOCHS = 2
SEED = 11
STEPS_PER_EXECUTION = {"async": 2, "mirrored2": 3}
"""The default is 1. The numbers divide an epoch, so that only one function is traced."""


def main() -> None:
    engine, folder, *names = sys.argv[1:]
    for name in names:
        path = Path(folder, name)
        path.touch()
        try:
            written = trained(engine, CASES[name])
        except TfdistError as error:
            write_error(path, error, error.code)
        except Exception as error:  # noqa: BLE001 it is written, and a new cluster is started
            traceback.print_exception(error)
            write_error(path, error, None)
            exit_now(1)
        else:
            temporary = path.with_suffix(".tmp.npz")
            np.savez(temporary, **written)
            temporary.replace(path.with_suffix(".npz"))


def exit_now(code: int) -> None:
    """Exits without cleanup, which may block after an unknown error."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_error(path: Path, error: Exception, code: str | None) -> None:
    """Writes an error.

    Args:
        path: the path of the model's results, without a suffix.
        error: the error.
        code: its code; None if it is not a `TfdistError`.
    """
    found = {"type": type(error).__name__, "message": str(error), "code": code}
    temporary = path.with_suffix(".tmp.json")
    temporary.write_text(json.dumps(found))
    temporary.replace(path.with_suffix(".json"))


def trained(engine: str, wanted: Case) -> dict[str, np.ndarray]:
    """Trains a model; returns the variables of the model and its optimizer, and the history."""
    keras.backend.clear_session()
    keras.config.set_dtype_policy(wanted.policy)
    arrays = wanted.data()
    keras.utils.set_random_seed(SEED)
    pipeline = (wanted.pipeline or wanted.prepare or (lambda: None))()
    checked = wanted.validation() if wanted.validation else scored(arrays, wanted.scored)
    mapped = None if wanted.validation else pipeline
    if engine.startswith("keras"):
        model = wanted.build()
        if tf.config.list_physical_devices("GPU"):
            model.jit_compile = False  # XLA's search for a GPU's fastest kernels takes minutes
        size = BATCH * int(engine.removeprefix("keras"))
        validation = {"validation_data": batches(checked, mapped, BATCH)} if wanted.scored else {}
        history = model.fit(batches(arrays, pipeline, size), epochs=EPOCHS, shuffle=False, verbose=0,
                            **validation, **wanted.fit())  # fmt: skip
    else:
        with tfdist.scope():
            model = wanted.build()
        share = "copy" if wanted.copies and engine != "async2" else "split"
        given: dict[str, Any] = {"updates": tfdist.Updates(mode="sync")} if engine == "sync" else {}
        if wanted.scored:
            given["validation_data"] = lambda shard: batches(checked, mapped, BATCH, shard)
        history = tfdist.fit(
            model,
            lambda shard: batches(arrays, pipeline, BATCH, shard),
            epochs=EPOCHS,
            steps_per_execution=STEPS_PER_EXECUTION.get(engine, 1),
            share=share,
            **given,
            **wanted.fit(),
        )
    return outcome(model, history)


def scored(arrays: Any, examples: int) -> Any:
    """Returns the examples of the validation."""
    return tf.nest.map_structure(lambda array: array[:examples], arrays)


def batches(arrays: Any, pipeline: Any, size: int, shard: tfdist.Shard | None = None) -> tf.data.Dataset:
    """Returns the arrays in batches, in their order; only a shard of them if `shard` is given."""
    data = tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(as_tensor, arrays))
    if shard:
        data = data.shard(shard.count, shard.index)
    data = data.batch(size)
    return data.map(pipeline) if pipeline else data


def as_tensor(array: np.ndarray) -> Any:
    """Converts texts to strings."""
    return array.astype(str) if array.dtype == object else array


def outcome(model: keras.Model, history: Any) -> dict[str, np.ndarray]:
    """Returns everything that is compared, by name."""
    generators = {id(generator.state) for layer in model._flatten_layers() for generator in layer._seed_generators}
    found = {}
    of_optimizers = [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    for number, variable in enumerate([*model.variables, *of_optimizers]):
        kind = "seed" if id(variable) in generators else "variable"
        value = variable.numpy()
        found[f"{kind}/{number:03}/{variable.path}"] = value if value.dtype.kind in "biuf" else np.float64(value)
    for name, values in history.history.items():
        found[f"history/{name}"] = np.array(values, np.float64)
    return found


def optimizers(model: keras.Model) -> list[Any]:
    """Returns the compiled optimizer, and those that are attributes of the model."""
    found = [model.optimizer, *(each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer))]
    return list({id(optimizer): optimizer for optimizer in found}.values())


assert EXAMPLES % (2 * BATCH) == 0
if __name__ == "__main__":
    main()
