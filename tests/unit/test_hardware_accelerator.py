"""The facade on the cpu, and on made-up device modules for what no machine here has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainfit.errors import DeviceError
from trainfit.hardware import Accelerator, accelerator
from trainfit.hardware.memory import DeviceMemory
from trainfit.hardware.rng import RngState


def fake_module(**functions: object) -> SimpleNamespace:
    """A torch.npu with an RNG of its own and whatever else a test gives it."""
    generator = torch.Generator()
    rng = {
        "get_rng_state": lambda device: generator.get_state(),
        "set_rng_state": lambda state, device: generator.set_state(state),
    }
    return SimpleNamespace(generator=generator, **{**rng, **functions})


def fake_npu(**functions: object) -> Accelerator:
    return Accelerator(torch.device("cpu"), "npu", fake_module(**functions))  # type: ignore[arg-type]


def test_cpu_names():
    cpu = accelerator("cpu")
    assert (cpu.kind, cpu.name, cpu.autocast_name, cpu.distributed_backend) == ("cpu", "cpu", "cpu", "gloo")
    assert cpu.device == torch.device("cpu")
    assert accelerator(torch.device("cpu")).kind == "cpu"
    assert cpu.precisions == ("fp32", "bf16", "fp16")


@pytest.mark.parametrize("device", ["meta", "gpu", "", "cpuu", "cpu:x"])
def test_what_is_no_device_is_refused(device: str):
    with pytest.raises(DeviceError, match="cpu, cuda, npu"):
        accelerator(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_here_is_refused_with_the_next_move():
    with pytest.raises(DeviceError, match=r"no cuda device on this machine: it needs a CUDA build .* or use cpu"):
        accelerator("cuda")


@pytest.mark.skipif(hasattr(torch, "npu"), reason="this machine has torch_npu")
def test_an_npu_that_is_not_here_names_torch_npu():
    with pytest.raises(DeviceError, match="torch_npu"):
        accelerator("npu:0")


def test_autocast_on_the_cpu():
    layer, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    with accelerator("cpu").autocast("bf16"):
        assert layer(inputs).dtype is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
    with accelerator("cpu").autocast("bf16", cache_enabled=True):
        assert torch.is_autocast_cache_enabled()
    with accelerator("cpu").autocast("fp32"):
        assert layer(inputs).dtype is torch.float32


def test_a_chip_without_bf16_refuses_autocast():
    old = fake_npu(is_bf16_supported=lambda: False, get_device_name=lambda device: "Ascend910A")
    assert old.supports("fp16")
    assert not old.supports("bf16")
    with pytest.raises(DeviceError, match="Ascend910A has no bf16 arithmetic; use --precision fp32 or fp16"):
        old.autocast("bf16")


def test_rng_state_repeats_the_host_draws():
    rng = accelerator("cpu").rng
    state = rng.get_state()
    first = torch.rand(3)
    rng.set_state(state)
    assert torch.equal(torch.rand(3), first)


def test_rng_of_a_device_is_stashed_without_initialized():
    """CK-04: torch.utils.checkpoint would skip this module without a word."""
    module = fake_module()
    assert not hasattr(module, "_initialized")
    rng = RngState(torch.device("cpu"), module)  # type: ignore[arg-type]
    state = rng.get_state()
    first = torch.rand(3, generator=module.generator)
    rng.set_state(state)
    assert torch.equal(torch.rand(3, generator=module.generator), first)


@pytest.mark.parametrize("lacking", ["get_rng_state", "set_rng_state"])
def test_a_device_without_rng_functions_is_refused(lacking: str):
    """CK-04: bit-equal, or refuse."""
    with pytest.raises(DeviceError, match=f"has no {lacking}"):
        fake_npu(**{lacking: None})


def test_rng_state_of_another_kind_of_device_is_refused():
    state = accelerator("cpu").rng.get_state()
    with pytest.raises(DeviceError, match="1 generators, cpu has 2"):
        fake_npu().rng.set_state(state)


@pytest.mark.parametrize(
    ("error", "recognised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("NPU out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_on_an_npu(error: BaseException, recognised: bool):
    assert fake_npu().is_out_of_memory(error) is recognised


def test_out_of_memory_on_the_cpu():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert accelerator("cpu").is_out_of_memory(caught.value)
    assert accelerator("cpu").is_out_of_memory(MemoryError())
    assert not accelerator("cpu").is_out_of_memory(RuntimeError("NPU out of memory"))


@pytest.mark.parametrize(
    ("reserved", "allocated", "emptied"),
    [(95, 50, True), (90, 50, False), (89, 10, False), (95, 95, False)],
)
def test_the_cache_is_emptied_under_pressure_only(reserved: int, allocated: int, emptied: bool):
    """ "Pressure" is more than 90 of 100 bytes reserved, and some of them only cached."""
    calls: list[str] = []
    module = SimpleNamespace(
        memory_reserved=lambda device: reserved,
        memory_allocated=lambda device: allocated,
        mem_get_info=lambda device: (100 - reserved, 100),
        empty_cache=lambda: calls.append("empty"),
    )
    memory = DeviceMemory(torch.device("cpu"), module)  # type: ignore[arg-type]
    assert memory.release_cache(threshold=0.9) is emptied
    assert bool(calls) is emptied


def test_fused_adamw_under_a_grad_scaler_is_flagged_on_the_npu_alone():
    assert fake_npu().fused_adamw_ignores_grad_scaler
    assert not accelerator("cpu").fused_adamw_ignores_grad_scaler


def test_streams_on_the_cpu_do_nothing():
    cpu = accelerator("cpu")
    with cpu.stream(cpu.new_stream()):
        total = torch.ones(3).sum()
    cpu.synchronize()
    assert total == 3
