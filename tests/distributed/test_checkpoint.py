"""Sharded checkpoints: any ranks and stage write them, any others read them, and a kill never leaves a part of one."""

from __future__ import annotations

import shutil

import checkpoint_ranks as on_ranks
import pytest
import torch
from checkpoint_ranks import TwoMatrices, new_step, resume, state_at, with_moments
from ranks import run_ranks
from torch import nn

from trainfit.hardware import Ranks
from trainfit.profile import Mesh
from trainfit.train.checkpoint import check_files, list_checkpoints, read_manifest, read_state
from trainfit.train.saving import Checkpoints

ONE = (1, 1, 1, 1)


def assert_equal(there, here):
    assert there.keys() == here.keys()
    for name, value in there.items():
        assert torch.equal(value, here[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(checkpoint of 4 ranks at stage 3, what each of them had and did next)."""
    folder = tmp_path_factory.mktemp("saved")
    answers = run_ranks(on_ranks.save_while_training, 4, folder)
    return folder / "step-00000003", answers


def test_a_save_runs_beside_training_and_holds_what_was_there_when_it_began(saved):
    checkpoint, answers = saved
    assert all(answer["under_way"] for answer in answers)  # two updates later nothing was there yet
    assert [answer["saved"] for answer in answers] == [[3]] * 4
    assert read_state(checkpoint) == state_at(3)
    assert read_manifest(checkpoint).mesh == Mesh(shard=4)
    names = sorted(path.name for path in checkpoint.iterdir())
    assert [name for name in names if name.startswith("model")] == [
        f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    assert {name.rpartition(".")[2] for name in names} == {"safetensors", "json"}  # nothing pickled


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (1, [(ONE, 0)]),
        (2, [((1, 1, 2, 1), 3), ((1, 1, 2, 1), 1)]),
        (3, [((1, 1, 3, 1), 3), ((1, 3, 1, 1), 0)]),
        (4, [((1, 1, 4, 1), 3), ((1, 1, 4, 1), 1), ((1, 2, 2, 1), 2)]),
    ],
)
def test_four_ranks_at_stage_3_go_on_as_any_ranks_at_any_stage(saved, num_ranks, layouts):
    checkpoint, before = saved
    if num_ranks == 1:
        by_rank = [[resume(checkpoint, *layouts[0])]]
    else:
        by_rank = run_ranks(on_ranks.resume_many, num_ranks, checkpoint, layouts)
    for rank, answers in enumerate(by_rank):
        for answer in answers:
            assert_equal(before[0]["tensors"], answer["tensors"])  # parameters, buffers and moments to the bit
            assert answer["losses"] == pytest.approx(before[0]["losses"], rel=1e-6)
            assert answer["tied"]
            assert torch.equal(answer["rng"], before[rank]["rng"])
            expected = () if num_ranks == 4 else (f"4 ranks saved, {num_ranks} go on",)
            assert [note.partition(":")[0] for note in answer["notes"]] == list(expected)


def test_every_stage_saves_what_one_process_can_load(tmp_path):
    """Also more ranks than saved: those without random numbers draw their own, each another."""
    layouts = [((1, 1, 2, 1), 1), ((1, 2, 1, 1), 0), ((1, 1, 2, 1), 2)]
    by_rank = run_ranks(on_ranks.save_stages, 2, tmp_path, layouts)
    for number, tensors in enumerate(by_rank[0]):
        answer = resume(tmp_path / str(number) / "step-00000002", ONE, 0)
        assert_equal(tensors, answer["tensors"])
    grown = run_ranks(on_ranks.resume, 3, tmp_path / "0" / "step-00000002", (1, 1, 3, 1), 3)
    assert_equal(by_rank[0][0], grown[2]["tensors"])
    assert grown[2]["notes"] == (
        "2 ranks saved, 3 go on: data share 2 draws random numbers from the run's seed, step and share",
    )
    assert not torch.equal(grown[2]["rng"], grown[0]["rng"])


def test_shards_of_shards_are_put_together(tmp_path):
    answers = run_ranks(on_ranks.save_on_two_dims, 4, tmp_path)
    assert "_StridedShard" in answers[0]["placements"]
    for answer in answers:
        assert_equal(answer["tensors"], answer["again"])
    model = TwoMatrices()
    optimizer = with_moments(model, 0.0)
    Checkpoints(tmp_path, Ranks(), keep=1).load(tmp_path / "step-00000001", model, optimizer)
    assert_equal(answers[0]["tensors"], dict(model.named_parameters()))
    assert_equal(answers[0]["moments"], {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()})


def test_pipeline_stages_and_one_process_read_each_other_tie_and_all(tmp_path):
    whole = on_ranks.Stage(first=True, last=True)
    with torch.no_grad():
        whole.embedding.weight.add_(3)
    optimizer = with_moments(whole, 1.0)
    alone = Checkpoints(tmp_path / "alone", Ranks(), keep=1)
    alone.save(state_at(1), whole, optimizer, (torch.get_rng_state(),))
    first, last = run_ranks(on_ranks.pipeline_stages, 2, tmp_path / "stages", alone.latest)
    assert torch.equal(first["loaded"]["embedding.weight"], whole.embedding.weight)
    assert torch.equal(last["loaded"]["head.weight"], whole.embedding.weight)
    assert torch.equal(last["loaded"]["late.weight"], whole.late.weight)
    assert torch.equal(last["moments"]["head.weight"], whole.embedding.weight)
    Checkpoints(tmp_path / "stages", Ranks(), keep=1).load(tmp_path / "stages" / "step-00000001", whole, optimizer)
    assert whole.head.weight is whole.embedding.weight
    assert torch.equal(whole.embedding.weight, first["saved"]["embedding.weight"])
    assert torch.equal(whole.late.weight, last["saved"]["late.weight"])
    assert torch.equal(optimizer.state[whole.embedding.weight]["exp_avg"], 2 * whole.embedding.weight)


def test_what_one_rank_finds_all_ranks_refuse_and_nothing_is_touched(tmp_path):
    torch.manual_seed(0)
    model = on_ranks.Model()
    good = Checkpoints(tmp_path, Ranks(), keep=2)
    good.save(state_at(1), model, torch.optim.AdamW(model.parameters()), (torch.get_rng_state(),))
    damaged, moved = tmp_path / "damaged" / "step-00000001", tmp_path / "other" / "step-00000001"
    shutil.copytree(good.latest, damaged)
    with (damaged / "rng.safetensors").open("r+b") as file:  # the third file: rank 1 does not hash it, rank 0 does
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    other = Checkpoints(tmp_path / "more", Ranks(), keep=1)
    other.save(state_at(4), model, torch.optim.AdamW(model.parameters()), (torch.get_rng_state(),))
    shutil.copytree(other.latest, moved)
    answers = run_ranks(on_ranks.refused, 2, damaged, good.latest)
    assert answers[0] == answers[1]
    (hashed, same_1), (another_model, same_2), (another_step, same_3) = answers[0]
    assert "rng.safetensors is not what was saved (SHA-256 differs)" in hashed
    assert "tensors differ in shape" in another_model
    assert "rank 0 sees a checkpoint at step 1, rank 1 another at step 4" in another_step
    assert same_1
    assert same_2
    assert same_3


def test_a_full_disk_of_one_rank_is_told_on_all_at_the_next_save(tmp_path):
    first, second = run_ranks(on_ranks.full_disk, 2, tmp_path)
    assert first == second
    line, latest, names = first
    assert line.startswith(f"cannot save step 2 to {tmp_path} ([Errno 28] No space left on device); free some space")
    assert line.endswith("the last checkpoint is " + str(tmp_path / "step-00000001"))
    assert latest == str(tmp_path / "step-00000003")
    assert names == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(("victim", "asynchronous"), [(0, True), (0, False), (1, True)])
def test_a_kill_at_any_moment_of_a_save_leaves_whole_checkpoints_only(tmp_path, victim, asynchronous):
    fatal, codes = 0, [None, None]
    seen = set()
    while codes != [0, 0]:
        folder = tmp_path / str(fatal)
        folder.mkdir()
        codes = on_ranks.run_killed(folder, victim, fatal, asynchronous=asynchronous)
        if codes != [0, 0]:
            assert codes[victim] == -9, (fatal, codes)
            assert codes[1 - victim] in (0, 3), (fatal, codes)  # the other one is told; it does not hang
        found = list_checkpoints(folder / "saves")
        seen.add(len(found))
        assert [path.name for path in found] in (["step-00000001"], ["step-00000001", "step-00000002"])
        for number, path in enumerate(found, 1):
            check_files(path, read_manifest(path))
            model = nn.Linear(4, 3)
            optimizer = with_moments(model, 0.0)
            checkpoints = Checkpoints(folder / "saves", Ranks(), keep=3)
            checkpoints.load(path, model, optimizer)
            assert (model.weight == number).all()
        checkpoints.save(state_at(3), model, optimizer, (torch.get_rng_state(),))
        assert not list((folder / "saves").glob(".partial*"))
        fatal += 1
    assert fatal > (20 if victim == 0 else 8)
    assert seen == {1, 2}


def test_one_process_resumes_to_the_bit(tmp_path):
    step = new_step(Mesh(), 0, seed=0)
    on_ranks.train(step, range(2))
    checkpoints = Checkpoints(tmp_path, Ranks(), keep=1)
    checkpoints.save(state_at(2), step.model, step.optimizer, (torch.get_rng_state(),))
    losses = on_ranks.train(step, (3, 4))
    assert resume(checkpoints.latest, ONE, 0)["losses"] == losses
