"""Answers of all jobs, kept in a file as they come, so that a run that was stopped goes on, and new words cost nothing.

They are kept under a hash of the rooms of trainfit that they come from: other code, other answers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

import trainfit
from llama_13b.cases import Answer, Job, Question, answer
from trainfit.plan import Plan
from trainfit.profile import Profile

PARTS = ("profile.py", "hardware", "workload", "techniques", "step", "rehearsal", "plan")
FOLDER = Path(__file__).resolve().parents[2] / "build" / "llama-13b"


def source_hash() -> str:
    """Of what answers depend on beside the jobs."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    package = Path(trainfit.__file__).parent
    for path in sorted(path for part in PARTS for path in [package / part, *(package / part).rglob("*.py")]):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def answer_all(jobs: Sequence[Job], workers: int, say: Callable[[str], None] = lambda line: None) -> dict[Job, Answer]:
    """Every answer, in processes of their own. The order changes nothing in what comes out."""
    path = FOLDER / f"{source_hash()}.jsonl"
    found = {job: known for job in jobs if (known := _read(path).get(repr(job))) is not None}
    left = [job for job in dict.fromkeys(jobs) if job not in found]
    if left:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(answer, job): job for job in left}
            for done in as_completed(running):
                job = running[done]
                found[job] = done.result()
                _keep(path, job, found[job])
                say(f"{len(found)}/{len(jobs)} {job.command}")
    return {job: found[job] for job in jobs}


def _keep(path: Path, job: Job, found: Answer) -> None:
    with path.open("a", encoding="utf-8") as file:
        line = {"job": repr(job), "plan": isinstance(job, Question), "answer": found.to_json()}
        file.write(json.dumps(line) + "\n")


def _read(path: Path) -> dict[str, Answer]:
    if not path.is_file():
        return {}
    lines = map(_parse, path.read_text(encoding="utf-8").splitlines())
    return {line["job"]: _load(line) for line in lines if line is not None}


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # the run was stopped while it wrote
        return None


def _load(line: dict[str, Any]) -> Answer:
    return Plan.from_json(line["answer"]) if line["plan"] else Profile.from_json(line["answer"])


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
