"""Training through the facade gives on the npu what plain PyTorch gives on the cpu."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from trainfit.hardware import Accelerator

VOCAB_SIZE, DIM, TOKENS = 37, 16, 24


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(VOCAB_SIZE, DIM), *blocks, nn.Linear(DIM, VOCAB_SIZE))


def train(device: torch.device, steps: int = 4) -> list[float]:
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB_SIZE, (2, TOKENS + 1), generator=generator).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_plain_pytorch_on_the_cpu(target: Accelerator):
    losses = train(target.device)
    assert losses == pytest.approx(train(torch.device("cpu")), rel=1e-6)
    assert losses[-1] != losses[0]


def test_a_step_after_out_of_memory_gives_the_same_loss(npu: Accelerator, set_limit):
    expected = train(npu.device)
    set_limit(npu.memory.current_bytes() + 16 * 1024)
    with pytest.raises(RuntimeError) as caught:
        train(npu.device)
    assert npu.is_out_of_memory(caught.value)
    # The traceback holds the failed step's frames, and they hold its tensors.
    del caught
    set_limit(2**30)
    assert train(npu.device) == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_computes_matmuls_in_that_precision(target: Accelerator, precision: str):
    layer = nn.Linear(DIM, DIM).to(target.device)
    inputs = torch.ones(2, DIM, device=target.device)
    with target.autocast(precision):
        outputs = layer(inputs)
    assert outputs.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert layer(inputs).dtype is torch.float32
    with target.autocast("fp32"):
        assert layer(inputs).dtype is torch.float32


def test_autocast_keeps_no_copies_of_weights_unless_asked(npu: Accelerator):
    layer = nn.Linear(256, 256, bias=False).to(npu.device)
    inputs = torch.ones(1, 256, device=npu.device)

    def held_bytes(cache_enabled: bool) -> int:
        with npu.autocast("bf16", cache_enabled=cache_enabled), torch.enable_grad():
            before = npu.memory.current_bytes()
            layer(inputs).detach_()
            return npu.memory.current_bytes() - before

    assert held_bytes(cache_enabled=False) == 0
    assert held_bytes(cache_enabled=True) == 2 * layer.weight.numel()


def test_work_on_a_stream_is_done_after_synchronize(target: Accelerator):
    with target.stream(target.new_stream()):
        result = torch.ones(4, device=target.device) * 3
    target.synchronize()
    assert_close(result.cpu(), torch.full((4,), 3.0))


def test_the_backend_named_reduces_tensors_of_the_device(target: Accelerator):
    dist.init_process_group(target.distributed_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.full((3,), 2.0, device=target.device)
        dist.all_reduce(tensor)
        assert_close(tensor.cpu(), torch.full((3,), 2.0))
        assert dist.get_backend() == {"cpu": "gloo", "npu": "hccl"}[target.kind]
    finally:
        dist.destroy_process_group()
