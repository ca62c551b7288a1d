"""Problems: their text, and their order."""

from tfdist_cli.spec.loading.problems import Place, Problem, SpecError, dotted, either


def test_a_line_for_each_once():
    first = Problem(Place("c.yaml", 7, 5), "roles.worker.replica", "unknown key", "unknown-key")
    second = Problem(Place("--set name=5"), "name", "expected text", "wrong-type")
    error = SpecError([first, second, first])
    assert error.problems == (first, second)
    assert error.code == "unknown-key"
    assert [name for name, _ in error.labelled_lines()] == ["error[unknown-key]", "error[wrong-type]"]
    assert str(error).splitlines() == ["c.yaml:7:5: roles.worker.replica: unknown key", "--set name=5: expected text"]


def test_what_would_confuse_a_terminal_is_escaped():
    problem = Problem(Place("a\x1b[2J.yaml"), "x\ny", "got \udcff and \x9b and é", "c")
    assert str(problem) == "a\\x1b[2J.yaml: x\\ny: got \\udcff and \\x9b and é"


def test_a_flood_is_cut():
    lines = str(SpecError(Problem(Place("f", line, 1), "k", "m", "c") for line in range(1, 1001))).splitlines()
    assert len(lines) == 51
    assert lines[-1] == "... and more"


def test_words():
    assert dotted(("a", 0, "b c", "d.e")) == "a.0.'b c'.'d.e'"
    assert dotted(()) == ""
    assert either(["a"]) == "a"
    assert either(["a", "b", "a", "c"]) == "a, b or c"
