"""Predicted against measured memory of other people's runs: python benchmarks/published_runs.py [FILE.json]

Rehearses each record's step as its framework takes it and compares the peak in the record's own metric, and whether
it fits. A record that cannot be modelled is a miss. Exits 1 when a target is missed, 2 for a file that is none.
  --all         a row for each record
  --json FILE   all rows as JSON
  --only WORDS  only records whose source or id has these words
  --jobs N      processes; 1 unless said
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from published.predict import predictions
from published.records import read_records
from published.report import TARGETS, Row, constants_table, rows_json, rows_table, source_table, targets_met
from trainfit.errors import TrainfitError

DATA = Path(__file__).parent / "data" / "measured_runs.json"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        records = read_records(options.file)
    except TrainfitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = [record for record in records if options.only in record.source or options.only in record.id]
    found = track(predictions(records, jobs=options.jobs), "rehearsing", len(records), console=Console(stderr=True))
    rows = [Row(record, prediction) for record, prediction in zip(records, found)]
    console = Console(width=150)
    if options.all:
        console.print(rows_table(rows))
    console.print(source_table(rows))
    console.print(constants_table())
    if options.json:
        options.json.write_text(json.dumps(rows_json(rows), indent=1) + "\n")
    print(TARGETS)
    return 0 if targets_met(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
