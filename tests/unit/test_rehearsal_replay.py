"""Reserved memory of a step: hand-made events, rehearsed steps, and what a strategy sets of the allocator."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tiny_models import TINY_CONFIGS
from trainfit.errors import DeviceError, RecipeError
from trainfit.hardware import accelerator, find_device, this_machine
from trainfit.hardware.allocator import conf_of, configure
from trainfit.profile import AllocatorSettings, Mesh, Profile, Zero
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.events import Event
from trainfit.rehearsal.replay import reserved_memory
from trainfit.rehearsal.workspaces import library_bytes, scratch_sizes
from trainfit.step import Strategy
from trainfit.step.build import build_step
from trainfit.workload import workload_from_config

MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)
LLAMA = workload_from_config(TINY_CONFIGS["llama"], seq_len=128, name="tiny-llama")
H100 = find_device("h100")


def born(storage: int, size: int, operator: str = "mm", **rest) -> Event:
    return Event(storage, size * MIB, rest.pop("phase", "forward"), operator, requested=size * MIB, **rest)


def dies(storage: int, size: int, phase: str = "backward") -> Event:
    return Event(storage, -size * MIB, phase, "mm")


def test_resident_storages_are_placed_once_and_a_step_repeats():
    events = [born(0, 40, "start"), born(1, 100), dies(1, 100)]
    found = reserved_memory(events, AllocatorSettings())
    assert (found.reserved_bytes, found.allocated_bytes) == (140 * MIB, 140 * MIB)
    assert (found.unused_bytes, found.num_steps) == (0, 3)


def test_what_a_second_step_finds_may_be_cut_too_small():
    """A state of 30 MiB that comes with the first update is cut from the 100 that the forward left behind."""
    events = [born(0, 30, "start"), born(1, 100), dies(1, 100), born(2, 8, phase="optimizer"), dies(2, 8, "optimizer")]
    first = reserved_memory(events, AllocatorSettings())
    late = reserved_memory(events, AllocatorSettings(), late=[0])
    assert first.reserved_bytes == (30 + 100) * MIB
    assert late.reserved_bytes == (100 + 100) * MIB
    assert (late.request_bytes, late.pool_free_bytes, late.phase) == (100 * MIB, 70 * MIB, "forward")
    assert reserved_memory(events, EXPANDABLE, late=[0]).reserved_bytes == 140 * MIB  # 130 in pages of 20


def test_gradients_of_earlier_micro_batches_come_again_in_every_step():
    events = [born(0, 40, "start"), born(1, 60), dies(1, 60), dies(0, 40, "optimizer")]
    assert reserved_memory(events, AllocatorSettings()).reserved_bytes == 100 * MIB


def test_what_outlives_a_step_is_there_in_the_next():
    assert reserved_memory([born(0, 40), born(1, 60), dies(1, 60)], AllocatorSettings()).reserved_bytes == 100 * MIB


def test_a_sum_in_place_of_an_addend_asks_for_nothing():
    events = [born(0, 40), born(1, 40), dies(0, 40), born(2, 40, in_place_of=0), dies(1, 40), dies(2, 40)]
    found = reserved_memory(events, AllocatorSettings())
    assert (found.reserved_bytes, found.allocated_bytes) == (80 * MIB, 80 * MIB)
    other = [replace(event, in_place_of=None) for event in events[:2]] + [born(2, 40), *events[2:3], *events[4:]]
    assert reserved_memory(other, AllocatorSettings()).reserved_bytes == 120 * MIB


def test_streams_hold_what_others_cannot_use():
    events = [born(0, 40), dies(0, 40), born(1, 40, stream=1), dies(1, 40)]
    found = reserved_memory(events, AllocatorSettings())
    assert (found.reserved_bytes, found.allocated_bytes) == (80 * MIB, 40 * MIB)
    assert (found.other_streams_bytes, found.unused_bytes, found.stream) == (40 * MIB, 40 * MIB, 1)


def test_an_npu_pads_each_request():
    events = [Event(0, MIB, "forward", "mm", requested=MIB)]
    assert reserved_memory(events, AllocatorSettings()).reserved_bytes == 2 * MIB
    assert reserved_memory(events, AllocatorSettings(), padding=32).reserved_bytes == 20 * MIB  # a large one now


@pytest.fixture(scope="module")
def of_device() -> Profile:
    return rehearse(LLAMA, Strategy(2, tiers=("keep",) * 4), H100)


def test_a_rehearsed_step_holds_what_it_uses_and_some_more(of_device: Profile):
    found = of_device.reserved
    assert found is not None
    assert of_device.reserved_bytes == found.reserved_bytes == of_device.needed_bytes
    assert of_device.peak_bytes <= found.allocated_bytes <= found.reserved_bytes
    assert found.unused_bytes == found.reserved_bytes - found.allocated_bytes
    assert found.other_streams_bytes == 0
    assert found.reserved_bytes < of_device.peak_bytes + 2 * 20 * MIB * 4  # a tiny model: a few segments over
    assert Profile.from_json(json.loads(json.dumps(of_device.to_json()))) == of_device


def test_a_cpu_reserves_nothing():
    found = rehearse(LLAMA, Strategy(2, tiers=("keep",) * 4), this_machine("cpu"))
    assert (found.reserved_bytes, found.reserved) == (0, None)


def test_gathering_and_reducing_have_streams_of_their_own():
    strategy = Strategy(1, tiers=("keep",) * 4, mesh=Mesh(shard=2), zero=Zero(3))
    found = rehearse(LLAMA, strategy, replace(H100, count=2)).reserved
    assert found is not None
    assert found.other_streams_bytes >= 2 * 2 * MIB  # a segment for each of gathers and reductions


def test_cublas_has_a_workspace_for_each_thread(of_device: Profile):
    assert library_bytes(H100.spec) == (32 * MIB, 32 * MIB)
    assert library_bytes(H100.spec, side_streams=1) == 3 * (32 * MIB,)
    assert library_bytes(find_device("a100-80gb").spec) == (8320 * 1024, 8320 * 1024)
    assert library_bytes(find_device("ascend-910b3").spec) == ()
    assert of_device.categories["temporary"] >= 64 * MIB


def test_scratch_of_flash_attention_on_cuda():
    """softmax_d and dq in fp32; dk and dv of every head where keys have fewer. The CPU's kernel needs none of them."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    query = torch.empty(2, 8, 256, 64, dtype=torch.bfloat16, device="meta")
    sums, accumulated = 4 * 2 * 8 * 256, 4 * 2 * 8 * 256 * 64
    assert scratch_sizes("cuda", operator, (query, query, query, query)) == (sums, accumulated)
    few = torch.empty(2, 2, 256, 64, dtype=torch.bfloat16, device="meta")
    expanded = 2 * 2 * 8 * 256 * 64
    assert scratch_sizes("cuda", operator, (query, query, few, few)) == (sums, accumulated, expanded, expanded)
    assert scratch_sizes("npu", operator, (query, query, few, few)) == ()


def test_scratch_of_an_embedding_with_many_ids():
    operator = torch.ops.aten.embedding_dense_backward.default
    gradient = torch.empty(4, 1024, 64, device="meta")
    ids = torch.empty(4, 1024, dtype=torch.long, device="meta")
    sizes = scratch_sizes("cuda", operator, (gradient, ids, 1000, -1, False))
    assert sizes[-1] == (4096 // 10 + 1000) * 64 * 4
    assert scratch_sizes("cuda", operator, (gradient[:3], ids[:3], 1000, -1, False)) == ()


def test_dropout_is_one_kernel_on_devices_and_its_mask_smaller():
    config = TINY_CONFIGS["gpt2"] | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    workload = workload_from_config(config, seq_len=128, name="gpt2")
    strategy = Strategy(8, tiers=("keep",) * len(workload.anatomy().blocks))
    devices = (H100, find_device("ascend-910b3"), this_machine("cpu"))
    cuda, npu, cpu = (rehearse(workload, strategy, device).categories["activations"] for device in devices)
    assert npu < cuda < 0.8 * cpu  # the CPU also makes all attention scores


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_split_size_mb": 20}, "more than 20 MiB"),
        ({"garbage_collection_threshold": 1.0}, "between 0 and 1"),
        ({"roundup_power2_divisions": 6}, "power of two"),
        ({"expandable_segments": True, "max_split_size_mb": 64}, "set one of them"),
        ({"expandable_segments": 1}, "true or false"),
    ],
)
def test_settings_that_pytorch_does_not_take(wrong: dict[str, object], message: str):
    with pytest.raises(RecipeError, match=message):
        Strategy(1, allocator=AllocatorSettings(**wrong))  # type: ignore[arg-type]


def test_a_strategy_keeps_its_settings_in_json():
    strategy = Strategy(1, allocator=AllocatorSettings(max_split_size_mb=128, garbage_collection_threshold=0.8))
    assert Strategy.from_json(json.loads(json.dumps(strategy.to_json()))) == strategy
    assert strategy.hash != Strategy(1).hash


def test_settings_in_pytorchs_words():
    assert conf_of(AllocatorSettings()) == ""
    assert conf_of(EXPANDABLE) == "expandable_segments:True"
    assert conf_of(AllocatorSettings(max_split_size_mb=64, garbage_collection_threshold=0.8)) == (
        "max_split_size_mb:64,garbage_collection_threshold:0.8"
    )


class Module:
    """Of torch.cuda what configure() calls."""

    fraction: float | None = None

    def set_per_process_memory_fraction(self, fraction: float, device: object) -> None:
        self.fraction = fraction


@pytest.fixture
def user_settings():
    """What a user has set; PyTorch's own parser keeps it, on any build."""
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_settings_are_set_and_taken_back(user_settings: None):
    module, device = Module(), torch.device("cuda")
    assert configure(EXPANDABLE, module, device, held_bytes=0) == []  # type: ignore[arg-type]
    current = torch._C._accelerator_getAllocatorSettings
    assert set(current().split(",")) == {"expandable_segments:True", "max_split_size_mb:512"}
    collecting = AllocatorSettings(garbage_collection_threshold=0.7)
    notes = configure(collecting, module, device, held_bytes=3 * 2**30)  # type: ignore[arg-type]
    assert "expandable_segments:False" in current()
    assert "garbage_collection_threshold:0.7" in current()
    assert module.fraction == 0.99
    assert notes == ["the allocator was set when it held 3.0 GiB: segments from before stay as they are"]
    assert configure(AllocatorSettings(), module, device, held_bytes=0) == []  # type: ignore[arg-type]
    assert set(current().split(",")) == {"expandable_segments:False", "max_split_size_mb:512"}
    assert "environment" in configure(AllocatorSettings(), module, device, held_bytes=0)[0]  # type: ignore[arg-type]


def test_what_pytorch_refuses_is_one_line(user_settings: None):
    with pytest.raises(DeviceError, match="max_split_size_mb:5"):
        configure(AllocatorSettings(max_split_size_mb=5), Module(), torch.device("cuda"), held_bytes=0)  # type: ignore[arg-type]
    configure(AllocatorSettings(), Module(), torch.device("cuda"), held_bytes=0)  # type: ignore[arg-type]


def test_a_cpu_says_that_settings_have_no_effect():
    step = build_step(LLAMA, Strategy(1, tiers=("keep",) * 4, allocator=EXPANDABLE), accelerator("cpu"))
    assert any("no caching allocator" in note for note in step.notes)
