"""What is read of a run for its report."""

import pytest

from tests.support.codes import raises
from tests.support.recorded import RecordedRun
from tfdist_cli.errors import UsageError
from tfdist_cli.report.data import read_data


def test_pauses_between_launches_do_not_count(tmp_path):
    run = RecordedRun(tmp_path / "run")
    run.launch()
    run.trained(3, 1)
    run.happened(10, "signal", signal="SIGTERM")
    run.launch(at=5000.0)
    run.trained(2, 2)
    run.used(4, chief_0={"cpu": 1.0})
    run.happened(7, "phase", phase="ended")
    data = read_data(run.path)
    assert [report.at for report in data.reports] == [3.0, 12.0]
    assert [event.at for event in data.events] == [0.0, 10.0, 10.0, 17.0]
    assert data.usage["chief:0"][0][0] == 14.0
    assert data.seconds == 17.0


def test_without_events_the_run_begins_with_its_first_report(tmp_path):
    run = RecordedRun(tmp_path / "run")
    run.trained(100, 1)
    run.trained(105, 2)
    data = read_data(run.path)
    assert [report.at for report in data.reports] == [0.0, 5.0]
    assert data.seconds == 5.0


def recorded(path, *, host_ahead=0.0, ended=True):
    """A run of 60 s, on a machine whose chief is on a host with another clock."""
    run = RecordedRun(path)
    run.launch()
    for second in (10, 30, 59):
        run.trained(second + host_ahead, second)
    run.happened(30, "checkpoint", step=30)
    if ended:
        run.happened(60, "phase", phase="ended")
        run.ended()
    return run


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_the_clock_of_another_host_does_not_count(ahead, tmp_path):
    data = read_data(recorded(tmp_path / "run", host_ahead=ahead).path)
    first, second, third = (report.at for report in data.reports)
    assert data.seconds == 60
    assert (second - first, third - second) == (20, 29)
    assert 0 <= first < third <= 60


def test_lines_after_the_last_event_of_a_launcher_that_was_killed(tmp_path):
    data = read_data(recorded(tmp_path / "run", ended=False).path)
    assert ([report.at for report in data.reports], data.seconds) == ([10, 30, 59], 59)


def test_the_time_for_which_the_machine_was_suspended_does_not_count(tmp_path):
    run = RecordedRun(tmp_path / "run")
    run.launch()
    run.trained(5, 1)
    run.happened(10, "checkpoint", step=2)
    run._launched_at = 1000.0  # the time of day goes on
    run.happened(20, "checkpoint", step=3)
    run.trained(25, 4)
    run.happened(30, "phase", phase="ended")
    run.ended()
    data = read_data(run.path)
    assert ([report.at for report in data.reports], data.seconds) == ([5, 25], 30)


def test_settings_are_paths_with_texts(tmp_path):
    run = RecordedRun(tmp_path / "run")
    settings = read_data(run.path).settings
    assert (settings["launcher.kind"], settings["train.epochs"], settings["module"]) == ("local", "3", "digits")
    (run.path / "recipe.yaml").write_text("a: [1, {b: null}]\nc: {}\nd: 0.5\n")
    settings = read_data(run.path).settings
    assert (settings["a"], settings["c"], settings["d"]) == ("[1, {b: null}]", "{}", "0.5")
    (run.path / "recipe.yaml").write_text("{")
    assert read_data(run.path).damaged == ("recipe.yaml",)


def test_another_folder_is_refused(tmp_path):
    with raises(UsageError, "not-a-run-dir"):
        read_data(tmp_path)


@pytest.mark.parametrize("metrics", ["values", "metrics"])
def test_scores_of_an_evaluator_have_a_line_of_their_own(tmp_path, metrics):
    run = RecordedRun(tmp_path / "run")
    run._add("evaluation.jsonl", 3, split="test", step=5, **{metrics: {"loss": 0.5}})
    (score,) = read_data(run.path).evaluations
    assert (score.split, score.step, score.values) == ("test, evaluator", 5, {"loss": 0.5})
