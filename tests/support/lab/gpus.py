"""Simulated GPUs: where TensorFlow places operations, and what it copies, on a machine without a GPU.

A simulated GPU is a device of type GPU whose memory is the host's. It has the kernels that TensorFlow's CUDA build
registers for GPUs, each of which computes as the CPU's does: an operation that has none stays on the CPU, or fails,
as it would with a GPU. Speed, NCCL, XLA for GPUs, CUDA's own kernels and the memory of a GPU are not simulated.

`simulated_gpus/kernels.tsv` has these kernels: operation, arguments in host memory, types by their numbers. It is the
difference of `kernels.get_all_registered_kernels()` (tensorflow.python.framework) in tensorflow and tensorflow-cpu.
"""

import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent / "simulated_gpus"


def missing():
    """Why there can be no simulated GPUs here; None if there can."""
    return None if shutil.which("g++") else "there is no g++, with which simulated GPUs are compiled"


def environment(folder, count=4):
    """Compiles the device; the variables under which each Python that imports TensorFlow sees so many GPUs.

    CUDA_VISIBLE_DEVICES narrows them to some, as it does with CUDA. In `folder` each process leaves a file of what it
    has made to run on a GPU: device, operation and name.
    """
    import tensorflow as tf  # noqa: PLC0415 what only collects tests need not wait for it

    library, log = Path(folder, "simulated_gpus.so"), Path(folder, "placed")
    log.mkdir()
    subprocess.run(
        [
            *("g++", "-O0", "-w", "-shared", "-fPIC", *tf.sysconfig.get_compile_flags()),
            *(str(FOLDER / "device.cc"), "-o", str(library), *tf.sysconfig.get_link_flags()),
        ],
        check=True,
        timeout=280,
    )
    return {
        "SIMULATED_GPUS": str(count),
        "SIMULATED_GPU_KERNELS": str(FOLDER / "kernels.tsv"),
        "SIMULATED_GPU_LIBRARY": str(library),
        "SIMULATED_GPU_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")])),
    }


def placed(variables):
    """What has been made to run on GPUs since the last call: (device, operation, name)."""
    found = []
    for file in Path(variables["SIMULATED_GPU_LOG"]).iterdir():
        found += [tuple(line.split("\t")) for line in file.read_text().splitlines()]
        file.unlink()
    return found
