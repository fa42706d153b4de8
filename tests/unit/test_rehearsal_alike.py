"""Models that run their blocks by number: what fewer blocks give is what all give, since all run where it would not."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainfit.hardware import find_device
from trainfit.profile import Profile
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.splice import Cut, Repeat
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import Workload, workload_from_module

module: Any = importlib.import_module("trainfit.rehearsal.rehearse")
alike: Any = importlib.import_module("trainfit.rehearsal.alike")
BLOCKS, DIM, VOCAB = 12, 32, 64
NPU = find_device("ascend-910b3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


Run = Callable[["Model", Sequence[nn.Module], Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(BLOCKS))
        self.scales = nn.Parameter(torch.ones(BLOCKS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.run(self, self.blocks, self.embedding(ids)))


def plain(_: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = block(hidden)
    return hidden


def scaled(model: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        hidden = block(model.scales[number] * hidden)
    return hidden


def by_range(model: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for number in range(BLOCKS):
        hidden = blocks[number](hidden)
    return hidden


def norm_of_each(model: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for block, norm in zip(blocks, model.norms):
        hidden = block(norm(hidden))
    return hidden


def all_stacked(_: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    outputs = []
    for block in blocks:
        hidden = block(hidden)
        outputs.append(hidden)
    return torch.stack(outputs).mean(0)


def second_half_squashed(_: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        hidden = block(hidden)
        if number >= BLOCKS // 2:
            hidden = hidden.sigmoid()
    return hidden


def last_squashed(_: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        hidden = block(hidden)
        if number == BLOCKS - 1:
            hidden = hidden.double().sigmoid().float()
    return hidden


def first_half_frozen(_: Model, blocks: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = plain(_, blocks[: BLOCKS // 2], hidden)
    return plain(_, blocks[BLOCKS // 2 :], hidden)


def workload(run: Run) -> Workload:
    return workload_from_module(lambda: Model(run), seq_len=16, vocab_size=VOCAB)


def strategy(steps: int = 2) -> Strategy:
    return Strategy(1, steps, "bf16", parse_tiers("keep", BLOCKS))


def bytes_of(profile: Profile) -> dict[str, Any]:
    return {
        name: getattr(profile, name)
        for name in ("peak_bytes", "peak_phase", "peak_place", "phases", "categories", "reserved", "resident_bytes")
    }


@pytest.mark.parametrize(
    ("run", "is_cut"),
    [
        (plain, True),
        (scaled, True),
        (by_range, False),
        (norm_of_each, False),
        (all_stacked, False),
        (second_half_squashed, False),
        (last_squashed, False),
        (first_half_frozen, False),
    ],
)
def test_only_a_model_that_runs_blocks_alike_is_cut(run: Run, is_cut: bool, monkeypatch: pytest.MonkeyPatch):
    model = workload(run)
    assert bool(list(module.cuts_of(model, strategy(), 0))) is is_cut
    some = rehearse(model, strategy(), NPU)
    monkeypatch.setattr(module, "cuts_of", lambda *_: iter(()))
    every = rehearse(model, strategy(), NPU)
    assert bytes_of(some) == bytes_of(every)
    assert some.step_seconds == pytest.approx(every.step_seconds, rel=1e-4)


def test_a_model_runs_once_for_each_number_of_blocks(monkeypatch: pytest.MonkeyPatch):
    runs = []
    original = alike.run_model
    monkeypatch.setattr(alike, "run_model", lambda *given: runs.append(given) or original(*given))
    model = workload(plain)
    cut = Cut((0, 1, 10, 11), (Repeat(0, 4, 1, 1, 8, 1),))
    for _ in range(3):
        assert alike.runs_alike(model, cut, range(BLOCKS))
    assert len(runs) == 2


def test_what_was_found_out_stays_in_the_process():
    model = workload_from_module(Model(plain), seq_len=16, vocab_size=VOCAB)
    assert list(module.cuts_of(model, strategy(), 0))
    assert model.memo
    assert pickle.loads(pickle.dumps(model)).memo == {}
