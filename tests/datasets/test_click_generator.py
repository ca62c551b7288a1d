"""Tests of generated clicks: their format, reproducibility, and best AUC."""

import gzip
import hashlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli.datasets import click_generator, criteo
from tfdist_cli.datasets.click_generator import auc, generate
from tfdist_cli.errors import UsageError


def test_lines_are_in_criteos_format():
    lines = generate(500, "train").lines
    hexadecimal = re.compile(rb"[0-9a-f]{8}|")
    integer = re.compile(rb"-1|\d+|")
    for line in lines:
        label, *fields = line.split(b"\t")
        assert label in (b"0", b"1")
        assert len(fields) == 39
        assert all(integer.fullmatch(field) for field in fields[:13])
        assert all(hexadecimal.fullmatch(field) for field in fields[13:])
    columns = list(zip(*(line.split(b"\t") for line in lines), strict=True))
    assert all(b"" in column for column in columns[1:14])
    assert sum(b"" in column for column in columns[14:]) == 7
    assert any(b"-1" in column for column in columns[1:14])


def test_labels_match_the_lines():
    clicks = generate(500, "test")
    assert [int(line[:1]) for line in clicks.lines] == clicks.labels.tolist()


def test_the_lines_are_the_same_everywhere():
    assert hashlib.sha256(b"\n".join(generate(200, "train").lines)).hexdigest()[:16] == "4a932edb219a9927"


def test_the_first_lines_do_not_depend_on_the_number_of_lines():
    more = generate(click_generator.BLOCK + 10, "train")
    fewer = generate(50, "train")
    assert len(more.lines) == len(more.labels) == len(more.probabilities) == click_generator.BLOCK + 10
    assert more.lines[:50] == fewer.lines
    assert not set(more.lines[click_generator.BLOCK :]) & set(more.lines[: click_generator.BLOCK])


def test_splits_and_seeds_have_different_lines():
    train, test = generate(1_000, "train"), generate(1_000, "test")
    other = generate(1_000, "train", seed=1)
    assert not set(train.lines) & (set(test.lines) | set(other.lines))


def test_labels_have_their_probabilities():
    clicks = generate(50_000, "test")
    bins = np.digitize(clicks.probabilities, np.linspace(0, 1, 11)) - 1
    for number in range(10):
        own = bins == number
        expected = clicks.probabilities[own].mean()
        deviation = np.sqrt(expected * (1 - expected) / own.sum())
        assert abs(clicks.labels[own].mean() - expected) < 4 * deviation


def test_auc_is_the_share_of_ordered_pairs():
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 200), random.integers(0, 20, 200).astype(float)
    clicks, others = scores[labels == 1][:, None], scores[labels == 0]
    assert auc(labels, scores) == pytest.approx(((clicks > others) + (clicks == others) / 2).mean(), abs=1e-12)
    assert auc(np.array([0, 1]), np.array([0.1, 0.2])) == 1
    assert np.isnan(auc(np.array([1, 1]), np.array([0.1, 0.2])))


@pytest.mark.slow
def test_a_logistic_regression_comes_near_the_best_auc():
    """The features are read from the lines; each category and each missing number is a feature."""
    train, test = generate(60_000, "train"), generate(10_000, "test")
    rows = 1 << 16
    (numbers, ids), (test_numbers, test_ids) = (features(clicks.lines, rows) for clicks in (train, test))
    weights, table, bias = np.zeros(numbers.shape[1]), np.zeros(rows), 0.0
    weight_sums, table_sums = np.full(numbers.shape[1], 1e-8), np.full(rows, 1e-8)
    random = np.random.default_rng(0)
    for _ in range(3):
        for batch in np.split(random.permutation(len(ids)), len(ids) // 200):
            z = bias + numbers[batch] @ weights + table[ids[batch]].sum(axis=1)
            error = (1 / (1 + np.exp(-z)) - train.labels[batch]) / len(batch)
            gradient = numbers[batch].T @ error
            weight_sums += gradient**2
            weights -= 0.05 * gradient / np.sqrt(weight_sums)
            sparse = np.bincount(ids[batch].ravel(), np.repeat(error, 26), rows)
            table_sums += sparse**2
            table -= 0.05 * sparse / np.sqrt(table_sums)
            bias -= error.sum()
    reached = auc(test.labels, test_numbers @ weights + table[test_ids].sum(axis=1))
    assert test.best_auc - 0.04 < reached < test.best_auc


def features(lines, rows):
    x, _ = next(iter(criteo.from_lines(lines, rows).batch(len(lines)).as_numpy_iterator()))
    missing = x["numbers"] == criteo.MISSING_NUMBER
    return np.hstack([np.where(missing, 0, x["numbers"]), missing]).astype(float), x["categories"]


def test_files_equal_generated_lines(tmp_path):
    best = click_generator.write(tmp_path / "new" / "folder", rows=300, test_rows=200, seed=3)
    train, test = best
    assert (train.name, test.name) == ("train.tsv", "test.tsv")
    assert train.read_bytes() == b"".join(line + b"\n" for line in generate(300, "train", seed=3).lines)
    assert best[test] == generate(200, "test", seed=3).best_auc
    packed, _ = click_generator.write(tmp_path, rows=300, test_rows=200, seed=3, compress=True)
    assert packed.name == "train.tsv.gz"
    assert gzip.decompress(packed.read_bytes()) == train.read_bytes()


def test_an_existing_file_is_an_error(tmp_path):
    (tmp_path / "test.tsv").write_text("mine")
    with raises(UsageError, "file-exists") as caught:
        click_generator.write(tmp_path, rows=10, test_rows=10)
    assert str(tmp_path / "test.tsv") in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["test.tsv"]
    assert (tmp_path / "test.tsv").read_text() == "mine"


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(UsageError, "folder-not-writable"):
        click_generator.write(tmp_path / "file", rows=10, test_rows=10)


def test_no_lines():
    with raises(UsageError, "invalid-argument"):
        generate(0, "train")


def test_an_unknown_split():
    with raises(UsageError, "unknown-split"):
        generate(10, "validation")


def test_the_program(tmp_path):
    command = [sys.executable, "-m", "tfdist_cli.datasets.click_generator", "clicks", "--rows", "30", "--test-rows=40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    name, auc = done.stdout.splitlines()[1].split()[:: len(done.stdout.splitlines()[1].split()) - 1]
    assert (name, auc) == ("clicks/test.tsv:", f"{generate(40, 'test').best_auc:.4f}")
    assert len((tmp_path / "clicks" / "train.tsv").read_bytes().splitlines()) == 30


@pytest.mark.parametrize("rows", ["0", "x"])
def test_the_program_reports_an_invalid_number_of_lines(tmp_path, capsys, rows):
    with pytest.raises(SystemExit) as caught:
        click_generator.main([str(tmp_path / "clicks"), "--rows", rows])
    assert caught.value.code == 2
    assert rows in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "clicks").exists()
