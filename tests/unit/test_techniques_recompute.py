"""A recomputed block gives the gradients of a plain one, and refuses what it cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recompute_blocks import (
    CPU,
    DIM,
    ROWS,
    TIERS,
    Feedforward,
    Remembers,
    assert_same,
    assert_twins_agree,
    inputs,
    run,
    twins,
)
from torch import Tensor, nn

from trainfit.errors import RecomputeError
from trainfit.techniques.activation import recompute_block

# ---- the same gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_dropout_is_the_same_in_recompute_and_goes_on_as_it_would(tier: str):
    assert_twins_agree(Feedforward, tier)

    def then_draw(block: nn.Module, x: Tensor) -> Tensor:
        return (block(x) * torch.rand(DIM)).sum()

    assert_twins_agree(Feedforward, tier, then_draw)


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor, extra: dict[str, Any]) -> tuple[Tensor, Any]:
        a, b = pair
        hidden = torch.tanh(self.first(a)) * extra["gate"] + self.second(b) * scale
        return hidden, {"half": (hidden * a).exp(), "name": extra["name"]}


@pytest.mark.parametrize("tier", TIERS)
def test_tuples_keywords_and_dicts_go_in_and_out(tier: str):
    def use(block: nn.Module, x: Tensor) -> Tensor:
        hidden, rest = block((x, x * 2), scale=x.mean(), extra={"gate": x.sigmoid(), "name": "n"})
        assert rest["name"] == "n"
        return hidden.square().sum() + rest["half"].sum()

    assert_twins_agree(ManyInputs, tier, use)


@pytest.mark.parametrize("tier", TIERS)
def test_backward_through_one_output_then_the_other(tier: str):
    def one_then_other(block: nn.Module, x: Tensor) -> Tensor:
        hidden, rest = block((x, x * 2), scale=x.mean(), extra={"gate": x.sigmoid(), "name": "n"})
        hidden.sum().backward(retain_graph=True)
        return rest["half"].sum()

    assert_twins_agree(ManyInputs, tier, one_then_other)

    def one_only(block: nn.Module, x: Tensor) -> Tensor:
        return block((x, x * 2), scale=x.mean(), extra={"gate": x.sigmoid(), "name": "n"})[0].sum()

    assert_twins_agree(ManyInputs, tier, one_only)


class TwoHeads(nn.Module):
    """Outputs that share nothing: backward through one leaves the other's graph whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Feedforward(), Feedforward()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_backwards_free_one_output_after_the_other(tier: str, order: tuple[int, int]):
    def use(block: nn.Module, x: Tensor) -> Tensor:
        outputs = block(x)
        outputs[order[0]].square().sum().backward()
        return outputs[order[1]].square().sum()

    assert_twins_agree(TwoHeads, tier, use)


@pytest.mark.parametrize("tier", TIERS)
def test_a_retained_graph_can_be_walked_again(tier: str):
    def use(block: nn.Module, x: Tensor) -> Tensor:
        output = block(x).square().sum()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        return output

    assert_twins_agree(Feedforward, tier, use)


class InPlace(nn.Module):
    """Overwrites the outputs of its matmuls, which a tier would otherwise have kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x), inplace=True)
        out = self.down(hidden)
        out[:, : DIM // 2].mul_(2.0)
        return out.add_(x).tanh()


@pytest.mark.parametrize("tier", TIERS)
def test_activations_in_place_after_a_kept_matmul(tier: str):
    assert_twins_agree(InPlace, tier)


class WithParameterInput(nn.Module):
    """Latents that train go into the block as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(ROWS, DIM))
        self.scale = nn.Parameter(torch.randn(ROWS, DIM))
        self.mixer = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self.latents, x, scale=self.scale)


class Mixer(nn.Module):
    def forward(self, latents: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return (latents * x).tanh() * scale * x.sin()


@pytest.mark.parametrize("tier", TIERS)
def test_parameters_may_be_inputs(tier: str):
    torch.manual_seed(0)
    plain = WithParameterInput()
    planned = copy.deepcopy(plain)
    recompute_block(planned.mixer, tier, CPU, name="mixer")
    assert_same(run(planned), run(plain))


class NestedAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.low(x))
        with torch.autocast("cpu", enabled=False):
            return self.high(hidden.float()).tanh()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("cache_enabled", [False, True])
def test_autocast_around_and_inside(tier: str, cache_enabled: bool):
    """CK-12: backward runs outside of the autocast that forward ran in."""

    def use(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            hidden = block(x) + block(x * 2)
        return hidden.float().square().sum()

    assert_twins_agree(NestedAutocast, tier, use)


class CountsTokens(nn.Module):
    """Counts in a buffer, in place and by a new tensor, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += x.shape[0]
        self.replaced = self.replaced + x.shape[0]
        return self.linear(self.norm(x)).tanh()


@pytest.mark.parametrize("tier", TIERS)
def test_buffers_count_a_batch_once(tier: str):
    plain, recomputed = twins(CountsTokens, tier)
    for _ in range(3):
        assert_same(run(recomputed), run(plain))
    assert recomputed.in_place == recomputed.replaced == 3 * ROWS
    assert_same(list(recomputed.buffers()), list(plain.buffers()))


class UsesItsCounter(CountsTokens):
    """What it computes depends on a buffer that it writes."""

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        return (self.linear(x) * self.in_place).tanh() + x * self.replaced.sqrt() * self.linear.weight[0]


@pytest.mark.parametrize("tier", TIERS)
def test_recompute_sees_buffers_as_forward_saw_them(tier: str):
    assert_twins_agree(UsesItsCounter, tier)


class Sampled(nn.Module):
    """A kept operator that draws from the default generator, then dropout from the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.multinomial(x.detach().softmax(-1), 4, replacement=True)
        noise = torch.rand(x.shape, generator=torch.default_generator)
        picked = x.gather(1, chosen).sum(1, keepdim=True)
        return F.dropout(self.linear(x).tanh(), 0.5) * picked * noise


@pytest.mark.parametrize("tier", TIERS)
def test_random_numbers_after_a_kept_random_operator_are_forwards(tier: str):
    """A replayed operator draws nothing, so the generator must be moved to where forward had left it."""
    assert_twins_agree(Sampled, tier)


class NoisyInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator) if self.training else 1.0
        return self.linear(x).tanh() * noise


@pytest.mark.parametrize("tier", TIERS)
def test_noise_that_begins_after_a_first_quiet_call(tier: str):
    """In eval mode with grad on the block draws nothing; what was learnt there must not hold for training."""
    plain, recomputed = twins(NoisyInTraining, tier)
    for training in (False, True, True):
        plain.train(training), recomputed.train(training)
        assert_same(run(recomputed), run(plain))


@pytest.mark.parametrize("tier", TIERS)
def test_hooks_fire_as_often_as_without(tier: str):
    """On parameters, on the block itself and on its output; CK-03: a weight that is used twice steps once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x).tanh()).tanh()

    counts = []
    for block in twins(Twice, tier):
        seen: list[str] = []
        block.linear.weight.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append("accumulated"))
        block.linear.weight.register_hook(lambda _, seen=seen: seen.append("gradient"))
        block.register_forward_hook(lambda *_, seen=seen: seen.append("forward"))
        block.register_full_backward_hook(lambda *_, seen=seen: seen.append("backward"))
        run(block)
        counts.append(sorted(seen))
    assert counts[1] == counts[0]
    assert counts[1].count("accumulated") == 1


def test_a_weight_that_frees_its_gradient_in_backward_gets_it_whole():
    """CK-03: an optimizer in backward steps when the hook fires; the gradient must be complete by then."""
    plain, recomputed = twins(Feedforward, "full")
    expected = run(plain)
    taken: list[Tensor] = []

    def take(parameter: Tensor) -> None:
        taken.append(parameter.grad.clone())
        parameter.grad = None

    for parameter in recomputed.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    run(recomputed)
    for gradient in expected[2:]:
        assert any(torch.equal(gradient, each) for each in taken)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_an_input_changed_in_place_after_forward_is_refused(tier: str):
    _, block = twins(Feedforward, tier)
    x = inputs() * 1.0
    output = block(x).sum()
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RecomputeError, match=r"layers\.0.*changed in place.*keep"):
        output.backward()


@pytest.mark.parametrize("tier", TIERS)
def test_a_cache_that_fills_in_forward_names_block_and_cause(tier: str):
    _, block = twins(Remembers, tier)
    with pytest.raises(RecomputeError, match=r"layers\.0.*use_cache=False"):
        block(inputs()).sum().backward()


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)], ids=["more", "fewer"])
def test_another_number_of_saved_tensors_is_refused(first: int, second: int):
    class Branches(nn.Module):
        times = first

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x.exp()
            return x

    _, block = twins(Branches, "full")
    output = block(inputs() * 0.1).sum()
    block.times = second
    if second > first:  # recompute has what it needs before it comes to what is new
        output.backward()
    else:
        with pytest.raises(RecomputeError, match=r"forward saved 3 tensors, recompute only 1"):
            output.backward()


def test_second_derivatives_are_refused():
    """What recompute fills in has no graph of its own: second derivatives would be wrong without a word."""
    _, block = twins(Feedforward, "full")
    x = inputs()
    with pytest.raises(RecomputeError, match="second derivative"):
        torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
