"""Another process that takes and holds a lock, and can be stopped or killed meanwhile."""

import os
import signal
import subprocess
import sys

from tfdist_cli.train.cluster.shared_memory.locks import NUMBERS

PROGRAM = f"""
import os, sys
import numpy as np
from tfdist_cli.train.cluster.shared_memory.locks import OthersLock
from tfdist_cli.train.cluster.shared_memory.memory import OthersMemory

memory = OthersMemory.of(bytes.fromhex(sys.argv[1]))
offset = int(sys.argv[2])
numbers = memory.first(offset + 8 * {NUMBERS} + 8)[offset:].view(np.int64)
lock = OthersLock(memory.process, numbers[:{NUMBERS}])


def add(times):
    for _ in range(int(times)):
        assert lock.acquire(60)
        numbers[{NUMBERS}] += 1
        lock.release()


ORDERS = {{
    "acquire": lambda: lock.acquire(60),
    "take": lambda: os.read(lock._descriptor, 8),  # and does not say so
    "say": lambda: numbers.put(3, os.getpid()),
    "release": lock.release,
    "add": add,
}}
print("ready", flush=True)
for line in sys.stdin:
    order, *arguments = line.split()
    ORDERS[order](*arguments)
    print("done", flush=True)
"""


class LockHolder:
    """The process; a context that kills it.

    Args:
        identity: of the memory that has the numbers of the lock.
        offset: where they begin.
    """

    def __init__(self, identity, offset):
        command = [sys.executable, "-c", PROGRAM, identity.hex(), str(offset)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def __enter__(self):
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.kill()
        self._process.communicate()

    def order(self, *words):
        """Lets it do something; the other processes go on meanwhile."""
        print(*words, file=self._process.stdin, flush=True)

    def done(self):
        """Waits until it has done what it was told last."""
        assert self._process.stdout.readline() == "done\n"

    def do(self, *words):
        """Lets it do something, and waits until it has."""
        self.order(*words)
        self.done()

    def stop(self):
        """Stops it, as a debugger or a user does."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self):
        """Lets it go on after a stop."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        """Kills it, and waits until it has ended."""
        self._process.kill()
        self._process.wait()
