"""Checkpoint folders: what is not whole, ours, known and of this model is refused before anything is touched."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from trainfit.errors import ResumeError
from trainfit.hardware import Ranks
from trainfit.train.checkpoint import RunState, list_checkpoints, read_state
from trainfit.train.packing import Position
from trainfit.train.saving import Checkpoints


def tiny(width=4):
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    return model, torch.optim.AdamW(model.parameters())


def save(folder, state, model, optimizer, **options):
    checkpoints = Checkpoints(folder, Ranks(), **{"keep": 1, **options})
    checkpoints.save(state, model, optimizer, (torch.get_rng_state(),))
    checkpoints.wait()
    return checkpoints.latest


def save_tiny(folder):
    model, optimizer = tiny()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return save(folder, RunState(1, Position(0, 4), 10), model, optimizer)


def test_another_models_checkpoint_is_refused_before_anything_is_written(tmp_path):
    path = save_tiny(tmp_path)
    model, optimizer = tiny(width=5)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ResumeError, match=r"3 of 4 tensors differ in shape, 0\.bias is \(4,\) there and \(5,\) here"):
        Checkpoints(path.parent, Ranks(), keep=1).load(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    with pytest.raises(ResumeError, match=r"2 only there such as 1\.bias"):
        Checkpoints(path.parent, Ranks(), keep=1).load(path, nn.Sequential(nn.Linear(3, 4)), optimizer)


def edit_manifest(path, **values):
    manifest = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**manifest, **values}))


def damage(path):
    with (path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 64)


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (lambda path: (path / "checkpoint.json").unlink(), "has no checkpoint.json: not a trainfit checkpoint"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "checkpoint.json").write_text("[]"), "not of format"),
        (lambda path: edit_manifest(path, version=9), "format version 9, this trainfit reads version 2; upgrade"),
        (
            lambda path: edit_manifest(path, version=1),
            "format version 1, this trainfit reads version 2; go on with the",
        ),
        (lambda path: edit_manifest(path, version=None), "is not of format"),
        (lambda path: edit_manifest(path, format="other"), "is not of format"),
        (lambda path: (path / "rng.safetensors").unlink(), r"rng\.safetensors has 0 bytes, \d+ were saved"),
        (damage, "SHA-256 differs"),
    ],
)
def test_partial_foreign_newer_and_damaged_folders_are_refused(tmp_path, harm, match):
    path = save_tiny(tmp_path)
    harm(path)
    model, optimizer = tiny()
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": parameter * 0, "exp_avg_sq": parameter * 0}
    with pytest.raises(ResumeError, match=match):
        Checkpoints(path.parent, Ranks(), keep=1).load(path, model, optimizer)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    """Moments and step counters of every parameter, buffers and the generator's state, bit for bit."""
    model, optimizer = tiny()
    model.register_buffer("seen", torch.tensor([3, 4]))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = RunState(7, Position(2, 5), 99, {"seed": 1}, "recipe", "plan")
    generator = torch.get_rng_state()
    path = save(tmp_path, state, model, optimizer)
    other, other_optimizer = tiny()
    other.register_buffer("seen", torch.tensor([0, 0]))
    other(torch.zeros(1, 3)).sum().backward()
    other_optimizer.step()
    (rng,) = Checkpoints(tmp_path, Ranks(), keep=1).load(path, other, other_optimizer).rng
    assert read_state(path) == state
    assert torch.equal(rng, generator)
    assert torch.equal(other.seen, model.seen)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][key])


def test_the_same_step_can_be_saved_again(tmp_path):
    save_tiny(tmp_path)
    path = save_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == list_checkpoints(tmp_path) == [path]


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    from trainfit.train import RunFolder

    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(ResumeError, match="another run"), RunFolder(tmp_path / "run").locked():
        pass
    with folder.locked():
        pass  # free again
