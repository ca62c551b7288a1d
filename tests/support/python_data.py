"""Data that Python code yields, of each kind that Keras takes."""

import math
import sys
import types

import keras
import numpy as np


class Rows(keras.utils.PyDataset):
    """Batches of arrays, which may be scaled anew after each epoch.

    Args:
        arrays: the arrays, with the same number of rows.
        batch: rows in a batch.
        scale: what the first array is multiplied by after an epoch.
        endless: whether the batches repeat without end.
        options: threads or processes that make batches.
    """

    def __init__(self, *arrays, batch=8, scale=1.0, endless=False, **options):
        super().__init__(**options)
        self.arrays, self.batch, self.scale, self.endless = list(arrays), batch, scale, endless
        self.epochs = []

    @property
    def num_batches(self):
        return None if self.endless else self._count

    @property
    def _count(self):
        return -(-len(self.arrays[0]) // self.batch)

    def __getitem__(self, index):
        start = index % self._count * self.batch
        return tuple(array[start : start + self.batch] for array in self.arrays)

    def on_epoch_begin(self):
        self.epochs.append("begin")

    def on_epoch_end(self):
        self.epochs.append("end")
        self.arrays[0] = np.float32(self.scale) * self.arrays[0]


def generated(*arrays, batch=8, passes=None):
    """A generator of batches; it ends after some passes, or never."""
    rows = Rows(*arrays, batch=batch)
    done = 0
    while passes is None or done < passes:
        yield from (rows[index] for index in range(rows.num_batches))
        done += 1


def fake_torch(monkeypatch):
    """Installs what Keras asks of torch where torch is not: a DataLoader's class and a tensor's methods."""
    utils = types.ModuleType("torch.utils.data")

    class Tensor(np.ndarray):
        def cpu(self):
            return self

    class DataLoader:
        batch_size = 8

        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return math.ceil(len(self.dataset[0]) / self.batch_size)

        def __iter__(self):
            for batch in generated(*self.dataset, batch=self.batch_size, passes=1):
                yield [array.view(Tensor) for array in batch]

    DataLoader.__module__ = "torch.utils.data.dataloader"
    monkeypatch.setattr(utils, "DataLoader", DataLoader, raising=False)
    torch, parent = types.ModuleType("torch"), types.ModuleType("torch.utils")
    monkeypatch.setattr(torch, "utils", parent, raising=False)
    monkeypatch.setattr(parent, "data", utils, raising=False)
    for name, module in {"torch": torch, "torch.utils": parent, "torch.utils.data": utils}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return DataLoader
