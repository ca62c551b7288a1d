"""Python's end waits for threads of runs that were broken off, once what they wait for has failed."""

import subprocess
import sys

PROGRAM = """
import threading
from tfdist_cli.train.tf_compat.exit_hooks import end_at_exit

def wait(number, came):
    came.wait()
    print(number, flush=True)

for number in range(2):
    came = threading.Event()
    waiting = threading.Thread(target=wait, args=(number, came), daemon=True)
    waiting.start()
    end_at_exit(came.set, waiting)
print("over", flush=True)
"""


def test_all_are_ended_when_python_ends_and_not_before():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["over", "0", "1"]
