"""A search that may offload: what blocks send away costs what the link does not hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.errors import RecipeError
from trainfit.hardware import Hardware, find_device, this_machine
from trainfit.hardware.device import Figure
from trainfit.profile import SEARCH_TIERS, Offload
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.trace import Tracer
from trainfit.step import Strategy
from trainfit.techniques.activation import searched_tiers
from trainfit.techniques.offload import OFFLOADED
from trainfit.workload import Workload, workload_from_config

NPU = find_device("ascend-910b3")
BLOCKS, LENGTH, ROWS = 6, 512, 4
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": LENGTH,
}  # fmt: skip


def workload() -> Workload:
    return workload_from_config(CONFIG, seq_len=LENGTH, name="small")


def with_link(bytes_per_second: float) -> Hardware:
    link = Figure(bytes_per_second, "for this test", "high")
    return replace(NPU, spec=replace(NPU.spec, host_link=link))


def test_a_search_takes_them_where_it_is_told_and_they_save_something():
    assert searched_tiers(NPU, frozenset()) == SEARCH_TIERS
    assert searched_tiers(NPU, frozenset(), Offload()) == (*SEARCH_TIERS, *OFFLOADED)
    assert searched_tiers(this_machine("cpu"), frozenset(), Offload()) == SEARCH_TIERS
    assert searched_tiers(this_machine("cpu"), frozenset(), Offload("disk")) == (*SEARCH_TIERS, *OFFLOADED)


def test_the_traced_block_is_what_one_of_several_in_a_row_does():
    """Bytes on the device and seconds of the whole model, against its rehearsal."""
    for hardware in (with_link(1e12), with_link(1e9)):
        tracer = Tracer(workload(), hardware, precision="bf16", tiers=("full", *OFFLOADED))
        trace = tracer.trace(ROWS, "bf16", [1], accumulates=False)
        full = rehearse(workload(), Strategy(ROWS, precision="bf16", tiers=("full",) * BLOCKS), hardware)
        for tier in OFFLOADED:
            found = rehearse(workload(), Strategy(ROWS, precision="bf16", tiers=(tier,) * BLOCKS), hardware)
            one, other = trace.blocks[0, tier], trace.blocks[0, "full"]
            assert one.saved_bytes <= 0.02 * other.saved_bytes
            longer = BLOCKS * (
                one.forward_seconds + one.backward_seconds - other.forward_seconds - other.backward_seconds
            )
            # The last block's copies are waited for at its own end, and come back with nothing beside them.
            waits = found.offloaded_bytes / BLOCKS / hardware.spec.host_link.value
            assert longer - 1e-4 <= found.step_seconds - full.step_seconds <= longer + 2 * waits + 1e-4


@pytest.mark.parametrize("bad", [{"place": "tape"}, {"budget_bytes": -1}, {"directory": "/x"}])
def test_what_offload_cannot_be_is_refused(bad: dict[str, object]):
    with pytest.raises(RecipeError, match=rf"offload\.{next(iter(bad))}"):
        Strategy(1, offload=Offload(**bad))  # type: ignore[arg-type]
