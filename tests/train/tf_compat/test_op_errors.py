"""What is left of TensorFlow's errors: the user's code and what went wrong in it."""

import re

import keras
import pytest
import tensorflow as tf

from tfdist_cli.train.tf_compat import op_errors
from tfdist_cli.train.tf_compat.op_errors import shortened, summary


def raised(call):
    with pytest.raises(tf.errors.OpError) as caught:
        call()
    return shortened(caught.value)


def each(dataset):
    return lambda: list(dataset)


def test_python_code_in_the_data_is_told_as_python_does():
    def refuse(x):
        raise KeyError("mistake")

    numbers = tf.data.Dataset.range(3)
    failed = raised(each(numbers.map(lambda x: tf.py_function(refuse, [x], tf.int64))))
    assert (failed.type, failed.message) == ("KeyError", "'mistake'")
    assert failed.traceback.count("Traceback") == 1
    assert failed.traceback.splitlines()[1].startswith(f'  File "{__file__}"')
    assert "in refuse\n    raise KeyError" in failed.traceback
    assert failed.traceback.endswith("\nKeyError: 'mistake'\n")


def test_a_generator_that_fails():
    def generate():
        yield 1
        raise ValueError("two\nlines")

    failed = raised(each(tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([], tf.int64))))
    assert failed.type == "ValueError"
    assert failed.message == "two"
    assert "in generate\n" in failed.traceback


def test_an_operation_in_the_data():
    failed = raised(each(tf.data.Dataset.range(3).map(lambda x: x // (x - 1))))
    assert failed.message.endswith("(Map): Integer division by zero")
    assert failed.traceback == f"InvalidArgumentError: {failed.message}\n"


def test_an_operation_in_the_model_names_the_users_line():
    @tf.function
    def pick(index):
        return tf.gather([1, 2, 3], index)

    failed = raised(lambda: pick(tf.constant(5)))
    assert re.fullmatch(r"indices = 5 .* \[0, 3\)", failed.message)
    assert failed.traceback.startswith("Traceback (most ")
    assert "in pick\n" in failed.traceback
    assert "Detected at" not in failed.traceback


REMOTE = """Graph execution error:

Detected at node floordiv defined at (most recent call last):
<stack traces unavailable>
2 root error(s) found.
  (0) INVALID_ARGUMENT:  Integer division by zero
\t [[{{node floordiv}}]]
Additional GRPC error information from remote target /job:worker/replica:0/task:3 while calling /tensorflow.eager:
:UNKNOWN:Error received from peer  {grpc_message:"x"}
  (1) CANCELLED:  Function was cancelled before it was started
0 successful operations. [Op:__inference_execute_1]"""


def test_a_remote_operation_names_its_worker():
    error = tf.errors.InvalidArgumentError(None, None, REMOTE)
    assert shortened(error).traceback.startswith("InvalidArgumentError: worker:3: Integer ")


@pytest.mark.parametrize("text", ["", "plain", "Traceback (most recent call last):\n", "\n\n [Op:x]"])
def test_what_has_no_parts_stays(text):
    kept = shortened(tf.errors.AbortedError(None, None, text)).traceback
    assert kept.startswith("AbortedError: ")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n  first \nsecond"), "first"),
        (ValueError(), "ValueError"),
        (
            ValueError(
                "Exception encountered when calling A.call().\n\n\x1b[1mfirst\x1b[0m\n\nArguments received by A"
            ),
            "first",
        ),
    ],
)
def test_the_summary_is_the_first_line_without_what_keras_adds(error, line):
    assert summary(error) == line


def test_a_ps_that_is_gone_is_named_not_the_worker_that_missed_it():
    text = (
        "Graph execution error:\n\n2 root error(s) found.\n  (0) UNAVAILABLE:  Socket closed\n"
        "Additional GRPC error information from remote target /job:ps/replica:0/task:1/device:CPU:0 while calling "
        "/tensorflow.eager.EagerService/RunComponentFunction:\n"
        "Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling "
        "/tensorflow.eager.EagerService/Enqueue:"
    )
    assert shortened(tf.errors.UnavailableError(None, None, text)).message == "ps:1: Socket closed"
    worker = "Socket closed\nAdditional GRPC error information from remote target /job:worker/replica:0/task:0"
    assert shortened(tf.errors.UnavailableError(None, None, worker)).message == "worker:0: Socket closed"


@pytest.mark.parametrize("library", [tf, keras])
def test_libraries_in_a_folder_of_their_own_are_not_the_users(library, monkeypatch):
    monkeypatch.setattr(op_errors, "_INSTALLED", ())
    monkeypatch.setattr(op_errors, "_PACKAGES", frozenset())
    assert not op_errors.is_users(library.__file__)
    assert op_errors.is_users(__file__)
