"""The ledger of a block: of the block that the plan runs, with whatever tiers it has."""

from __future__ import annotations

import pytest

from trainfit.errors import RecipeError
from trainfit.hardware import find_device
from trainfit.plan import Target
from trainfit.plan.ledger import Ledger, ledgers_of
from trainfit.profile import Compile
from trainfit.step import Strategy
from trainfit.workload import workload_from_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
WORKLOAD = workload_from_config(CONFIG, seq_len=128, name="tiny")


def ledger_of(strategy: Strategy) -> Ledger:
    (found,) = ledgers_of(WORKLOAD, find_device("h100"), Target(2**34, 128, 128), strategy)
    return found


def test_a_tier_that_no_search_takes_is_traced_for_it():
    found = ledger_of(Strategy(1, tiers=("selective", "full", "full")))
    full = ledger_of(Strategy(1, tiers=("full",) * 3))
    assert found.room_bytes > full.room_bytes == 0
    assert found.plan_seconds < full.plan_seconds


def test_operators_are_those_of_the_attention_that_the_plan_takes():
    own, blockwise = (
        {entry.operator for entry in ledger_of(Strategy(1, tiers=("full",) * 3, attention=attention)).entries}
        for attention in ("model", "blockwise")
    )
    assert own - blockwise == {"attention#1"}
    assert blockwise - own == {"trainfit.blockwise_attention.default#1"}


def test_compiled_blocks_have_no_operators_to_show():
    with pytest.raises(RecipeError, match="of which a compiled block has none"):
        ledger_of(Strategy(1, tiers=("full",) * 3, compile=Compile(1)))
