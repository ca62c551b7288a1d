"""Tests of the metrics file: lost steps, damaged lines and a full disk."""

import json

import pytest

from tfdist_cli.train.trainer import metrics_file
from tfdist_cli.train.trainer.metrics_file import MetricsFile


def line(step, epoch=1, split="train", done=False):
    return json.dumps({"split": split, "step": step, "epoch": epoch, "epoch_done": done}).encode() + b"\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def records_sent(monkeypatch):
    """The records sent to the launcher."""
    records = []
    monkeypatch.setattr(metrics_file, "emit", lambda kind, **fields: records.append((kind, fields["reason"])))
    return records


def lost_lines(path):
    return path.with_name("metrics_lost.jsonl").read_bytes()


def test_lines_of_lost_steps_move_to_another_file(path):
    lines = [line(step) for step in (10, 20, 20, 30, 40)]
    path.write_bytes(b"".join(lines) + b'{"step": 5')
    MetricsFile(path).truncate(20, 0)
    assert path.read_bytes() == b"".join(lines[:3])
    assert lost_lines(path) == b"".join(lines[3:])
    path.write_bytes(path.read_bytes() + lines[3])
    MetricsFile(path).truncate(20, 0)
    assert lost_lines(path) == b"".join([*lines[3:], lines[3]])


@pytest.mark.parametrize(("recorded", "kept"), [(0, 1), (1, 3)])
def test_the_end_of_an_epoch_is_removed_unless_it_is_recorded(path, recorded, kept):
    lines = [line(20), line(20, done=True), line(20, split="test")]
    path.write_bytes(b"".join(lines))
    MetricsFile(path).truncate(20, recorded)
    assert path.read_bytes() == b"".join(lines[:kept])


def test_a_file_without_lost_lines_is_unchanged(path):
    MetricsFile(path).truncate(20, 0)
    assert not path.exists()
    path.write_bytes(line(20))
    MetricsFile(path).truncate(20, 0)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe", b"[" * 100_000, b'{"step": 1e999, "epoch_done": 5', b'{"step": "a"}', b"[]", b'{"step": 1}\r\xff'],
)
def test_a_damaged_line_is_ignored(path, damage):
    path.write_bytes(line(10) + damage + b"\n" + line(20) + line(30))
    MetricsFile(path).truncate(20, 0)
    assert path.read_bytes() == line(10) + damage + b"\n" + line(20)
    assert lost_lines(path) == line(30)


def test_on_a_full_disk_nothing_fails_and_no_step_is_counted_twice(path, small_disk, records_sent, log):
    path = small_disk / "metrics.jsonl"
    lines = [line(step) for step in range(1000)]
    path.write_bytes(b"".join(lines))
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(2**20))
    file = MetricsFile(path)
    file.truncate(900, 0)
    assert path.read_bytes() == b"".join(lines[:901])
    before = path.stat().st_size
    for _ in range(200):
        file.append({"split": "train", "step": 901, "loss": "x" * 100})
    assert path.read_bytes().endswith(b"}\n"), "a line is whole or not there"
    assert path.stat().st_size > before, "the rest of a block took no room"
    reason = records_sent[0][1]
    assert str(path) in reason
    assert "No space left" in reason
    assert records_sent == [("metrics_failed", reason)], "it is reported once"
    assert len(log) == 1
    assert log[0].startswith(reason)
    (small_disk / "ballast").unlink()
    file.append({"step": 902})
    assert path.read_bytes().splitlines()[-1] == b'{"step":902}'


def test_a_removed_run_directory_is_not_an_error(path, records_sent):
    path.parent.rmdir()
    MetricsFile(path).append({"step": 1})
    MetricsFile(path).truncate(0, 0)
    ((kind, reason),) = records_sent
    assert kind == "metrics_failed"
    assert str(path) in reason
    assert "No such file" in reason
    assert not path.parent.exists()
