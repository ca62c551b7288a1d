"""Calls of Slurm's programs and the reading of their answers, with stand-ins for the programs."""

import asyncio
import json
import os
import sys

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.slurm import commands
from tfdist_cli.launch.slurm.commands import Job

FAKE = f"""#!{sys.executable}
import json, os, sys
name = os.path.basename(sys.argv[0])
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
open(folder + "/calls", "a").write(json.dumps([name, *sys.argv[1:]]) + "\\n")
open(folder + "/environment", "w").write(json.dumps(dict(os.environ)))
code, out, err = json.load(open(folder + "/answers")).get(name, [0, "", ""])
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Calls a function while Slurm's programs give these answers; returns its result and the programs' calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in commands.PROGRAMS:
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def call(coroutine, **answers):
        (folder / "answers").write_text(json.dumps(answers))
        (folder / "calls").unlink(missing_ok=True)
        result = asyncio.run(coroutine)
        return result, [json.loads(line) for line in (folder / "calls").read_text().splitlines()]

    return call


@pytest.mark.parametrize("answer", ["12\n", "12;main\n"])
@pytest.mark.parametrize(
    ("name", "output"), [("a b'; $x", "a b'; $x"), ("50% %j", "50%% %%j"), ("a\\%j", "a\\%j"), ("ü\nx", "ü\nx")]
)
def test_a_job_is_submitted(answer, name, output, fake, tmp_path):
    log = tmp_path / name / "slurm.log"
    submitting = commands.submit(tmp_path / "s.sh", log, ["3", "60"], {"TFDIST_RUN_SECRET": "x1"})
    number, calls = fake(submitting, sbatch=[0, answer, ""])
    assert number == "12"
    environment = json.loads((tmp_path / "bin" / "environment").read_text())
    assert (environment["TFDIST_RUN_SECRET"], environment["PATH"]) == ("x1", os.environ["PATH"])
    assert calls == [["sbatch", "--parsable", f"--output={tmp_path}/{output}/slurm.log", f"{tmp_path}/s.sh", "3", "60"]]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (
            "sbatch: error: invalid partition specified: gpu\nsbatch: error: Batch job submission failed: Invalid\n",
            "Batch job submission failed: Invalid",
        ),
        (
            "sbatch: unrecognized option '--exclusiv=a'\nTry \"sbatch --help\" for more information\n",
            "unrecognized option '--exclusiv=a'",
        ),
        ("sbatch: error: Invalid --exclusive specification\n\n", "Invalid --exclusive specification"),
        ("", "exit code 255"),
    ],
)
def test_a_rejected_job_is_reported_with_slurms_reason(errors, reason, fake, tmp_path):
    with raises(UsageError, "slurm-job-rejected") as caught:
        fake(commands.submit(tmp_path / "s.sh", tmp_path / "log", [], {}), sbatch=[255, "", errors])
    assert str(caught.value).partition(": ")[2] == reason


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        ([0, "0           RUNNING                 None            \n", ""], Job("RUNNING", 0, "None")),
        ([0, "2           PENDING                 BeginTime       \n", ""], Job("PENDING", 2, "BeginTime")),
        # A heterogeneous job has a line for each component; the first is the leader's.
        ([0, "1  COMPLETING  None\n0  PENDING  Priority\n", ""], Job("COMPLETING", 1, "None")),
        ([0, "0  FAILED  Node failure, perhaps\n", ""], Job("FAILED", 0, "Node failure, perhaps")),
        ([0, "", ""], Job("GONE")),
        ([1, "", "slurm_load_jobs error: Invalid job id specified\n"], Job("GONE")),
        ([1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"], None),
    ],
)
def test_the_status_of_a_job(answer, job, fake):
    status, ((program, *argv),) = fake(commands.query("12"), squeue=answer)
    assert status == job
    assert program == "squeue"
    assert "--jobs=12" in argv


@pytest.mark.parametrize(
    ("state", "pending", "running", "active"),
    [
        ("PENDING", True, False, True),
        ("RUNNING", False, True, True),
        ("CONFIGURING", False, True, True),
        ("COMPLETING", False, False, True),
        ("NODE_FAIL", False, False, False),
        ("GONE", False, False, False),
    ],
)
def test_job_states(state, pending, running, active):
    job = Job(state)
    assert (job.is_pending, job.is_running, job.is_active) == (pending, running, active)


def test_a_job_is_terminated_killed_and_cancelled(fake):
    assert fake(commands.terminate_tasks("12"))[1] == [
        ["scontrol", "update", "JobId=12", "Requeue=0"],
        ["scancel", "--signal=TERM", "12"],
    ]
    for parts, steps in {"12\n": ["12.0"], "12\n13\n": ["12.0", "13.0"], "": ["12.0"]}.items():
        assert fake(commands.kill_tasks("12"), squeue=[0, parts, ""])[1][1:] == [
            ["scancel", "--full", "--signal=STOP", "12"],
            ["scancel", "--signal=KILL", *steps],
            ["scancel", "--full", "--signal=CONT", "12"],
        ]
    over, calls = fake(commands.cancel_and_wait("12", 5), squeue=[0, "0 CANCELLED None\n", ""])
    assert over
    assert [call[0] for call in calls] == ["scancel", "squeue"]


def test_waiting_for_a_job_has_a_timeout(fake, monkeypatch):
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.01)
    assert fake(commands.cancel_and_wait("12", 0.05), squeue=[0, "0 COMPLETING None\n", ""])[0] is False


def test_slurm_is_queried_until_it_answers(fake, tmp_path, monkeypatch):
    """A busy controller does not mean that a job is gone or cancelled."""
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.01)
    answers, cancels = iter([None, None, Job("RUNNING"), Job("RUNNING"), Job("CANCELLED")]), iter([False, True])

    async def query(job):
        return next(answers)

    async def cancel(job):
        return next(cancels)

    monkeypatch.setattr(commands, "query", query)
    monkeypatch.setattr(commands, "cancel", cancel)
    assert asyncio.run(commands.cancel_and_wait("12", 5))
    assert list(answers) == list(cancels) == []


def test_a_controller_that_does_not_answer(fake, monkeypatch):
    silent = [1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"]
    with raises(TfdistError, "slurm-unreachable"):
        fake(commands.await_answer("12", 0), squeue=silent)


def test_a_machine_without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(UsageError, "program-not-found") as caught:
        commands.check_programs()
    assert "'sbatch'" in str(caught.value)
    assert "--to slurm" in str(caught.value.hint)
