"""What would go wrong unseen is refused when a step is built: the reason and the fix, in one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import CPU, build, random_batch, small_workload
from torch import Tensor, nn

from trainfit.errors import DeviceError, ModelError, RecipeError
from trainfit.hardware import find_device, this_machine
from trainfit.profile import OptimizerVariant
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.workload import Workload, workload_from_module

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def with_optimizer(make: Any) -> Workload:
    return small_workload("llama").copy(make_optimizer=make)


def sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


def test_an_optimizer_of_ones_own_trains_and_is_rehearsed():
    """Its states come with its first step, and a rehearsal counts them from the second, as a run has them."""
    workload = with_optimizer(sgd)
    step = build(workload)
    batch = random_batch(workload)
    losses = [float(step([batch]).loss) for _ in range(5)]
    assert losses[-1] < losses[0]
    strategy = Strategy(2, tiers=parse_tiers("keep", 2))
    predicted, measured = rehearse(workload, strategy, this_machine("cpu")), measure(workload, strategy, CPU, steps=0)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
    assert predicted.categories["optimizer"] == 4 * workload.anatomy().num_parameters


def test_an_optimizer_of_another_models_parameters_is_refused():
    """As when it was made before sharding, casting or adapters put other parameters in their place."""
    other = small_workload("llama").make_model()

    def make(named: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(other.parameters(), lr=0.1)

    with pytest.raises(ModelError, match=r"holds 21 of 21 parameters that the model does not have") as caught:
        build(with_optimizer(make))
    assert "\n" not in str(caught.value)


def test_an_optimizer_that_leaves_parameters_out_is_refused():
    def make(named: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in list(named)[1:]], lr=0.1)

    with pytest.raises(ModelError, match=r"leaves out 1 of 21 parameters that train, such as model\.embed_tokens"):
        build(with_optimizer(make))


def test_a_variant_beside_ones_own_optimizer_is_refused():
    with pytest.raises(RecipeError, match="brings an optimizer of its own"):
        build(with_optimizer(sgd), optimizer=OptimizerVariant(states="int8"))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 8)
        self.head = nn.Linear(8, 4096)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def own_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Out of autocast's reach, as in a compiled or custom kernel: it would lift the sums to fp32."""
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_in_half_precision_over_a_large_vocabulary_is_refused(precision: Any):
    workload = workload_from_module(Tagger, seq_len=8, vocab_size=4096, loss=own_loss)
    step = build_step(workload, Strategy(2, precision=precision), CPU, max_grad_norm=None)
    with pytest.raises(ModelError, match=r"vocabulary of 4096 .* compute it from output\.float\(\)"):
        step([random_batch(workload)])
    with pytest.raises(ModelError, match="vocabulary of 4096"):
        rehearse(workload, Strategy(2, precision=precision), this_machine("cpu"))


def test_a_loss_that_lifts_its_logits_is_not():
    def lifted(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    workload = workload_from_module(Tagger, seq_len=8, vocab_size=4096, loss=lifted)
    step = build_step(workload, Strategy(2, precision="bf16"), CPU, max_grad_norm=None)
    assert step([random_batch(workload)]).loss > 0


def test_bf16_on_a_device_without_it_is_refused():
    """The Ascend 910A, say: its cube computes in fp16 only."""
    workload = small_workload("llama")
    with pytest.raises(DeviceError, match="bf16"):
        rehearse(workload, Strategy(2, precision="bf16", tiers=parse_tiers("keep", 2)), find_device("ascend-910a"))


def test_fused_adamw_under_a_scaler_is_refused_for_an_npu_before_the_run():
    workload = small_workload("llama")
    strategy = Strategy(2, precision="fp16", tiers=parse_tiers("keep", 2))
    with pytest.raises(RecipeError, match=r"optimizer\.kernel: foreach"):
        rehearse(workload, strategy, find_device("ascend-910a"))
