"""What a task says when TensorFlow does not see the GPUs that the task is to have."""

import logging
import re
from pathlib import Path

import pytest
import tensorflow as tf

from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import gpus
from tfdist_cli.train.cluster.gpus import LIBRARIES, Driver, log_missing_gpus, why_missing

CUDA = {"is_cuda_build": True, "cuda_version": "12.5.1"}
WORKS = Driver(0, 1, (12, 8))


@pytest.mark.parametrize(
    ("seen", "build", "driver", "lacks", "reason"),
    [
        (0, {"is_cuda_build": False}, WORKS, "", "built for the CPU"),
        (0, CUDA, None, "", "libcuda.so.1"),
        (0, CUDA, Driver(100, 0, (12, 8)), "", "no GPU for CUDA_VISIBLE_DEVICES=7;"),
        (0, CUDA, Driver(0, 0, (12, 8)), "", "no GPU for CUDA_VISIBLE_DEVICES=7;"),
        (0, CUDA, Driver(803, 0, (12, 8)), "", "error 803 of cuInit"),
        (0, CUDA, Driver(0, 1, (11, 8)), "", "CUDA 11.8, and this TensorFlow needs 12.5.1"),
        (0, CUDA, WORKS, "cudnn", "libcudnn is missing;"),
        (0, CUDA, WORKS, "cublas", "libcublas is missing;"),
        (0, CUDA, WORKS, "", "TF_CPP_MIN_LOG_LEVEL=0"),
        (1, CUDA, WORKS, "", "CUDA_VISIBLE_DEVICES=7 names GPUs"),
    ],
)
def test_the_likely_reason(seen, build, driver, lacks, reason):
    text = why_missing(seen, lambda: build, lambda: driver, lambda name: name != lacks, {"CUDA_VISIBLE_DEVICES": "7"})
    assert reason in text
    assert "\n" not in text


def test_all_gpus_of_a_machine_that_has_none():
    assert "this machine" in why_missing(0, lambda: CUDA, lambda: Driver(100, 0, (12, 8)), environ={})


def test_a_library_is_looked_for_where_tensorflow_finds_it(tmp_path, monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(tf, "__file__", str(tmp_path / "tensorflow" / "__init__.py"))
    loaded = Path("/proc/self/maps").read_text()
    absent = [name for name in LIBRARIES if f"/lib{name}.so" not in loaded]  # on a machine with GPUs some are loaded
    assert not any(map(gpus.has_library, absent))
    assert gpus.has_library("tensorflow_framework")  # which is loaded
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").touch()
    assert gpus.has_library("cudnn")
    assert [name for name in absent if gpus.has_library(name)] in (["cudnn"], [])
    (tmp_path / "libcudart.so.12").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert gpus.has_library("cudart")


@pytest.mark.parametrize(
    ("wanted", "seen", "values"),
    [
        (1, 0, ["worker:1", "1 GPU,", "none"]),
        (4, 3, ["worker:1", "4 GPUs,", "3"]),
        (2, 2, None),
        (0, 0, None),
        (1, 8, None),  # gpus: all
    ],
)
def test_one_line_where_gpus_are_missing(wanted, seen, values, monkeypatch, caplog):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: [None] * seen)
    monkeypatch.setattr(gpus, "why_missing", lambda _: "why")
    with caplog.at_level(logging.WARNING, "tfdist"):
        log_missing_gpus(TaskId("worker", 1), wanted)
    assert [re.findall(r"worker:1|\d GPUs?,|\d(?=:)|none", line) for line in caplog.messages] == (
        [values] if values else []
    )
    assert all(line.endswith(": why") for line in caplog.messages)
