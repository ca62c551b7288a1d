"""Trains the zoo and prints what came of it: `python -m tests.zoo [--engines single async] [MODEL...]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.zoo.engines import ENGINES, LIMIT, REFERENCES, Result, judge, train
from tests.zoo.models import CASES


def run(names: list[str], keys: list[str], folder: Path, limit: float = LIMIT) -> dict[str, dict[str, Result]]:
    """Trains models by Keras and by engines.

    Returns:
        By model and engine what came of it.
    """
    folders = {key: folder / key for key in (*REFERENCES, *keys)}
    problems: dict[str, dict[str, str]] = {}
    several = any(ENGINES[key].workers > 1 for key in keys)
    for key, own_folder in folders.items():
        own = [name for name in names if key != "keras2" or (several and not CASES[name].copies)]
        own = [name for name in own if not list(own_folder.glob(f"*/{name}.*"))]
        began = time.monotonic()
        problems[key] = train(REFERENCES.get(key) or ENGINES[key], key, own, own_folder, limit)
        print(f"{key}: {len(own)} models in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {
        name: {key: judge(CASES[name], name, key, folders, problems[key].get(name)) for key in keys} for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("models", nargs="*", help="their names; all by default")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that one model may take")
    parser.add_argument("--keep", type=Path, help="a folder to keep results in; those found there are not made again")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    given = parser.parse_args()
    names = given.models or list(CASES)
    with tempfile.TemporaryDirectory(prefix="tfdist-zoo-") as folder:
        found = run(names, given.engines, given.keep or Path(folder), given.limit)
    for name, results in found.items():
        print(f"{name:48}", *(f"{result.state:8} {result.difference:7.0e}" for result in results.values()))
        for key, result in results.items():
            if result.said:
                print(f"    {key}: {result.said[:600]}")
    counts = Counter((key, result.state) for results in found.values() for key, result in results.items())
    for key in given.engines:
        print(f"{ENGINES[key].title:24}", *(f"{state} {n}" for (other, state), n in counts.items() if other == key))
    if given.json:
        written = {name: {key: vars(one) for key, one in results.items()} for name, results in found.items()}
        given.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
