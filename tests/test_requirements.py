"""Another backend of Keras is an error before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli import requirements
from tfdist_cli.doctor import probe
from tfdist_cli.errors import UsageError
from tfdist_cli.requirements import keras_backend, require_backend, require_tensorflow, require_trackers


def config(folder, text):
    (folder / "keras.json").write_text(text)
    return {"KERAS_HOME": str(folder)}


def environments(folder):
    """Environments, the backend that Keras uses in them, and where it is written."""
    file = str(folder / "keras.json")
    yield {"KERAS_BACKEND": "jax"}, "jax", "KERAS_BACKEND"
    yield {"KERAS_BACKEND": "tensorflow", **config(folder, '{"backend": "jax"}')}, "tensorflow", "KERAS_BACKEND"
    yield config(folder, '{"backend": "torch"}'), "torch", file
    yield config(folder, '{"floatx": "float32"}'), "tensorflow", file
    for unread in ("", "[]", "{"):
        yield config(folder, unread), "tensorflow", "KERAS_BACKEND"


def test_the_backend_is_found_where_keras_finds_it(tmp_path):
    for environ, backend, where in environments(tmp_path):
        assert keras_backend(environ) == probe.keras_backend(environ) == (backend, where)


def test_another_backend_is_named_with_its_place(tmp_path):
    with raises(UsageError, "keras-backend") as raised:
        require_tensorflow({"KERAS_BACKEND": "jax"})
    assert "KERAS_BACKEND" in raised.value.message
    assert "unset KERAS_BACKEND" in str(raised.value.hint)
    with raises(UsageError, "keras-backend") as raised:
        require_backend(config(tmp_path, '{"backend": "torch"}'))
    assert "keras.json" in raised.value.message
    assert "torch" in raised.value.message
    assert '"backend": "tensorflow"' in str(raised.value.hint)
    require_backend({"KERAS_BACKEND": "tensorflow"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["-c", "import tfdist_cli as tfdist; tfdist.fit"],
        ["-m", "tfdist_cli", "launch", "configs/local.yaml"],
        ["-m", "tfdist_cli", "role", "--task", "chief:0", "--cluster", "configs/local.yaml"],
    ],
)
def test_programs_and_commands_report_it(argv, tmp_path):
    environ = {**os.environ, "KERAS_BACKEND": "jax", "TFDIST_RUN_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, *argv], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode
    assert "KERAS_BACKEND" in ended.stderr
    assert "jax" in ended.stderr
    assert "No module named" not in ended.stderr


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_tensorboard_callback_works_after_the_installation(extra):
    """TensorFlow 2.21 does not bring the package that its summaries are written by."""
    toml = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = toml.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert any(package.startswith("tensorboard") for package in project["optional-dependencies"][extra])


def test_trackers_whose_library_or_server_is_missing(monkeypatch):
    installed = {"tensorboard", "mlflow"}
    monkeypatch.setattr(requirements, "_is_installed", installed.__contains__)
    require_trackers(["csv", "tensorboard"])
    with raises(UsageError, "no-tracker-library"):
        require_trackers(["csv", "wandb"])
    with raises(UsageError, "unknown-tracker"):
        require_trackers(["tensorbord"])
    with raises(UsageError, "no-tracking-server"):
        require_trackers(["mlflow"], {})
    require_trackers(["mlflow"], {"MLFLOW_TRACKING_URI": "http://localhost:5000"})
    installed.add("sqlalchemy")
    require_trackers(["mlflow"], {})


def test_a_folder_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "a_tracker_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not requirements._is_installed("a_tracker_folder")
    assert requirements._is_installed("json")
