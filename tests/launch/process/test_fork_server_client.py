"""Tasks that are forked from a process that has imported for all, and are as if each had its own interpreter."""

import asyncio
import gc
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.launch.local.test_launcher import is_alive, python
from tfdist_cli.launch.local import launcher as local
from tfdist_cli.launch.process import fork_server_client
from tfdist_cli.launch.process.fork_server_client import (
    ForkServerClient,
    ForkServerExited,
    fork_server_environment,
    import_environment,
)
from tfdist_cli.launch.process.orphans import Watchdog, adopting
from tfdist_cli.launch.supervisor.events import Exited, Output, SignalReceived, Started
from tfdist_cli.spec.task_id import TaskId

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has fork servers")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Has fork servers fork a module's code, with another one imported before."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(fork_server_client, "IMPORTS", ("imported_before",))
    monkeypatch.setattr(local, "can_fork", lambda argv, _: "forked_program" in "".join(argv[1:3]))

    def make(code, before="pid = __import__('os').getpid()"):
        (tmp_path / "imported_before.py").write_text(textwrap.dedent(before))
        (tmp_path / "forked_program.py").write_text(textwrap.dedent(code))
        return sys.executable, "-m", "forked_program"

    return make


@pytest.fixture
def forked(run, program):
    """Runs a module's code in a cluster's tasks."""

    def start(code, *arguments, before="pid = __import__('os').getpid()", **options):
        return run(*program(code, before), *arguments, **options)

    return start


def test_a_task_is_a_fork_of_what_has_imported(forked):
    outcome = forked("import imported_before, os; print(imported_before.pid == os.getppid() != os.getpid())")
    assert outcome.lines() == ["True"]


def test_a_task_is_as_one_of_its_own_interpreter(forked, tmp_path):
    code = """
        import os, sys
        print(os.getsid(0) == os.getpid() == os.getpgid(0))
        print(__name__, sys.argv, os.getcwd())
        print(os.environ["OWN"], "TFDIST_LAUNCHER_PID" in os.environ)
        print(repr(sys.stdin.read()), sorted(int(each) for each in os.listdir("/proc/self/fd"))[:3])
        print("err", file=sys.stderr)
    """
    outcome = forked(code, "--task", "worker:0")
    argv = [str(tmp_path / "forked_program.py"), "--task", "worker:0"]
    expected = ["True", f"__main__ {argv} {Path.cwd()}", "worker:0 1 False", "'' [0, 1, 2]"]
    assert outcome.lines() == expected
    assert outcome.logs[W0, "stderr"] == b"err\n"


REPORT = """
'''The docstring.'''
import atexit, inspect, json, multiprocessing, os, signal, sys, threading

def square(number):
    return number * number

class Kept:
    pass

if __name__ == "__main__":
    main = sys.modules["__main__"]
    handlers = {{each.name: str(signal.getsignal(each)) for each in signal.Signals}}
    print(json.dumps({{
        "main": [__name__, __doc__, __file__, __package__, str(__spec__)[:20], main.__dict__ is globals()],
        "globals": sorted(globals()),
        "sys": [sys.argv, sys.orig_argv, sys.path, sys.executable, sys.flags.dev_mode, sys.gettrace()],
        "streams": [sys.stdin.read(), [[each.line_buffering, each.write_through, each.encoding, each.errors, each.mode]
                                       for each in (sys.stdout, sys.stderr)]],
        "signals": handlers,
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "source": inspect.getsource(square),
        "module": [Kept.__module__, square.__module__],
        "future": str(inspect.signature(lambda x: int)),
        "cwd": os.getcwd(),
    }}))
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(way, pool.map(square, [3]))
    atexit.register(lambda: print("at exit", main.__dict__ is globals(), square(2)))
    os.write(1, b"unbuffered\\n")
    sys.stdout.write("buffered\\n")
    def fail():
        raise ValueError("own")
    {ending}
"""


RUNPY_FRAME = re.compile(rb'  File "[^"]*runpy[^"]*".*\n(    .*\n)*')
"""A frame of the interpreter itself, which shows how it runs `-m`."""


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("ending", ["fail()", "sys.exit('bye')", "os.kill(os.getpid(), signal.SIGINT)", "pass"])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_cannot_tell_a_fork_from_an_interpreter(run, program, tmp_path, monkeypatch, ending, as_module):
    module = program(REPORT.format(ending=ending))
    argv = module if as_module else (sys.executable, str(tmp_path / "forked_program.py"))
    outcomes = []
    for forks in (True, False):
        monkeypatch.setattr(local, "can_fork", lambda *_, forks=forks: forks)
        outcomes.append(run(*argv, "--epochs", "3"))
    forked, fresh = outcomes
    assert forked.lines() == fresh.lines()
    assert len(fresh.lines()) == 6
    assert forked.logs[W0, "stderr"] == RUNPY_FRAME.sub(b"", fresh.logs[W0, "stderr"])
    assert forked.of(Exited)[0].code == fresh.of(Exited)[0].code


def test_a_program_gets_its_own_modules_not_those_of_the_same_name_that_are_imported(
    run, program, tmp_path, monkeypatch
):
    program("", before="import json")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "json.py").write_text("own = True")
    (folder / "forked_program.py").write_text("import json; print(json.own)")
    outcome = run(sys.executable, str(folder / "forked_program.py"))
    assert outcome.lines() == ["True"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9), ("exit('no')", 1)],
)
def test_how_a_task_ends(forked, code, expected):
    outcome = forked(code)
    assert outcome.of(Exited) == [Exited(W0, expected)]
    assert ("ZeroDivisionError" in outcome.logs[W0, "stderr"].decode()) == (code == "1 / 0")


def test_tasks_share_no_random_numbers(forked, make_cluster):
    pytest.importorskip("numpy")
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    before = "import random, numpy; numpy.random.seed(0); random.seed(0)"
    outcome = forked(code, before=before, cluster=make_cluster(worker=2))
    drawn = [number for task in (W0, W1) for number in outcome.lines(task)[0].split()]
    assert len(set(drawn)) == 4


def test_what_the_imports_write_is_in_every_log(forked, make_cluster):
    outcome = forked("print('own')", before="import os; os.write(2, b'imported')", cluster=make_cluster(worker=2))
    assert {outcome.logs[task, "stderr"] for task in (W0, W1)} == {b"imported"}


def test_ps_shows_which_task_it_is(forked):
    def react(event, state):
        if isinstance(event, Output) and event.lines:
            shown.extend(psutil.Process(int(event.lines[0])).cmdline())
            return (SignalReceived(signal.SIGTERM),)
        return ()

    shown = []
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    forked(code, "--task", "worker:0", react=react)
    assert [word for word in shown if word] == [sys.executable, "-m", "forked_program", "--task", "worker:0"]


def test_imports_that_fail_are_reported_by_the_tasks_own_interpreter(forked):
    outcome = forked("import imported_before", before="raise ImportError('broken install')")
    assert outcome.of(Exited) == [Exited(W0, 1)]
    assert outcome.logs[W0, "stderr"].count(b"ImportError: broken install") == 1


def test_imports_that_make_threads_are_not_forked(forked):
    before = "import os, threading as t; pid = os.getpid(); t.Thread(target=t.Event().wait, daemon=True).start()"
    code = "import imported_before, os; print(imported_before.pid == os.getpid())"
    assert forked(code, before=before).lines() == ["True"]


def test_the_thread_of_jemalloc_does_not_prevent_forks(forked):
    before = """
        import os, threading
        from pathlib import Path

        pid, named, ended = os.getpid(), threading.Event(), threading.Event()

        def wait():
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("jemalloc_bg_thd")
            named.set()
            ended.wait()

        threading.Thread(target=wait, daemon=True).start()
        named.wait()
    """
    code = "import imported_before, os; print(imported_before.pid == os.getppid())"
    assert forked(code, before=textwrap.dedent(before)).lines() == ["True"]


def test_a_task_that_is_reported_to_end_while_its_fork_server_imports(forked, caplog):
    answers = [SignalReceived(signal.SIGTERM)]

    def react(event, state):
        return [answers.pop()] if answers else ()

    outcome = forked("", before="import time; time.sleep(1000)", react=react)
    assert outcome.of(Exited) == [Exited(W0, -signal.SIGTERM)]
    assert outcome.state.exit_code == 143
    assert outcome.of(Started) == []
    gc.collect()
    assert caplog.text == ""  # asyncio logs an error that was never retrieved


def test_tasks_outlive_their_fork_server_and_their_ends_are_noticed(forked, make_cluster):
    code = """
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
        print(os.getppid(), flush=True)
        while True:
            signal.pause()
    """
    tasks, parents = {}, []

    def react(event, state):
        if isinstance(event, Started):
            tasks[event.task] = event.pid
        if isinstance(event, Output) and event.lines:
            parents.append(int(event.lines[0]))
            if len(parents) == 2:
                os.kill(parents[0], signal.SIGKILL)
                os.kill(tasks[W1], signal.SIGUSR1)

    outcome = forked(code, cluster=make_cluster(worker=2), react=react)
    assert len(set(parents)) == 1
    assert outcome.of(Exited) == [Exited(W1, 5), Exited(W0, -signal.SIGTERM)]


@pytest.fixture
def impatient(monkeypatch):
    """A fork server has a moment to say what it owes."""
    monkeypatch.setattr(fork_server_client, "_PERIOD", 0.05)


@pytest.mark.timeout(60)
def test_the_ends_of_tasks_are_noticed_though_their_fork_server_is_stopped(forked, make_cluster, impatient):
    code = """
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
        print(os.getppid(), flush=True)
        while True:
            signal.pause()
    """
    tasks, parents = {}, []

    def react(event, state):
        if isinstance(event, Started):
            tasks[event.task] = event.pid
        if isinstance(event, Output) and event.lines:
            parents.append(int(event.lines[0]))
            if len(parents) == 2:
                os.kill(parents[0], signal.SIGSTOP)
                os.kill(tasks[W1], signal.SIGUSR1)

    before = psutil.Process().num_fds()
    outcome = forked(code, cluster=make_cluster(worker=2), react=react)
    assert outcome.of(Exited) == [Exited(W1, 5), Exited(W0, -signal.SIGTERM)]
    assert psutil.Process().num_fds() == before


@pytest.mark.timeout(60)
def test_a_fork_server_that_is_stopped_when_a_task_is_wanted_is_given_up(program, impatient, tmp_path):
    argv = program("")

    async def want():
        server = ForkServerClient(fork_server_environment(os.environ, tmp_path))
        try:
            await server.ready
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(ForkServerExited):
                await server.fork(argv, os.environ)
        finally:
            server.close()
            server.close_lifeline()

    asyncio.run(want())


@pytest.mark.timeout(60)
def test_a_run_ends_although_its_watchdog_is_stopped(run, monkeypatch):
    monkeypatch.setattr(local, "_CLEANUP_SECONDS", 0.2)
    processes = []
    start = local._start_watchdog

    def stopped(scratch):
        watchdog = start(scratch)
        processes.append(watchdog._process)
        os.kill(processes[0].pid, signal.SIGSTOP)
        return watchdog

    monkeypatch.setattr(local, "_start_watchdog", stopped)
    assert run(*python("")).state.exit_code == 0
    assert processes[0].returncode == -signal.SIGKILL


DIES = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from tfdist_cli.launch.process import fork_server_client
fork_server_client.IMPORTS = ()

async def whole():
    made = fork_server_client.ForkServerClient(dict(os.environ))
    await made.ready
    task = await made.fork((sys.executable, "-m", "forked_program"), dict(os.environ))
    print(made.pid, task.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(whole())
"""


@pytest.mark.slow
def test_no_task_outlives_the_launcher_even_without_its_fork_server(program):
    program("import time; time.sleep(1000)")
    launcher = subprocess.Popen([sys.executable, "-c", DIES.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout
    server, task = (psutil.Process(int(word)) for word in launcher.stdout.readline().split())
    os.kill(server.pid, signal.SIGKILL)
    assert is_alive(task.pid)
    launcher.kill()
    launcher.communicate()
    psutil.wait_procs([server, task], timeout=5)
    assert not is_alive(task.pid)


@pytest.fixture
def guarded(monkeypatch):
    """The process groups that were added to a watchdog, and those that were removed."""
    groups = {"+": [], "-": []}
    write = Watchdog._write

    def record(watchdog, line):
        groups[line[0]].append(int(line[1:]))
        write(watchdog, line)

    monkeypatch.setattr(Watchdog, "_write", record)
    return groups


def test_a_run_leaves_no_file_open_and_the_guard_nothing_to_end(forked, make_cluster, guarded):
    assert forked("", cluster=make_cluster(worker=2)).state.exit_code == 0
    before = psutil.Process().num_fds()
    forked("", cluster=make_cluster(worker=2))
    assert psutil.Process().num_fds() == before
    assert len(guarded["+"]) == 6  # a fork server and two tasks, twice
    assert sorted(guarded["+"]) == sorted(guarded["-"])


def test_a_fork_server_that_has_died_is_replaced(forked, make_cluster, tmp_path, guarded):
    code = f"""
        import imported_before, os, pathlib, signal
        if os.environ["OWN"].startswith("worker"):
            print(os.getppid() == imported_before.pid, os.getppid(), flush=True)
            mark = pathlib.Path({str(tmp_path)!r}, "mark")
            if not mark.exists():
                mark.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(9)
        signal.pause()
    """

    def react(event, state):
        if isinstance(event, Output) and event.lines:
            lines.append(event.lines[0].split())
            return [SignalReceived(signal.SIGTERM)] if len(lines) == 2 else ()
        return ()

    lines = []
    cluster = make_cluster("parameter_server", chief=1, ps=1, worker=1)
    before = psutil.Process().num_fds()
    outcome = forked(code, cluster=cluster, react=react, max_restarts=1)
    assert psutil.Process().num_fds() == before
    assert len(guarded["+"]) == 6  # two fork servers, and the worker twice
    assert sorted(guarded["+"]) == sorted(guarded["-"])
    assert [true for true, _ in lines] == ["True", "True"]
    assert lines[0] != lines[1]
    assert {event.code for event in outcome.of(Exited)} == {9, -signal.SIGTERM}


def test_a_fork_server_of_whose_death_no_process_has_heard_yet_is_replaced(forked, make_cluster, tmp_path, guarded):
    code = f"""
        import imported_before, os, pathlib, signal
        if os.environ["OWN"].startswith("worker"):
            print(os.getppid() == imported_before.pid, flush=True)
            mark = pathlib.Path({str(tmp_path)!r}, "mark")
            if not mark.exists():
                mark.touch()
                os._exit(9)
        signal.pause()
    """

    def react(event, state):
        if isinstance(event, Exited) and event.code == 9:
            os.kill(guarded["+"][0], signal.SIGKILL)
            os.waitid(os.P_PID, guarded["+"][0], os.WEXITED | os.WNOWAIT)
        if isinstance(event, Output) and event.lines:
            lines.extend(event.lines)
            return [SignalReceived(signal.SIGTERM)] if len(lines) == 2 else ()
        return ()

    lines = []
    cluster = make_cluster("parameter_server", chief=1, ps=1, worker=1)
    before = psutil.Process().num_fds()
    forked(code, cluster=cluster, react=react, max_restarts=1)
    assert psutil.Process().num_fds() == before
    assert lines == ["True", "True"]
    assert len(guarded["+"]) == 6
    assert sorted(guarded["+"]) == sorted(guarded["-"])


async def _death_with_an_order_unread(program, tmp_path):
    """Two requests; the fork server exits after it has received only the first, and before the launcher got a reply."""
    argv = program(f"open({str(tmp_path / 'begun')!r}, 'a').write('x')")
    server = ForkServerClient(fork_server_environment(os.environ, tmp_path))
    try:
        await server.ready
        first = asyncio.ensure_future(server.fork(argv, os.environ))
        await asyncio.sleep(0)  # from here on only this function reads packets
        select.select([server._channel], [], [])
        os.kill(server.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        second = asyncio.ensure_future(server.fork(argv, os.environ))
        asyncio.get_running_loop().call_soon(os.kill, server.pid, signal.SIGKILL)
        with pytest.raises(ForkServerExited):
            await second
        task = await first
        ended = asyncio.Event()
        task.on_exit(ended.set)
        await ended.wait()
        for output in task.outputs:
            output.close()
        return task.reap()
    finally:
        server.close()
        server.close_lifeline()


def test_what_a_fork_server_has_written_before_its_death_is_heard(program, tmp_path):
    with adopting():
        assert asyncio.run(_death_with_an_order_unread(program, tmp_path)) == 0
    assert (tmp_path / "begun").read_text() == "x"


def test_what_must_stand_before_the_import():
    env = {"TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONHASHSEED": "1", "LD_PRELOAD": "x.so", "KERAS_BACKEND": "tensorflow"}
    late = {"TF_CONFIG": "{}", "TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "LOG_LEVEL": "debug"}
    assert dict(import_environment(env | late)) == env


def test_a_fork_server_knows_nothing_of_one_task_that_another_must_not(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_SHELL", "1")
    env = {"TF_CONFIG": "{}", "TOKEN": "secret", "KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "2"}
    own = fork_server_environment(env, tmp_path)
    assert not {"TF_CONFIG", "TOKEN"} & set(own)
    assert (own["FROM_SHELL"], own["KERAS_BACKEND"], own["OMP_NUM_THREADS"]) == ("1", "tensorflow", "1")
    assert (own["TFDIST_LAUNCHER_PID"], own["TFDIST_TASK_DIR"]) == (str(os.getpid()), str(tmp_path))


def test_what_a_task_leaves_behind_leaves_no_zombie(run):
    """The daemon outlives its task, and is dead when the launcher ends it all."""
    code = """
        import os, time
        said, saying = os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 3)
            os.write(saying, b"1")
            os._exit(0)
        os.read(said, 1)
    """
    outcome = run(*python(code))
    assert outcome.state.exit_code == 0
    zombies = [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    assert zombies == []
