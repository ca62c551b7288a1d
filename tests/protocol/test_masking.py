"""Secrets are taken out of text, wherever it is cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.protocol.masking import SECRETS, Mask, MaskedStream

SECRET = 'kä"\\key-1234'


def masked(mask, *chunks):
    stream = MaskedStream(mask)
    return b"".join([*(stream.feed(chunk) for chunk in chunks), stream.close()])


def test_values_are_replaced_as_they_are_and_as_json_has_them():
    mask = Mask([SECRET])
    assert mask.text(f"it is {SECRET}, {SECRET}") == "it is ***, ***"
    assert json.loads(mask.text(json.dumps({"message": f"no {SECRET}"}))) == {"message": "no ***"}


def test_short_values_are_left_in_ordinary_text():
    assert Mask(["1234567", ""]).text("1234567 steps") == "1234567 steps"


def test_of_two_values_the_longer_one_goes_first():
    assert Mask(["password", "password-2"]).text("password-2 password") == "*** ***"


def test_a_task_masks_what_it_was_given():
    mask = Mask.from_environment({SECRETS: "A,B,GONE", "A": "value-of-a", "B": "value-of-b", "C": "value-of-c"})
    assert mask.text("value-of-a value-of-b value-of-c") == "*** *** value-of-c"
    assert Mask.from_environment({}).text("x") == "x"


def test_bytes_that_are_no_text_stay():
    assert masked(Mask([SECRET]), b"\xff\xfe" + SECRET.encode(), b"\x00") == b"\xff\xfe***\x00"
    assert Mask([SECRET]).text("\udcff") == "\udcff"


def test_only_what_may_begin_a_value_waits():
    stream = MaskedStream(Mask(["abcabcabd"]))
    assert stream.feed(b"Epoch 1: ") == b"Epoch 1: "
    assert stream.feed(b"xabcabc") == b"x"
    assert stream.feed(b"abc") == b"abc"
    assert stream.feed(b"abd!") == b"***!"
    assert stream.feed(b"ab") == b""
    assert stream.close() == b"ab"


@given(st.lists(st.sampled_from([b"ab", b"aab", b"aabaabaab", b"b", b"\n"]), max_size=30).map(b"".join), st.data())
def test_nothing_depends_on_how_the_bytes_are_cut(data, drawn):
    mask = Mask(["aabaabaab"])
    cuts = drawn.draw(st.lists(st.integers(0, len(data)), max_size=8).map(sorted))
    chunks = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]
    assert masked(mask, *chunks) == data.replace(b"aabaabaab", b"***")


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_value_in_pieces(size):
    data = b"x" * 50 + SECRET.encode() + b"y" * 50
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert masked(Mask([SECRET]), *chunks) == b"x" * 50 + b"***" + b"y" * 50
