"""The metrics of recipes/crnn.py, compared with plain Python."""

import importlib.util
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.recipes.reading import BLANK, distance, greedy
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.train.data.shard import Shard

STEPS, CLASSES = 8, 11


@pytest.fixture(scope="module")
def crnn():
    spec = importlib.util.spec_from_file_location("crnn", Path(__file__).parents[2] / "recipes" / "crnn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits_of(*lines):
    """Returns logits whose likeliest labels are `lines`."""
    return 5 * np.eye(CLASSES, dtype=np.float32)[np.array(lines)]


def labels_of(*lines):
    return np.array([[*line, *[BLANK] * (6 - len(line))] for line in lines], np.int32)


def scores(crnn, labels, logits, weights=None):
    metrics = [crnn.SequenceAccuracy(), crnn.DigitErrorRate()]
    for metric in metrics:
        metric.update_state(labels, logits, weights)
    return [float(metric.result()) for metric in metrics]


READINGS = {
    "repetitions are one": ([3, 3, 3, 0, 0, 4, 4, 0], [3, 4], 0),
    "twins have a blank between": ([3, 3, 0, 3, 0, 0, 0, 0], [3, 3], 0),
    "twins without one are one": ([3, 3, 3, 3, 0, 0, 0, 0], [3, 3], 1),
    "the first and the last step count": ([1, 0, 0, 0, 0, 0, 0, 10], [1, 10], 0),
    "nothing read": ([0] * 8, [1, 2, 3], 3),
    "a digit too many at the end": ([1, 2, 3, 4, 0, 0, 0, 0], [1, 2, 3], 1),
    "a digit too few at the end": ([1, 2, 0, 0, 0, 0, 0, 0], [1, 2, 3], 1),
    "one digit for another": ([1, 2, 3, 0, 0, 0, 0, 0], [1, 9, 3], 1),
    "more digits than labels have room for": ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], 2),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_reading(crnn, name):
    steps, written, mistakes = READINGS[name]
    accuracy, error_rate = scores(crnn, labels_of(written), logits_of(steps))
    assert accuracy == (mistakes == 0)
    assert error_rate == pytest.approx(mistakes / len(written))


def test_metrics_equal_plain_python_over_batches_of_any_size(crnn):
    numbers = np.random.default_rng(0)
    accuracy, error_rate = crnn.SequenceAccuracy(), crnn.DigitErrorRate()
    right = mistakes = digits = 0
    for size in (40, 7, 1):
        logits = numbers.normal(size=(size, STEPS, CLASSES)).astype(np.float32)
        logits[..., BLANK] += 2
        read = [greedy(line)[:6] or [1] for line in logits]
        written = [line if numbers.random() < 0.5 else numbers.integers(1, CLASSES, 4).tolist() for line in read]
        for metric in (accuracy, error_rate):
            metric.update_state(labels_of(*written), logits)
        distances = [distance(greedy(line), label) for line, label in zip(logits, written, strict=True)]
        right += distances.count(0)
        mistakes += sum(distances)
        digits += sum(map(len, written))
    assert 0 < right < 48
    assert float(accuracy.result()) == pytest.approx(right / 48)
    assert float(error_rate.result()) == pytest.approx(mistakes / digits)


def test_sample_weights(crnn):
    labels, logits = labels_of([1, 2], [3, 4, 5]), logits_of([1, 2, 0, 0], [3, 0, 0, 0])
    assert scores(crnn, labels, logits, np.array([1, 3], np.float32)) == pytest.approx([1 / 4, 6 / 11])


def test_metrics_without_updates_are_zero(crnn):
    assert float(crnn.DigitErrorRate().result()) == 0


def test_metrics_count_in_a_function_of_unknown_shapes(crnn):
    metric = crnn.SequenceAccuracy()
    update = tf.function(
        lambda labels, logits: metric.stateless_update_state([tf.zeros([]), tf.zeros([])], labels, logits),
        input_signature=[tf.TensorSpec([None, 6], tf.int32), tf.TensorSpec([None, None, CLASSES], tf.float32)],
    )
    total, count = update(labels_of([1, 2], [3]), logits_of([1, 2, 0, 0], [3, 0, 3, 0]))
    assert (float(total), float(count)) == (1, 2)
    assert {variable.aggregation for variable in [*metric.variables, *crnn.DigitErrorRate().variables]} == {"sum"}


def test_an_image_too_narrow_for_its_digits_is_refused(crnn):
    params = {"length": [3, 6], "height": 12, "width": 48, "filters": [4, 4], "units": 4, "learning_rate": 1}
    assert crnn.model(params).output_shape == (None, 12, CLASSES)
    with raises(UsageError, "image-too-narrow"):
        crnn.model(params | {"filters": [4, 4, 4]})


def test_a_split_without_lines_is_refused(crnn):
    with raises(UsageError, "unknown-split") as caught:
        crnn.dataset({"lines": {"train": 8, "test": 4}}, "validation", Shard())
    assert "'validation'" in str(caught.value)
    assert "train or test" in str(caught.value.hint)


def test_the_loss_of_a_correct_line_is_small_and_of_a_wrong_one_large(crnn):
    labels = labels_of([1, 2, 2])
    right, wrong = (float(keras.losses.CTC()(labels, 4 * logits_of(steps))) for steps in ([1, 2, 0, 2], [1, 3, 0, 3]))
    assert right < 1e-3
    assert wrong > 10
