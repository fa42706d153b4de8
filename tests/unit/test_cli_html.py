"""--html FILE: a page beside what is printed, one clear line where it cannot be written, and never half a file."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

import trainfit.cli.page as page_file
from trainfit.cli.main import main
from trainfit.errors import RecipeError
from trainfit.units import format_bytes

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODEL = ("config.json", "--seq-len", "32")
PLAN = ("plan", *MODEL, "--device", "cpu", "--tokens-per-step", "64")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"config.json"}


def test_plan_writes_a_page_and_prints_as_ever(folder, capsys):
    assert main([*PLAN, "--memory", "16MiB", "--json", "--html", "plan.html"]) == 0
    plan = json.loads(capsys.readouterr().out)
    page = (folder / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert plan["hash"] in page
    assert "plot area" in page
    assert "plot scatter" in page
    for alternative in plan["alternatives"]:
        assert alternative["why"] in page
    assert files(folder) == {"plan.html"}


def test_a_comparison_of_policies_is_on_the_page(folder, capsys):
    asked = (*PLAN, "--memory", "16MiB", "--policy", "every:2", "--policy", "full")
    assert main([*asked, "--json", "--html", "plan.html"]) == 0
    plan = json.loads(capsys.readouterr().out)
    page = (folder / "plan.html").read_text()
    assert page.count("plot scatter") == 2
    assert f"What binds: {plan['binds']}." in page
    for row in plan["policies"]:
        assert row["policy"] in page
        assert format_bytes(row["peak_bytes"]) in page


def test_a_plan_that_does_not_fit_still_has_its_page(folder, capsys):
    assert main([*PLAN, "--memory", "200KiB", "--html", "plan.html"]) == 2
    assert "error: does not fit" in capsys.readouterr().err
    assert "Does not fit:" in (folder / "plan.html").read_text()


def test_rehearse_writes_its_page(folder, capsys):
    step = (*MODEL, "--micro-batch", "2", "--accumulation", "2")
    assert main(["rehearse", *step, "--device", "cpu", "--json", "--html", "step.html"]) == 0
    profile = json.loads(capsys.readouterr().out)
    page = (folder / "step.html").read_text()
    assert f"comes in the {profile['peak_phase']} phase" in page
    assert "the last of 2 micro batches" in page


def test_measure_writes_its_page(folder):
    assert (
        main(["measure", *MODEL, "--micro-batch", "2", "--device", "cpu", "--steps", "0", "--html", "both.html"]) == 0
    )
    page = (folder / "both.html").read_text()
    assert page.count("plot area") == 2
    assert "error of the prediction" in page


def test_the_same_words_in_terminal_and_page(folder, capsys):
    assert main(["rehearse", *MODEL, "--micro-batch", "2", "--device", "cpu", "--html", "step.html"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    sentences = [line for line in (folder / "step.html").read_text().split("<p>") if line.startswith("The peak, ")]
    assert len(sentences) == 1
    assert sentences[0].split("</p>")[0] in printed


@pytest.mark.parametrize("verb", [PLAN, ("rehearse", *MODEL), ("measure", *MODEL)], ids=lambda verb: verb[0])
@pytest.mark.parametrize(("file", "words"), [(".", "is a folder"), ("", "is a folder"), ("no/x.html", "no folder no")])
def test_a_file_that_cannot_be_is_one_line_before_any_work(folder, capsys, monkeypatch, verb, file, words):
    monkeypatch.setattr("trainfit.cli.setup.open_workload", lambda *_: pytest.fail("worked before it looked"))
    assert main([*verb, "--html", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --html")
    assert err.count("\n") == 1
    assert words in err
    assert files(folder) == set()


def test_a_disk_that_fills_up_leaves_what_was_there(folder, monkeypatch):
    (folder / "plan.html").write_text("before")

    def full(self, *_, **__):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecipeError, match=r"plan.html cannot be written: No space left on device"):
        page_file.write_page("plan.html", "after")
    assert files(folder) == {"plan.html"}
    assert (folder / "plan.html").read_text() == "before"


def test_a_name_that_the_system_refuses_is_one_line(folder):
    with pytest.raises(RecipeError, match="cannot be written"):
        page_file.write_page("x" * 300, "page")
    assert files(folder) == set()
