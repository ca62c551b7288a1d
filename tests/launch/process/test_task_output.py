"""A task's output, however it is cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.launch.process.task_output import MAX_LINE, OutputParser, shown


def parse(*chunks):
    parser = OutputParser()
    parts = [parser.feed(chunk) for chunk in chunks] + [parser.close()]
    return (
        b"".join(part.log for part in parts),
        [line for part in parts for line in part.lines],
        [record for part in parts for record in part.records],
    )


def record(**fields):
    return b"\x1e" + json.dumps(fields).encode() + b"\n"


def test_lines_and_records_are_reported_apart():
    data = b"one\n" + record(kind="state", state="training") + b"two\n"
    assert parse(data) == (b"one\ntwo\n", ["one", "two"], [{"kind": "state", "state": "training"}])


def test_a_record_behind_text_without_a_line_feed():
    assert parse(b"50%\r" + record(kind="x") + b"rest\n") == (b"50%\rrest\n", ["50%", "rest"], [{"kind": "x"}])


def test_two_records_in_one_line():
    assert parse(record(kind="a")[:-1] + record(kind="b")) == (b"", [], [{"kind": "a"}, {"kind": "b"}])


def test_what_only_looks_like_a_record_is_text():
    assert parse(b"\x1e{not json}\n") == (b"{not json}\n", ["{not json}"], [])


def test_a_last_line_without_a_line_feed_is_kept():
    assert parse(b"one\ntwo") == (b"one\ntwo", ["one", "two"], [])


def test_invalid_utf8_is_shown_replaced_and_logged_as_it_came():
    data = b"caf\xe9 \xff\n" + b"x\xe9" + record(kind="a")
    log, lines, records = parse(data)
    assert log == b"caf\xe9 \xff\n" + b"x\xe9"
    assert lines == ["caf� �", "x�"]
    assert records == [{"kind": "a"}]


def test_a_line_that_never_ends_is_cut_and_takes_no_memory():
    parser = OutputParser()
    lines = []
    for _ in range(100):
        lines += parser.feed(b"x" * 10_000).lines
        assert len(parser._line) <= MAX_LINE
    assert {len(line) for line in lines} == {MAX_LINE}
    assert sum(map(len, lines)) + len(parser._line) == 1_000_000


def test_a_progress_bar_shows_its_last_state():
    parser = OutputParser()
    assert parser.feed(b"\r10%\r20%").lines == []
    assert parser.unfinished == "20%"
    assert parser.feed(b"\r30%\n").lines == ["30%"]
    assert parser.unfinished == ""


@pytest.mark.parametrize(
    ("line", "seen"), [("a\rb", "b"), ("a\r", "a"), ("a\r\r", "a"), ("\r", ""), ("a", "a"), ("", "")]
)
def test_shown(line, seen):
    assert shown(line) == seen


def test_text_is_logged_before_its_line_is_over():
    parser = OutputParser()
    assert parser.feed(b"Epoch 1: ").log == b"Epoch 1: "
    assert parser.feed(b"loss 3\nEp").log == b"loss 3\nEp"


PIECES = st.sampled_from([b"a", b"\n", b"\r", b"\xc3\xa9", b"\xff", b"\x1e", record(kind="r", n=1), b"x" * 300, b" "])


@given(st.lists(PIECES, max_size=30).map(b"".join), st.lists(st.integers(0, 400), max_size=8))
def test_nothing_depends_on_how_the_bytes_are_cut(data, cuts):
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(ends)]
    assert parse(*chunks) == parse(data)
    if b"\x1e" not in data:
        assert parse(data)[0] == data
