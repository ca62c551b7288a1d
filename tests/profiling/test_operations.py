"""The operations that take a task's time."""

from tfdist_cli.profiling.operations import Operation, operations, self_times
from tfdist_cli.profiling.xplane import Event, Line, Plane

SECOND = 10**12
NAMES = {1: "ExecutorState::Process", 2: "model/dense/MatMul:MatMul", 3: "add:AddV2", 4: "FunctionRun", 5: "loop:While"}


def test_an_events_own_time_is_without_what_it_contains():
    outer, first, inner, second, after = (
        Event(number, *times) for number, times in enumerate([(0, 100), (10, 30), (20, 5), (50, 50), (100, 7)])
    )
    assert dict(self_times([after, inner, first, second, outer])) == {
        outer: 20,
        first: 25,
        inner: 5,
        second: 50,
        after: 7,
    }
    assert list(self_times([])) == []


def test_operations_are_added_over_threads_and_listed_by_device():
    first = Line("a", [Event(1, 0, 9 * SECOND), Event(5, 0, 8 * SECOND), Event(2, SECOND, 6 * SECOND)])
    second = Line("b", [Event(2, 0, SECOND), Event(4, SECOND, SECOND), Event(3, 2 * SECOND, SECOND)])
    host = Plane("/host:CPU", [first, second], NAMES)
    gpu = Plane("/device:GPU:0", [Line("Stream #13", [Event(1, 0, 2 * SECOND)])], {1: "sgemm_128x64"})
    other = Plane("Task Environment", [Line("x", [Event(2, 0, SECOND)])], NAMES)
    assert operations([host, gpu, other]) == [
        Operation("CPU", "MatMul", 2, 7.0),
        Operation("CPU", "While", 1, 2.0),
        Operation("GPU:0", "sgemm_128x64", 1, 2.0),
        Operation("CPU", "AddV2", 1, 1.0),
    ]
