"""Amounts of memory, and what a role may ask for."""

import pytest

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.resources import Size
from tfdist_cli.spec.sections.role_spec import RoleSpec


@pytest.mark.parametrize(
    ("text", "bytes_", "written"),
    [
        ("4GiB", 2**32, "4 GiB"),
        (" 512 MiB", 2**29, "512 MiB"),
        ("1.5GiB", 3 * 2**29, "1536 MiB"),
        ("2GB", 2 * 10**9, "1953125 KiB"),
        ("1kB", 1000, "1000 B"),
        ("1024 GiB", 2**40, "1 TiB"),
        ("7B", 7, "7 B"),
    ],
)
def test_an_amount_is_read_and_written(text, bytes_, written):
    assert Size.parse(text) == Size(bytes_)
    assert str(Size(bytes_)) == written
    assert Size.parse(written) == Size(bytes_)


NOT_SIZES = ["", "4", "4G", "GiB", "4 gib", "-4GiB", "4GiB 2MiB", "1e3MiB", "0.0000001KiB"]


@pytest.mark.parametrize(("text", "code"), [*((text, "invalid-size") for text in NOT_SIZES), ("0.1B", "out-of-range")])
def test_other_texts_are_not_amounts(text, code):
    with pytest.raises(InvalidValue) as caught:
        Size.parse(text)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("key", "value", "held"),
    [
        ("gpus", "all", "all"),
        ("gpus", 0, 0),
        ("gpus", [2, 0], [2, 0]),
        ("gpus", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"], ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"]),
        ("gpu_memory", "grow", "grow"),
        ("gpu_memory", 1, 1.0),
        ("gpu_memory", 0.5, 0.5),
        ("gpu_memory", "4096 MiB", Size(2**32)),
        ("memory", "4GiB", Size(2**32)),
    ],
)
def test_what_a_role_may_ask_for(key, value, held):
    assert getattr(RoleSpec.model_validate({key: value}), key) == held


@pytest.mark.parametrize("value", [True, 0, 0.0, 1.01, -0.5, float("nan"), "0.5", [1], None, "1000 B"])
def test_what_is_no_part_of_a_gpus_memory(value):
    with pytest.raises(ValueError, match="gpu_memory"):
        RoleSpec.model_validate({"gpu_memory": value} if value is not None else {"gpu_memory": [None]})
