"""A task's id and addresses, from Slurm's variables alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slurm.task_environment import (
    HIGHEST_PORT,
    LOWEST_PORT,
    expand_counts,
    expand_nodes,
    find_step_task,
    in_step,
)
from tfdist_cli.spec.sections.cluster import Cluster

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4,1",
    "SLURMD_NODENAME": "n1",
}
# As srun 22.05 sets them in task 1 of a job of two components, which share a node.
COMPONENTS = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "1",
    "SLURM_CPUS_PER_TASK_HET_GROUP_1": "8",
}


def cluster(**roles):
    given = {role: {"replicas": count} for role, count in roles.items()}
    return Cluster.model_validate({"strategy": "parameter_server", "launcher": "slurm", "roles": given})


FIVE = cluster(chief=1, worker=2, ps=2)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[1-4,07-09]", ["n1", "n2", "n3", "n4", "n07", "n08", "n09"]),
        ("n[098-101],login", ["n098", "n099", "n100", "n101", "login"]),
        ("a[3],b-[1,5]", ["a3", "b-1", "b-5"]),
        ("r[0-1]c[1-2]", ["r0c1", "r0c2", "r1c1", "r1c2"]),
        ("gpu-1.lab,gpu-2.lab", ["gpu-1.lab", "gpu-2.lab"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("", []),
    ],
)
def test_a_node_list(text, nodes):
    assert list(expand_nodes(text)) == nodes


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n[]", "n1]", "n[1,,2]"])
def test_an_invalid_node_list_is_refused(text):
    with pytest.raises(ValueError, match="node list"):
        expand_nodes(text)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z][a-z-]{0,4}", fullmatch=True), st.integers(0, 1200), st.integers(1, 6),
                  st.integers(1, 5)),
        max_size=6,
    )
)  # fmt: skip
def test_a_node_list_expands_to_its_nodes(parts):
    text = ",".join(f"{head}[{low:0{width}}-{low + many - 1:0{width}}]" for head, low, many, width in parts)
    names = [f"{head}{number:0{width}}" for head, low, many, width in parts for number in range(low, low + many)]
    assert list(expand_nodes(text)) == names


@given(st.lists(st.tuples(st.integers(0, 128), st.integers(1, 50)), min_size=1, max_size=8))
def test_counts_expand_to_one_number_per_node(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert list(expand_counts(text)) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "a", "2(x)", "2,,1", "2(x3", "-1"])
def test_an_invalid_list_of_counts_is_refused(text):
    with pytest.raises(ValueError, match="list of counts"):
        expand_counts(text)


def test_a_task_of_a_step():
    found = find_step_task(FIVE, STEP | {"SLURM_CPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert str(found.task) == "ps:0"
    assert (found.cpus, found.gpus) == (2, ("0", "1"))
    hosts = {str(task): address.host for task, address in found.addresses.items()}
    assert hosts == {"chief:0": "n1", "worker:0": "n1", "worker:1": "n1", "ps:0": "n1", "ps:1": "n2"}
    ports = [address.port for address in found.addresses.values()]
    assert ports == list(range(LOWEST_PORT + 17 * 97, LOWEST_PORT + 17 * 97 + 5))


def test_every_task_of_a_step_finds_the_same_cluster():
    own = [{"SLURM_PROCID": str(number), "SLURMD_NODENAME": "n2" if number == 4 else "n1"} for number in range(5)]
    found = [find_step_task(FIVE, STEP | variables) for variables in own]
    assert [each.task for each in found] == list(FIVE.tasks)
    assert len({tuple(each.addresses.items()) for each in found}) == 1


@settings(max_examples=30)
@given(st.integers(1, 2**26), st.integers(1, 300))
def test_ports_are_below_those_of_outgoing_connections(job, workers):
    many = cluster(chief=1, worker=workers, ps=1)
    count = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": str(workers + 2),
        "SLURM_JOB_ID": str(job),
    }
    ports = [address.port for address in find_step_task(many, STEP | count).addresses.values()]
    assert len(set(ports)) == workers + 2
    assert LOWEST_PORT <= min(ports) <= max(ports) <= HIGHEST_PORT


def test_the_components_of_a_heterogeneous_job_are_one_cluster():
    found = find_step_task(FIVE, COMPONENTS)
    assert (str(found.task), found.cpus, found.gpus) == ("worker:0", 8, ())
    assert [address.host for address in found.addresses.values()] == ["n1", "n1", "n1", "n2", "n2"]
    assert find_step_task(FIVE, COMPONENTS | {"SLURM_PROCID": "0"}).cpus == 1


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "task-count-mismatch", ["5 tasks", "8"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, "slurm-variable-invalid", ["SLURM_STEP_TASKS_PER_NODE"]),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "slurm-variable-invalid", ["SLURM_STEP_NODELIST", "'n[1-'"]),
        ({"SLURMD_NODENAME": "n2"}, "task-node-mismatch", ["ps:0", "n2", "n1"]),
        ({"SLURM_JOB_ID": "x"}, "slurm-variable-invalid", ["SLURM_JOB_ID", "'x'"]),
        ({"SLURM_HET_SIZE": "2"}, "slurm-variable-invalid", ["'SLURM_JOB_NODELIST_HET_GROUP_0'"]),
    ],
)
def test_variables_that_do_not_fit_the_cluster(change, code, values):
    with raises(UsageError, code) as caught:
        find_step_task(FIVE, STEP | change)
    assert all(value in caught.value.message for value in values)
    assert caught.value.hint


def test_hosts_in_the_file_are_refused():
    written = {"strategy": "multi_worker_mirrored", "roles": {"worker": {"hosts": ["a:1", "b:1", "c:1", "d:1", "e:1"]}}}
    with raises(UsageError, "hosts-not-supported"):
        find_step_task(Cluster.model_validate(written), STEP)


def test_a_batch_script_is_not_a_task():
    assert in_step(STEP)
    assert not in_step({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17"})
