"""Tests of the formats of exports: a missing library is an error, and the command line has the same formats."""

import sys

import pydantic
import pytest

from tests.support.codes import raises
from tfdist_cli.cli.export import Format
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.export_formats import EXPORT_FORMATS, require_export_libraries
from tfdist_cli.spec.sections.recipe import Export


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_a_missing_library_is_an_error_with_the_extra(name, monkeypatch):
    for library in EXPORT_FORMATS[name].libraries:
        monkeypatch.setitem(sys.modules, library, None)
    with raises(UsageError, "export-library-missing") as caught:
        require_export_libraries(["keras", name])
    assert f"tfdist-cli[{name}]" in str(caught.value.hint)


def test_formats_of_tensorflow_and_keras_need_no_library():
    require_export_libraries(["saved_model", "keras", "litert"])


def test_the_command_has_all_formats():
    assert [each.value for each in Format] == list(EXPORT_FORMATS)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"format": ["saved_model", "keras"], "quantize": "int8"}, "export-not-quantizable"),
        ({"format": "onnx", "versions": True}, "export-has-no-versions"),
    ],
)
def test_keys_that_do_not_fit_the_formats_are_errors(given, code):
    with pytest.raises(pydantic.ValidationError) as caught:
        Export.model_validate(given)
    assert [problem.code for error in caught.value.errors() for problem in error["ctx"]["error"].problems] == [code]
