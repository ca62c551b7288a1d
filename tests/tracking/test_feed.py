"""A tracker gets each line once, over restarts of the training and of its own process."""

import json

import pytest

from tfdist_cli.tracking.feed import Feed
from tfdist_cli.tracking.tracker import RewritableTracker


def resumed(run, kept):
    """Replaces the metrics as a training does that resumes: the first lines stay."""
    path = run.path / "metrics.jsonl"
    new = path.with_name("new")
    new.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    new.replace(path)


def train(run, *steps, lost=0.0):
    for step in steps:
        run.trained(step, step, done=False, values={"loss": 1 / step + lost})


@pytest.fixture(params=[True, False], ids=["replayed", "extended"])
def tracker(request, recording):
    return recording(rewritable=request.param)


def test_new_lines_are_passed_on_once(run, tracker, tmp_path):
    feed = Feed(run.path, tracker, tmp_path)
    feed.pass_on()
    train(run, 1, 2)
    feed.pass_on()
    feed.pass_on()
    train(run, 4)
    feed.pass_on()
    assert tracker.losses() == [(1, 1.0), (2, 0.5), (4, 0.25)]
    assert [call for call in tracker.calls if call in ("open", "describe")] == ["open", "describe"]


def test_a_line_that_is_being_written_waits(run, tracker, tmp_path):
    feed = Feed(run.path, tracker, tmp_path)
    train(run, 1)
    path = run.path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    feed.pass_on()
    path.write_text(whole)
    feed.pass_on()
    assert tracker.losses() == [(1, 1.0)]


def test_steps_that_are_taken_again(run, tracker, tmp_path):
    feed = Feed(run.path, tracker, tmp_path)
    train(run, 1, 2)
    train(run, 3, 4, lost=7.0)
    feed.pass_on()
    resumed(run, kept=2)
    train(run, 4)
    feed.pass_on()
    rewritten = isinstance(tracker, RewritableTracker)
    if rewritten:
        assert tracker.losses() == [(1, 1.0), (2, 0.5), (4, 0.25)]
    else:  # it cannot remove values: the new one comes after that of the lost step
        assert [step for step, _ in tracker.losses()] == [1, 2, 3, 4, 4]
        assert tracker.losses()[-1] == (4, 0.25)


def test_another_process_continues(run, tracker, tmp_path, recording):
    train(run, 1, 2)
    Feed(run.path, tracker, tmp_path).pass_on()
    train(run, 4)
    rewritten = isinstance(tracker, RewritableTracker)
    second = recording(rewritable=rewritten)
    Feed(run.path, second, tmp_path).pass_on()
    steps = [step for step, _ in second.losses()]
    assert steps == ([1, 2, 4] if rewritten else [4])


def test_another_process_notices_lost_steps(run, recording, tmp_path):
    train(run, 1, 2, 3)
    Feed(run.path, recording(rewritable=False), tmp_path).pass_on()
    resumed(run, kept=1)
    train(run, 2)
    second = recording(rewritable=False)
    train(run, 8)
    Feed(run.path, second, tmp_path).pass_on()
    # The second line is what it was: the tracker has it. The third one is another.
    assert [step for step, _ in second.losses()] == [8]


@pytest.mark.parametrize("broken", ["open", "describe", "log"])
def test_a_failure_loses_nothing(run, recording, tmp_path, broken):
    tracker = recording(rewritable=True)
    feed = Feed(run.path, tracker, tmp_path)
    train(run, 1, 2)
    tracker.broken = {broken}
    with pytest.raises(ConnectionError):
        feed.pass_on()
    tracker.broken = set()
    train(run, 4)
    feed.pass_on()
    assert tracker.losses() == [(1, 1.0), (2, 0.5), (4, 0.25)]


def test_parameters_and_versions_are_described_again_when_they_change(run, recording, tmp_path):
    tracker = recording(rewritable=True)
    feed = Feed(run.path, tracker, tmp_path)
    feed.pass_on()
    run.happened(2, "versions", task="chief:0", tensorflow="2.21.0", keras="3.15.1")
    feed.pass_on()
    run.settings(epochs=5)
    feed.pass_on()
    run.happened(3, "checkpoint", task="chief:0", step=3)
    feed.pass_on()
    assert tracker.calls.count("describe") == 3


def test_damaged_files_are_passed_over(run, tracker, tmp_path):
    (run.path / "metrics.jsonl").write_bytes(
        b'{"step": 1}\n\xff\n[]\n' + json.dumps({"time": "x", "step": 2}).encode() + b"\n"
    )
    (run.path / "cluster.yaml").write_text("a: [")
    feed = Feed(run.path, tracker, tmp_path)
    train(run, 2)
    feed.pass_on()
    assert tracker.losses() == [(2, 0.5)]
