"""What a task measures of itself."""

import ctypes
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist_cli.protocol.usage import LARGEST_SHARE, PERIOD, UsageMeter, gpu_reader


class Clocks:
    """Clocks that a test moves."""

    def __init__(self):
        self.now = self.cpu = self.own = 0.0
        self.cost = 0.0

    def meter(self, proc=None):
        def own():
            self.own += self.cost
            return self.own

        arguments = {} if proc is None else {"proc": proc}
        return UsageMeter(clock=lambda: self.now, cpu_clock=lambda: self.cpu, own_clock=own, gpus=dict, **arguments)


def test_rates_are_those_since_the_last_measurement():
    clocks = Clocks()
    meter = clocks.meter()
    clocks.now, clocks.cpu = PERIOD / 2, 1.0
    assert meter.measure() is None
    clocks.now, clocks.cpu = 4.0, 6.0
    assert meter.measure()["cpu"] == 1.5
    clocks.now = 6.0
    last = meter.measure()
    assert (last["seconds"], last["cpu"]) == (2.0, 0.0)
    assert 1e6 < last["memory"] < 1e10


def test_the_pause_grows_with_the_cost():
    clocks = Clocks()
    meter = clocks.meter()
    clocks.now, clocks.cost = PERIOD, 0.01
    assert meter.measure()
    clocks.now = PERIOD + 0.01 / LARGEST_SHARE - 0.1
    assert meter.measure() is None
    clocks.now += 0.2
    assert meter.measure()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux counts the bytes of a connection")
def test_bytes_of_its_own_connections_count_once():
    clocks = Clocks()
    with socket.create_server(("127.0.0.1", 0)) as server:
        meter = clocks.meter()
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        here.sendall(b"x" * 40_000)
        left = 40_000
        while left:
            left -= len(there.recv(left))
        clocks.now = 4.0
        # Both ends are in this process. An acknowledgement may be on its way: the sender's count can lag behind.
        first = meter.measure()
        assert first["received"] == 10_000
        clocks.now = 8.0
        second = meter.measure()
        assert first["sent"] + second["sent"] == pytest.approx(10_000, abs=1)
        assert second["received"] == 0
        here.close()
        there.close()
    clocks.now = 12.0
    assert (meter.measure()["sent"], meter.measure()) == (0, None)


def test_without_a_proc_file_system_the_memory_is_known_and_the_network_is_not(tmp_path):
    clocks = Clocks()
    meter = clocks.meter(tmp_path)
    clocks.now = PERIOD
    fields = meter.measure()
    assert fields["memory"] > 1e6
    assert "sent" not in fields


@pytest.mark.timed
def test_measurements_take_little_of_a_core():
    meter = UsageMeter()
    began, rounds = time.thread_time(), 50
    for _ in range(rounds):
        meter._due_at = 0.0
        assert meter.measure()
    assert (time.thread_time() - began) / rounds < 0.001 * PERIOD


def _put(reference, field, value):
    setattr(reference._obj, field, value)
    return 0


UNKNOWN = 2
NVML = SimpleNamespace(
    nvmlInit_v2=lambda: 0,
    nvmlDeviceGetCount_v2=lambda count: _put(count, "value", 2),
    nvmlDeviceGetHandleByIndex_v2=lambda index, handle: (
        _put(handle, "value", index.value + 1) if index.value < 2 else UNKNOWN
    ),
    nvmlDeviceGetHandleByUUID=lambda name, handle: _put(handle, "value", 2) if name == b"GPU-b" else UNKNOWN,
    nvmlDeviceGetUtilizationRates=lambda handle, used: _put(used, "gpu", 87) if handle.value == 1 else UNKNOWN,
    nvmlDeviceGetMemoryInfo=lambda handle, memory: _put(memory, "used", 5 * handle.value),
)
"""NVIDIA's library, with two GPUs; it does not know how busy the second one is."""


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, {"0": [87, 5], "1": [None, 10]}),
        ("1", {"1": [None, 10]}),
        ("0,9,1", {"0": [87, 5]}),
        ("GPU-b", {"GPU-b": [None, 10]}),
        ("-1", {}),
        ("", {}),
    ],
)
def test_the_visible_gpus(visible, found):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_reader(environ, lambda _: NVML)() == found


def test_a_machine_without_a_driver_has_no_gpus():
    def missing(name):
        raise OSError(name)

    assert gpu_reader({}, missing)() == {}
    assert ctypes.sizeof(ctypes.c_uint) == 4  # as NVML's structures assume
