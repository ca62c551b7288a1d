"""The entry point of a fork of the fork server: `forked.py FOLDER PROGRAM...` or `forked.py FOLDER -m MODULE...`.

It continues as if Python had been started in that folder with the remaining arguments.
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
        sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120 the entries of sys.path are strings
        runpy.run_path(sys.argv[0], run_name="__main__")


main()
