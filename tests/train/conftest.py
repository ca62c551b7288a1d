"""Each test trains in a process that is in no cluster, whatever the one that runs the tests is in."""

import logging

import keras
import pytest

from tfdist_cli.train import cluster


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("TF_CONFIG", "TFDIST_STRATEGY", "TFDIST_RUN_DIR", "TFDIST_RECORDS", "TFDIST_START_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster, "_joined", None)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def log():
    """What tfdist says, line by line."""
    lines = []

    class Keeper(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, keeper = logging.getLogger("tfdist"), Keeper()
    logger.addHandler(keeper)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(before)
    logger.removeHandler(keeper)
