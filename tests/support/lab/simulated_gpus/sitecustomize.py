"""Loads the simulated GPUs into each Python that imports TensorFlow; a folder for PYTHONPATH."""

import importlib.abc
import importlib.util
import os
import sys


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        module.load_library(os.environ["SIMULATED_GPU_LIBRARY"])


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if "SIMULATED_GPU_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _Finder())
