"""`PYTHONPATH=tests python -m simulator.mutate`: each broken rule against seed after seed, and who noticed it.

Writes build/mutations.json. What no seed notices shows where the oracle is blind, unless the table says why nothing can
come of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path

from simulator.exhaustive import Search
from simulator.mutations import MUTATIONS, Mutation, broken
from simulator.scopes import Found
from simulator.world import simulate

MOST_SEEDS = 400
REDUNDANT_SEEDS = 20
MOST_SECONDS = 120.0
"""CPU of one mutation."""


def noticed(mutation: Mutation, most_seeds: int, most_seconds: float) -> dict[str, object]:
    """What became of it: by which check it was found, under which seed, and after how many seconds of CPU.

    A seed that shows a violation without the mutation too finds nothing; it is passed over.
    """
    began, seed = time.process_time(), 0
    found: dict[str, object] = {"name": mutation.name, "found": False, "redundant": mutation.redundant}
    while seed < most_seeds and time.process_time() - began < most_seconds:
        check, said = _violation(seed, mutation)
        if said is not None and simulate(seed, mutation.settings).violation is None:
            found |= {"found": True, "check": check, "seed": seed, "violation": said}
            break
        seed += 1
    if not found["found"] and mutation.scope is not None:
        try:
            with broken(mutation):
                Search(mutation.scope).run()
        except Found as way:
            found |= {"found": True, "check": "exhaustive search", "seed": None, "violation": str(way)}
    return found | {"seeds": seed, "seconds": round(time.process_time() - began, 1)}


def _violation(seed: int, mutation: Mutation) -> tuple[str | None, str | None]:
    """The check that one run with the broken rule violates, and its sentence."""
    try:
        with broken(mutation):
            outcome = simulate(seed, mutation.settings, mutation.rules, mutation.decisions)
    except (AssertionError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        return "crash", f"{type(error).__name__}: {error}"
    return outcome.check, outcome.violation


def _one(given: tuple[int, int, float]) -> dict[str, object]:
    number, most_seeds, most_seconds = given
    mutation = MUTATIONS[number]
    return noticed(mutation, min(most_seeds, REDUNDANT_SEEDS) if mutation.redundant else most_seeds, most_seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulator.mutate", description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose name has this pattern")
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS)
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="CPU for each at most")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, default=Path("build/mutations.json"))
    given = parser.parse_args(arguments)
    wanted = [(n, given.seeds, given.seconds) for n, m in enumerate(MUTATIONS) if re.search(given.only, m.name)]
    results = []
    with multiprocessing.Pool(given.processes, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(_one, wanted, chunksize=1):
            results.append(result)
            how = f"{result['check']}, seed {result['seed']}" if result["found"] else "NOT FOUND"
            how = "redundant, not found" if not result["found"] and result["redundant"] else how
            print(f"{result['seconds']:6.1f} s  {result['name']}: {how}", flush=True)
    needed = [r for r in results if not r["redundant"]]
    blind = [r["name"] for r in needed if not r["found"]]
    useful = [r["name"] for r in results if r["redundant"] and r["found"]]
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(
        json.dumps({"made": len(needed), "found": len(needed) - len(blind), "mutations": results}, indent=1)
    )
    print(f"{len(needed) - len(blind)} of {len(needed)} found, {len(results) - len(needed)} redundant; {given.report}")
    for name in blind:
        print(f"NOT FOUND: {name}")
    for name in useful:
        print(f"NOT REDUNDANT: {name}")
    return 1 if blind or useful else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
