"""Speed against memory of every way to save activations: benchmarks/fair.sh python benchmarks/frontier.py [OPTIONS]

Peers (contest/variants.py) against trainfit's plans for 100 % to 15 % of plain training's peak, on two models in fp32
and bf16. First `trainfit devices --calibrate`, and `benchmarks/peers/install.sh build/peers all` for peers that need
an environment of their own. Every variant lives in its own process; one at a time does a step, round after round, so
that a noisy neighbour hits all alike. All update by fused AdamW and begin with the same weights.
  x plain   the median over rounds of a variant's seconds / plain's in the same round
  peak MB   the heap's peak above what was live between steps: activations, logits, gradients, temporaries. Of a plan,
            what it keeps between steps counts too, beyond what plain training keeps.
A peer is met when a plan is no slower and has at most 0.85 of its peak; else the nearest plan says what is missing.
What was measured is kept in a file, to which other models, precisions or families can be added by running it again;
ratios are within one run. Exits 1 when a peer is missed, a variant did another step than plain (its loss tells), or
nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from contest.page import case_tables, write_page
from contest.pool import Contest, Row
from contest.variants import FAMILIES, PEERS, Variant, plan_variant
from contest.verdict import other_losses, points_of, verdicts

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.38, 0.36, 0.3, 0.29, 0.27, 0.25, 0.24, 0.23, 0.22, 0.2, 0.19, 0.18, 0.15)
MODELS, PRECISIONS = ("reference", "wide"), ("fp32", "bf16")


def main() -> int:
    options = _options()
    kept: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if not options.report:
        measure(options, kept)
    if options.docs:
        write_page(kept, ROOT / "docs")
    return report(kept)


def measure(options: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Run each case; its rows are in the file after each round."""
    deadline = time.monotonic() + options.seconds
    logs = BUILD / "frontier"
    logs.mkdir(parents=True, exist_ok=True)
    for model, precision in product(options.models, options.precisions):
        case = {"model": model, "precision": precision, "device": options.device}
        key = f"{model}-{precision}" + ("" if options.device == "cpu" else f"-{options.device}")
        _say(f"{key}: planning")
        keep = partial(_keep, options.json, kept, key, {"case": case, "rows": kept.get(key, {}).get("rows", {})})
        contest = Contest(case, options.environments, logs, options.rounds, options.alive, deadline, _say, keep)
        keep(contest.run(_variants(case, options, deadline)))


def _keep(path: Path, kept: dict[str, Any], key: str, before: dict[str, Any], found: dict[str, Row]) -> None:
    """Put what was found of a case beside, or in the place of, what was known before."""
    told = {name: row for name, row in found.items() if row["seconds"] or "error" in row}
    kept[key] = {**before, "rows": _merged(before["rows"], told)}
    path.parent.mkdir(parents=True, exist_ok=True)
    passing = path.with_suffix(".tmp")
    passing.write_text(json.dumps(kept, indent=1))
    passing.replace(path)


def _variants(case: dict[str, str], options: argparse.Namespace, deadline: float = math.inf) -> list[Variant]:
    """Plans beside the peers that they are for, in the order of what is likely to be near: fast ones first."""
    peers = [variant for variant in PEERS if variant.family in options.peers and _can_run(variant, options.device)]
    peers = [variant for variant in peers if re.search(options.only, variant.name)]
    if "plans" not in options.peers:
        return peers
    from contest.plans import plan_all  # torch is not needed to report
    from contest.setting import Case

    return [*(plan_variant(plan) for plan in plan_all(Case(**case), options.shares, deadline)), *peers]


def _can_run(variant: Variant, device: str) -> bool:
    """Environments of other peers hold PyTorch for CPUs, and ckptplan's bytes are the heap's."""
    return device == "cpu" or variant.environment is None


def _merged(old: dict[str, Row], new: dict[str, Row]) -> dict[str, Row]:
    """New rows in the place of old ones of the same name; new plans in the place of all old plans."""
    replanned = any(row["role"] == "plan" for row in new.values())
    return {**{name: row for name, row in old.items() if not (replanned and row["role"] == "plan")}, **new}


def report(kept: dict[str, Any]) -> int:
    console, missed, bad = Console(width=150), 0, []
    for key, each in kept.items():
        for table in case_tables(key, each["rows"]):
            console.print(table)
        found = verdicts(points_of(each["rows"]))
        missed += sum(not verdict.met for verdict in found)
        bad += [f"{key}: {name}" for name in other_losses(each["rows"], each["case"]["precision"])]
        print(f"{key}: {sum(verdict.met for verdict in found)} of {len(found)} peers met")
    print(f"{len(kept)} cases, {missed} peers missed; other losses than plain's: {', '.join(bad) or 'none'}")
    return int(missed > 0 or bool(bad) or not kept)


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("reference", "wide", "large"), default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--peers", nargs="+", choices=FAMILIES, default=FAMILIES, help="families, plans among them")
    parser.add_argument("--only", default="", help="regular expression: names of peers to run")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=SHARES, help="of plain's peak that plans are made for"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alive", type=int, default=64, help="processes at once, where memory has room for so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no variant and no round after that")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--environments", type=Path, default=BUILD / "peers", help="what peers/install.sh has made")
    parser.add_argument("--json", type=Path, default=BUILD / "frontier.json", help="file of what was measured")
    parser.add_argument("--report", action="store_true", help="only report what is in the file")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into docs/ too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
