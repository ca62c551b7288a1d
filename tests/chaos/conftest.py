"""Trainings that are disturbed, none of which outlives its test."""

import pytest

from tests.support.bare_task import BareLaunch
from tests.support.chaos import Training


@pytest.fixture
def train(tmp_path):
    """Launches a training: `train(SERVERS, "--max-restarts", 5)`."""
    begun = []

    def train(cluster, *options):
        begun.append(Training(tmp_path / f"training{len(begun)}", cluster, *options))
        return begun[-1]

    yield train
    for training in begun:
        training.stop()


@pytest.fixture
def bare(tmp_path):
    """Launches a bare program: `bare("print(index)", workers=3)`."""
    begun = []

    def bare(program, *options, **others):
        begun.append(BareLaunch(tmp_path / f"launch{len(begun)}", program, *options, **others))
        return begun[-1]

    yield bare
    for launch in begun:
        launch.stop()
