"""A user's program: trains on a dataset of Ray.

Arguments: the address of the cluster, the store, and the number of epochs. It prints what it has found as JSON.
"""

import json
import os
import sys
from functools import partial

import numpy as np
import ray
import ray.data

import tfdist_cli as tfdist
from tests.support.table_models import four_classes
from tfdist_cli.errors import TfdistError

address, store, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])


def columns(seed, batch):
    """Returns eight numbers in an array and two columns, their class, and columns that are refused."""
    x = np.random.default_rng(seed).random((2001, 8)).astype(np.float32)[batch["id"]]
    y = x[:, :4].argmax(axis=1)
    ragged = np.empty(len(x), object)
    ragged[:] = [np.ones(1 + (row > 0)) for row in y]
    refused = {
        "name": np.full(len(x), "text"),
        "null": np.array([1.0 if row else None for row in y], object),
        "ragged": ragged,
    }
    return {"array": x[:, :6], "a": x[:, 6], "b": x[:, 7], "y": y, **refused}


def dataset(seed):
    """2001 rows, which Ray's workers compute."""
    return ray.data.range(2001, override_num_blocks=4).map_batches(partial(columns, seed))


def refused(rows, feature):
    """The code of the error for a column."""
    try:
        tfdist.ray.fit(four_classes, rows, features=[feature], label="y", store=store, shuffle=False)
    except TfdistError as error:
        return error.code
    return None


if __name__ == "__main__":
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = dataset(0).materialize()
    codes = {name: refused(rows, name) for name in ("none", "name", "null", "ragged")}
    trained = tfdist.ray.fit(
        "tests.support.table_models:four_classes",
        rows,
        features=["array", "a", "b"],
        label="y",
        model_args={"units": 16},
        validation_data=dataset(1),
        epochs=epochs,
        batch_size=16,
        store=store,
        set={"checkpoint.every_steps": 100},
    )
    model, test = trained.load(), columns(2, {"id": np.arange(2001)})
    outputs = model.predict_on_batch(np.column_stack([test["array"], test["a"], test["b"]]))
    accuracy = float(np.mean(outputs.argmax(axis=1) == test["y"]))
    print(json.dumps({"refused": codes, "accuracy": accuracy, "path": str(trained.path)}))
