"""Attributes of objects are replaced for a while."""

from types import SimpleNamespace

from tfdist_cli.train.tf_compat.patching import original, replaced


class Owner:
    rate = 1


def test_an_attribute_has_another_value_within_the_context():
    owner = SimpleNamespace(rate=1)
    with replaced(owner, {"rate": 2}):
        assert (owner.rate, original(owner, "rate")) == (2, 1)
    assert vars(owner) == {"rate": 1}


def test_an_attribute_of_the_class_is_left_to_the_class():
    owner = Owner()
    with replaced(owner, {"rate": 2}):
        assert owner.rate == 2
    assert vars(owner) == {}


def test_a_context_within_another_one_ends_with_the_outer_value():
    owner = SimpleNamespace(rate=1)
    with replaced(owner, {"rate": 2}):
        with replaced(owner, {"rate": 3}):
            assert (owner.rate, original(owner, "rate")) == (3, 1)
        assert owner.rate == 2
    assert owner.rate == 1


def test_contexts_of_threads_may_end_in_any_order():
    owner = SimpleNamespace(rate=1)
    first, second = replaced(owner, {"rate": 2}), replaced(owner, {"rate": 3})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (owner.rate, original(owner, "rate")) == (3, 1)
    second.__exit__(None, None, None)
    assert owner.rate == 1
