"""Boards show other tasks arrays."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.boards import Array, Board, OthersBoard
from tfdist_cli.train.cluster.shared_memory.memory import gone_if_ended

PROCESS = """
from tfdist_cli.train.cluster.shared_memory.boards import Board
board = Board([])
print(board.identity.hex(), flush=True)
input()
"""

ARRAYS = [Array(np.dtype(np.float32), 5), Array(np.dtype(np.int64), 3), Array(np.dtype(np.uint8), 0)]


@pytest.fixture
def board():
    board = Board(ARRAYS)
    yield board
    board.close()


def values(number):
    return [np.full(array.size, number, array.dtype) for array in ARRAYS]


def same(found, expected):
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_another_task_sees_what_was_written(board):
    board.write(0, values(7))
    other = OthersBoard(board.identity, ARRAYS)
    found = other.read(0)
    assert same(found, values(7))
    assert [each.dtype for each in found] == [array.dtype for array in ARRAYS]
    other.close()


def test_values_stay_until_those_of_the_turn_after_the_next_one(board):
    other = OthersBoard(board.identity, ARRAYS)
    board.write(4, values(4))
    board.write(5, values(5))
    first = other.read(4)
    assert same(first, values(4))
    assert same(other.read(5), values(5))
    board.write(6, values(6))
    assert same(first, values(6))
    other.close()


def test_arrays_begin_where_tensorflow_can_use_them(board):
    other = OthersBoard(board.identity, ARRAYS)
    assert {each.ctypes.data % 64 for turn in range(2) for each in other.read(turn)} == {0}
    other.close()


def test_some_arrays_are_written_alone(board):
    other = OthersBoard(board.identity, ARRAYS)
    board.write(0, values(1))
    board.write(0, values(2)[1:], first=1)
    assert same(other.read(0), [values(1)[0], *values(2)[1:]])
    other.close()


def test_the_end_is_seen(board):
    other = OthersBoard(board.identity, ARRAYS)
    before = [other.has_ended, board.has_ended]
    board.end()
    assert [*before, other.has_ended, board.has_ended] == [False, False, True, True]
    other.close()


def test_the_end_of_a_process_is_seen_though_its_parent_does_not_know_it():
    with subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        other = OthersBoard(bytes.fromhex(process.stdout.readline().decode()), [])
        before = other.has_ended
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (before, other.has_ended) == (False, True)
        other.close()


def test_what_a_user_may_not_look_at_is_gone_if_its_process_has_ended():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for error in (FileNotFoundError, PermissionError):
            with pytest.raises(error), gone_if_ended(process.pid):
                raise error
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(FileNotFoundError), gone_if_ended(process.pid):
            raise PermissionError


def test_values_that_were_read_outlive_the_board():
    board = Board(ARRAYS)
    other = OthersBoard(board.identity, ARRAYS)
    board.write(0, values(3))
    found = other.read(0)
    board.close()
    other.close()
    assert same(found, values(3))


def test_a_closed_board_cannot_be_opened():
    board = Board(ARRAYS)
    board.close()
    with pytest.raises(FileNotFoundError):
        OthersBoard(board.identity, ARRAYS)


def test_descriptors_are_closed():
    before = opened()
    for _ in range(3):
        board = Board(ARRAYS)
        other = OthersBoard(board.identity, ARRAYS)
        other.close()
        board.close()
        del board, other
    assert not opened() - before
