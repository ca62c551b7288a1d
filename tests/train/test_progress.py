"""Metrics of steps that were lost."""

import json

from tfdist_cli.train.progress import take_back


def test_lines_of_steps_that_are_taken_again_move_to_another_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (10, 20, 20, 30, 40)]
    path.write_text("".join(lines) + '{"step": 5')
    take_back(path, 20)
    assert path.read_text() == "".join(lines[:3])
    assert (tmp_path / "metrics_lost.jsonl").read_text() == "".join(lines[3:])
    path.write_text(path.read_text() + lines[3])
    take_back(path, 20)
    assert (tmp_path / "metrics_lost.jsonl").read_text() == "".join([*lines[3:], lines[3]])


def test_a_file_that_ends_where_the_training_goes_on_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    take_back(path, 20)
    assert not path.exists()
    path.write_text('{"step": 20}\n')
    take_back(path, 20)
    assert list(tmp_path.iterdir()) == [path]
