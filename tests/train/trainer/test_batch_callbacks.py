"""Tests of batch hooks: one call for each group of batches, with the batch numbers that Keras passes."""

from types import SimpleNamespace

import keras
import pytest

from tfdist_cli.train.trainer.batch_callbacks import BatchGroup, CallbackNeeds, acts_on_batches


def calls_of(group_size, batches, pause_after=()):
    """Returns the calls for a pass of `batches` batches."""
    calls = []
    group = BatchGroup(
        lambda first: calls.append(("begin", first)), lambda last, logs: calls.append(("end", last)), group_size
    )
    for batch in range(batches):
        group.begin(batch)
        if group.is_full(batch) or batch in pause_after:
            group.end(batch, {})
    group.end(batches - 1, {}, data_ended=True)
    return calls


@pytest.mark.parametrize(
    ("size", "batches", "calls"),
    [
        (1, 2, [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]),
        (2, 4, [("begin", 0), ("end", 1), ("begin", 2), ("end", 3)]),
        (2, 3, [("begin", 0), ("end", 1), ("begin", 2), ("end", 3)]),
        (5, 2, [("begin", 0), ("end", 4)]),
        (5, 0, []),
    ],
)
def test_groups_are_numbered_as_in_keras(size, batches, calls):
    assert calls_of(size, batches) == calls


def test_before_a_pause_a_group_ends_with_the_last_batch():
    assert calls_of(4, 6, pause_after={1}) == [("begin", 0), ("end", 1), ("begin", 2), ("end", 5)]


class Logger(keras.callbacks.Callback):
    """Logs batches or epochs, like the callback of another library whose name it gets."""

    def __init__(self, **attributes):
        super().__init__()
        self.__dict__.update(attributes)

    def on_train_batch_end(self, batch, logs=None):
        """Returns at once if it logs epochs."""


@pytest.mark.parametrize(
    ("module", "name", "epochs", "batches"),
    [
        ("mlflow.keras.callback", "MlflowCallback", {"log_every_n_steps": None}, {"log_every_n_steps": 5}),
        (
            "wandb.integration.keras.callbacks.metrics_logger",
            "WandbMetricsLogger",
            {"logging_batch_wise": False},
            {"logging_batch_wise": True},
        ),
    ],
)
def test_a_tracker_of_epochs_does_not_slow_the_steps(module, name, epochs, batches):
    kind = type(name, (Logger,), {"__module__": module, "on_train_batch_end": lambda *_: None})
    assert not acts_on_batches(kind(**epochs))
    assert acts_on_batches(kind(**batches))
    changed = type("Own", (kind,), {"on_train_batch_end": lambda *_: None})
    assert acts_on_batches(changed(**epochs))


class ActsAsEpochsBegin(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        """Reads something."""


@pytest.mark.parametrize(
    ("callback", "needed"),
    [
        (None, []),
        (keras.callbacks.CSVLogger("log"), ["callbacks"]),
        (keras.callbacks.LambdaCallback(on_epoch_end=print), ["callbacks"]),
        (keras.callbacks.LambdaCallback(on_epoch_begin=print), ["callbacks", "epoch_begin"]),
        (ActsAsEpochsBegin(), ["callbacks", "epoch_begin"]),
        (keras.callbacks.LambdaCallback(on_train_batch_begin=print), ["callbacks", "each_batch"]),
        (keras.callbacks.TerminateOnNaN(), ["callbacks", "each_batch", "end_on_nan"]),
    ],
)
def test_the_chief_tells_all_tasks_what_its_callbacks_need(callback, needed):
    callbacks = [] if callback is None else [callback]
    told = []

    def total(numbers):
        told.append(numbers)
        return numbers if len(told) == 1 else told[0]  # as the sum of this task's numbers and the chief's

    for is_chief in (True, False):
        engine = SimpleNamespace(is_chief=is_chief, total=total)
        needs = CallbackNeeds.of_chief(engine, callbacks if is_chief else [])
        assert [name for name, value in vars(needs).items() if value] == needed
    assert not told[1].any()
