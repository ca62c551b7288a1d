"""What several workers could not train as Keras does is refused."""

import pytest

from tests.support.compare import batches, classifier
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
