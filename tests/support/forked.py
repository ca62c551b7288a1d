"""What a fork of the fork server runs first: `forked.py FOLDER PROGRAM...` and `forked.py FOLDER -m MODULE...`.

From there on it is as if Python had been started in that folder with the rest of these arguments.
"""

import os
import runpy
import sys


def main():
    """Runs the program or module."""
    folder, *sys.argv = sys.argv[1:]
    os.chdir(folder)
    if sys.argv[0] == "-m":
        sys.path[0] = folder
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120 a string is what belongs there
        runpy.run_path(sys.argv[0], run_name="__main__")


main()
