"""`tfdist launch --on compose` with real containers of podman or docker."""

import os
import signal
import subprocess
import time

import pytest

from tests.support import launching
from tests.support.lab import containers
from tfdist_cli.launch.compose.services import project_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ROLES = launching.PARAMETER_SERVER % ""
SETTINGS = f"launcher: compose\ncompose: {{image: {containers.IMAGE}, volumes: {containers.volumes()}}}\n"
PROGRAM = """
trap 'echo signalled; exit 143' TERM
case "$TF_CONFIG" in *'"type":"worker","index":1'*) [ -z "$CODE" ] || exit "$CODE";; esac
echo up
sleep 1000 & wait
"""


@pytest.fixture
def project(tmp_path):
    return launching.project(tmp_path / "project", ROLES + SETTINGS)


def left(engine, run_dir):
    """The names of a run's containers and networks."""
    own, names = project_name(run_dir), []
    for kind in (("ps", "--all", "--format", "{{.Names}}"), ("network", "ls", "--format", "{{.Name}}")):
        listed = subprocess.run([engine, *kind], capture_output=True, text=True, check=True).stdout
        names += [name for name in listed.splitlines() if name.startswith(own)]
    return names


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.rotates(5, 1)
def test_a_recipe_trains_in_containers(project, engine):
    launched = launching.launch(
        project, "--run-dir", "run", "--start-timeout", "240", "--set", "train.epochs=12", timeout=280
    )
    assert launched.code == 0, launched.stderr
    assert launched.report["metrics"]["test_accuracy"] > 0.8
    run_dir = launched.run_dir
    assert (run_dir / "export" / "model.keras").stat().st_uid == os.getuid()
    assert [line["step"] for line in launched.lines("metrics.jsonl") if line.get("epoch")]
    assert left(engine, run_dir) == []


def run_program(project, *options):
    """Launches a program that only waits for SIGTERM."""
    return launching.start(project, "--run-dir", "run", *options, "--", "sh", "-c", PROGRAM)


def count_tasks(project, word):
    """The number of tasks that have written a word."""
    return sum(word in log.read_text().split() for log in project.glob("run/attempt_1/*/stdout.log"))


def test_a_launch_exits_with_the_failed_programs_code_and_stops_the_others(project, engine):
    launched = launching.finish(run_program(project, "--set", "roles.worker.env={CODE: '7'}"))
    assert launched.code == 7
    assert "worker:1 failed" in launched.stderr
    assert left(engine, project / "run") == []


@pytest.mark.rotates(5, 3)
def test_sigterm_reaches_every_task(project, engine):
    launched = run_program(project)
    wait_for(lambda: count_tasks(project, "up") == 4)
    launched.send_signal(signal.SIGTERM)
    assert launching.finish(launched).code == 143
    assert count_tasks(project, "signalled") == 4
    assert left(engine, project / "run") == []


def test_nothing_outlives_a_killed_launcher(project, engine):
    launched = run_program(project)
    wait_for(lambda: count_tasks(project, "up") == 4)
    launched.kill()
    launched.wait()
    wait_for(lambda: left(engine, project / "run") == [], seconds=30)


@pytest.mark.rotates(5, 1)
def test_a_killed_container_is_replaced(project, engine):
    launched = run_program(project, "--max-restarts", "1")
    wait_for(lambda: count_tasks(project, "up") == 4)
    [worker] = [name for name in left(engine, project / "run") if "worker-0" in name]
    subprocess.run([engine, "kill", "--signal", "KILL", worker], check=True, capture_output=True)
    log = project / "run" / "attempt_1" / "worker-0" / "stdout.log"
    wait_for(lambda: log.read_text().split().count("up") == 2)
    launched.send_signal(signal.SIGINT)
    done = launching.finish(launched)
    assert done.code == 130
    assert "137 (SIGKILL)" in done.stderr
    assert left(engine, project / "run") == []
