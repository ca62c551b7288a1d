"""Each test trains in a process that is in no cluster, with few steps in a function."""

import logging
import subprocess

import keras
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster import join
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.variables.placement import Placement, PlacementRules


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in (
        "TF_CONFIG",
        "TFDIST_STRATEGY",
        "TFDIST_COMMUNICATION",
        "TFDIST_RUN_DIR",
        "TFDIST_RECORDS",
        "TFDIST_START_TIMEOUT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(join, "_joined", None)
    for engine in (MirroredEngine, ParameterServerEngine):
        monkeypatch.setattr(engine, "max_steps_per_execution", 2)  # tracing is most of the time of a short training
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


@pytest.fixture
def servers():
    """Makes a strategy of so many ps that are all this process: `servers(3, shard=ShardRule(min_bytes=100))`."""

    def make(count, **rules):
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        extended = strategy.extended
        create = extended._create_variable
        extended._num_ps, extended._variable_count = count, 0
        extended._create_var_creator = lambda creator, **_: creator
        extended._create_variable_round_robin = create
        extended._create_variable = lambda creator, **kwargs: (
            create(creator, **kwargs)
            if "colocate_with" in kwargs
            else extended._create_variable_round_robin(creator, **kwargs)
        )
        strategy.placement = Placement(strategy, PlacementRules(**rules))
        return strategy

    return make


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)
