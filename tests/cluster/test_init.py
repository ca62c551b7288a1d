"""What `tfdist init` writes is checked and launched as it is."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = """
import keras
import numpy as np

x = np.random.default_rng(0).random((256, 3), np.float32)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(x, x[:, :1], epochs=2, verbose=0)
"""


def tfdist(folder, *arguments):
    argv = [sys.executable, "-m", "tfdist_cli", *arguments]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("start", "epochs"),
    [
        pytest.param(["project"], 5, id="recipe", marks=pytest.mark.rotates(5, 1)),
        pytest.param(["project", "--program"], 5, id="program", marks=pytest.mark.rotates(5, 3)),
        pytest.param(["project", "--from", "train.py"], 2, id="script", marks=pytest.mark.rotates(5, 0)),
    ],
)
def test_init_check_launch(tmp_path, start, epochs):
    (tmp_path / "train.py").write_text(SCRIPT)
    written = tfdist(tmp_path, "init", *start)
    assert written.returncode == 0, written.stderr
    check, launch = (shlex.split(line)[1:] for line in written.stdout.partition("Next:\n")[2].splitlines())
    checked = tfdist(tmp_path, *check)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    trained = tfdist(tmp_path, launch[0], "--quiet", "--json", *launch[1:])
    assert trained.returncode == 0, trained.stderr
    lines = (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["epoch"] == epochs
