"""Trains the zoo and prints the results: `python -m tests.zoo [--examples] [--engines single,async] [MODEL...]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.zoo.coverage import NOT_TRAINED, covered
from tests.zoo.engines import ENGINES, LIMIT, REFERENCES, Result, engines_of, judge, train
from tests.zoo.models import CASES
from tests.zoo.table import EXAMPLES, MODELS, examples_table, put, table


def run(names: list[str], keys: list[str], folder: Path, limit: float = LIMIT) -> dict[str, dict[str, Result]]:
    """Trains models with Keras and with engines.

    Args:
        names: the names of the models.
        keys: the names of the engines.
        folder: where they write; results that exist are not computed again.
        limit: the time limit for one model in seconds.

    Returns:
        The results by model and engine.
    """
    problems = trained(names, keys, folder, limit)
    return judged(names, keys, folder, problems)


def trained(names: list[str], keys: list[str], folder: Path, limit: float) -> dict[str, dict[str, str]]:
    """Trains models; returns the reason for each missing result, by engine and model."""
    folders = {key: folder / key for key in (*REFERENCES, *keys)}
    problems: dict[str, dict[str, str]] = {}
    several = any(ENGINES[key].workers > 1 for key in keys)
    for key, own_folder in folders.items():
        own = [name for name in names if key in REFERENCES or key in engines_of(CASES[name])]
        own = [name for name in own if key != "keras2" or (several and not CASES[name].copies)]
        own = [name for name in own if not list(own_folder.glob(f"*/{name}.*"))]
        start = time.monotonic()
        problems[key] = train(REFERENCES.get(key) or ENGINES[key], key, own, own_folder, limit)
        print(f"{key}: {len(own)} models in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return problems


def judged(
    names: list[str], keys: list[str], folder: Path, problems: dict[str, dict[str, str]]
) -> dict[str, dict[str, Result]]:
    """Returns the results by model and engine."""
    folders = {key: folder / key for key in (*REFERENCES, *keys)}
    return {
        name: {
            key: judge(CASES[name], name, key, folders, problems.get(key, {}).get(name))
            for key in keys
            if key in engines_of(CASES[name])
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("models", nargs="*", help="names of models; default: all")
    parser.add_argument("--examples", action="store_true", help="the models of Keras's examples")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names separated by commas; default: %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT, help="time limit for one model in seconds")
    parser.add_argument("--keep", type=Path, help="folder for the results; results that exist are not computed again")
    parser.add_argument("--found", action="store_true", help="only compare the results in the folder of --keep")
    parser.add_argument("--page", action="store_true", help="write the results to docs/reference/models.md")
    given = parser.parse_args()
    names = given.models or [name for name, case in CASES.items() if case.example or not given.examples]
    keys = given.engines.split(",")
    unknown = sorted({*names, *keys} - {*CASES, *ENGINES})
    if unknown:
        parser.error(f"unknown model or engine: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="tfdist-zoo-") as folder:
        kept = given.keep or Path(folder)
        found = judged(names, keys, kept, {}) if given.found else run(names, keys, kept, given.limit)
    for name, results in found.items():
        print(f"{name:48}", *(f"{result.state:8} {result.difference:7.0e}" for result in results.values()))
        for key, result in results.items():
            if result.detail:
                print(f"    {key}: {result.code} {result.detail[:600]}")
    counts = Counter((key, result.state) for results in found.values() for key, result in results.items())
    for key in keys:
        print(f"{ENGINES[key].title:24}", *(f"{state} {n}" for (other, state), n in counts.items() if other == key))
    if given.page:
        examples = {name: results for name, results in found.items() if CASES[name].example}
        put(examples_table(examples), EXAMPLES)
        if not given.examples:
            models = {name: case for name, case in CASES.items() if name not in examples}
            put(table({name: found[name] for name in models}, covered(models.items()), list(NOT_TRAINED)), MODELS)


if __name__ == "__main__":
    main()
