"""The process of a check: how it is started, and what is reported if it fails."""

import os
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tfdist_cli.check import process
from tfdist_cli.check.process import check_recipe
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

CLUSTER = {
    "strategy": "parameter_server",
    "roles": {"chief": {"env": {"MINE": "${X}1"}, "secrets": {"TOKEN": {"env": "THE_TOKEN"}}}, "ps": {}, "worker": {}},
}
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from tfdist_cli.protocol.check_report import REPORT, ReportWriter
writer = ReportWriter(Path(sys.argv[1]) / REPORT)
writer.stage("reading the data")
"""


@pytest.fixture
def ended(monkeypatch):
    """Runs a program in place of the check; returns its report."""

    def of(code, tasks=(), timeout=60):
        monkeypatch.setenv("THE_TOKEN", "secret")
        monkeypatch.setattr(process, "_PROGRAM", ("-c", PROGRAM + textwrap.dedent(code)))
        return check_recipe(Cluster.model_validate(CLUSTER), Recipe(module="one"), tasks, timeout)

    return of


def test_the_process_has_the_environment_of_the_task_that_trains(ended, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    report = ended("writer.facts('env', **os.environ)\nwriter.facts('argv', argv=sys.argv)", [TaskId("worker")])
    env = report.facts["env"]
    assert not report.findings
    assert (env["MINE"], env["TOKEN"], env["CUDA_VISIBLE_DEVICES"]) == ("${X}1", "secret", "-1")
    assert "TF_CONFIG" not in env
    assert report.facts["argv"]["argv"][2:] == ["worker:0"]
    assert not Path(report.facts["argv"]["argv"][1]).exists()


def test_the_files_load_in_the_process(ended):
    report = ended("""
        from tfdist_cli.spec.loading.load import load_cluster, load_recipe
        folder = Path(sys.argv[1])
        cluster, recipe = load_cluster(folder / "cluster.yaml"), load_recipe(folder / "recipe.yaml")
        writer.facts("files", env=dict(cluster.roles.chief.env), module=recipe.module)
    """)
    assert report.facts["files"] == {"env": {"MINE": "${X}1"}, "module": "one"}


@pytest.mark.parametrize(
    ("code", "finding", "said"),
    [
        ("time.sleep(1000)", "check-timeout", "reading the data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "check-killed", "reading the data"),
        ("sys.exit('a\\nthe reason')", "check-failed", "the reason"),
    ],
)
def test_a_process_that_does_not_end_well(ended, code, finding, said):
    report = ended(code, timeout=2 if finding == "check-timeout" else 60)
    assert [each.code for each in report.findings] == [finding]
    assert said in report.findings[0].message


def test_what_it_has_found_before_is_kept(ended):
    report = ended("writer.facts('model', bytes=1)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert report.facts == {"model": {"bytes": 1}}


@pytest.mark.slow
def test_no_process_is_left(ended):
    report = ended("""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        writer.facts("child", pid=child.pid)
    """)
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(report.facts["child"]["pid"])
        assert child.status() == psutil.STATUS_ZOMBIE or child.wait(30) is None


def test_the_launchers_process_is_named_so_that_the_check_ends_with_it(ended):
    assert ended("writer.facts('env', **os.environ)").facts["env"]["TFDIST_LAUNCHER_PID"] == str(os.getpid())
