"""Rounds are kept in a file: what was measured before an interruption is not measured again."""

import pytest

from benchmarks import contests
from benchmarks import run as benchmark
from benchmarks.cluster import ROOT
from benchmarks.contests import run_contests
from benchmarks.grid import chosen
from benchmarks.record import Measured, Record, source_of
from benchmarks.run import main


@pytest.fixture
def races(monkeypatch):
    """The races that run, instead of real ones: the names of their contests. The fourth one is interrupted."""
    ran = []

    def quiet_race(group, data, turns, patience, first):
        ran.append([contest.name for contest in group])
        if len(ran) == 4:
            raise KeyboardInterrupt
        return [100.0 * len(ran), *(50.0 for _ in group)], 0.02

    monkeypatch.setattr(contests, "_quiet_race", quiet_race)
    return ran


def run(path, rounds=2):
    chosen_ones = chosen(["mlp:ps_async:*", "mlp:single:*"])
    return run_contests(chosen_ones, rounds=rounds, turns=1, patience=0, log=lambda _: None, record=Record(path))


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, races):
    path, ps, alone = tmp_path / "rounds.jsonl", ["mlp:ps_async:tf_keras", "mlp:ps_async:keras"], ["mlp:single:keras"]
    with pytest.raises(KeyboardInterrupt):
        run(path)
    assert races == [ps, alone, ps, alone]
    outcomes = run(path)
    assert races[4:] == [alone]
    assert [each.ours for each in outcomes] == [[100.0, 300.0], [100.0, 300.0], [200.0, 500.0]]
    assert [each.others for each in outcomes] == [0.02] * 3
    run(path, rounds=1)
    assert len(races) == 5


def test_rounds_of_other_contests_do_not_count(tmp_path, races):
    record = Record(tmp_path / "rounds.jsonl")
    record.add(Measured("mlp:mirrored:keras", 1.0, 1.0, 0.0))
    assert [len(each.ours) for each in run(tmp_path / "rounds.jsonl", rounds=1)] == [1, 1, 1]


@pytest.mark.parametrize("line", ["{", "[1]", '{"contest": "mlp:single:keras"}'])
def test_a_damaged_file_is_an_error_with_the_line(tmp_path, capsys, monkeypatch, line):
    path = tmp_path / "rounds.jsonl"
    Record(path, "this").add(Measured("mlp:single:keras", 1.0, 1.0, 0.0))
    monkeypatch.setattr(benchmark, "source_of", lambda *_: "this")
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "mlp:single:keras", "--record", str(path)])
    assert stopped.value.code == 2
    assert f"{path}:2" in capsys.readouterr().err


def test_rounds_of_another_version_or_machine_are_not_mixed_with_these(tmp_path, capsys):
    path = tmp_path / "rounds.jsonl"
    Record(path, source_of("another machine", ROOT)).add(Measured("mlp:single:keras", 1.0, 1.0, 0.0))
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "mlp:single:keras", "--record", str(path)])
    assert stopped.value.code == 2
    assert f"{path}:1" in capsys.readouterr().err


def test_a_checkout_without_git_has_no_version(tmp_path):
    assert source_of("2 cores", tmp_path) == "unknown version; 2 cores"
    assert source_of("2 cores", ROOT) != source_of("4 cores", ROOT)


def test_a_file_that_cannot_be_written_is_an_error_before_the_first_round(tmp_path, capsys):
    path = tmp_path / "none" / "rounds.jsonl"
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "mlp:single:keras", "--record", str(path)])
    assert stopped.value.code == 2
    assert str(path) in capsys.readouterr().err
