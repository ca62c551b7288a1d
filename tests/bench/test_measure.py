"""Rates and phases are those of the second epoch, as metrics.jsonl has them."""

import json

import pytest

from tests.support.codes import raises
from tfdist_cli.bench.measure import read_rate, read_split
from tfdist_cli.errors import TfdistError
from tfdist_cli.protocol.phases import COLUMNS


def line(step, seconds, *, done=True, split="train", each=0.0, workers=2):
    """A line of metrics.jsonl after so many steps, of which each worker took its share and `each` second a phase."""
    own = step // workers
    counted = dict.fromkeys(COLUMNS, 0.0) | {"pull": own * each, "compute": own * 3 * each, "pulled": own * 100.0}
    names = [f"worker:{number}" for number in range(workers)]
    return {
        "split": split,
        "step": step,
        "epoch_done": done,
        "seconds": seconds,
        "worker_steps": dict.fromkeys(names, own),
        "phases": dict.fromkeys(names, counted),
    }


def run(folder, *lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def test_the_rate_is_that_of_the_second_epoch(tmp_path):
    path = run(tmp_path, line(50, 4.0, done=False), line(100, 10.0), line(100, 11.0, split="test"), line(200, 12.5))
    rate = read_rate(path, {"step": 200, "examples": 6400})
    assert (rate.steps, rate.examples) == (40.0, 1280.0)


def test_a_step_is_split_and_the_rest_is_told(tmp_path):
    warm, measured = line(100, 10.0, each=0.5), line(200, 11.0, each=0.25 + 0.002)
    split = read_split(run(tmp_path, warm, measured))
    assert split.step == pytest.approx(20.0)  # two workers, 50 steps each, one second
    assert split.phases == pytest.approx({"pull": 4.0, "compute": 12.0})
    assert split.rest == pytest.approx(4.0)
    assert split.traffic == {"pulled": 100.0}
    assert split.steps_per_second == pytest.approx(100.0)


@pytest.mark.parametrize("lines", [[line(100, 1.0)], [line(100, 1.0), line(150, 2.0)]])
def test_a_training_that_was_stopped_gives_no_number(tmp_path, lines):
    with raises(TfdistError, "measurement-incomplete"):
        read_rate(run(tmp_path, *lines), {"step": 100, "examples": 1})


def test_a_training_that_reported_no_step_gives_no_number(tmp_path):
    for read in (lambda: read_rate(tmp_path, {}), lambda: read_split(tmp_path)):
        with raises(TfdistError, "measurement-incomplete") as caught:
            read()
        assert str(tmp_path) in str(caught.value.hint)
