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

from trainfit.profile import OptimizerVariant

RESIDUAL = OptimizerVariant(weights="bf16_residual")
MASTER = OptimizerVariant(weights="bf16_master")
SMALL = OptimizerVariant(weights="bf16_residual", states="int8", gradients="half")
FP8 = Case(OptimizerVariant(states="fp8"), 2, "fp32", accumulation=2)
CASES = [
    *(Case(RESIDUAL, stage, accumulation=2) for stage in (0, 1, 2, 3)),
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
TENSOR = [Case(OptimizerVariant(states="int8"), 0, "fp32", tensor=2), Case(RESIDUAL, 0, tensor=2)]
SAVED = [
    Case(SMALL, 3),
    FP8,
    Case(RESIDUAL, 1, accumulation=2),
]


@cache
def runs() -> tuple[dict[Case, Path], list[dict[Case, Any]]]:
    """Folders of what was saved, and by rank what each case left."""
    folders = {case: Path(mkdtemp()) for case in SAVED}
    cases = [*CASES, *TENSOR]
    answers = run_ranks(on_ranks.run_all, 2, [(case, folders.get(case)) for case in cases])
    return folders, [dict(zip(cases, answer)) for answer in answers]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_train_as_one_process_does(case: Case) -> None:
    """One process runs the ranks' shares as micro batches, so that matmuls are the same and sums have two terms.

    MP-08: dtypes of gradients and states are those that were asked for.
    """
    expected = on_ranks.run(case)
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


@pytest.mark.parametrize("case", TENSOR, ids=str)
def test_split_matrices_keep_their_states_split(case: Case) -> None:
    expected = on_ranks.run(case)
    for answer in runs()[1]:
        assert answer[case]["losses"] == pytest.approx(
            expected["losses"], rel=2e-2 if case.precision == "bf16" else 1e-3
        )


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_one_process_goes_on_from_two_with_every_dtype_kept(case: Case) -> None:
    folders, by_rank = runs()
    checkpoint = folders[case] / f"step-{NUM_STEPS:08d}"
    found = on_ranks.resume(case, checkpoint)
    for name, value in by_rank[0][case]["tensors"].items():
        assert found["tensors"][name].dtype == value.dtype
        assert torch.equal(found["tensors"][name].float(), value.float()), name
    assert found["next"] == pytest.approx(by_rank[0][case]["next"], rel=1e-5)
