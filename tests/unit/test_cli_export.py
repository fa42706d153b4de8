"""`trainfit plan --export`: to stdout, to a file, to a folder, in JSON; and what is refused."""

from __future__ import annotations

import json
import tomllib

import pytest

import trainfit.cli.plan as plan_verb
from trainfit.cli.main import main
from trainfit.export import SYSTEMS
from trainfit.plan import Plan

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PLAN = ("plan", "config.json", "--seq-len", "32", "--tokens-per-step", "256", "--device", "cpu", "--memory", "1GiB")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple:
    """What one real plan's choose_plan gave, for all tests, since each takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("plan")
        patch.chdir(path)
        (path / "config.json").write_text(json.dumps(LLAMA))
        kept: list[tuple] = []
        choose = plan_verb.choose_plan
        patch.setattr(plan_verb, "choose_plan", lambda *a, **b: kept.append(choose(*a, **b)) or kept[0])
        assert main(PLAN) == 0
    return kept[0]


@pytest.fixture
def ready(planned, monkeypatch) -> Plan:
    monkeypatch.setattr(plan_verb, "choose_plan", lambda *args, **options: planned)
    return next(each for each in planned if isinstance(each, Plan))


def test_stdout_is_the_file_and_nothing_else(ready, capsys):
    capsys.readouterr()
    assert main([*PLAN, "--export", "deepspeed"]) == 0
    out, err = capsys.readouterr()
    made = json.loads(out)
    strategy = ready.strategy
    assert made["train_micro_batch_size_per_gpu"] == strategy.micro_batch_size
    assert made["train_batch_size"] == 256 // 32
    assert ready.hash in made["trainfit"]["plan"]
    assert all(note.split()[0] in err for note in made["trainfit"]["notes"])


def test_a_file_is_written_beside_the_plan(ready, capsys, folder):
    capsys.readouterr()
    assert main([*PLAN, "--export", "torchtitan", "--export-to", "my.toml"]) == 0
    out, _ = capsys.readouterr()
    assert "Plan " in out
    assert "my.toml" in out
    assert tomllib.loads((folder / "my.toml").read_text())["training"]["seq_len"] == 32


def test_several_systems_fill_a_folder(ready, capsys, folder):
    words = [word for system in SYSTEMS for word in ("--export", system)]
    capsys.readouterr()
    assert main([*PLAN, *words, "--export-to", "settings"]) == 0
    written = sorted(path.name for path in (folder / "settings").iterdir())
    assert len(written) == len(SYSTEMS)
    out = capsys.readouterr().out
    assert all(name in out for name in written)


def test_json_has_exports_and_is_still_a_plan(ready, capsys):
    capsys.readouterr()
    assert main([*PLAN, "--export", "trl", "--export", "megatron", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["exports"].keys() == {"trl", "megatron"}
    assert made["exports"]["trl"].keys() == {"file_name", "text", "notes", "file"}
    assert made["exports"]["trl"]["file"] is None
    assert Plan.from_json(made) == ready


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--export", "deepsped"], "did you mean deepspeed"),
        (["--export", "nemo"], "there are deepspeed"),
        (["--export-to", "x"], "say what with --export"),
        (["--export", "trl", "--export", "deepspeed"], "--export-to FOLDER"),
        (["--export", "trl", "--export-to", "none/x.yaml"], "no folder none"),
        (["--export", "trl", "--export-to", "config.json/x"], "config.json is a file"),
        (["--export", "trl", "--export", "deepspeed", "--export-to", "config.json"], "is a file"),
    ],
)
def test_what_is_refused_before_anything_is_planned(words, message, capsys, monkeypatch, folder):
    monkeypatch.setattr(plan_verb, "choose_plan", lambda *args, **options: pytest.fail("planned first"))
    assert main([*PLAN, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_plan_that_does_not_fit_is_not_exported(capsys, folder):
    words = [*PLAN[:-1], "100KiB", "--export", "deepspeed"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "does not fit" in err
    assert main([*words, "--export-to", "x.json"]) == 2
    assert not (folder / "x.json").exists()
