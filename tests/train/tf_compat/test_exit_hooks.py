"""How a process exits although threads of TensorFlow still run in it."""

import subprocess
import sys

import pytest

from tfdist_cli.train.tf_compat import exit_hooks

PROGRAM = """
import threading
from tfdist_cli.train.tf_compat.exit_hooks import end_at_exit, stop_at_exit

def stop():
    print("stops", flush=True)
    last.start()
    return [last]

def wait(number, came):
    came.wait()
    print(number, flush=True)

for number in range(2):
    came = threading.Event()
    waiting = threading.Thread(target=wait, args=(number, came), daemon=True)
    waiting.start()
    end_at_exit(came.set, waiting)
last = threading.Thread(target=print, args=("stopped",), kwargs={"flush": True}, daemon=True)
stop_at_exit(stop)
print("over", flush=True)
"""


def test_all_are_ended_when_python_ends_and_not_before():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["over", "0", "1", "stops", "stopped"]


ENDLESS = """
import threading
from tfdist_cli.train.tf_compat import exit_hooks

def run():
    try:
        while True:
            sum(range(100))
    finally:
        print("stopped", flush=True)

exit_hooks.GRACE_SECONDS = 0.1
for register in (exit_hooks.stop_at_exit, lambda stop: exit_hooks.end_at_exit(list, stop()[0])):
    waiting = threading.Thread(target=run, daemon=True)
    waiting.start()
    register(lambda waiting=waiting: [waiting])
print("over", flush=True)
"""


def test_threads_that_go_on_are_stopped():
    ended = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout.split(), ended.stderr) == (["over", "stopped", "stopped"], "")


SERVER = """
import atexit, importlib.util, sys
spec = importlib.util.spec_from_file_location("exit_hooks", sys.argv[1])
exit_hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exit_hooks)

class Library:
    def __del__(self):
        print("destructor")

library = Library()
atexit.register(print, "at the exit")
exit_hooks.exit_without_destructors(3)
try:
    EXIT
finally:
    print("finally")
"""


@pytest.mark.parametrize(
    ("ends", "code", "printed"),
    [
        ("sys.exit(3)", 3, ["finally", "at the exit"]),
        ("raise ValueError('the program fails after all')", 1, ["finally", "at the exit", "destructor"]),
    ],
)
def test_a_server_exits_after_pythons_functions_and_before_destructors(ends, code, printed):
    assert _run(SERVER.replace("EXIT", ends)) == (code, printed)


def test_any_other_process_runs_them():
    program = SERVER.replace("exit_hooks.exit_without_destructors(3)", "").replace("EXIT", "sys.exit(3)")
    assert _run(program) == (3, ["finally", "at the exit", "destructor"])


def _run(program):
    argv = [sys.executable, "-S", "-c", program, exit_hooks.__file__]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout.split("\n")[:-1]


HINT = """
from tfdist_cli.train.tf_compat import exit_hooks
exit_hooks.hint_at_errors(lambda error: "a hint" if isinstance(error, ValueError) else None)
raise {}
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes")
@pytest.mark.parametrize(("error", "last"), [("ValueError(1)", "hint: a hint"), ("KeyError(1)", "KeyError: 1")])
def test_an_error_that_is_not_caught_has_a_hint(error, last):
    command = [sys.executable, "-c", HINT.format(error)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.stderr.splitlines()[-1] == last
