"""Losses at equal steps, of several seeds."""

import contextlib

import pytest

from benchmarks import losses
from benchmarks.grid import chosen
from benchmarks.workload import Lap


class Trained:
    """A cluster whose loss depends on the program, the seed and the epoch."""

    def __init__(self, side, seed):
        self._loss = len(side.roles) + seed / 10

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def await_laps(self, count):
        self._laps = [Lap(float(n), {"loss": self._loss / (n + 1)}) for n in range(count + 1)]

    def laps(self):
        return self._laps


class Started:
    def __init__(self):
        self.count = 0

    def start(self, side, *, seed):
        self.count += 1
        return Trained(side, seed)


def test_mean_and_spread_of_the_last_epochs_loss(monkeypatch):
    started = Started()
    monkeypatch.setattr(losses, "generated_data", lambda: contextlib.nullcontext(started))
    contests = chosen(["mlp:ps_async:tf_keras", "mlp:ps_async:keras"])
    text = losses.compare_losses(contests, seeds=3, epochs=2, log=lambda text: None)
    assert started.count == 3 * 3  # tfdist trains once for both of its contests
    assert text.count("**1.6000 ± 0.0500** (1.5500, 1.6000, 1.6500)") == 3
    assert text.count("**0.1000 ± 0.0500** (0.0500, 0.1000, 0.1500)") == 1
    assert "| 400 |" in text


def test_one_seed_has_no_spread():
    with pytest.raises(ValueError, match="2 seeds"):
        losses.compare_losses(chosen(["mlp:single:keras"]), seeds=1, epochs=2, log=lambda text: None)
