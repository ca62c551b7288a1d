"""The kernel's counters of processes killed for lack of memory."""

import pytest

from tfdist_cli.launch.process.oom import OomKills


@pytest.fixture
def system(tmp_path):
    """A system's files: `system("0::/job", "sys/fs/cgroup/job/memory.events", 3)` gives what reads them."""

    def make(cgroup, name, count):
        proc = tmp_path / "proc" / "self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(f"5:cpu:/x\n{cgroup}\n")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")
        return OomKills(tmp_path)

    return make


@pytest.mark.parametrize(
    ("cgroup", "name"),
    [
        ("0::/a/job", "sys/fs/cgroup/a/job/memory.events"),
        ("0::/../..", "sys/fs/cgroup/memory.events"),
        ("4:memory:/a/job", "sys/fs/cgroup/memory/a/job/memory.oom_control"),
        ("4:hugetlb,memory:/docker/f00", "sys/fs/cgroup/memory/memory.oom_control"),
    ],
)
def test_each_kill_is_claimed_once(system, cgroup, name):
    kills = system(cgroup, name, 3)
    assert kills.claim() is False
    system(cgroup, name, 5)
    assert [kills.claim() for _ in range(3)] == [True, True, False]


def test_version_1_tells_of_each_cgroup_alone(system):
    """A task with its own memory limit has its own cgroup, which may have been removed by the next claim."""
    job, task = "sys/fs/cgroup/memory/job/memory.oom_control", "sys/fs/cgroup/memory/job/task/memory.oom_control"
    kills = system("4:memory:/job", job, 1)
    system("4:memory:/job", "sys/fs/cgroup/memory/other/memory.oom_control", 7)
    assert kills.claim() is False
    system("4:memory:/job", task, 2)
    assert [kills.claim(), kills.claim(), kills.claim()] == [True, True, False]
    (kills._file.parent / "task" / "memory.oom_control").unlink()
    system("4:memory:/job", job, 2)
    assert [kills.claim(), kills.claim()] == [True, False]


def test_the_uppermost_cgroup_of_version_1_is_not_that_of_all_others(system):
    kills = system("4:memory:/", "sys/fs/cgroup/memory/memory.oom_control", 0)
    system("4:memory:/", "sys/fs/cgroup/memory/other/memory.oom_control", 7)
    assert kills.claim() is False


def test_a_system_that_does_not_say(system, tmp_path):
    assert OomKills(tmp_path).claim() is None
    kills = system("0::/job", "sys/fs/cgroup/job/memory.events", 0)
    (tmp_path / "sys/fs/cgroup/job/memory.events").unlink()
    assert kills.claim() is None
    (tmp_path / "sys/fs/cgroup/job/memory.events").write_text("oom 3\n")
    assert OomKills(tmp_path).claim() is None
