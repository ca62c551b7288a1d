"""That the threads of a task get short time slices, and nothing else changes."""

import os
import platform
import subprocess
import sys

import pytest

from tfdist_cli.train.cluster import time_slices
from tfdist_cli.train.cluster.time_slices import SHORT_NANOSECONDS, shorten, slice_of

PROGRAM = """
import os, threading
from tfdist_cli.train.cluster.time_slices import shorten, slice_of
os.nice(3)
before, ended, found = slice_of(0), threading.Event(), []
thread = threading.Thread(target=ended.wait)
thread.start()
shorten()
later = threading.Thread(target=lambda: found.append(slice_of(0)))
later.start()
later.join()
found += [slice_of(0), slice_of(thread.native_id)]
ended.set()
print(before, *found, os.nice(0))
"""
VERSION = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(
    platform.system() != "Linux" or VERSION < (6, 12), reason="threads have slices of their own from Linux 6.12 on"
)
def test_all_threads_and_later_ones_have_short_slices_and_keep_their_nice_value():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, *slices, nice = map(int, done.stdout.split())
    assert before != SHORT_NANOSECONDS
    assert slices == [SHORT_NANOSECONDS] * 3
    assert nice == os.nice(0) + 3


def test_where_it_is_not_allowed_nothing_changes(monkeypatch):
    def refused(*_args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(time_slices, "_call", refused)
    shorten()
    with pytest.raises(PermissionError):
        slice_of(0)


def test_on_another_system_nothing_is_called(monkeypatch):
    monkeypatch.setattr(time_slices, "_call", None)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    shorten()
