"""How scores of the same runs changed between two commits, from the rows that each of them has in benchmarks/results.

Rows are matched by their columns of text (data, method, variant) and their seed; of several, the last counts. Printed
are the pairs whose score differs by more than --least, largest change first, the median change of each file, and the
processors and versions that its JSON file names.

Usage: python benchmarks/accuracy/two_commits.py OLD NEW [--files defaults papers] [--score nll] [--least 0.01]
NEW may be "." for the files of the checkout.
"""

import argparse
import csv
import io
import json
import statistics
import subprocess
from pathlib import Path

RESULTS = Path("benchmarks/results")
KEYS = ("part", "data", "kind", "method", "variant", "setting", "seed", "num_train")


def text_at(commit, path):
    """A file at a commit, "" where it did not exist."""
    if commit == ".":
        return path.read_text(encoding="utf-8") if path.exists() else ""
    return subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=False).stdout


def rows_at(commit, file):
    """Rows of a file of results at a commit; none where it did not exist."""
    return list(csv.DictReader(io.StringIO(text_at(commit, RESULTS / f"{file}.csv")), restval=""))


def measured_with(commit, file, rows):
    """What the file's environments say of the commits of some rows, each said once."""
    known = json.loads(text_at(commit, RESULTS / f"{file}.json") or "{}")
    found = [each for name in sorted({row.get("commit", "") for row in rows}) for each in known.get(name, [])]
    return sorted({", ".join(f"{name} {value}" for name, value in each.items()) for each in found})


def scores(rows, columns, score):
    """The last score under each key."""
    return {tuple(row[name] for name in columns): float(row[score]) for row in rows if row.get(score)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("commits", nargs=2, metavar="COMMIT")
    parser.add_argument("--files", nargs="+", default=sorted(path.stem for path in RESULTS.glob("*.csv")))
    parser.add_argument("--score", default="nll")
    parser.add_argument("--least", type=float, default=0.01)
    args = parser.parse_args()
    for file in args.files:
        versions = [rows_at(commit, file) for commit in args.commits]
        if not all(versions):
            continue
        columns = [name for name in KEYS if all(name in rows[0] for rows in versions)]
        old, new = (scores(rows, columns, args.score) for rows in versions)
        changes = {key: new[key] - old[key] for key in old.keys() & new.keys()}
        if not changes:
            continue
        median = statistics.median(changes.values())
        print(f"{file}: {len(changes)} rows in both, median change of {args.score} {median:+.4f}")
        for side, commit, rows in zip(("old", "new"), args.commits, versions, strict=True):
            for line in measured_with(commit, file, rows):
                print(f"  {side}: {line}")
        for key in sorted(changes, key=lambda key: -abs(changes[key])):
            if abs(changes[key]) > args.least:
                print(f"  {', '.join(key)}: {old[key]:.3f} -> {new[key]:.3f} ({changes[key]:+.3f})")


if __name__ == "__main__":
    main()
