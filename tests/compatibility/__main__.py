"""The matrix of other people's libraries: `python -m compatibility [--quick|--apart] [--only TEXT] [--json FILE] [--page FILE]`."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

warnings.simplefilter("ignore")

import torch  # noqa: E402  # quiet from the first import on

from compatibility.case import Case, Unrun  # noqa: E402
from compatibility.catalogue import APART, CASES  # noqa: E402
from compatibility.rows import Row, as_json, as_page, of_page  # noqa: E402
from compatibility.running import preload  # noqa: E402
from compatibility.running import run as run_case  # noqa: E402
from compatibility.scripted import Script  # noqa: E402
from compatibility.scripted import run as run_script  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="compatibility", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a part of all cases, without libraries beyond torch")
    parser.add_argument("--apart", action="store_true", help="those of libraries that need an environment of their own")
    parser.add_argument("--only", default="", help="cases whose title has this text")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument("--page", type=Path, help="where the document is written; rows that were not run stay in it")
    parser.add_argument("--keep", type=Path, help="folder in which lives leave their logs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    preload(options.quick or options.apart)
    cases = APART if options.apart else CASES
    wanted = [c for c in cases if (c.quick or not options.quick) and options.only.lower() in c.title.lower()]
    rows: list[Row] = []
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of fsyncs
    with TemporaryDirectory(prefix="surefoot-compatibility-", dir=in_memory) as temporary:
        for number, case in enumerate(wanted, 1):
            begun = time.monotonic()
            scratch = (options.keep or Path(temporary)).resolve() / f"{number}"
            row = found(case, scratch)
            rows.append(row)
            took = time.monotonic() - begun
            print(f"{number:3}/{len(wanted)} {row.result:8} {case.title}: {row.why} ({took:.1f} s)", flush=True)
    if options.page is not None and options.page.exists():
        run = {(row.area, row.name, row.world) for row in rows}
        there = {(case.area, case.name, case.world) for case in (*CASES, *APART)}
        known = of_page(options.page.read_text())
        rows += [row for row in known if (row.area, row.name, row.world) in there - run]
    for path, text in ((options.json, as_json(rows)), (options.page, as_page(rows))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    wrong = sum(row.result == "wrong" for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong")
    return 1 if wrong else 0


def found(case: Case | Script | Unrun, scratch: Path) -> Row:
    match case:
        case Unrun(area, name, why, world):
            return Row(area, name, world, "rejected", why)
        case Script():
            return run_script(case, scratch)
        case Case():
            return run_case(case, scratch)


if __name__ == "__main__":
    sys.exit(main())
