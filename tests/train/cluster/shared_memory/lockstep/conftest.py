"""Parts are saved once in four updates, so that short runs save them several times."""

import pytest

from tfdist_cli.train.cluster.shared_memory.lockstep import memory


@pytest.fixture(autouse=True)
def saved_often(monkeypatch):
    monkeypatch.setattr(memory, "_MOST_MEANS", 4)
