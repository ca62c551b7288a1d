"""What tasks use, in a table."""

import pytest

from tfdist_cli.cli.console.usage import amount, usage_cells
from tfdist_cli.launch.usage import GpuUsage, TaskUsage


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9960, "10 kB"),
        (999_500, "1.0 MB"),
        (4.2e8, "420 MB"),
        (2e18, "2000 PB"),
    ],
)
def test_amounts(count, text):
    assert amount(count) == text


def test_what_is_not_known_is_left_out():
    assert usage_cells(None) == usage_cells(TaskUsage()) == ("", "", "", "")
    gpus = {"0": GpuUsage(87.0, 12e9), "1": GpuUsage(None, None)}
    cells = usage_cells(TaskUsage(0.94, 412e6, 0.0, 3.4e6, gpus))
    assert cells == ("0.9 cores", "412 MB", "GPU 0 87% 12 GB, GPU 1", "↓3.4 MB/s")
