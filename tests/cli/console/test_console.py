"""What is printed while nothing runs yet."""

import logging

import pytest

from tfdist_cli.cli.console import console


@pytest.mark.parametrize(("quiet", "printed"), [(False, "[tfdist] copying [worker:1] to h2\n"), (True, "")])
def test_what_a_launcher_tells_while_it_gets_ready(capsys, quiet, printed):
    log = logging.getLogger("tfdist.launch")
    with console.launcher_messages(quiet=quiet):
        log.info("copying %s to h2", "[worker:1]")
    log.info("afterwards")
    assert capsys.readouterr().err == printed
