"""Simulated GPUs: test the placement of operations and copies between devices on a machine without a GPU.

A simulated GPU is a device of type GPU whose memory is the host's. It has the kernels that TensorFlow's CUDA build
registers for GPUs. Each computes as the CPU's kernel does. An operation without a GPU kernel stays on the CPU or fails,
as with a real GPU. Speed, NCCL, XLA for GPUs, CUDA kernels and the memory of a GPU are not simulated.

`simulated_gpus/kernels.tsv` lists these kernels: operation, arguments in host memory, type numbers. It is the
difference of `kernels.get_all_registered_kernels()` (tensorflow.python.framework) in tensorflow and tensorflow-cpu.
"""

import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent / "simulated_gpus"


def missing():
    """Why simulated GPUs cannot be compiled here; None if they can."""
    return None if shutil.which("g++") else "g++ is not installed, which compiles the simulated GPUs"


def environment(folder, count=4):
    """Compiles the device, and returns variables with which any Python that imports TensorFlow sees `count` GPUs.

    CUDA_VISIBLE_DEVICES selects some of them, as with CUDA. Each process writes a file in `folder` with the operations
    that it has placed on a GPU: device, operation and name.
    """
    import tensorflow as tf  # noqa: PLC0415 the collection of tests must not wait for it

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
    """The operations placed on GPUs since the last call: (device, operation, name)."""
    operations = []
    for file in Path(variables["SIMULATED_GPU_LOG"]).iterdir():
        operations += [tuple(line.split("\t")) for line in file.read_text().splitlines()]
        file.unlink()
    return operations
