"""`tfdist bench`: what it runs, in which order, and what it makes of it; the trainings themselves are made up."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.codes import codes_in
from tfdist_cli.cli import bench as command
from tfdist_cli.launch.run.report import Failure, Report
from tfdist_cli.protocol.phases import COLUMNS, PHASES, WATCH
from tfdist_cli.spec.task_id import TaskId

pytestmark = pytest.mark.tensorflow
SECONDS = 2.0
"""How long the measured epoch of a made-up training takes."""
FAILURE = Failure(TaskId("chief"), 1.0, "exit code 1", "ValueError: no", "", "", (), Path("stderr.log"))


@pytest.fixture
def trainings(monkeypatch, cluster_file):
    """Takes the place of `launch_job`: each call leaves the metrics of a training behind, and is kept."""
    calls = []

    def launch_job(launcher, job, timeouts, *, quiet):
        assert quiet
        calls.append(job)
        train = job.recipe.train
        tasks = [str(task) for task in job.cluster.tasks if task.role == "worker"] or ["chief:0"]
        own = train.steps_per_epoch // len(tasks)
        is_watched = any(job.cluster.role(task).env.get(WATCH) for task in job.cluster.tasks)
        job.run_dir.mkdir()
        with (job.run_dir / "metrics.jsonl").open("w") as file:
            for epoch in (1, 2):
                counted = dict.fromkeys(COLUMNS, 0.0) | dict.fromkeys(PHASES[1:4], epoch * own * 0.001)
                line = {"split": "train", "epoch_done": True, "step": epoch * train.steps_per_epoch}
                line |= {"seconds": 5.0 + SECONDS * epoch, "worker_steps": dict.fromkeys(tasks, epoch * own)}
                line |= {"phases": dict.fromkeys(tasks, counted)} if is_watched else {}
                file.write(json.dumps(line) + "\n")
        wrong = job.recipe.updates.local_steps > 1
        if wrong:  # as with an optimizer that has no kernel
            return Report(1, FAILURE.summary, (FAILURE,), (), 1.0), job.run_dir
        steps = 2 * train.steps_per_epoch
        return Report(0, "", (), (), 1.0, {"step": steps, "examples": steps * train.batch_size}), job.run_dir

    monkeypatch.setattr(command, "launch_job", launch_job)
    cluster_file.write_text(cluster_file.read_text() + "recipe: digits.yaml\n")
    return calls


def sizes(calls):
    """The workers of each training, 0 for the one process, and whether it took the time of the phases."""
    found = []
    for job in calls:
        count = 0 if job.cluster.strategy == "single" else job.cluster.roles.count("worker")
        found.append((count, any(job.cluster.role(task).env.get(WATCH) for task in job.cluster.tasks)))
    return found


def test_rounds_go_back_and_forth_and_the_time_is_taken_apart_after_them(tfdist, cluster_file, trainings):
    result = tfdist("bench", cluster_file, "--rounds", "2", "--steps", "40")
    assert result.code == 0, result.err
    forth = [(1, False), (2, False), (0, False)]
    assert sizes(trainings) == [*forth, *reversed(forth), (1, True), (2, True), (0, True)]
    assert not any(job.run_dir.parent.exists() for job in trainings)
    lines = [line.split() for line in result.out.splitlines() if line.strip()]
    assert ["1", "worker", "20.0", "(20.0", "to", "20.0)", "640", "(640", "to", "640)", "100%"] in lines
    assert ["2", "workers", "40.0", "(40.0", "to", "40.0)", "1,280", "(1,280", "to", "1,280)", "100%"] in lines
    assert ["ms", "a", "step", "data", "pull", "compute", "rest", "step"] in lines
    assert ["one", "process", "1.00", "1.00", "1.00", "47.00", "(94%)", "50.00"] in lines
    assert "round 2/2  2 workers: 40.0 steps/s" in result.err


@pytest.mark.parametrize("left", [0, 1])
def test_the_logs_of_a_training_that_ended_early_are_kept(tfdist, cluster_file, trainings, monkeypatch, left):
    """It reports no step, as if the recipe's module called sys.exit(0), or one epoch, as with a stopping callback."""
    made_up = vars(command)["launch_job"]

    def launch_job(*arguments, **named):
        report, run_dir = made_up(*arguments, **named)
        metrics = run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)[:left]
        metrics.write_text(lines[0]) if lines else metrics.unlink()
        return report, run_dir

    monkeypatch.setattr(command, "launch_job", launch_job)
    result = tfdist("bench", cluster_file, "--rounds", "1", "--steps", "40")
    assert codes_in(result.err) == ["measurement-incomplete"]
    (job,) = trainings
    assert job.run_dir.exists()
    assert str(job.run_dir) in "".join(result.err.split())
    shutil.rmtree(job.run_dir.parent)


def test_json_is_all_there_is_on_stdout(tfdist, cluster_file, trainings):
    result = tfdist("bench", cluster_file, "--rounds", "1", "--workers", "4", "--json", "--set", "train.batch_size=8")
    assert result.code == 0, result.err
    read = json.loads(result.out)
    assert (read["title"], read["steps"]) == ("cluster: digits, parameter_server", 200)
    assert [(row["name"], row["workers"]) for row in read["rows"]] == [("4 workers", 4), ("one process", 1)]
    assert read["rows"][0]["examples_per_second"]["rounds"] == [3200.0]
    assert [job.recipe.train.steps_per_epoch for job in trainings] == [800, 200, 800, 200]


def test_results_are_written_with_a_plot(tfdist, cluster_file, trainings, monkeypatch):
    plotted = []
    monkeypatch.setattr(command, "require_matplotlib", lambda: None)
    monkeypatch.setattr(command, "plot", lambda results, path: plotted.append(path))
    result = tfdist("bench", cluster_file, "--rounds", "1", "--output", "a/b")
    assert result.code == 0, result.err
    folder = cluster_file.parent / "a" / "b"
    assert [path.resolve() for path in plotted] == [folder / "bench.svg"]
    assert "| 2 workers |" in (folder / "bench.md").read_text()
    assert len(json.loads((folder / "bench.json").read_text())["rows"]) == 3


def test_advice_compares_single_changes_with_the_settings_as_they_are(tfdist, cluster_file, trainings):
    more = "--rounds", "2", "--set", "train.batch_size=8", "--output", "advice"
    result = tfdist("bench", cluster_file, "--advise", *more)
    assert result.code == 0, result.err
    changed = [(job.recipe.wire, job.recipe.train.batch_size) for job in trainings]
    assert changed.count(("bfloat16", 8)) == 2
    assert {size for _, size in changed} == {8}
    assert [job.cluster.strategy for job in trainings].count("single") == 2
    assert sum(job.recipe.updates.local_steps > 1 for job in trainings) == 1  # it fails
    assert not any(job.run_dir.parent.exists() for job in trainings)
    assert "No change helps" in result.out
    assert "updates.local_steps=20 failed: ValueError: no" in " ".join(result.out.split())
    written = json.loads((cluster_file.parent / "advice" / "advice.json").read_text())
    assert (written["base"]["median"], written["one_process"]["median"]) == (1600, 800)
    assert written["candidates"][0]["error"] == "ValueError: no"
    assert {each["file"] for each in written["candidates"] if each["set"][0].startswith("roles")} == {str(cluster_file)}
    assert "No change helps" in (cluster_file.parent / "advice" / "advice.md").read_text()


def test_a_cluster_slower_than_one_process_is_the_first_line_of_advice(tfdist, cluster_file, trainings, monkeypatch):
    made_up = vars(command)["launch_job"]

    def slow_cluster(launcher, job, timeouts, *, quiet):
        report, path = made_up(launcher, job, timeouts, quiet=quiet)
        factor = 8 if job.cluster.strategy == "single" else 1
        return replace(report, result={**report.result, "examples": factor * report.result["examples"]}), path

    monkeypatch.setattr(command, "launch_job", slow_cluster)
    monkeypatch.setattr("tfdist_cli.bench.candidates._of_asynchronous", lambda recipe: iter(()))
    result = tfdist("bench", cluster_file, "--advise", "--rounds", "2")
    assert result.code == 0, result.err
    assert result.out.startswith("warning: one process is 4 times as fast as this cluster")
    read = json.loads(tfdist("bench", cluster_file, "--advise", "--rounds", "2", "--json").out)
    assert read["slower_than_one_process"]


def test_what_cannot_be_written_is_told_before_anything_runs(tfdist, cluster_file, trainings, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())
    result = tfdist("bench", cluster_file, "--output", "there")
    assert (result.code, trainings) == (2, [])
    assert "pip install 'tfdist-cli[plot]'" in result.err
    monkeypatch.setattr(command, "require_matplotlib", lambda: None)
    result = tfdist("bench", cluster_file, "--output", cluster_file)
    assert (result.code, trainings) == (2, [])
    assert codes_in(result.err) == ["output-not-writable"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "two"], "error[invalid-workers]: "),
        (["--workers", "1,100000"], "error[out-of-range]: "),
        (["--steps", "0"], "--steps"),
        (["--rounds", "0"], "--rounds"),
        (["--advise", "--rounds", "1"], "error[too-few-rounds]: "),
        (["--advise", "--workers", "1"], "error[advice-with-workers]: "),
        (["--", "python", "train.py"], "unexpected extra argument"),
    ],
)
def test_bad_usage(tfdist, cluster_file, trainings, arguments, message):
    result = tfdist("bench", cluster_file, *arguments)
    assert (result.code, trainings) == (2, [])
    assert message in result.err


def test_without_a_recipe_there_is_nothing_to_measure(tfdist, cluster_file):
    result = tfdist("bench", cluster_file)
    assert result.code == 2
    assert codes_in(result.err) == ["nothing-to-run"]
    assert str(cluster_file) in result.err


@pytest.mark.parametrize(("code", "failures"), [(1, (FAILURE,)), (130, ())])
def test_the_first_failure_ends_all_and_its_logs_stay(tfdist, cluster_file, trainings, monkeypatch, code, failures):
    made_up = vars(command)["launch_job"]

    def failing(*arguments, **options):
        report, path = made_up(*arguments, **options)
        return replace(report, exit_code=code, headline="what happened", failures=failures), path

    monkeypatch.setattr(command, "launch_job", failing)
    result = tfdist("bench", cluster_file)
    assert (result.code, len(trainings)) == (code, 1)
    assert "error: what happened" in result.err
    assert trainings[0].run_dir.exists() == bool(failures)
    shutil.rmtree(trainings[0].run_dir.parent, ignore_errors=True)


def test_ctrl_c_between_two_trainings_ends_it(tfdist, cluster_file, trainings, monkeypatch):
    monkeypatch.setattr(command, "read_rate", lambda *_: signal.raise_signal(signal.SIGINT))
    result = tfdist("bench", cluster_file)
    assert (result.code, len(trainings)) == (130, 1)
    assert not trainings[0].run_dir.exists()
