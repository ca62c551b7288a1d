"""docs/reference/models.md has the results of the models that there are, and nothing among them is wrong."""

from tests.zoo.coverage import NOT_TRAINED
from tests.zoo.models import CASES
from tests.zoo.table import PAGE, rows


def test_the_page_has_every_model():
    assert [name for name in rows() if name in CASES] == list(CASES)


def test_the_page_has_the_expected_states():
    found = {name: states for name, states in rows().items() if name in CASES}
    unexpected = {
        (name, engine): state
        for name, states in found.items()
        for engine, state in states.items()
        if state not in (("refused",) if CASES[name].refusal(engine) else ("ok", "random", "close"))
    }
    assert not unexpected


def test_the_page_names_every_refusal_and_what_is_not_trained():
    text = PAGE.read_text()
    assert all(f"`{code}`" in text for case in CASES.values() for code in case.refused.values())
    assert all(name.rpartition(".")[2] in text for name in NOT_TRAINED)
