"""`tfdist`, and `python -m tfdist_cli`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from tfdist_cli.errors import ExitCode


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    """Handles Ctrl-C where the command has no handler for SIGINT."""
    sys.exit(ExitCode.INTERRUPTED)


def main() -> None:
    """Runs `tfdist`."""
    signal.signal(signal.SIGINT, _interrupted)
    from tfdist_cli.cli.app import main as run  # noqa: PLC0415 Ctrl-C during the imports, too

    run()


if __name__ == "__main__":
    main()
