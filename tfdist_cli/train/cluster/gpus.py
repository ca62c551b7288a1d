"""Whether a task has the GPUs that it is to have, and the likely reason where it does not."""

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
"""What TensorFlow loads before it looks for a GPU; when one of them is missing, it uses none."""
_CUDA_ERROR_NO_DEVICE = 100
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says.

    Args:
        error: what `cuInit` returned; 0 for no error.
        gpus: how many GPUs it shows to this process.
        cuda: the newest CUDA that it supports, (major, minor).
    """

    error: int
    gpus: int
    cuda: tuple[int, int]


def tell_missing_gpus(task: TaskId, wanted: int) -> None:
    """Logs one line where TensorFlow sees fewer GPUs than the task is to have.

    Args:
        task: this task.
        wanted: how many it is to have.
    """
    seen = len(tf.config.list_physical_devices("GPU")) if wanted else 0
    if seen < wanted:
        text = "%s is to have %d GPU%s, but TensorFlow sees %s: %s"
        log.warning(text, task, wanted, "" if wanted == 1 else "s", seen or "none", why_missing(seen))


def why_missing(
    seen: int,
    build: Callable[[], Mapping[str, object]] = tf.sysconfig.get_build_info,
    driver: Callable[[], Driver | None] | None = None,
    has: Callable[[str], bool] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The likely reason, and what to do.

    Args:
        seen: how many GPUs TensorFlow sees.
        build: how this TensorFlow was built.
        driver: asks the driver; None where there is none.
        has: whether a CUDA library can be loaded.
        environ: the environment of the process.
    """
    ids = environ.get("CUDA_VISIBLE_DEVICES")
    ids = "this machine" if ids is None else f"CUDA_VISIBLE_DEVICES={ids}"
    if seen:
        return f"{ids} names GPUs that the driver does not have; `nvidia-smi -L` lists them"
    info = build()
    if not info.get("is_cuda_build"):
        return "this TensorFlow is built for the CPU; `pip install 'tensorflow[and-cuda]'` installs the one for GPUs"
    trouble = _driver_trouble((driver or ask_driver)(), ids, str(info.get("cuda_version", "0")))
    if trouble:
        return trouble
    missing = next((name for name in LIBRARIES if not (has or has_library)(name)), None)
    if missing:
        return f"the CUDA library lib{missing} is missing; `pip install 'tensorflow[and-cuda]'` installs it"
    return "driver and libraries are there; set TF_CPP_MIN_LOG_LEVEL=0 to see what TensorFlow says"


def _driver_trouble(said: Driver | None, ids: str, cuda: str) -> str:
    """Why the driver has no GPU for this process; empty when it has one."""
    if said is None:
        return "there is no NVIDIA driver (libcuda.so.1) here; install it, or start the container with its GPUs"
    if said.error == _CUDA_ERROR_NO_DEVICE or (not said.error and not said.gpus):
        return f"the driver finds no GPU for {ids}; `nvidia-smi -L` lists the GPUs"
    if said.error:
        return f"the NVIDIA driver fails with error {said.error} of cuInit; `nvidia-smi` shows its state"
    if said.cuda[0] < int(cuda.partition(".")[0]):
        return f"the driver supports CUDA {said.cuda[0]}.{said.cuda[1]}, and this TensorFlow needs {cuda}: update it"
    return ""


def ask_driver() -> Driver | None:
    """Asks the driver of this machine; None where there is none."""
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
    """Whether a CUDA library is loaded, comes with one of NVIDIA's Python packages, or is known to the linker."""
    file = f"lib{name}.so"
    if f"/{file}" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        return True
    packages = Path(tf.__file__).parents[1] / "nvidia"  # beside TensorFlow
    folders = (Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    if any(packages.glob(f"*/lib/{file}*")) or any(any(folder.glob(f"{file}*")) for folder in folders):
        return True
    return ctypes.util.find_library(name) is not None
