"""Records in a task's standard error."""

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_cli.protocol import records
from tfdist_cli.protocol.records import RECORD_SEPARATOR, emit, split
from tfdist_cli.protocol.run_files import number

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture
def stderr(monkeypatch):
    """What is written to descriptor 2."""
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda descriptor, data: written.append(data) if descriptor == 2 else None)
    monkeypatch.setenv("TFDIST_RECORDS", "1")
    return written


def read(written):
    lines = b"".join(written).decode().removesuffix("\n").split("\n")  # splitlines() would split at the separators too
    return [part for line in lines for part in split(line)]


def test_goes_there_and_back(stderr):
    emit("progress", step=5, total=None, metrics={"loss": 0.5})
    emit("state", state="done")
    assert read(stderr) == [
        {"kind": "progress", "step": 5, "total": None, "metrics": {"loss": 0.5}},
        {"kind": "state", "state": "done"},
    ]


def test_nothing_without_a_launcher(stderr, monkeypatch):
    monkeypatch.delenv("TFDIST_RECORDS")
    emit("state", state="done")
    assert not stderr


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "E", "message": "m", "traceback": "é\n" * 100_000},
        {"message": "a" * 100_000, "traceback": "b" * 100_000},
        {"step": 1, "metrics": {f"metric {index}": 0.1 for index in range(1000)}},
        {"step": 1, "workers": {f"worker:{index}": 12.3456789 for index in range(10_000)}, "metrics": {"loss": 1}},
        {"paths": ["x" * 1000] * 100},
        {"paths": ["x" * 100_000]},
        {"step": 10**4200},
    ],
)
def test_a_record_is_one_short_write(stderr, fields):
    emit("progress", **fields)
    [data] = stderr
    assert len(data) <= records._LIMIT
    [record] = read(stderr)
    assert record["kind"] == "progress"
    for key, value in record.items():
        assert type(value) is type({"kind": "", **fields}[key])


def test_what_is_short_stays_whole(stderr):
    emit("error", type="ValueError", message="bad", hint=None, traceback="x" * 50_000)
    [record] = read(stderr)
    assert (record["type"], record["message"], record["hint"]) == ("ValueError", "bad", None)
    assert len(record["traceback"]) > records._LIMIT * 0.9


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key != "kind"), JSON, max_size=3), st.integers(1, 200))
def test_any_record_is_short_and_readable(fields, times):
    data = records._encode({"kind": "any", **{key: [value] * times for key, value in fields.items()}})
    assert len(data) <= records._LIMIT
    assert data.count(b"\n") == 1
    [record] = split(data.decode().removesuffix("\n"))
    assert isinstance(record, dict)
    assert record["kind"] == "any"


@pytest.mark.parametrize(("levels", "is_record"), [(15, True), (16, False), (400, False)])
def test_a_record_that_is_nested_as_none_of_ours_is_text(levels, is_record):
    text = '{"kind": "odd", "value": ' + "[" * levels + "]" * levels + "}"
    [part] = split(f"{RECORD_SEPARATOR}{text}")
    assert part == (json.loads(text) if is_record else text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), (-2.5, -2.5), (0, 0), (2**62, 2**62)]
    + [(value, None) for value in (2**63, math.inf, -math.inf, math.nan, True, "5", None, [5])],
)
def test_a_number_is_one_to_count_with(value, expected):
    assert number(value) == expected


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", [""]),
        ("text", ["text"]),
        ('\x1e{"kind":"a"}', [{"kind": "a"}]),
        ('half a line\x1e{"kind":"a"}', ["half a line", {"kind": "a"}]),
        ('\x1e{"kind":"a"}\x1e{"kind":"b"}', [{"kind": "a"}, {"kind": "b"}]),
        ("\x1enot json", ["not json"]),
        ('\x1e{"kind":5}', ['{"kind":5}']),
        ('\x1e["kind"]', ['["kind"]']),
        ("\x1e", [""]),
        ("\x1e" + "[" * 100_000, ["[" * 100_000]),
        ("\x1e" + "9" * 10_000, ["9" * 10_000]),
    ],
)
def test_splits(line, parts):
    assert list(split(line)) == parts


@given(st.text())
def test_any_line_splits_and_loses_nothing(line):
    for part in split(line):
        assert isinstance(part, dict) or part in line.split(RECORD_SEPARATOR)
        assert isinstance(part, str) or json.dumps(part)
