"""Trainings that are disturbed, none of which outlives its test."""

import pytest

from tests.support.bare_task import BareLaunch
from tests.support.chaos import Training


@pytest.fixture
def train(tmp_path):
    """Launches a training: `train(SERVERS, "--max-restarts", 5)`."""
    started = []

    def train(cluster, *options, **others):
        started.append(Training(tmp_path / f"training{len(started)}", cluster, *options, **others))
        return started[-1]

    yield train
    for training in started:
        training.stop()


@pytest.fixture
def bare(tmp_path):
    """Launches a bare program: `bare("print(index)", workers=3)`."""
    started = []

    def bare(program, *options, **others):
        started.append(BareLaunch(tmp_path / f"launch{len(started)}", program, *options, **others))
        return started[-1]

    yield bare
    for launch in started:
        launch.stop()
