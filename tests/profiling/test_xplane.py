"""Reading an XPlane file."""

import pytest

from tfdist_cli.profiling.xplane import Event, Line, Plane, read_planes


def varint(value):
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])


def field(number, value):
    """A field of a protocol buffer: a number, bytes, or a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def xplane():
    """A file with one plane, and fields that are not read."""
    statistic = field(4, field(1, 7) + varint(2 << 3 | 1) + bytes(8))
    event = field(4, field(1, 300) + field(2, 2**45) + field(3, 1500) + statistic)
    line = field(1, 2**63) + field(2, b"tf_Compute") + event + field(4, field(1, 300)) + varint(12 << 3 | 5) + bytes(4)
    names = field(4, field(1, 300) + field(2, field(1, 300) + field(2, b"a:MatMul") + field(4, b"shown")))
    return field(1, field(2, b"/host:CPU") + field(3, line) + names) + field(4, b"host")


def test_threads_and_their_events():
    events = [Event(300, 2**45, 1500), Event(300, 0, 0)]
    assert list(read_planes(xplane())) == [Plane("/host:CPU", [Line("tf_Compute", events)], {300: "a:MatMul"})]


def test_a_damaged_file_is_an_error():
    data = xplane()
    for end in range(1, len(data) - len(field(4, b"host"))):
        with pytest.raises(ValueError, match="XPlane"):
            list(read_planes(data[:end]))
