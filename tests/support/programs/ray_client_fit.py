"""A user's program: trains on Parquet files with Ray Client.

Arguments: the address of the client server, and the store, in which it writes the files. It prints what it has found as
JSON.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import ray.data
from pyarrow import parquet

import tfdist_cli as tfdist
from tfdist_cli.errors import TfdistError

address, store = sys.argv[1], Path(sys.argv[2])


def refused(fit, table):
    """The code of the error for a table."""
    try:
        fit(table)
    except TfdistError as error:
        return error.code
    return None


if __name__ == "__main__":
    ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    x = np.random.default_rng(0).random((512, 8)).astype(np.float32)
    (rows := store / "rows").mkdir(parents=True)
    names = [f"x{column}" for column in range(8)]
    table = pa.table({**{name: x[:, column] for column, name in enumerate(names)}, "y": x[:, :4].argmax(axis=1)})
    parquet.write_table(table, rows / "0.parquet")
    model = "tests.support.table_models:four_classes"
    fit = partial(tfdist.ray.fit, model, features=names, label="y", store=store / "runs", batch_size=16)
    codes = [refused(fit, rows), refused(partial(fit, address=address), ray.data.range(3))]
    trained = fit(rows, address=address)
    print(json.dumps({"refused": codes, "outputs": trained.load().predict(x, verbose=0).shape}))
