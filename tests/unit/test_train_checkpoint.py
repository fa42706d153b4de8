"""Checkpoint folders: what is not whole, ours, known and of this model is refused before anything is touched."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainfit.train.storage as storage_module
from trainfit.errors import ResumeError
from trainfit.hardware import Ranks
from trainfit.train.checkpoint import RunState, list_checkpoints, read_state
from trainfit.train.packing import Position
from trainfit.train.pieces import share_out
from trainfit.train.saving import Checkpoints
from trainfit.train.storage import DTYPE_NAMES, Entry, facts_of, write_safetensors


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
        (lambda path: edit_manifest(path, version=9), "format version 9, this trainfit reads version 3; upgrade"),
        (
            lambda path: edit_manifest(path, version=2),
            "format version 2, this trainfit reads version 3; go on with the",
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


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path, monkeypatch):
    """Returns before anything is written; what training changes meanwhile is not in it; told once it is there."""
    model, optimizer = tiny()
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": parameter * 2, "exp_avg_sq": parameter * 3}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    may_write, told = threading.Event(), []
    write = storage_module._bytes_of
    monkeypatch.setattr(storage_module, "_bytes_of", lambda entry: (may_write.wait(20), write(entry))[1])
    with Checkpoints(
        tmp_path, Ranks(), keep=1, asynchronous=True, on_saved=lambda step, path: told.append((step, path))
    ) as checkpoints:
        checkpoints.save(RunState(1, Position(0, 4), 10), model, optimizer, (torch.get_rng_state(),))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
                optimizer.state[parameter]["exp_avg"].zero_()
        assert not list_checkpoints(tmp_path)
        assert told == []
        may_write.set()
    assert told == [(1, tmp_path / "step-00000001")]
    Checkpoints(tmp_path, Ranks(), keep=1).load(told[0][1], model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], 2 * before[name])


def test_another_dtype_is_refused_and_not_cast(tmp_path):
    path = save_tiny(tmp_path)
    model, optimizer = tiny()
    with pytest.raises(ResumeError, match=r"4 of 4 tensors differ in dtype, 0\.bias is F32 there and BF16 here"):
        Checkpoints(tmp_path, Ranks(), keep=1).load(path, model.to(torch.bfloat16), optimizer)


def test_a_damaged_index_is_refused(tmp_path):
    path = save_tiny(tmp_path)
    (path / "index.json").unlink()
    with pytest.raises(ResumeError, match=r"index\.json has 0 bytes"):
        read_state(path)


def test_replicas_share_the_work_and_each_piece_has_one_writer():
    """4 ranks: pairs hold the same shards, all hold the same vectors, one has a piece of its own."""
    shards = [{("weight", (8 * (rank // 2), 0)): 800, ("bias", (0,)): 100, ("norm", (0,)): 60} for rank in range(4)]
    shards[3]["rng", (0,)] = 70
    mine = [share_out(shards, rank) for rank in range(4)]
    assert sorted(key for keys in mine for key in keys) == sorted({key for held in shards for key in held})
    assert all(keys <= held.keys() for keys, held in zip(mine, shards))
    loads = [sum(shards[rank][key] for key in mine[rank]) for rank in range(4)]
    assert sorted(loads) == [100, 70 + 60, 800, 800]


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
def test_files_are_those_of_safetensors(tmp_path, dtype):
    """Read by the format's own reader: without dims, without rows, strided; and what the facts say is on the disk."""
    values = torch.arange(24).reshape(4, 6)
    tensors = {"b.strided": values.t(), "a": values, "none": values[:0], "c.one": values[1, 2], "odd": values[0, :3]}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()} | {"z.byte": torch.tensor([7]).byte()}
    entries = {
        name: Entry(tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor) for name, tensor in tensors.items()
    }
    facts = write_safetensors(tmp_path / "file", entries, {"format": "pt"})
    assert facts == facts_of(tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].contiguous().view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert loaded[name].shape == tensor.shape
