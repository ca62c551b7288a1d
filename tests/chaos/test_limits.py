"""A disk that is full or read-only, and limits on files, processes and memory: each is reported, and nothing is
lost."""

import errno
import json
import os
import re
import resource
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.chaos import RECIPE, Training
from tests.support.codes import codes_in
from tfdist_cli.launch.supervisor.restarts import NOT_RETRYABLE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(100)]
CGROUPS = Path("/sys/fs/cgroup")
FULL, READ_ONLY = os.strerror(errno.ENOSPC), os.strerror(errno.EROFS)


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield path
    while path.is_mount():
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture
def cgroup():
    """Makes a cgroup with a limit: `cgroup("pids.max", 9)` gives its folder."""
    made = []

    def make(name, limit):
        controller = name.partition(".")[0]
        above = CGROUPS / controller if (CGROUPS / controller).is_dir() else CGROUPS
        folder = above / f"tfdist-test-{os.getpid()}"
        try:
            folder.mkdir()
            made.append(folder)
            file = folder / ("memory.limit_in_bytes" if name == "memory.max" and above != CGROUPS else name)
            file.write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no cgroup with a limit can be made here: {error}")
        return folder

    yield make
    for folder in made:
        folder.rmdir()


def into(folder):
    """What a process does to be in a cgroup, before it begins."""
    return lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))


def test_a_disk_that_becomes_full_ends_no_training_and_is_reported(bare, disk):
    launch = bare('write(b"x" * 2_000_000)\nsys.exit(5 * index)', "--run-dir", disk / "run")
    code, stderr = launch.finish()
    assert code == 5
    assert codes_in(stderr) == ["task-failed"]
    assert "worker:1 failed" in stderr
    warnings = launch.report["warnings"]
    assert all(FULL in warning for warning in warnings)
    assert any("stdout.log" in warning for warning in warnings)
    assert any(f"{disk / 'run'}: " in warning for warning in warnings)
    assert all(f"warning: {warning}" in stderr for warning in warnings)
    assert launch.report["exit_code"] == 5
    assert not (disk / "run" / "result.json").exists()

    code, stderr = bare("", "--run-dir", disk / "another").finish()
    assert code == 2
    assert codes_in(stderr) == ["disk-full"]
    assert str(disk / "another") in stderr
    assert FULL in stderr


def test_a_run_that_cannot_be_reported_of_keeps_what_an_earlier_launch_reported(bare, disk):
    assert bare("", "--run-dir", disk / "run").finish()[0] == 0
    before = (disk / "run" / "result.json").read_bytes()
    with (disk / "fills").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    code, stderr = bare("sys.exit(3)", "--run-dir", disk / "run").finish()
    assert code == 2
    assert codes_in(stderr) == ["disk-full"]
    assert FULL in stderr
    assert (disk / "run" / "result.json").read_bytes() == before
    assert json.loads((disk / "run" / "plan.json").read_text())["tasks"]


@pytest.mark.rotates(5, 2)
def test_a_disk_that_becomes_read_only(bare, disk):
    launch = bare(
        f"""
        import subprocess
        for options in (["--bind", disk := {str(disk)!r}], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *options, disk], check=True)
        print("read-only now")
        sys.exit(4)
        """,
        "--run-dir",
        disk / "run",
        workers=1,
    )
    code, stderr = launch.finish()
    assert code == 4
    assert "read-only now" in stderr
    assert any("events.jsonl" in warning and READ_ONLY in warning for warning in launch.report["warnings"])
    code, stderr = bare("", "--run-dir", disk / "run").finish()
    assert code == 2
    assert codes_in(stderr) == ["run-directory-unusable"]
    assert READ_ONLY in stderr


def test_too_few_files_are_reported_before_anything_starts(bare):
    launch = bare("", workers=20, before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)))
    code, stderr = launch.finish()
    assert code == 2
    assert codes_in(stderr) == ["too-few-open-files"]
    assert all(number in stderr for number in ("20 tasks", "224", "60"))
    assert not launch.run.exists()


def test_a_soft_limit_on_files_is_raised(bare):
    launch = bare("", workers=3, before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 500)))
    assert launch.finish()[0] == 0


def test_too_few_processes(bare, cgroup):
    folder = cgroup("pids.max", 4)
    code, stderr = bare("time.sleep(100)", workers=8, before=into(folder)).finish()
    assert code == 126
    assert "ulimit -u" in stderr


HOARDS = """
if index == 1:
    print("hoarding", flush=True)
    held = [bytes(range(256)) * 40_000 for _ in range(1000)]
time.sleep(100)
"""


def test_a_task_that_the_kernel_kills_for_lack_of_memory_is_reported(bare, cgroup):
    folder = cgroup("memory.max", 200_000_000)
    code, stderr = bare(HOARDS, before=into(folder)).finish()
    assert code == 137
    assert codes_in(stderr) == ["out-of-memory"]
    assert re.search(r"^error.* worker:1 .*SIGKILL, by", stderr, re.MULTILINE)


def test_a_task_that_another_process_kills_is_not(bare, cgroup):
    folder = cgroup("memory.max", 200_000_000)
    code, stderr = bare("if index == 1: os.kill(os.getpid(), 9)\ntime.sleep(100)", before=into(folder)).finish()
    assert code == 137
    assert codes_in(stderr) == ["task-killed"]
    assert re.search(r"^error.* worker:1 .*SIGKILL, not", stderr, re.MULTILINE)
    assert "hint:" not in stderr


def test_a_task_that_may_not_have_more_memory_is_reported(bare):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (300_000_000,) * 2)\n"
    code, stderr = bare(limit + HOARDS).finish()
    assert code == 1
    assert codes_in(stderr) == ["out-of-memory"]
    assert "worker:1 failed" in stderr


ONE = "strategy: single\nroles: {chief: {}}\nrecipe: recipe.yaml\n"


def fill(path, block):
    """Appends to a file until the disk is full."""
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(block):
            pass


def kill(pid):
    """Kills a process, and waits until it has exited and its files are closed."""
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([handle], [], [])
    os.close(handle)


HELD = (
    RECIPE
    + '''

class Hold(keras.callbacks.Callback):
    """Stops the training after 30 steps, as long as a file exists."""

    def __init__(self, path):
        super().__init__()
        self.path = pathlib.Path(path)

    def on_train_batch_end(self, batch, logs=None):
        while batch == 29 and self.path.exists():
            time.sleep(0.01)


def callbacks(params):
    return [Hold(os.environ["HOLD"])]
'''
).replace("import keras\n", "import os\nimport pathlib\nimport time\n\nimport keras\n")


@pytest.mark.rotates(5, 0)
def test_a_disk_that_becomes_full_ends_no_training_even_when_it_is_started_again(disk, tmp_path, monkeypatch):
    """The chief is killed between the checkpoints of steps 24 and 44, and the disk is full from then on.

    The launcher is stopped meanwhile, so that the restart comes after that. The last block of the metrics is filled,
    too.
    """
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("HOLD", str(hold))
    options = ("train.epochs=1", "checkpoint.every_steps=24", "evaluate=null")
    training = Training(disk / "training", ONE, *(f"--set={option}" for option in options), module=HELD)
    try:
        training.until(lambda: training.events("checkpoint", "chief:0"))
        os.kill(training.process.pid, signal.SIGSTOP)
        kill(training.events("started", "chief:0")[0]["pid"])
        fill(disk / "fills", b"x" * 4096)
        fill(training.run / "metrics.jsonl", b"\n")
        hold.unlink()
        os.kill(training.process.pid, signal.SIGCONT)
        done = training.finish()
    finally:
        training.stop()
    assert done.code == 1
    assert set(codes_in(done.stderr)) == {"checkpoint-not-written"}  # from the task, and in the headline
    assert done.report["code"] == "checkpoint-not-written"
    assert "chief:0 was lost" in done.stderr, done.stderr
    assert f"note: {NOT_RETRYABLE}" in done.stderr
    (unsaved,) = [warning for warning in done.report["warnings"] if "metrics.jsonl" in warning]
    assert FULL in unsaved
    assert "Traceback" not in done.stderr
    assert done.report["step"] == 44
    (lost,) = done.report["losses"]
    assert lost["task"] == "chief:0"
    assert "SIGKILL, not by" in lost["cause"]
