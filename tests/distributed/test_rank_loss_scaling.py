"""Loss scaling on several ranks: what one sees, all do (MP-07)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from ranks import run_ranks
from scaling_ranks import STEPS, Case, run_all, train

from trainfit.profile import Mesh

ON_TWO = [
    *(Case(f"stage {stage}", Mesh(shard=2), stage) for stage in (1, 2, 3)),
    Case("replicas", Mesh(replicate=2)),
    Case("reduced in fp16", Mesh(shard=2), 2, accumulation=1, reduce_dtype="fp16"),
    Case("tensor", Mesh(tensor=2)),
    Case("pipeline", Mesh(pipeline=2)),
    Case("chunks", Mesh(shard=2), 3, loss_chunks=3),
    *(Case(f"stage {stage} by block", Mesh(shard=2), stage, per_block=True) for stage in (1, 3)),
]
ON_THREE = [
    *(Case(f"stage {stage} of 2 rows", Mesh(shard=3), stage, vocab_size=2) for stage in (1, 2, 3)),
    Case("stage 3 of 2 rows by block", Mesh(shard=3), 3, per_block=True, vocab_size=2),
]


@cache
def runs(size: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_all, size, ON_TWO if size == 2 else ON_THREE)


@cache
def one_process(per_block: bool, vocab_size: int, loss_chunks: int) -> dict[str, Any]:
    return train(Case("alone", per_block=per_block, vocab_size=vocab_size, loss_chunks=loss_chunks))


@pytest.mark.parametrize("case", [*ON_TWO, *ON_THREE], ids=str)
def test_an_inf_on_one_rank_skips_the_step_of_all(case: Case):
    ranks = [found[case.name] for found in runs(case.mesh.size)]
    alone = one_process(case.per_block, case.vocab_size, case.loss_chunks)
    for rank in ranks:
        assert rank["skipped"] == [False, True, False, False] == alone["skipped"]
        assert rank["losses"] == pytest.approx(alone["losses"], rel=2e-3)
        finite = [norm for norm, skipped in zip(rank["norms"], rank["skipped"]) if not skipped]
        expected = [norm for norm, skipped in zip(alone["norms"], alone["skipped"]) if not skipped]
        assert finite == pytest.approx(expected, rel=1e-2)
        assert rank["states"] == ranks[0]["states"]
        assert rank["overflow"] is None
    moved = [[rank["moved"][step] for rank in ranks] for step in range(STEPS)]
    assert moved[1] == [False] * len(ranks)
    assert all(moved[0] + moved[2] + moved[3])
    if not case.per_block:
        assert [state["scale"] for state in ranks[0]["states"]] == [65536.0, 32768.0, 32768.0, 32768.0]
        assert ranks[0]["states"] == alone["states"]


def test_a_rank_without_rows_takes_part():
    assert [found["stage 3 of 2 rows"]["rows"] for found in runs(3)] == [1, 1, 0]
