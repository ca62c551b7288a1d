"""The contests: which there are, and that both sides train the same."""

import importlib.util
from dataclasses import replace

import pytest

from benchmarks.grid import CONTESTS, FIGURES, GROUPS, PLACEMENTS, STAGED, chosen
from benchmarks.run import main
from benchmarks.sizes import SIZES


def test_the_grid_has_every_model_on_every_placement():
    rows = {tuple(name.split(":")[:2]) for name in GROUPS["grid"]}
    models = [key for key, size in SIZES.items() if size.kind != "table" and key not in STAGED]
    assert len(models) == 7
    assert rows == {(model, placement) for model in models for placement in PLACEMENTS}


def test_the_published_figures_are_contests():
    assert [contest.name for contest in chosen(FIGURES)] == list(FIGURES)


@pytest.mark.parametrize("contest", CONTESTS.values(), ids=CONTESTS.keys())
def test_both_sides_take_the_same_steps_with_the_same_settings(contest):
    ours, peer = contest.ours, contest.peer
    assert (ours.name, ours.checkout) != (peer.name, peer.checkout)
    for side in (ours, peer):
        assert importlib.util.find_spec(side.program) is not None
        assert side.work.steps % side.work.steps_per_execution == 0
    assert ours.work.steps_per_execution == peer.work.steps_per_execution
    assert ours.work.wire == peer.work.wire or not contest.name.endswith("torch_fp16")


@pytest.mark.parametrize("contest", GROUPS["grid"].values(), ids=GROUPS["grid"].keys())
def test_a_step_has_as_many_examples_on_both_sides(contest):
    def examples(side):
        asynchronous = "ps" in side.roles and not side.work.updates
        return side.work.batch_size * (1 if asynchronous else max(1, side.roles.get("worker", 1)))

    assert examples(contest.ours) == examples(contest.peer)


@pytest.mark.parametrize("contest", GROUPS["limits"].values(), ids=GROUPS["limits"].keys())
def test_processes_that_exchange_nothing_train_as_many_examples_in_a_counted_step(contest):
    ours, peer = contest.ours, contest.peer
    together = ours.roles["worker"] * ours.work.batch_size
    assert together == peer.work.batch_size * ours.batches
    assert (ours.program == peer.program) != ours.work.apart
    assert peer.roles == {}


@pytest.mark.parametrize("side", ["ps_async", "keras_64", "tf_keras_mirrored"])
def test_contests_of_kernels_differ_in_nothing_else(side):
    name = f"mlp:{side}_onednn:eigen"
    ours, peer = CONTESTS[name].ours, CONTESTS[name].peer
    assert (ours.work.onednn, peer.work.onednn) == (True, False)
    assert replace(ours.work, onednn=False) == peer.work
    assert ours.work.as_environment()["TF_ENABLE_ONEDNN_OPTS"] == "1"
    assert peer.work.as_environment()["TF_ENABLE_ONEDNN_OPTS"] == "0"


def test_each_side_has_its_own_choice_of_kernels():
    large = CONTESTS["mlp_large:ps_async:keras"]
    assert (large.ours.work.onednn, large.peer.work.onednn) == (True, False)
    tables = CONTESTS["two_tower:ps_async:tf_keras"]
    assert (tables.ours.work.onednn, tables.peer.work.onednn) == (False, False)
    assert "oneDNN" in large.ours.settings
    assert "Eigen" in large.peer.settings


def test_names_are_chosen_by_patterns_and_groups():
    assert [each.name for each in chosen(["mlp:single:*"])] == ["mlp:single:keras"]
    assert {each.name for each in chosen(["variants"])} == set(GROUPS["variants"])
    with pytest.raises(ValueError, match="--list"):
        chosen(["mlp:nowhere:*"])


def test_a_wrong_name_is_an_error_of_the_command_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "mlp:nowhere:*"])
    assert stopped.value.code == 2
    assert "mlp:nowhere:*" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--record", "rounds.jsonl"], ["--write"]])
def test_losses_are_only_printed(option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["--losses", "--only", "mlp:single:*", *option])
    assert stopped.value.code == 2
    assert "--losses" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_has_every_contest(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CONTESTS)
