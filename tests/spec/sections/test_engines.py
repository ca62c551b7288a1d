"""The cluster file's sections spark and ray."""

import pytest
from pydantic import ValidationError

from tfdist_cli.spec.sections.engines import SparkSpec


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("executor.memory", "invalid-spark-property"),
        ("spark.a=b", "invalid-spark-property"),
        ("spark.master", "reserved-spark-property"),
        ("spark.submit.deployMode", "reserved-spark-property"),
    ],
)
def test_properties_that_spark_cannot_have_are_refused(name, code):
    with pytest.raises(ValidationError) as caught:
        SparkSpec.model_validate({"conf": {name: "x"}})
    [details] = caught.value.errors()
    assert details["ctx"]["error"].code == code


def test_a_server_of_spark_connect_is_no_master():
    with pytest.raises(ValidationError) as caught:
        SparkSpec.model_validate({"master_url": "sc://host:15002"})
    [details] = caught.value.errors()
    assert details["ctx"]["error"].code == "spark-connect"
