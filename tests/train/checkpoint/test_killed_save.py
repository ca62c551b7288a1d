"""A save may end at any moment, and a disk may go wrong: a whole checkpoint is always found, and nothing saved is lost.

`TFDIST_TEST_TRIALS=200` tries that many moments and ways.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.compare import batches, classifier
from tfdist_cli.train.checkpoint import store
from tfdist_cli.train.checkpoint.store import CheckpointFolder, DamagedCheckpoint, TrainingState
from tfdist_cli.train.model.train_step import ModelStep

pytestmark = pytest.mark.slow

TRIALS = int(os.environ.get("TFDIST_TEST_TRIALS", "20"))
PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "saves.py"


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * TRIALS)
def test_processes_that_are_killed_at_any_moment(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, str(PROGRAM), str(tmp_path / "kept"), str(TRIALS), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50 + 10 * TRIALS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told)
    assert told["saved"] > 0
    if TRIALS >= 200:
        assert min(told["unfinished"].values()) > 0


@pytest.fixture(scope="module")
def step():
    step = ModelStep(classifier())
    step.build(batches().element_spec)
    return step


class EventLog:
    """Copies a folder each time before something in it is made, renamed or removed: the states a kill may leave.

    Of each copy it is known which files had reached the disk as they are.
    """

    def __init__(self, folder, states, monkeypatch):
        self.folder, self.states = folder, states
        self.unsynced = {}
        self._synced = {}
        self._busy = False
        sync = os.fsync

        def noting(descriptor):
            sync(descriptor)
            self._synced[os.fstat(descriptor).st_ino] = _version(os.fstat(descriptor))

        monkeypatch.setattr(os, "fsync", noting)

    def heard(self, event, given):
        """An audit hook."""
        names = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")
        if event not in names or self._busy or not str(given[0]).startswith(str(self.folder)):
            return
        self._busy = True
        self.take()
        self._busy = False

    def take(self):
        """Copies the folder."""
        state = self.states / f"{len(self.unsynced):04d}"
        shutil.copytree(self.folder, state)
        self.unsynced[state] = [
            state / path.relative_to(self.folder)
            for path in self.folder.rglob("*")
            if path.is_file() and self._synced.get(path.stat().st_ino) != _version(path.stat())
        ]


def _version(stat):
    return stat.st_size, stat.st_mtime_ns


journals = []


def _heard(event, given, journals=journals):  # of its own, since a hook outlives its module
    for journal in journals:
        journal.heard(event, given)


sys.addaudithook(_heard)


@pytest.fixture(scope="module")
def journal(step, tmp_path_factory):
    """What saving a third checkpoint, its final version, and a fourth one does to a folder; `least` of each state."""
    folder = tmp_path_factory.mktemp("kept")
    kept = CheckpointFolder(folder, keep=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        journal = EventLog(folder, tmp_path_factory.mktemp("states"), monkeypatch)
        for number in (1, 2):
            kept.save(step, TrainingState(number, 0), arrays=[np.arange(3)])
        least = {}
        journals.append(journal)
        try:
            for number, final, saved in ((3, False, 2), (3, True, 3), (4, False, 3)):
                kept.save(step, TrainingState(number, 0, final), arrays=[np.arange(3)])
                least.update(dict.fromkeys(journal.unsynced.keys() - least.keys(), saved))
        finally:
            journals.remove(journal)
    assert len(least) > 20
    return journal, least


def find(state):
    """What a training that is launched finds."""
    kept = CheckpointFolder(state)
    kept.prepare()
    found, damaged = kept.newest()
    assert damaged == {}
    assert not [entry for entry in state.iterdir() if not entry.name.startswith("step-")]
    return found.state.step


def test_a_save_that_is_cut_off_between_any_two_operations(journal, tmp_path):
    journal, least = journal
    found = []
    for state, saved in least.items():
        shutil.copytree(state, tmp_path / state.name)
        found.append(find(tmp_path / state.name))
        assert found[-1] >= saved
    assert {2, 3} <= set(found)


def test_a_power_cut_takes_the_end_of_what_has_not_reached_the_disk(journal, tmp_path):
    """Every file of each state that was not synced is cut at every byte, or at 12 of its bytes."""
    journal, least = journal
    cuts = 0
    for state, saved in least.items():
        for file in journal.unsynced[state]:
            size = file.stat().st_size
            for end in sorted({*range(0, size, max(1, size // 12)), size - 1} - {-1}):
                copy = tmp_path / f"{state.name}-{cuts}"
                shutil.copytree(state, copy)
                os.truncate(copy / file.relative_to(state), end)
                assert find(copy) >= saved
                shutil.rmtree(copy)
                cuts += 1
    assert cuts > 50


def cut(path, numbers):
    os.truncate(path, numbers.randrange(path.stat().st_size))


def flip(path, numbers):
    data = bytearray(path.read_bytes())
    data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)


def zero(path, numbers):
    """As a file system leaves what it had no time to fill."""
    data = bytearray(path.read_bytes())
    begin = numbers.randrange(len(data))
    end = min(len(data), begin + 512)
    if any(data[begin:end]):
        data[begin:end] = bytes(end - begin)
    else:
        data[begin] = 1
    path.write_bytes(data)


def append(path, numbers):
    byte = numbers.randrange(ord(" ") + 1, 256)  # white space behind JSON changes nothing
    path.write_bytes(path.read_bytes() + bytes([byte]))


def remove(path, _):
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, zero, append, remove])
def test_damage_of_any_file_is_found_and_named(damage, step, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "sync", lambda path: None)
    kept = CheckpointFolder(tmp_path / "kept")
    for number in (1, 2):
        kept.save(step, TrainingState(number, 0), arrays=[np.arange(3)])
    numbers = random.Random(damage.__name__)
    for number in range(max(20, TRIALS)):
        copy = tmp_path / str(number)
        shutil.copytree(kept.path, copy)
        file = numbers.choice(sorted((copy / "step-00000002").iterdir()))
        damage(file, numbers)
        with pytest.raises(DamagedCheckpoint, match=str(file)):
            CheckpointFolder(copy).find(2)
        assert CheckpointFolder(copy).newest()[0].state.step == 1
        shutil.rmtree(copy)
