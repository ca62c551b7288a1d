"""Tests of interrupted saves and damaged disks: an undamaged checkpoint is always found, and no saved one is lost.

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
from tfdist_cli.train.checkpoint.files.state import DamagedCheckpoint, TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.model.train_step import ModelStep

pytestmark = pytest.mark.slow

TRIALS = int(os.environ.get("TFDIST_TEST_TRIALS", "10"))
PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "saves.py"


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * TRIALS)
def test_killed_processes(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, str(PROGRAM), str(tmp_path / "checkpoints"), str(TRIALS), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50 + 10 * TRIALS)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(result)
    assert result["saved"] > 0
    if TRIALS >= 200:
        assert min(result["unfinished"].values()) > 0
        assert result["deltas"].keys() == {"0", "1", "2"}


@pytest.fixture(scope="module")
def step():
    step = ModelStep(classifier())
    step.build(batches().element_spec)
    return step


class EventLog:
    """Copies a folder before each creation, renaming and removal in it: the states that a kill may leave.

    `unsynced` has the files of each copy that had not reached the disk.
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

    def on_audit_event(self, event, given):
        """An audit hook."""
        names = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")
        if event not in names or self._busy or not str(given[0]).startswith(str(self.folder)):
            return
        self._busy = True
        self.copy_folder()
        self._busy = False

    def copy_folder(self):
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


event_logs = []


def _on_audit_event(event, given, event_logs=event_logs):  # with its own list: an audit hook outlives its module
    for event_log in event_logs:
        event_log.on_audit_event(event, given)


sys.addaudithook(_on_audit_event)


@pytest.fixture(scope="module")
def event_log(step, tmp_path_factory):
    """The states of a folder while checkpoints 3, 3 (final) and 4 are saved, and the step that each guarantees."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = CheckpointFolder(folder, keep=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        event_log = EventLog(folder, tmp_path_factory.mktemp("states"), monkeypatch)
        for number in (1, 2):
            checkpoints.save(step, TrainingState(number, 0), arrays=[np.arange(3)])
        guaranteed = {}
        event_logs.append(event_log)
        try:
            for number, final, saved in ((3, False, 2), (3, True, 3), (4, False, 3)):
                checkpoints.save(step, TrainingState(number, 0, final), arrays=[np.arange(3)])
                guaranteed.update(dict.fromkeys(event_log.unsynced.keys() - guaranteed.keys(), saved))
        finally:
            event_logs.remove(event_log)
    assert len(guaranteed) > 20
    return event_log, guaranteed


def find_newest(state):
    """Returns the step from which a training resumes."""
    checkpoints = CheckpointFolder(state)
    checkpoints.prepare()
    found, damaged = checkpoints.newest()
    assert damaged == {}
    assert not [entry for entry in state.iterdir() if not entry.name.startswith("step-")]
    return found.state.step


def test_a_save_killed_between_any_two_operations(event_log, tmp_path):
    event_log, guaranteed = event_log
    found = []
    for state, saved in guaranteed.items():
        shutil.copytree(state, tmp_path / state.name)
        found.append(find_newest(tmp_path / state.name))
        assert found[-1] >= saved
    assert {2, 3} <= set(found)


def test_a_power_cut_truncates_unsynced_files(event_log, tmp_path):
    """Every file of each state that was not synced is cut at every byte, or at 12 of its bytes."""
    event_log, guaranteed = event_log
    cuts = 0
    for state, saved in guaranteed.items():
        for file in event_log.unsynced[state]:
            size = file.stat().st_size
            for end in sorted({*range(0, size, max(1, size // 12)), size - 1} - {-1}):
                copy = tmp_path / f"{state.name}-{cuts}"
                shutil.copytree(state, copy)
                os.truncate(copy / file.relative_to(state), end)
                assert find_newest(copy) >= saved
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
    """Zeroes a block, as a file system does that had no time to write it."""
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


@pytest.mark.rotates(5)
@pytest.mark.parametrize("damage", [cut, flip, zero, append, remove])
def test_damage_of_any_file_is_detected(damage, step, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "sync", lambda path: None)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for number in (1, 2):
        checkpoints.save(step, TrainingState(number, 0), arrays=[np.arange(3)])
    numbers = random.Random(damage.__name__)
    for number in range(max(20, TRIALS)):
        copy = tmp_path / str(number)
        shutil.copytree(checkpoints.path, copy)
        file = numbers.choice(sorted((copy / "step-00000002").iterdir()))
        damage(file, numbers)
        with pytest.raises(DamagedCheckpoint, match=str(file)):
            CheckpointFolder(copy).find(2)
        assert CheckpointFolder(copy).newest()[0].state.step == 1
        shutil.rmtree(copy)
