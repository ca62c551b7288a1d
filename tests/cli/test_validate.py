"""`tfdist validate`."""

from tests.support.codes import codes_in


def test_ok(tfdist, cluster_file):
    result = tfdist("validate", cluster_file)
    assert (result.code, result.err) == (0, "")
    assert result.out == "OK: cluster: parameter_server with 1 chief, 2 workers, 1 ps\n"


def test_ok_with_a_recipe_that_is_not_imported(tfdist, cluster_file):
    result = tfdist(
        "validate", cluster_file, "--recipe", "digits.yaml", "-s", "roles.worker.replicas=1", "-s", "name=x"
    )
    assert result.out == "OK: x: parameter_server with 1 chief, 1 worker, 1 ps; trains digits\n"


def test_everything_that_is_wrong(tfdist, cluster_file):
    cluster_file.write_text("strategy: parameter_server\nroles:\n  worker:\n    replica: 2\n")
    result = tfdist("validate", "cluster.yaml", "--recipe", "digits.yaml", "--set", "train.epochs=no")
    assert result.code == 2
    assert not result.out
    assert codes_in(result.err) == ["unknown-key", "wrong-type"]
    first, second = result.err.splitlines()
    assert first.startswith("error[unknown-key]: cluster.yaml:4:5: roles.worker.replica: ")
    assert second.startswith("error[wrong-type]: --set train.epochs=no: ")


def test_a_file_that_is_not_there(tfdist, cluster_file):
    result = tfdist("validate", "clutser.yaml")
    assert (result.code, codes_in(result.err)) == (2, ["no-such-file"])
    assert "cluster.yaml?" in result.err


def test_a_module_that_is_not_there(tfdist, cluster_file):
    result = tfdist("validate", cluster_file, "-r", "digits.yaml", "-s", "module=digit")
    assert result.code == 2
    assert codes_in(result.err) == ["no-such-module"]
    assert "'digits'?" in result.err


def test_long_messages_stay_on_one_line(tfdist, cluster_file):
    cluster_file.write_text("strategy: parameter_server\nroles: {}\n" + f"{'x' * 300}: 1\n")
    assert len(tfdist("validate", "cluster.yaml").err.splitlines()) == 1


def test_a_public_address_is_warned_of(tfdist, cluster_file):
    result = tfdist("validate", cluster_file, "-s", "strategy=single", "-s", "roles={chief: {hosts: [8.8.8.8]}}")
    assert result.code == 0
    assert result.err.startswith("warning[exposed-port]: chief:0 ")
    assert "8.8.8.8:2222" in result.err
    assert "hint: " in result.err
