"""What several workers could not train as Keras does is refused."""

import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.model_checks import check_overwritten
from tfdist_cli.train.model.train_step import ModelStep


@pytest.mark.parametrize(("mode", "refused"), [(None, False), ("int8", False), ("float8", True)])
def test_scales_that_gradients_overwrite_are_of_one_worker(mode, refused):
    model = classifier()
    if mode:
        model.quantize(mode)
        model.compile("sgd", model.loss)
    step = ModelStep(model)
    step.build(batches().element_spec)
    check_overwritten(step)
    step.batches_per_update = 2
    if not refused:
        check_overwritten(step)
        return
    with pytest.raises(TrainingError) as caught:
        check_overwritten(step)
    assert caught.value.code == "overwritten-with-gradient"


@pytest.mark.parametrize("call", [tfdist.fit, tfdist.evaluate])
def test_a_model_that_runs_eagerly_is_refused(call):
    with raises(TrainingError, "runs-eagerly"):
        call(classifier(run_eagerly=True), *classes())


def test_functions_of_tensorflow_may_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        model = classifier()
        tfdist.fit(model, *classes())
    finally:
        tf.config.run_functions_eagerly(False)
    assert int(model.optimizer.iterations) == 2
