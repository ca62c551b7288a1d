"""Strings in rows of a fixed width: what training writes is what servers read."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.words import words
from tfdist_cli.tables.hashing import as_ids
from tfdist_cli.tables.strings import ELLIPSIS, decoded, row_width
from tfdist_cli.train.layers.row_keys import string_rows, strings_as_ids

WORDS = words(500)


def kept(texts, size):
    return decoded(string_rows(tf.constant(texts, tf.string), row_width(size)).numpy()).tolist()


def test_strings_come_back_byte_by_byte():
    longest = max(map(len, WORDS))
    found = kept(WORDS, longest)
    assert [text.encode("utf-8", "surrogateescape") for text in found] == WORDS
    np.testing.assert_array_equal(as_ids(np.array(found, object)), strings_as_ids(tf.constant(WORDS)))


@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_longer_string_is_cut_after_a_complete_character(size):
    for word, found in zip(WORDS, kept(WORDS, size), strict=True):
        if len(word) <= size:
            assert found.encode("utf-8", "surrogateescape") == word
        else:
            assert found.endswith(ELLIPSIS)
            assert word.decode("utf-8", "surrogateescape").startswith(found.removesuffix(ELLIPSIS))
            assert size - len(found.removesuffix(ELLIPSIS).encode("utf-8", "surrogateescape")) < 4


def test_no_strings():
    assert kept([], 5) == []
