"""benchmarks/published: records of every framework against what others measured, and the parts that get there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from published import rehearsing
from published.predict import predictions
from published.records import Record, Run, read_records
from published.rehearsing import rehearse_run
from published.splice import NotAlikeError
from published_runs import DATA, main
from trainfit.errors import RecipeError
from trainfit.hardware import find_device

ROWS: Mapping[str, dict[str, Any]] = {row["id"]: row for row in json.loads(DATA.read_text())}
A100 = find_device("a100-80gb")
ENDLESS = 2**50


def record(tmp_path: Path, row: dict[str, Any], **changes: Any) -> Record:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**row, **changes}]))
    return read_records(path)[0]


# FSDP1 with adapters, the update's peak, packed weights, litgpt, Megatron, torchtune: each another way to run.
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("fms-a-mistral-7b-v0.1-lora-base-foak-n2-b2", 0.02),
        ("fms-a-mistral-7b-v0.1-full-base-foak-n1-b8", 0.01),
        ("fms-a-mistral-7b-v0.1-qlora-bnb-accel-hf-n1-b4", 0.02),
        ("th-13b-L4-n1", 0.04),
        ("mlm-s-tp2cp2", 0.12),
        ("tune-3b-ac", 0.03),
    ],
)
def test_peaks_are_near_those_that_others_measured(tmp_path: Path, name: str, bound: float) -> None:
    measured = record(tmp_path, ROWS[name])
    (predicted,) = predictions([measured])
    assert predicted.error == ""
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=bound)
    assert predicted.fits


def small(tmp_path: Path, name: str, layers: int) -> Run:
    row = ROWS[name]
    sizes = {"layers": layers, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 1024}
    return record(tmp_path, row, model={**row["model"], **sizes}, seq_len=256, micro_batch=2).run


@pytest.mark.parametrize(
    "name",
    [
        "fms-a-mistral-7b-v0.1-lora-base-foak-n2-b2",
        "tt-reshard-default",
    ],
)
def test_a_spliced_step_is_the_whole_one(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(tmp_path, name, 8)
    spliced = rehearse_run(run, A100, ENDLESS)

    def never(*_: Any, whole: bool = False, **__: Any) -> Any:
        if not whole:
            raise NotAlikeError
        return original(*_, whole=True)

    original = rehearsing.spliced
    monkeypatch.setattr(rehearsing, "spliced", never)
    whole = rehearse_run(run, A100, ENDLESS)
    assert spliced == whole


def test_a_run_that_needs_more_than_there_is_does_not_fit(tmp_path: Path) -> None:
    run = small(tmp_path, "th-13b-L4-n1", 4)
    needed = rehearse_run(run, A100, ENDLESS)
    assert needed.fits
    assert rehearse_run(run, A100, needed.reserved_bytes).fits
    assert not rehearse_run(run, A100, needed.peak_bytes - 1).fits


def test_frozen_blocks_of_fsdp1_hold_two_hidden_states_until_the_end(tmp_path: Path) -> None:
    """NOTE [ What FSDP1 holds ]: inputs and their gradients, where a block that trains holds its input alone."""
    frozen = small(tmp_path, "fms-a-mistral-7b-v0.1-lora-base-foak-n2-b2", 4)
    alone = replace(frozen, wrap="none", shard=1)
    hidden = 2 * 256 * 256 * 2

    def growth(run: Run) -> int:
        """Of the peak by two blocks, without what is there before the step and what is gathered."""
        deep, flat = (
            rehearse_run(replace(run, dims=replace(run.dims, layers=n), seq_len=4096), A100, ENDLESS) for n in (6, 4)
        )
        return (deep.peak_bytes - deep.before_bytes) - (flat.peak_bytes - flat.before_bytes)

    assert growth(alone) == pytest.approx(2 * hidden * 16, rel=0.15)
    assert growth(frozen) == pytest.approx(4 * hidden * 16, rel=0.15)


def test_records_that_cannot_be_modelled_are_misses(tmp_path: Path) -> None:
    row = ROWS["th-13b-L4-n1"]
    broken = record(tmp_path, row, model={**row["model"], "heads": 0})
    (predicted,) = predictions([broken])
    assert not predicted.modelled
    assert predicted.error


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read as JSON"), ("{}", "not a list"), ('[{"id": "x"}]', "record x"), ("[3]", "number 0")],
)
def test_bad_files_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=words):
        read_records(path)
    assert main([str(path)]) == 2
    assert words in capsys.readouterr().err
