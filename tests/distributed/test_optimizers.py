"""Optimizer variants on two ranks: as one process trains, and as a checkpoint carries them to other ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import optimizer_ranks as on_ranks
import pytest
import torch
from optimizer_ranks import NUM_STEPS, Case
from ranks import run_ranks

from trainfit.errors import ResumeError
from trainfit.profile import OptimizerVariant
from trainfit.techniques.stored_moments import num_blocks

RESIDUAL = OptimizerVariant(weights="bf16_residual")
MASTER = OptimizerVariant(weights="bf16_master")
SMALL = OptimizerVariant(weights="bf16_residual", states="int8", gradients="half")
FP8 = Case(OptimizerVariant(states="fp8"), 2, "fp32", accumulation=2)
STOCHASTIC = Case(OptimizerVariant(weights="bf16_stochastic"), 0)
CHUNKED = [Case(RESIDUAL, stage, loss_chunks=4) for stage in (0, 1, 2, 3)]
CASES = [
    *(Case(RESIDUAL, stage, accumulation=2) for stage in (0, 1, 2, 3)),
    *(Case(RESIDUAL, stage) for stage in (0, 3)),
    Case(MASTER, 2),
    Case(MASTER, 3, accumulation=2),
    Case(OptimizerVariant(weights="bf16_kahan"), 3),
    *(Case(SMALL, stage) for stage in (0, 1, 3)),
    FP8,
    Case(OptimizerVariant(states="int8"), 3, "fp32"),
    Case(OptimizerVariant(states="int8", update="backward"), 3, "fp32"),
    Case(OptimizerVariant(update="backward"), 2, "fp32"),
    Case(OptimizerVariant(kernel="foreach"), 3, "fp32"),
]
TENSOR = [
    Case(OptimizerVariant(states="int8"), 0, "fp32", tensor=2),
    Case(OptimizerVariant(update="backward"), 0, "fp32", tensor=2),
    Case(RESIDUAL, 0, tensor=2),
]
# Rows of 3200 are four blocks of scales, and their halves two and two: as many, but of other elements.
UNEVEN = Case(OptimizerVariant(states="int8"), 0, "fp32", tensor=2, inner=3200)
SAVED = [
    Case(SMALL, 3),
    FP8,
    Case(RESIDUAL, 1, accumulation=2),
]
REFUSED = [TENSOR[0], UNEVEN]
RESUMED = [*SAVED, STOCHASTIC]
SUMMED = [*(case for case in CASES if case.variant in (RESIDUAL, MASTER)), *CHUNKED]


@cache
def runs() -> tuple[dict[Case, Path], list[dict[Case, Any]]]:
    """Folders of what was saved, and by rank what each case left."""
    folders = {case: Path(mkdtemp()) for case in [*RESUMED, *REFUSED]}
    cases = [*CASES, *TENSOR, UNEVEN, STOCHASTIC, *CHUNKED]
    answers = run_ranks(on_ranks.run_all, 2, [(case, folders.get(case)) for case in cases])
    return folders, [dict(zip(cases, answer)) for answer in answers]


@cache
def alone(case: Case) -> dict[str, Any]:
    """The same in this process."""
    return on_ranks.run(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_train_as_one_process_does(case: Case) -> None:
    """One process runs the ranks' shares as micro batches, so that matmuls are the same and sums have two terms.

    MP-08: dtypes of gradients and states are those that were asked for.
    """
    expected = alone(case)
    _, by_rank = runs()
    for answer in by_rank:
        found = answer[case]
        # In backward one process has all rows in one matmul, and sums in another order.
        tolerance = 1e-6 if case.variant.update == "step" else 1e-5
        assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert found["dtypes"] == expected["dtypes"]
        assert found["tensors"].keys() == expected["tensors"].keys()
        for name, value in expected["tensors"].items():
            assert found["tensors"][name].dtype == value.dtype, name
            if "_scale" not in name:
                assert found["tensors"][name].shape == value.shape, name
    # fp32 gradients of two micro batches are one sum; half ones are rounded at each, in another place on ranks.
    if (case.variant.gradients, case.variant.update, case.accumulation) == ("fp32", "step", 1):
        for name, value in expected["tensors"].items():
            assert torch.equal(by_rank[0][case]["tensors"][name], value), name


def test_copies_of_a_model_round_by_chance_alike() -> None:
    """Their data differ, and so do the generators that their dropout draws from."""
    first, second = (answer[STOCHASTIC] for answer in runs()[1])
    for name, value in first["tensors"].items():
        assert torch.equal(value, second["tensors"][name]), name
    begun = dict(on_ranks.new_step(STOCHASTIC).model.named_parameters())
    assert all(not torch.equal(first["tensors"][name], p) for name, p in begun.items() if p.dim() == 2)


@pytest.mark.parametrize("case", SUMMED, ids=str)
def test_half_weights_add_up_in_fp32_on_ranks(case: Case) -> None:
    """Sums over chunks of the loss, micro batches and ranks: of eight terms at most."""
    expected = alone(case)
    for answer in runs()[1]:
        found = answer[case]
        assert found["dtypes"] == {"torch.float32"}
        assert found["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            # Each addition is rounded at 2^-24 of sums that may be twice the largest; bf16 would round at 2^-9.
            bound = torch.full_like(gradient, 8 * 2**-23 * gradient.abs().max().item())
            if case.stage and case.loss_chunks > 1 and name == "lm_head.weight":
                # FSDP's whole parameters take gradients in their own dtype: each rank's sum of chunks is rounded once,
                # at 2^-9 of terms that may cancel. Stage 0, where nothing is rounded, shows that chunks add up in fp32.
                bound += 2 * 2**-9 * gradient.abs().max()
            assert torch.all((found["gradients"][name] - gradient).abs() <= bound), name


@pytest.mark.parametrize("case", TENSOR, ids=str)
def test_split_matrices_keep_their_states_split(case: Case) -> None:
    expected = alone(case)
    is_half, has_codes = case.precision == "bf16", case.variant.states == "int8"
    for answer in runs()[1]:
        found = answer[case]
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-2 if is_half else 1e-3)
        split = 0
        for name, shapes in found["local_shapes"].items():
            mine, whole = shapes[""], expected["local_shapes"][name][""]
            is_split = "self_attn" in name or ".mlp." in name
            assert torch.Size(mine).numel() * (2 if is_split else 1) == torch.Size(whole).numel(), name
            split += is_split
            for key, shape in shapes.items():
                if key.partition("@")[0].endswith("_scale"):
                    assert shape == (mine[0], num_blocks(mine[1])), (name, key)
                elif key != "step":
                    assert shape == mine, (name, key)
        assert split == 2 * 7
        assert found["moments"].keys() == expected["moments"].keys()
        for name, value in expected["moments"].items():
            error = (found["moments"][name] - value).abs().max().item() / value.abs().max().item()
            squares = 2 if name.startswith("exp_avg_sq") else 1
            if is_half:  # sums over split features are rounded to bf16 in two parts, in each matmul
                tolerance = squares * 2**-5
            elif has_codes:
                # A code is a step of 0.9 / 64 of its block's largest at most, rounded anew at each step.
                tolerance = squares * NUM_STEPS * 0.9 / 64
            else:
                tolerance = 1e-3
            assert error <= tolerance, name


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_two_ranks_go_on_from_two_to_the_bit(case: Case) -> None:
    for answer in runs()[1]:
        unbroken, resumed = answer[case], answer[case]["resumed"]
        assert resumed["next"] == unbroken["next"]
        assert resumed["last"].keys() == unbroken["last"].keys()
        for name, value in unbroken["last"].items():
            assert torch.equal(resumed["last"][name].float(), value.float()), name


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_codes_of_split_rows_are_not_read_as_those_of_whole_ones(case: Case) -> None:
    """A scale belongs to other elements there: moments would be off by any factor, and no shape need tell."""
    folders, _ = runs()
    with pytest.raises(ResumeError) as caught:
        on_ranks.resume(case, folders[case] / f"step-{NUM_STEPS:08d}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_one_process_goes_on_from_two_with_every_dtype_kept(case: Case) -> None:
    folders, by_rank = runs()
    checkpoint = folders[case] / f"step-{NUM_STEPS:08d}"
    found = on_ranks.resume(case, checkpoint)
    for name, value in by_rank[0][case]["tensors"].items():
        assert found["tensors"][name].dtype == value.dtype
        assert torch.equal(found["tensors"][name].float(), value.float()), name
    assert found["next"] == pytest.approx(by_rank[0][case]["next"], rel=1e-5)
