"""Checks whether TensorFlow sees the GPUs that a task asks for, and finds the likely reason if it does not."""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from tfdist_cli.spec.task_id import TaskId

LIBRARIES = ("cudart", "cublas", "cublasLt", "cufft", "cusolver", "cusparse", "cudnn")
"""The libraries that TensorFlow loads before it lists GPUs; if one is missing, it uses no GPU."""
_CUDA_ERROR_NO_DEVICE = 100
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Driver:
    """The state of the NVIDIA driver.

    Args:
        error: the return value of `cuInit`; 0 for no error.
        gpus: the number of GPUs that this process sees.
        cuda: the newest CUDA version that the driver supports, (major, minor).
    """

    error: int
    gpus: int
    cuda: tuple[int, int]


def log_missing_gpus(task: TaskId, wanted: int) -> None:
    """Logs one warning if TensorFlow sees fewer GPUs than the task asks for.

    Args:
        task: this task.
        wanted: the number of GPUs in the cluster file.
    """
    seen = len(tf.config.list_physical_devices("GPU")) if wanted else 0
    if seen < wanted:
        text = "%s needs %d GPU%s, but TensorFlow sees %s: %s"
        log.warning(text, task, wanted, "" if wanted == 1 else "s", seen or "none", why_missing(seen))


def why_missing(
    seen: int,
    build: Callable[[], Mapping[str, object]] = tf.sysconfig.get_build_info,
    driver: Callable[[], Driver | None] | None = None,
    has: Callable[[str], bool] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Returns the likely reason for missing GPUs, and how to fix it.

    Args:
        seen: the number of GPUs that TensorFlow sees.
        build: returns how this TensorFlow was built.
        driver: returns the state of the driver; None if there is no driver.
        has: returns whether a CUDA library can be loaded.
        environ: the environment of the process.
    """
    ids = environ.get("CUDA_VISIBLE_DEVICES")
    ids = "this machine" if ids is None else f"CUDA_VISIBLE_DEVICES={ids}"
    if seen:
        return f"{ids} names GPUs that the driver does not have; `nvidia-smi -L` lists them"
    info = build()
    if not info.get("is_cuda_build"):
        return "this TensorFlow is built for the CPU; `pip install 'tensorflow[and-cuda]'` installs the one for GPUs"
    problem = _driver_problem((driver or query_driver)(), ids, str(info.get("cuda_version", "0")))
    if problem:
        return problem
    missing = next((name for name in LIBRARIES if not (has or has_library)(name)), None)
    if missing:
        return f"the CUDA library lib{missing} is missing; `pip install 'tensorflow[and-cuda]'` installs it"
    return "driver and libraries are installed; set TF_CPP_MIN_LOG_LEVEL=0 to see TensorFlow's own messages"


def _driver_problem(state: Driver | None, ids: str, cuda: str) -> str:
    """Returns the reason why the driver has no GPU for this process; empty if it has one."""
    if state is None:
        return "there is no NVIDIA driver (libcuda.so.1) here; install it, or start the container with its GPUs"
    if state.error == _CUDA_ERROR_NO_DEVICE or (not state.error and not state.gpus):
        return f"the driver finds no GPU for {ids}; `nvidia-smi -L` lists the GPUs"
    if state.error:
        return f"the NVIDIA driver fails with error {state.error} of cuInit; `nvidia-smi` shows its state"
    if state.cuda[0] < int(cuda.partition(".")[0]):
        return f"the driver supports CUDA {state.cuda[0]}.{state.cuda[1]}, and this TensorFlow needs {cuda}: update it"
    return ""


def query_driver() -> Driver | None:
    """Returns the state of this machine's driver; None if there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, gpus = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    error = int(cuda.cuInit(0))
    if not error:
        cuda.cuDeviceGetCount(ctypes.byref(gpus))
    return Driver(error, gpus.value, (version.value // 1000, version.value % 1000 // 10))


def has_library(name: str) -> bool:
    """Whether a CUDA library is loaded, is part of one of NVIDIA's Python packages, or is known to the linker."""
    file = f"lib{name}.so"
    if f"/{file}" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        return True
    packages = Path(tf.__file__).parents[1] / "nvidia"  # beside TensorFlow
    folders = (Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    if any(packages.glob(f"*/lib/{file}*")) or any(any(folder.glob(f"{file}*")) for folder in folders):
        return True
    return ctypes.util.find_library(name) is not None
