"""SIGTERM within an evaluation ends it between two executions; the training saves its state and resumes there."""

import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tfdist_cli.train.model import evaluation
from tfdist_cli.train.trainer.sigterm import Terminated

pytestmark = pytest.mark.slow

SCORED = classes(40, seed=1)


class Killing:
    """Makes data whose third batch sends SIGTERM to this process, once."""

    def __init__(self):
        self.left = 3

    def batches(self):
        read = batches(*SCORED, batch=4)

        def counted(x, y):
            return tf.ensure_shape(tf.py_function(self._count, [x], x.dtype), read.element_spec[0].shape), y

        return read.map(counted)

    def _count(self, x):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)
        return x


@pytest.fixture(autouse=True)
def _one_batch_an_execution(monkeypatch):
    monkeypatch.setattr(evaluation, "EXECUTION_SECONDS", 0.0)


def trained(folder, validation, *callbacks):
    keras.utils.set_random_seed(1)
    model = classifier(optimizer="adam")
    history = tfdist.fit(
        model,
        batches(),
        epochs=2,
        validation_data=validation,
        callbacks=list(callbacks),
        checkpoints=tfdist.Checkpoints(folder, every_seconds=3600),
    )
    return model, history


@pytest.mark.rotates(5)
@pytest.mark.parametrize("each_batch", [False, True])
def test_a_validation_that_was_ended_is_repeated(tmp_path, each_batch):
    callbacks = [keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: None)] * each_batch
    killing = Killing()
    with raises(Terminated, "terminated"):
        trained(tmp_path / "kept", killing.batches(), *callbacks)
    assert killing.left > -7  # 10 batches have been read if it has not ended
    ours, history = trained(tmp_path / "kept", batches(*SCORED, batch=4), *callbacks)
    plain, expected = trained(tmp_path / "other", batches(*SCORED, batch=4), *callbacks)
    assert history.epoch == expected.epoch
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-6)
    for one, other in zip(plain.variables, ours.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("owner", ["model", "tfdist"])
def test_sigterm_ends_the_evaluation_of_a_callback(tmp_path, owner, method):
    killing, ended = Killing(), []

    class Scores(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            own = (self.model,) if owner == "tfdist" else ()
            data = killing.batches().repeat()
            getattr(tfdist if own else self.model, method)(*own, data, steps=10**6, verbose=0)
            ended.append(epoch)

    with raises(Terminated, "terminated"):
        trained(tmp_path / "kept", batches(*SCORED, batch=4), Scores())
    assert ended == []
    assert len([*(tmp_path / "kept").glob("step-*")]) == 1
    _, history = trained(tmp_path / "kept", batches(*SCORED, batch=4))
    assert history.epoch == [0, 1]


PROGRAM = """
import os, signal
import keras
import numpy as np
import tfdist_cli as tfdist

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    tfdist.fit(model, (np.zeros((8, 1)), np.zeros((8, 1))), batch_size=1, epochs=2, verbose=0, callbacks=[Kill()])
finally:
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_program_that_does_not_catch_it_exits_as_one_that_sigterm_ends(tmp_path):
    """In the training the handler is tfdist's, and after it the program's own again."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert "error[terminated]" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines() == ["own handler"]


FORKING = """
import multiprocessing, os, signal, threading
from tfdist_cli.train.trainer.sigterm import SigtermRequest

with SigtermRequest() as request:
    forked = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    forked.start()
    forked.terminate()
    forked.join(20)
    os.kill(os.getpid(), signal.SIGTERM)
    print(forked.exitcode, request.is_received(), flush=True)
"""


def test_sigterm_ends_a_process_that_was_forked_during_the_training():
    """In a process of its own: one that many tests have run in has threads and locks of other libraries."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(-signal.SIGTERM.value), "True"], done.stderr
