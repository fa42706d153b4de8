"""docs/llama-13b-on-8x910.md: what it shows is so, and it is not older than the code."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llama_13b.beliefs import embedding_gradients, half_numbers
from llama_13b.block import block_story, tensor_bytes
from llama_13b.cases import BATCHES, BIG, TECHNIQUES, Case, all_jobs, answer, technique_case, variant_text
from llama_13b.tables import part_cells, table
from trainfit.hardware import find_device
from trainfit.profile import OptimizerVariant, Profile
from trainfit.step.strategy_text import parse_variant
from trainfit.workload.resolve import workload_from_config

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "llama-13b-on-8x910.md"
AGAIN = "the page is older than the code: run `make article`"


def rows_of_page() -> list[list[str]]:
    lines = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_only_reentrant_checkpointing_loses_an_embeddings_gradient() -> None:
    found = embedding_gradients()
    assert found.equal
    assert found.plain == found.non_reentrant > 0
    assert found.reentrant is None
    assert "None of the inputs have requires_grad=True" in found.warning
    assert "does not require grad" in found.frozen_head_error


def test_a_loss_scale_saves_what_fp16_would_drop() -> None:
    half = half_numbers()
    assert half.tiny == half.scaled_after == 0.0
    assert half.scaled == pytest.approx(6.5536e-4, rel=2**-11)
    assert half.smallest == 2.0**-24
    assert half.smallest_normal == 2.0**-14
    assert half_numbers(2.0**-24).tiny > 0 == half_numbers(2.0**-25).tiny


def test_the_tracer_counts_the_tensors_that_autograd_saves_and_what_the_kernel_keeps_beside_them() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112}
    workload = workload_from_config({"model_type": "llama", "vocab_size": 300, **sizes}, seq_len=32, name="tiny")
    story = block_story(workload, find_device("ascend-910b3"), 3)
    # Row maximum and row sum, eight times in fp32, and not the one logarithm of a sum that a CPU keeps.
    assert story.kernel_bytes == 3 * 4 * 32 * (2 * 8 - 1) * 4
    rounded = sum(count * -(-tensor_bytes(*kind) // 512) * 512 for kind, count in story.kinds.items())
    assert story.saved["keep"] == rounded + story.kernel_bytes  # a device's allocator rounds each tensor
    assert story.saved["keep"] > story.saved["pointwise"] > story.saved["attention"] > story.saved["full"]
    assert story.hidden_bytes == 3 * 32 * 64 * 2


def test_the_page_shows_todays_figures_of_a_case_and_of_a_block() -> None:
    case = technique_case(BIG, BATCHES[0], "no technique")
    profile = answer(case)
    assert isinstance(profile, Profile)
    rows = rows_of_page()
    assert any(row[:-1] == ["128", "no technique", *part_cells(profile)] for row in rows), AGAIN
    story = block_story(BIG.workload, BIG.hardware, 16)
    for tier, saved in story.saved.items():
        assert [f"`{tier}`", f"{saved / 1e9:.2f}", f"{saved / story.hidden_bytes:.1f}"] in rows, AGAIN


def test_the_page_has_every_case_and_its_pictures_are_well_formed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [row[:2] for row in rows_of_page()]
    assert all([str(batch), name] in names for batch in BATCHES for name in TECHNIQUES), AGAIN
    pictures = re.findall(r"!\[[^]]+\]\((images/[^)]+\.svg)\)", text)
    assert len(pictures) == 2
    for picture in pictures:
        root = ElementTree.parse(DOCS / picture).getroot()
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme:dark" in (DOCS / picture).read_text(encoding="utf-8")


def test_commands_beside_the_figures_name_the_same_step() -> None:
    for job in all_jobs():
        if isinstance(job, Case) and not job.setting.adapter:
            said = re.search(r"--optimizer (\S+)", job.command)
            assert parse_variant(said[1] if said else "") == job.optimizer
            assert f"--micro-batch {job.micro_batch}" in job.command or job.micro_batch == 1
    assert variant_text(OptimizerVariant()) == ""


def test_tables_are_aligned() -> None:
    lines = table(["a", "b"], [["one", "2"], ["three", "45.6"]]).splitlines()
    assert lines == ["| a     |    b |", "|-------|-----:|", "| one   |    2 |", "| three | 45.6 |"]
