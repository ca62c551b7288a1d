"""Loading: defaults, relative paths, `--set`, and the messages of realistic mistakes, word for word."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist_cli.errors import ExitCode
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading import load
from tfdist_cli.spec.loading.load import resized
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.sections.cluster import RoleSpec


def load_cluster(*args):
    return load.load_cluster(*args)


def load_recipe(*args):
    return load.load_recipe(*args)


def load_run(*args):
    return load.load_run(*args)


def told(loader, *args, **kwargs):
    with pytest.raises(SpecError) as caught:
        loader(*args, **kwargs)
    return str(caught.value).splitlines()


def test_loads_a_cluster(folder):
    cluster = load_cluster("cluster.yaml")
    assert (cluster.name, cluster.strategy, cluster.launcher) == ("cluster", "parameter_server", "local")
    assert [str(task) for task in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "worker:2", "ps:0", "ps:1"]
    assert cluster.recipe is None
    assert cluster.run_dir is None


def test_loads_a_recipe(folder):
    recipe = load_recipe("recipes/recipe.yaml")
    assert recipe.params == {"hidden": [500, 500], "learning_rate": 0.001}
    assert recipe.train.epochs == 2
    assert recipe.module_dir == folder / "recipes"
    assert recipe.checkpoint is None


def test_a_whole_number_of_seconds_is_a_number_of_seconds(folder):
    (folder / "r.yaml").write_text("module: m\ncheckpoint: {every_seconds: 60}\n")
    assert load_recipe("r.yaml").checkpoint.every_seconds == 60.0


def test_relative_paths_start_at_their_file(folder, monkeypatch):
    sub = folder / "configs"
    sub.mkdir()
    (sub / "c.yaml").write_text("strategy: single\nroles: {chief: {}}\nrecipe: ../recipes/recipe.yaml\nrun_dir: runs\n")
    (folder / "recipes" / "recipe.yaml").write_text("module: digits\ncheckpoint: {every_steps: 5, dir: ck}\n")
    monkeypatch.chdir("/")
    cluster, recipe = load_run(sub / "c.yaml")
    assert cluster.recipe == folder / "recipes" / "recipe.yaml"
    assert cluster.run_dir == sub / "runs"
    assert recipe.checkpoint.dir == folder / "recipes" / "ck"
    monkeypatch.chdir(folder)
    assert load_run("configs/c.yaml") == (cluster, recipe)


def test_a_path_given_by_set_starts_here(folder, monkeypatch):
    monkeypatch.chdir(folder / "recipes")
    sets = ["run_dir=out", "recipe=recipe.yaml", "checkpoint={every_steps: 1, dir: ../ck}", "module_dir=."]
    cluster, recipe = load_run("../cluster.yaml", None, sets)
    assert cluster.run_dir == folder / "recipes" / "out"
    assert cluster.recipe == folder / "recipes" / "recipe.yaml"
    assert recipe.checkpoint.dir == folder / "ck"
    assert recipe.module_dir == folder / "recipes"


def test_home_and_absolute_paths(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load_cluster("cluster.yaml", ["run_dir=~/runs"]).run_dir == Path("/home/me/runs")
    assert load_cluster("cluster.yaml", ["run_dir=/tmp/../var/runs"]).run_dir == Path("/var/runs")


def test_parent_of_a_symbolic_link_is_kept(folder):
    (folder / "far" / "away").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "far" / "away")
    assert load_cluster("cluster.yaml", ["run_dir=link/../runs"]).run_dir == folder / "link" / ".." / "runs"


def test_the_argument_wins_over_the_clusters_recipe(folder):
    (folder / "other.yaml").write_text("module: other\n")
    cluster, recipe = load_run("cluster.yaml", "other.yaml", ["recipe=recipes/recipe.yaml"])
    assert recipe.module == "other"
    assert cluster.recipe == folder / "other.yaml"


def test_overrides_go_where_their_key_is(folder):
    sets = [
        "train.epochs=7",
        "roles.worker.replicas=1",
        "roles.evaluator={}",
        "checkpoint.every_steps=5",
        "name=x",
        "params.hidden.1=3",
        "roles.ps.env={A: b}",
    ]
    cluster, recipe = load_run("cluster.yaml", "recipes/recipe.yaml", sets)
    assert cluster.roles.count("worker") == cluster.roles.count("evaluator") == 1
    assert cluster.name == "x"
    assert cluster.roles.ps.env == {"A": "b"}
    assert recipe.train.epochs == 7
    assert recipe.params["hidden"] == [500, 3]


@pytest.mark.parametrize(
    ("override", "value"), [("2", 2.0), ("-0", 0.0), ("true", True), ("0.5", 0.5), ("1e3", 1000.0), ("null", None)]
)
def test_a_whole_number_for_a_decimal_one_is_taken_for_such(override, value, folder):
    _, recipe = load_run("cluster.yaml", "recipes/recipe.yaml", [f"params.learning_rate={override}"])
    found = recipe.params["learning_rate"]
    assert (found, type(found)) == (value, type(value))


def test_parameters_may_be_set_as_a_whole_and_below_what_the_recipe_has(folder):
    (folder / "r.yaml").write_text("module: r\nparams: {files: null, sizes: {train: 3}}\n")
    recipe = load_recipe("r.yaml", ["params.files.train=a", "params.files.test=b", "params.sizes.test=2"])
    assert recipe.params == {"files": {"train": "a", "test": "b"}, "sizes": {"train": 3, "test": 2}}
    assert load_recipe("r.yaml", ["params={x: 1}", "train.epochs=2"]).params == {"x": 1}
    assert load_recipe("r.yaml", ["params={x: 1}", "params.x=2"]).params == {"x": 2}
    (folder / "none.yaml").write_text("module: r\n")
    assert told(load_recipe, "none.yaml", ["params.x=1"]) == ["--set params.x=1: the recipe has no parameters"]


def test_the_last_override_wins_and_null_takes_a_key_away(folder):
    cluster = load_cluster(
        "cluster.yaml", ["name=a", "name=b", "roles.evaluator={}", "roles.evaluator=null", "run_dir="]
    )
    assert cluster.name == "b"
    assert cluster.roles.evaluator is None
    assert cluster.run_dir is None


def test_an_override_replaces_a_variable_that_is_not_set(folder):
    (folder / "c.yaml").write_text("strategy: single\nroles:\n  chief:\n    cpus: ${CPUS}\n")
    assert load_cluster("c.yaml", ["roles.chief.cpus=2"], {}).roles.chief.cpus == 2
    assert load_cluster("c.yaml", [], {"CPUS": "3"}).roles.chief.cpus == 3


def test_hosts_are_addresses(folder):
    cluster = load_cluster(
        "cluster.yaml",
        [
            "roles.ps={hosts: [10.0.0.1:2222, '[::1]', Gpu01]}",
            "roles.worker.hosts=[a]",
            "roles.worker.replicas=null",
            "roles.chief.hosts=[b:22]",
        ],
    )
    assert cluster.roles.ps.hosts == [Address("10.0.0.1"), Address("::1"), Address("gpu01")]


MISTAKES = Path(__file__).parent / "mistakes"
"""Files with what is to be said of them, each line behind `#>`."""


@pytest.mark.parametrize("mistake", sorted(MISTAKES.glob("*.yaml")), ids=lambda path: path.stem)
def test_mistakes(folder, mistake):
    text = mistake.read_text()
    expected = [f"f.yaml:{line[3:]}" for line in text.splitlines() if line.startswith("#> ")]
    (folder / "f.yaml").write_text(text)
    files = ("f.yaml", None) if mistake.name.startswith("cluster_") else ("cluster.yaml", "f.yaml")
    assert told(load_run, *files, (), {}) == expected


def test_a_cluster_with_other_numbers_is_checked_as_its_file_would_be(folder):
    path = folder / "cluster.yaml"
    cluster, recipe = load_run(path, folder / "recipes" / "recipe.yaml")
    more = resized(cluster, recipe, {"worker": 5, "ps": 1})
    settings = ["roles.worker.replicas=5", "roles.ps.replicas=1"]
    assert more == load_run(path, folder / "recipes" / "recipe.yaml", settings)[0]
    assert told(resized, cluster, recipe, {"worker": 0, "chief": 2}) == [
        "cluster: roles.chief: a cluster has at most one chief, not 2",
        "cluster: roles.worker: parameter_server needs a worker to compute gradients: it has 0 replicas",
    ]
    [line] = told(resized, cluster, recipe, {"evaluator": 1})
    assert line.startswith("--set roles.evaluator.replicas=1: roles.evaluator: an evaluator scores checkpoints: ")

    fixed = resized(cluster, None, {"ps": 2}).model_copy(
        update={"roles": cluster.roles.model_copy(update={"ps": RoleSpec(hosts=[Address("127.0.0.1", 2222)])})}
    )
    [line] = told(resized, fixed, None, {"ps": 2})
    assert "replicas is 2 but hosts names 1: give one of the two" in line


def test_updates_of_more_workers_than_there_are(folder):
    [line] = told(load_run, "cluster.yaml", "recipes/recipe.yaml", ["updates.mode=sync", "updates.aggregate=4"])
    assert line.endswith("recipes/recipe.yaml has updates.aggregate: 4, but there are 3 workers")


DATA = "  data_dispatcher: {}\n  data_worker: {replicas: 2}\n"


def test_data_workers_and_a_recipe_that_reads_from_them_need_each_other(folder):
    path = folder / "cluster.yaml"
    assert load_run(path, folder / "recipes" / "recipe.yaml")[1] is not None
    [line] = told(load_run, "cluster.yaml", "recipes/recipe.yaml", ["train.share=service"])
    assert line.startswith(
        "cluster.yaml:2:1: roles.data_worker: recipes/recipe.yaml has train.share: service, which needs"
    )
    path.write_text(path.read_text() + DATA)
    [line] = told(load_run, "cluster.yaml", "recipes/recipe.yaml")
    assert line.startswith(
        "cluster.yaml:8:3: roles.data_worker: nobody reads from it: recipes/recipe.yaml has train.share"
    )
    cluster, recipe = load_run(path, folder / "recipes" / "recipe.yaml", ["train.share=service"])
    assert recipe.train.share == "service"
    assert cluster.roles.count("data_worker") == 2


OVERRIDES = {
    "roles.worker.replicas": "expected PATH=VALUE, such as roles.worker.replicas=4",
    "=3": "a part of the path is empty: expected PATH=VALUE, such as roles.worker.replicas=4",
    "roles..replicas=3": "a part of the path is empty: expected PATH=VALUE, such as roles.worker.replicas=4",
    "roles.worker.replicas=x": "expected a whole number, got 'x'",
    "roles.worker.replica=3": "unknown key, did you mean 'replicas'?",
    "worker.replicas=3": "there is no key 'worker.replicas', did you mean 'roles.worker.replicas'?",
    "trian.epochs=3": "there is no key 'trian.epochs', did you mean 'train.epochs'?",
    "xyz=3": "there is no key 'xyz', expected one that starts with name, strategy, launcher, ",
    "strategy.a=3": "strategy is no map or list, so it has no 'a'; it is set at cluster.yaml:1:11",
    "params.learnin_rate=0.1": "the recipe has no parameter 'learnin_rate', did you mean 'learning_rate'?",
    "params.xyz=1": "the recipe has no parameter 'xyz', expected one of hidden, learning_rate",
    "params.hidden.2=3": "params.hidden is a list with items 0 to 1, so it has no '2'",
    "params.hidden.x=3": "params.hidden is a list with items 0 to 1, so it has no 'x'",
    "params.hidden.-1=3": "params.hidden is a list with items 0 to 1, so it has no '-1'",
    "name=[": "not YAML: ",
    f"params{'.a' * 50}=1": "the path is more than 50 deep",
    f"params.hidden={'[' * 50}": "nested more than 50 deep",
    "name=!!python/name:os.system": "tags such as ",
    "name=${NO}": "the environment variable NO is not set: set it, or write ${NO:-default}",
    "name=\udcff": "the character '\\udcff' cannot stand in YAML",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_mistakes_in_overrides(folder, override):
    [line] = told(load_run, "cluster.yaml", "recipes/recipe.yaml", [override], {})
    assert line.startswith(f"--set {override}: {OVERRIDES[override]}".replace("\udcff", "\\udcff"))


def test_all_overrides_are_told_at_once(folder):
    assert len(told(load_run, "cluster.yaml", None, ["a", "b=1", "name=["])) == 3


def test_a_recipes_override_needs_a_recipe(folder):
    assert told(load_run, "cluster.yaml", None, ["train.epochs=3"]) == [
        "--set train.epochs=3: is for a recipe, but there is none: name it with --recipe, or as 'recipe' in cluster.yaml"  # noqa: E501
    ]


def test_both_files_are_told_at_once(folder):
    (folder / "c.yaml").write_text("strategy: x\nroles: {}\n")
    (folder / "r.yaml").write_text("modul: x\n")
    lines = told(load_run, "c.yaml", "r.yaml")
    assert [line.split(":")[0] for line in lines] == ["c.yaml", "r.yaml", "r.yaml"]


def test_a_recipe_for_a_cluster_is_recognised(folder):
    with pytest.raises(SpecError) as caught:
        load_cluster("recipes/recipe.yaml")
    assert caught.value.hint == "this is a recipe file, and a cluster is expected here"
    with pytest.raises(SpecError) as caught:
        load_recipe("cluster.yaml")
    assert caught.value.hint == "this is a cluster file, and a recipe is expected here"


def test_an_evaluator_needs_checkpoints_to_score(folder):
    sets = ["roles.evaluator={}"]
    assert told(load_run, "cluster.yaml", "recipes/recipe.yaml", sets) == [
        "--set roles.evaluator={}: an evaluator scores checkpoints: recipes/recipe.yaml needs 'checkpoint' for it"
    ]
    (folder / "c.yaml").write_text("strategy: single\nroles:\n  chief: {}\n  evaluator: {}\n")
    [line] = told(load_run, "c.yaml", "recipes/recipe.yaml", ["evaluate=null"])
    assert line.endswith("recipes/recipe.yaml needs 'checkpoint' and 'evaluate' for it")
    assert load_run("c.yaml", "recipes/recipe.yaml", ["checkpoint.every_steps=5"])[1].checkpoint.every_steps == 5


def test_it_is_bad_usage(folder):
    with pytest.raises(SpecError) as caught:
        load_cluster("cluster.yaml", ["roles.ps.replicas=x", "nam=y"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_file_names_its_cluster_whatever_it_is_called(folder):
    for name, expected in (("a\x1bb", "a_b"), ("é" * 120, "é" * 100), (".hidden", ".hidden")):
        path = folder / f"{name}.yaml"
        try:
            path.write_text("strategy: single\nroles: {chief: {}}\n")
        except OSError:
            continue  # longer than this file system's names
        assert load_cluster(path).name == expected


def test_the_current_folder_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "c.yaml").write_text("strategy: single\nroles: {chief: {}}\n")
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_cluster(tmp_path / "c.yaml").name == "c"
    assert told(load_cluster, tmp_path / "c.yaml", ["run_dir=x"]) == ["x: the current directory is gone"]
    assert told(load_cluster, "c.yaml")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.text(), st.text("ab:-[]{}&*!|>'\"%@`#?,~ \n\t$0"), st.binary().map(lambda data: data.decode("latin-1"))
    )
)
def test_any_file_is_a_cluster_or_a_spec_error(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for loader in (load_cluster, load_recipe):
        assert told(loader, path)


KEYS = [
    "name",
    "strategy",
    "roles",
    "recipe",
    "run_dir",
    "params",
    "train",
    "export",
    "checkpoint",
    "evaluate",
    "module",
    "module_dir",
]
DEEP = ["roles.worker", "roles.worker.hosts", "export.format", "checkpoint.dir", "train.epochs", "params.hidden.0"]
PARTS = st.sampled_from(["replicas", "hosts", "cpus", "gpus", "env", "epochs", "format", "dir", "a"])
SOME_YAML = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab/.~:$1", max_size=5), st.just("${A}")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(PARTS, inner)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(KEYS + DEEP), SOME_YAML)
def test_any_override_is_a_run_or_a_spec_error(folder, path, value):
    text = repr(value).replace("None", "null").replace("True", "true").replace("False", "false")
    try:
        load_run("cluster.yaml", "recipes/recipe.yaml", [f"{path}={text}"], {"A": "1"})
    except SpecError as error:
        assert str(error)  # noqa: PT017
        assert "Input should" not in str(error)  # noqa: PT017
        assert "pydantic" not in str(error)  # noqa: PT017
