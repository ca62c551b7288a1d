import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.launch.supervisor.task_table import TaskTable
from tfdist_cli.spec.task_id import TaskId

asked = []


def workers(numbers):
    return {TaskId("worker", index): number for index, number in enumerate(numbers)}


def is_odd(name, number):
    asked.append(name)
    return number % 2


def time(_, number):
    return number or None


@given(st.lists(st.integers(0, 9), max_size=70), st.lists(st.dictionaries(st.integers(0, 99), st.integers(0, 9))))
def test_a_table_answers_as_a_dict_after_any_changes(numbers, changes):
    plain = workers(numbers)
    table = TaskTable.of(plain)
    for change in changes:
        changed = {TaskId("worker", index): number for index, number in change.items()}
        before, unchanged = table, dict(table)
        table, plain = table.with_states(changed), plain | changed
        assert dict(before) == unchanged
        assert list(table) == list(plain)
        assert list(table.items()) == list(plain.items())
        assert len(table) == len(plain)
        assert table.select(is_odd) == tuple(name for name, number in plain.items() if number % 2)
        assert table.earliest(time) == min((number for number in plain.values() if number), default=None)


def test_a_change_of_one_task_asks_about_few_others():
    table = TaskTable.of(workers(range(1000)))
    table.select(is_odd)
    asked.clear()
    changed = table.with_states({TaskId("worker", 500): 8})
    assert len(changed.select(is_odd)) == 500
    assert 0 < len(asked) < 50
    asked.clear()
    changed.select(is_odd)
    assert asked == []


def test_an_unknown_task():
    table = TaskTable.of(workers(range(3)))
    assert TaskId("ps") not in table
    assert table.get(TaskId("ps")) is None
    with pytest.raises(KeyError):
        table[TaskId("ps")]
