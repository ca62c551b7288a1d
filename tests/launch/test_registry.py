"""A launcher is one folder and one row of the table: everything else follows from the row."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.registry import launcher_of, refuse_active_jobs
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.spec.launchers import LAUNCHERS, LauncherTraits
from tfdist_cli.spec.loading.load import load_cluster
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.sections.cluster import Cluster

ROOT = Path(__file__).parents[2]
CLUSTER = "strategy: multi_worker_mirrored\nroles: {worker: {replicas: 3}}\n"
WITH_TOY = """
from tfdist_cli.spec.launchers import LAUNCHERS, LauncherTraits
LAUNCHERS["toy"] = LauncherTraits("tests.launch.toy.launcher:ToyLauncher", summary="subprocesses")
from tfdist_cli.__main__ import main
main()
"""
PROGRAM = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
print("address", config["cluster"][config["task"]["type"]][config["task"]["index"]], flush=True)
sys.exit(5 if "--fail" in sys.argv and config["task"]["index"] == 1 else 0)
"""


@pytest.fixture
def tfdist(tmp_path):
    """Runs `tfdist` with a toy launcher in its table."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)

    def run(*arguments):
        command = [sys.executable, "-c", WITH_TOY, *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_row_names_a_launcher(name):
    launcher = launcher_of(Cluster.model_validate({"strategy": "single", "roles": {"chief": {}}, "launcher": name}))
    for method, wanted in inspect.getmembers(Launcher, inspect.isfunction):
        if not method.startswith("_"):
            parameters = inspect.signature(getattr(launcher, method)).parameters
            assert [*parameters] == [*inspect.signature(wanted).parameters][1:]


class ActiveJobs:
    """Jobs of which one is active in every run directory."""

    def refuse_active(self, run_dir):
        raise UsageError(f"a job is active in {run_dir}", code="toy-job-active")


def test_jobs_of_every_scheduler_are_refused(tmp_path, monkeypatch):
    refuse_active_jobs(tmp_path)
    row = LauncherTraits("module:Class", summary="nothing", jobs=f"{__name__}:ActiveJobs")
    monkeypatch.setitem(LAUNCHERS, "toy", row)
    with raises(UsageError, "toy-job-active"):
        refuse_active_jobs(tmp_path)


def test_the_file_is_checked_against_the_table(tmp_path, monkeypatch):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    with pytest.raises(SpecError) as refused:
        load_cluster(tmp_path / "cluster.yaml", ["launcher=slrum"])
    assert all(f"'{name}'" in refused.value.message for name in LAUNCHERS)
    assert refused.value.message.endswith("'slurm'?")
    monkeypatch.setitem(LAUNCHERS, "slrum", LauncherTraits("module:Class", summary="nothing"))
    assert load_cluster(tmp_path / "cluster.yaml", ["launcher=slrum"]).launcher == "slrum"


@pytest.mark.slow
def test_a_new_launcher_is_offered_and_rendered(tfdist):
    assert "toy" in tfdist("launch", "--help").stdout
    rendered = tfdist("render", "cluster.yaml", "--to", "toy", "--", "echo", "a b")
    assert rendered.stdout.splitlines() == [f"toy worker:{index}: echo 'a b'" for index in range(3)]


@pytest.mark.slow
def test_a_new_launcher_starts_tasks(tfdist, tmp_path):
    done = tfdist("launch", "cluster.yaml", "--on", "toy", "--json", "--", sys.executable, "-c", PROGRAM)
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"]) == (0, 0), done.stderr
    logs = sorted(Path(report["run_dir"]).glob("attempt_1/*/stderr.log"))
    assert {log.read_text() for log in logs} == {f"address 127.0.0.1:{40_000 + index}\n" for index in range(3)}
    failed = tfdist("launch", "cluster.yaml", "--on", "toy", "--json", "--", sys.executable, "-c", PROGRAM, "--fail")
    assert failed.returncode == 5
