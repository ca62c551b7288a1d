"""CSV files and TensorBoard's event files have the numbers of the run."""

import csv
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.recorded import trained_run
from tests.tracking.test_feed import resumed
from tfdist_cli.tracking.feed import Feed
from tfdist_cli.tracking.tracker import make_tracker


def scalars(folder, series, tag):
    """What TensorBoard reads."""
    read = EventAccumulator(str(folder / series), size_guidance={"scalars": 0})
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def written(run, split, name):
    """The numbers in metrics.jsonl."""
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["values"][name]) for line in lines if line["split"] == split]


@pytest.fixture
def finished(tmp_path):
    return trained_run(tmp_path / "run")


@pytest.mark.slow  # TensorBoard's reader imports TensorFlow
@pytest.mark.tensorflow
def test_tensorboard_reads_the_numbers(finished, tmp_path):
    folder = tmp_path / "events"
    Feed(finished.path, make_tracker("tensorboard", folder), folder).pass_on()
    for split, name in (("train", "loss"), ("train", "accuracy"), ("test", "loss")):
        assert scalars(folder, split, name) == [
            (step, pytest.approx(value, rel=1e-7)) for step, value in written(finished, split, name)
        ]
    assert scalars(folder, "worker-1", "staleness_mean")[-1] == (60, 0.5)
    assert scalars(folder, "system/chief-0", "cpu") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    texts = EventAccumulator(str(folder / "run"))
    texts.Reload()
    assert b"train.epochs" in texts.Tensors("parameters")[-1].tensor_proto.string_val[0]


@pytest.mark.slow  # TensorBoard's reader imports TensorFlow
@pytest.mark.tensorflow
def test_tensorboard_forgets_lost_steps(finished, tmp_path):
    folder = tmp_path / "events"
    feed = Feed(finished.path, make_tracker("tensorboard", folder), folder)
    feed.pass_on()
    shown = EventAccumulator(str(folder / "train"))
    shown.Reload()
    resumed(finished, kept=2)
    finished.trained(9, 30, values={"loss": 0.125})
    feed.pass_on()
    expected = [(20, 0.5), (30, 0.125)]
    assert scalars(folder, "train", "loss") == expected
    shown.Reload()  # a TensorBoard that was open all the time
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == expected


def test_csv_has_each_number_as_it_is_and_forgets_lost_steps(finished, tmp_path):
    folder = tmp_path / "csv"
    folder.mkdir()
    feed = Feed(finished.path, make_tracker("csv", folder), folder)
    feed.pass_on()
    resumed(finished, kept=3)
    finished.trained(9, 50, values={"loss": 0.1 + 0.2})
    feed.pass_on()
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [
        (int(row["step"]), float(row["value"])) for row in rows if (row["series"], row["name"]) == ("train", "loss")
    ]
    assert found == written(finished, "train", "loss")
    assert found[-1] == (50, 0.1 + 0.2)
    with (folder / "parameters.csv").open(newline="") as file:
        assert dict(csv.reader(file))["train.epochs"] == "3"


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_another_launch_writes_the_files_again(finished, tmp_path, name):
    folder = tmp_path / "files"
    folder.mkdir()

    def size():
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    Feed(finished.path, make_tracker(name, folder), folder).pass_on()
    first = size()
    Feed(finished.path, make_tracker(name, folder), folder).pass_on()
    assert size() == first
