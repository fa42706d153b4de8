"""Optimizer variants against hand-written loops with torch's own AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plain import CPU, build, make_model, random_batch, small_workload, tiny_workload
from torch import Tensor, nn
from torch.testing import assert_close

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Ranks
from trainfit.profile import Accuracy, Mesh, OptimizerVariant, Precision
from trainfit.rehearsal import measure
from trainfit.step import Strategy, build_step
from trainfit.techniques.optimizer import accuracy_of, bytes_per_parameter, make_optimizer, store_weights
from trainfit.techniques.stored_adamw import StoredAdamW
from trainfit.techniques.stored_moments import BLOCK, BlockMoment, dynamic_map
from trainfit.techniques.stored_weights import by_chance_bf16, join_bits, nearest_bf16, split_bits
from trainfit.train.checkpoint import RunState, checkpoint_path
from trainfit.train.packing import Position
from trainfit.train.saving import Checkpoints
from trainfit.workload import AdamWSettings, Workload, with_frozen, workload_from_module

SETTINGS = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)


def finite_floats() -> st.SearchStrategy[float]:
    return st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127, min_value=-(2.0**127))


@given(st.lists(finite_floats(), min_size=1, max_size=50))
def test_bf16_and_residual_are_the_fp32_number_to_the_bit(numbers: list[float]):
    values = torch.tensor(numbers)
    weight, residual = split_bits(values)
    assert weight.dtype == torch.bfloat16
    assert residual.dtype == torch.int16
    assert torch.equal(join_bits(weight, residual).view(torch.int32), values.view(torch.int32))


def test_every_lower_half_comes_back():
    """All 2^16 neighbours of some numbers, ties among them."""
    low = torch.arange(2**16, dtype=torch.int32)
    for upper in (0, 0x3F80, 0x3F81, 0x0001, 0x7F7E, -0x4080, -0x8000):
        values = (low + (upper << 16)).view(torch.float32)
        assert torch.equal(join_bits(*split_bits(values)).view(torch.int32), values.view(torch.int32))


@given(st.lists(finite_floats(), min_size=1, max_size=50))
def test_nearest_bf16_is_torchs_but_for_ties(numbers: list[float]):
    values = torch.tensor(numbers)
    differs = nearest_bf16(values) != values.to(torch.bfloat16)
    assert torch.all((values[differs].view(torch.int32) & 0xFFFF) == 0x8000)


def not_numbers() -> Tensor:
    """NaNs of both signs: all 2^16 lower halves of some upper ones, so that none is saved by its last bits."""
    low = torch.arange(2**16, dtype=torch.int32)
    upper = (0x7F80, 0x7F81, 0x7FC0, 0x7FFE, 0x7FFF)
    bits = torch.cat([low + (half << 16) for half in upper])
    bits = bits[bits != 0x7F800000]  # inf
    bits = torch.cat([bits, bits | -(2**31)])
    known = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    assert torch.isin(torch.cat([known, known | -(2**31)]), bits).all()
    values = bits.view(torch.float32)
    assert values.isnan().all()
    return values


TO_BF16: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": nearest_bf16,
    "by chance": lambda value: by_chance_bf16(value, torch.Generator().manual_seed(0)),
    "split": lambda value: split_bits(value)[0],
    "split and joined": lambda value: join_bits(*split_bits(value)),
}


@pytest.mark.parametrize("way", TO_BF16)
def test_what_is_no_number_stays_none(way: str):
    """A loss that broke must not come back as an inf, or worse as a number, of a weight that looks trained."""
    values = not_numbers()
    assert int((~TO_BF16[way](values).isnan()).sum()) == 0


@pytest.mark.parametrize("way", TO_BF16)
def test_infinity_stays_itself(way: str):
    values = torch.tensor([torch.inf, -torch.inf]).repeat(1000)
    assert torch.equal(TO_BF16[way](values).float(), values)


def test_rounding_by_chance_gives_one_of_two_neighbours_and_the_right_mean():
    value = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    rounded = by_chance_bf16(value, torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = (rounded > 1.0).float().mean().item()
    # Four standard deviations of a share of 0.3 among 200,000.
    assert share == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 200_000))


def test_what_is_bf16_already_is_never_rounded():
    value = torch.randn(10_000).bfloat16()
    assert torch.equal(by_chance_bf16(value.float(), torch.Generator().manual_seed(0)), value)


def test_the_dynamic_map_has_256_values_up_to_one():
    for signed in (True, False):
        values = dynamic_map(signed=signed)
        assert len(set(values)) == 256
        assert values[-1] == 1.0
        assert 0.0 in values
    assert min(dynamic_map(signed=True)) == pytest.approx(-0.99297, abs=1e-5)  # -1 is not among them
    assert min(value for value in dynamic_map(signed=False) if value) == pytest.approx(3.25e-7)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("columns", [8, BLOCK, BLOCK + 5, 3 * BLOCK + 1])
def test_a_moment_of_eight_bits_is_near_what_was_written(fp8: bool, columns: int):
    generator = torch.Generator().manual_seed(0)
    for keeps_root in (False, True):
        moment = BlockMoment("moment", fp8=fp8, keeps_root=keeps_root)
        value = torch.randn(3, columns, generator=generator) * torch.tensor([[1e-6], [1.0], [1e4]])
        value = value.square() if keeps_root else value
        states = moment.first(value)
        assert torch.equal(moment.read(states), torch.zeros_like(value))
        moment.write(value.clone(), states)
        block_top = torch.stack([part.abs().amax(-1) for part in value.split(BLOCK, dim=-1)], -1)
        top = block_top.repeat_interleave(BLOCK, dim=-1)[:, :columns]
        error = (moment.read(states) - value).abs()
        # Half a step of the coarsest part, from 0.1 to 1: int8 has 64 there. e4m3 has 8 in each octave. A root's error
        # counts twice; one in a hundred is for fp32.
        step = value.abs() / 16 if fp8 else top * 0.9 / 64 / 2
        smallest = top * 2.0**-18  # where e4m3 has no more steps
        nearest = 1.01 * torch.maximum(step, smallest) * (2.1 if keeps_root else 1.0)
        # Codes are looked up by 11 bits of a number: at a border the second nearest may be taken.
        assert torch.all(error <= nearest + 2.0**-10 * value.abs())


def test_no_second_moment_is_rounded_to_zero():
    for fp8 in (False, True):
        moment = BlockMoment("moment", fp8=fp8, keeps_root=True)
        value = torch.tensor([[1.0, 1e-30, 0.0]])
        states = moment.first(value)
        moment.write(value.clone(), states)
        read = moment.read(states)
        assert read[0, 1] > 0
        assert read[0, 2] == 0


def reference_loop(
    steps: int, gradient_of: Callable[[dict[str, Tensor]], dict[str, Tensor]], weights: dict[str, Tensor], cast: Any
) -> dict[str, Tensor]:
    """fp32 masters by hand: torch's AdamW on them, and their half copies for the gradients."""
    masters = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    optimizer = make_optimizer(masters.items(), SETTINGS)
    for _ in range(steps):
        found = gradient_of({name: cast(master.detach()) for name, master in masters.items()})
        for name, master in masters.items():
            master.grad = found[name].float()
        optimizer.step()
        optimizer.zero_grad()
    return {name: master.detach() for name, master in masters.items()}


class TwoMatrices(nn.Module):
    """The same weights each time; the global generator, whose seed rounding by chance takes, is left as it was."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.one = nn.Linear(64, 128, bias=False)
            self.two = nn.Linear(128, 32, bias=False)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)


def gradients_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a small regression, in bf16."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 64, generator=generator).bfloat16()
    target = torch.randn(16, 32, generator=generator)
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    hidden = torch.tanh(inputs @ leaves["one.weight"].t())
    loss = ((hidden @ leaves["two.weight"].t()).float() - target).square().mean()
    loss.backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def stored(variant: OptimizerVariant) -> tuple[nn.Module, StoredAdamW]:
    model = TwoMatrices()
    beside = store_weights(model, model, variant)
    optimizer = make_optimizer(model.named_parameters(), SETTINGS, variant, beside=beside)
    assert isinstance(optimizer, StoredAdamW)
    return model, optimizer


def train(model: nn.Module, optimizer: StoredAdamW, steps: int) -> None:
    for _ in range(steps):
        for name, gradient in gradients_of(dict(model.named_parameters())).items():
            model.get_parameter(name).grad = gradient.float()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("weights", ["bf16_residual", "bf16_master"])
def test_100_steps_are_those_of_fp32_masters_to_the_bit(weights: Any):
    model, optimizer = stored(OptimizerVariant(weights=weights))
    whole = {name: value.detach() for name, value in TwoMatrices().named_parameters()}
    expected = reference_loop(100, gradients_of, whole, nearest_bf16)
    train(model, optimizer, 100)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert parameter.dtype == torch.bfloat16
        master = state["master"] if "master" in state else join_bits(parameter.detach(), state["residual"])
        assert torch.equal(master.view(torch.int32), expected[name].view(torch.int32))
        assert torch.equal(parameter.detach(), nearest_bf16(expected[name]))


def test_kahan_is_as_near_to_fp32_masters_as_two_bf16_can_be():
    """On gradients that do not depend on the weights: AdamW makes whole steps of the least difference in sign."""
    torch.manual_seed(0)
    gradients = torch.randn(100, 64, 64)
    masters, halves = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    halves.load_state_dict(masters.state_dict())
    plain = make_optimizer(masters.named_parameters(), SETTINGS)
    variant = OptimizerVariant(weights="bf16_kahan")
    beside = store_weights(halves, halves, variant)
    kahan = make_optimizer(halves.named_parameters(), SETTINGS, variant, beside=beside)
    for gradient in gradients:
        masters.weight.grad, halves.weight.grad = gradient.clone(), gradient.clone()
        plain.step()
        kahan.step()
    value = halves.weight.detach().float() + kahan.state[halves.weight]["compensation"].float()
    largest = masters.weight.detach().abs().max().item()
    # bf16 has 8 bits, two of them 16 and a sign: each step is rounded at 2^-18 of the weight at most.
    assert_close(value, masters.weight.detach(), rtol=0, atol=100 * 2**-18 * largest)
    assert (halves.weight.float() - masters.weight).abs().max().item() < 2**-8 * largest


@pytest.mark.parametrize("weights", ["bf16_stochastic", "bf16_kahan", "bf16_residual", "bf16_master"])
def test_mp_08_a_hundred_small_updates_are_not_lost(weights: Any):
    """Report MP-08: bf16 weights whose updates are below rounding stay where they are; fp32 ends at 0.9."""
    settings = AdamWSettings(learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-12)
    whole, model = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)
    for each in (whole, model):
        nn.init.ones_(each.weight)
    plain = torch.optim.AdamW(
        whole.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=0.0,
        fused=True,
    )
    variant = OptimizerVariant(weights=weights)
    beside = store_weights(model, model, variant)
    optimizer = make_optimizer(model.named_parameters(), settings, variant, beside=beside)
    naive = torch.ones(100, 100).bfloat16()
    for _ in range(100):
        model.weight.grad = torch.ones(100, 100)
        whole.weight.grad = torch.ones(100, 100)
        optimizer.step()
        plain.step()
        naive -= settings.learning_rate
    expected, found = whole.weight.detach(), model.weight.detach()
    assert naive.float().mean().item() == 1.0  # what is lost without
    assert expected.mean().item() == pytest.approx(0.9, abs=1e-5)
    spacing = 2.0**-8  # of bf16 below one
    state = optimizer.state[model.weight]
    if weights == "bf16_stochastic":
        # A step of a share p of the spacing is one of it with the probability p; four standard deviations of the mean.
        share = settings.learning_rate / spacing
        deviation = spacing * math.sqrt(100 * share * (1 - share) / found.numel())
        assert found.float().mean().item() == pytest.approx(expected.mean().item(), abs=4 * deviation)
    elif weights == "bf16_kahan":
        # A compensation is at most half a spacing, kept to 8 bits: what is lost is half of 2^-8 of it, each step.
        value = found.float() + state["compensation"].float()
        assert_close(value, expected, rtol=0, atol=100 * spacing / 2 * 2**-9)
    else:
        value = state["master"] if weights == "bf16_master" else join_bits(found, state["residual"])
        assert torch.equal(value, expected)
        assert torch.equal(found, nearest_bf16(expected))


def by_chance(seed: int) -> tuple[nn.Module, StoredAdamW]:
    """A process whose generator was seeded so before the build, and has moved on since."""
    torch.manual_seed(seed)
    model, optimizer = stored(OptimizerVariant(weights="bf16_stochastic"))
    torch.seed()
    return model, optimizer


def test_rounding_by_chance_takes_the_seed_that_the_process_began_with():
    """Generators go apart after the build (each rank's dropout); copies of a model must not."""
    runs = [by_chance(seed) for seed in (7, 7, 8)]
    for model, optimizer in runs:
        train(model, optimizer, 6)
    first, same, other = (model.get_parameter("one.weight") for model, _ in runs)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_rounding_by_chance_is_the_same_after_a_new_start(tmp_path: Path):
    unbroken, optimizer = by_chance(7)
    train(unbroken, optimizer, 6)
    saved, optimizer = by_chance(7)
    train(saved, optimizer, 3)
    with Checkpoints(tmp_path, Ranks(), keep=1) as checkpoints:
        checkpoints.save(RunState(3, Position(0, 0), 0), saved, optimizer, (torch.get_rng_state(),))
    resumed, optimizer = by_chance(7)
    with Checkpoints(tmp_path, Ranks(), keep=1) as checkpoints:
        checkpoints.load(checkpoint_path(tmp_path, 3), resumed, optimizer).set_rng(CPU)
    train(resumed, optimizer, 3)
    for one, another in zip(unbroken.parameters(), resumed.parameters()):
        assert torch.equal(one, another)


def test_states_fp32_updated_in_backward_are_plain_training_to_the_bit():
    workload = small_workload("llama")
    plain = build(workload, "keep")
    backward = build(workload, "keep", optimizer=OptimizerVariant(update="backward"))
    for seed in range(5):
        batch = random_batch(workload, seed=seed)
        assert torch.equal(plain([batch]).loss, backward([batch]).loss)
    assert all(parameter.grad is None for parameter in backward.model.parameters())
    for (name, one), (_, other) in zip(plain.model.named_parameters(), backward.model.named_parameters()):
        assert torch.equal(one, other), name


def test_gradients_go_while_backward_runs():
    """No two blocks have gradients at once."""
    workload = small_workload("llama", num_hidden_layers=3)
    step = build(workload, "keep", optimizer=OptimizerVariant(update="backward"))
    seen: list[set[int]] = []

    def look() -> None:
        blocks = [step.model.get_submodule(name) for name in step.anatomy.blocks]
        seen.append({i for i, each in enumerate(blocks) if any(p.grad is not None for p in each.parameters())})

    for name in step.anatomy.blocks:
        step.model.get_submodule(name).register_full_backward_hook(lambda *_: look())
    step([random_batch(workload)])
    assert len(seen) == 3
    assert all(len(blocks) <= 1 for blocks in seen)


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_small_pieces_change_nothing(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    whole_model, whole = stored(OptimizerVariant(weights="bf16_residual", kernel=kernel))
    monkeypatch.setattr("trainfit.techniques.stored_adamw.MIN_PIECE", 256)
    model, optimizer = stored(OptimizerVariant(weights="bf16_residual", kernel=kernel))
    train(whole_model, whole, 10)
    train(model, optimizer, 10)
    for one, other in zip(whole_model.parameters(), model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("states", ["int8", "fp8", "bf16"])
def test_small_states_learn_like_fp32(states: Any):
    losses = {}
    for name in ("fp32", states):
        step = build(small_workload("llama"), "keep", optimizer=OptimizerVariant(states=name), max_grad_norm=1.0)
        batch = random_batch(small_workload("llama"), rows=4)
        for group in step.optimizer.param_groups:
            group["lr"] = 3e-3
        losses[name] = [float(step([batch]).loss) for _ in range(40)]
    assert losses["fp32"][-1] < 0.5 * losses["fp32"][0]
    # The loss falls by more than half; the paths stay together within a twentieth of the way.
    way = losses["fp32"][0] - losses["fp32"][-1]
    assert losses[states][-1] == pytest.approx(losses["fp32"][-1], abs=0.05 * way)


def test_adafactor_is_torchs_own():
    workload = small_workload("llama")
    step = build(workload, "keep", optimizer=OptimizerVariant("adafactor"))
    batch = random_batch(workload)
    before = float(step([batch]).loss)
    for _ in range(10):
        step([batch])
    assert float(step([batch]).loss) < before
    matrix = next(p for p in step.model.parameters() if p.dim() == 2)
    state = step.optimizer.state[matrix]
    assert state["row_var"].numel() + state["col_var"].numel() == sum(matrix.shape)


def test_adafactor_steps_are_those_of_a_loop_with_torchs_own_to_the_bit():
    workload = small_workload("llama").copy(optimizer=SETTINGS)
    step = build(workload, optimizer=OptimizerVariant("adafactor"))
    model = make_model(workload)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.Adafactor(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
    )
    for seed in range(5):
        batch = random_batch(workload, seed=seed)
        step([batch])
        logits = model(batch.inputs).logits
        summed = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        (summed * (1.0 / batch.num_tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    begun = make_model(workload)
    for (name, mine), theirs in zip(step.model.named_parameters(), model.parameters()):
        assert torch.equal(mine, theirs), name
        assert not torch.equal(mine, begun.get_parameter(name)), name


def test_ga_10_half_weights_add_up_micro_batches_in_fp32():
    """Report GA-10: 1.0 and 0.001 a thousand times is 256 and 0.5 in bf16, 1000 and 1.0 in fp32."""
    model = nn.Linear(1, 2, bias=False)
    store_weights(model, model, OptimizerVariant(weights="bf16_residual"))
    sizes = torch.tensor([[1.0], [0.001]])
    in_bf16 = torch.zeros(2, 1, dtype=torch.bfloat16)
    for _ in range(1000):
        in_bf16 += sizes.bfloat16()
        (model.weight * sizes.bfloat16()).float().sum().backward()
    assert in_bf16.flatten().tolist() == [256.0, 0.5]  # what is lost without
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
    assert_close(model.weight.grad, 1000 * sizes.bfloat16().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("weights", ["bf16_residual", "bf16_master"])
def test_tied_weights_stay_one(weights: Any):
    workload = small_workload("llama", tie_word_embeddings=True)
    step = build(workload, "keep", optimizer=OptimizerVariant(weights=weights), precision="bf16")
    embedding, head = step.model.get_parameter("model.embed_tokens.weight"), step.model.get_submodule("lm_head").weight
    assert embedding is head
    assert embedding.shape == (97, 32)
    assert torch.equal(embedding, build(workload).model.get_parameter("model.embed_tokens.weight").bfloat16())
    before = float(step([random_batch(workload)]).loss)
    assert float(step([random_batch(workload)]).loss) < before


def test_gradients_of_half_are_what_was_asked_for():
    workload = small_workload("llama")
    variant = OptimizerVariant(weights="bf16_residual", gradients="half")
    step = build(workload, "keep", optimizer=variant, precision="bf16")
    step.accumulate([random_batch(workload)])
    assert {p.grad.dtype for p in step.model.parameters() if p.grad is not None} == {torch.bfloat16}


def wide() -> Workload:
    """Rows of 1024 and more, as real models have, so that scales weigh what they do there."""
    sizes = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
    return small_workload("llama", seq_len=8, **sizes)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (OptimizerVariant(), 16.0),
        (OptimizerVariant(states="int8"), 10.0),
        (OptimizerVariant(weights="bf16_master"), 18.0),
        (OptimizerVariant(weights="fp16_master"), 18.0),
        (OptimizerVariant(weights="bf16_residual", gradients="half"), 14.0),
        (OptimizerVariant(weights="bf16_kahan", gradients="half"), 14.0),
        (OptimizerVariant(weights="bf16_stochastic", gradients="half"), 12.0),
        (OptimizerVariant(weights="bf16_residual", states="int8", gradients="half"), 8.0),
        (OptimizerVariant(weights="bf16_residual", states="fp8", gradients="half", update="backward"), 6.0),
        (OptimizerVariant(weights="bf16_residual", states="int8", gradients="half", update="backward"), 6.0),
        (OptimizerVariant(weights="bf16_stochastic", states="int8", update="backward"), 4.0),
        (OptimizerVariant("adafactor"), 8.0),
    ],
    ids=lambda value: str(value) if isinstance(value, float) else f"{value.kind}-{value.weights}-{value.states}",
)
def test_bytes_per_parameter_are_those_of_the_table(variant: OptimizerVariant, expected: float):
    """Measured: what the allocator holds between steps, and the gradients of a window."""
    workload = wide()
    precision: Any = variant.weights.partition("_")[0]
    strategy = Strategy(1, precision=precision, tiers=("full",) * 2, optimizer=variant)
    norm = None if variant.update == "backward" else 1.0
    resident = measure(workload, strategy, CPU, steps=0, max_grad_norm=norm).resident_bytes
    step = build_step(workload, strategy, CPU, max_grad_norm=norm)
    step.accumulate([random_batch(workload, rows=1)])
    gradients = sum(parameter.grad.nbytes for parameter in step.model.parameters() if parameter.grad is not None)
    found = (resident + gradients) / workload.anatomy().num_parameters
    assert bytes_per_parameter(variant).total == pytest.approx(expected, rel=0.01)
    assert found == pytest.approx(bytes_per_parameter(variant).total, rel=0.01)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"optimizer": OptimizerVariant(weights="bf16_residual")}, "precision is fp32; set precision: bf16"),
        ({"optimizer": OptimizerVariant(gradients="half")}, "optimizer.weights is fp32"),
        (
            {"optimizer": OptimizerVariant(weights="fp16_master", gradients="half"), "precision": "fp16"},
            "loss scaling cannot unscale",
        ),
        ({"optimizer": OptimizerVariant("adafactor", states="int8")}, "factored states"),
        ({"optimizer": OptimizerVariant(update="backward"), "accumulation_steps": 2}, "accumulation_steps is 2"),
        ({"optimizer": OptimizerVariant(update="backward"), "precision": "fp16"}, "must skip such a step"),
        ({"optimizer": OptimizerVariant(update="backward"), "max_grad_norm": 1.0}, "max_grad_norm: null"),
        ({"cast": "block"}, "cast block casts fp32 weights"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(knobs: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message) as caught:
        build(small_workload("llama"), "keep", **knobs)
    assert "\n" not in str(caught.value)


def words(value: OptimizerVariant | str) -> str:
    return value if isinstance(value, str) else "-".join(vars(value).values())


def halves() -> Workload:
    """Of a user whose module is bf16 itself."""
    return workload_from_module(make_model(small_workload("llama")).bfloat16(), seq_len=24, vocab_size=97)


@pytest.mark.parametrize(
    ("variant", "precision"),
    [
        (OptimizerVariant(), "fp32"),
        (OptimizerVariant(), "bf16"),
        (OptimizerVariant(kernel="foreach"), "bf16"),
        (OptimizerVariant(weights="bf16_residual"), "bf16"),
    ],
    ids=words,
)
def test_a_model_that_is_bf16_itself_is_refused(variant: OptimizerVariant, precision: Precision):
    """Its updates would be rounded away (MP-08), and a variant has no fp32 to split."""
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight.*float") as caught:
        build(halves(), precision=precision, optimizer=variant)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_bf16_itself_is_trained_by_an_optimizer_of_its_own():
    def own(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    step = build(halves().copy(make_optimizer=own), precision="bf16")
    batch = random_batch(small_workload("llama"))
    losses = [float(step([batch]).loss) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.bfloat16}


def test_frozen_weights_may_be_bf16_themselves():
    model = make_model(small_workload("llama")).bfloat16().requires_grad_(False)
    model.get_submodule("lm_head").float().requires_grad_(True)
    step = build(workload_from_module(model, seq_len=24, vocab_size=97), precision="bf16")
    batch = random_batch(small_workload("llama"))
    assert step([batch]).loss > step([batch]).loss


HALF_WEIGHTS: dict[Any, Precision] = {
    "bf16_master": "bf16",
    "bf16_residual": "bf16",
    "bf16_kahan": "bf16",
    "bf16_stochastic": "bf16",
    "fp16_master": "fp16",
}
EXACT = [
    OptimizerVariant(),
    OptimizerVariant(kernel="foreach"),
    OptimizerVariant(place="host"),
    OptimizerVariant(update="backward"),
]
ACCURACIES: list[tuple[OptimizerVariant, Precision, Accuracy]] = [
    *((variant, "fp32", "exact") for variant in EXACT),
    *((variant, "bf16", "rounding") for variant in EXACT),
    *((variant, "fp16", "rounding") for variant in EXACT if variant.update == "step"),
    *(
        (OptimizerVariant(weights=weights, gradients=gradients), precision, accuracy)
        for weights, precision in HALF_WEIGHTS.items()
        for gradients in ("fp32", "half")
        for accuracy in ["lossy" if weights in ("bf16_kahan", "bf16_stochastic") else "rounding"]
        if (precision, gradients) != ("fp16", "half")
    ),
    (OptimizerVariant(weights="bf16_master", place="host"), "bf16", "rounding"),
    (OptimizerVariant(weights="bf16_residual", update="backward"), "bf16", "rounding"),
    *(
        (OptimizerVariant(states=states), precision, "lossy")
        for states in ("bf16", "int8", "fp8")
        for precision in ("fp32", "bf16", "fp16")
    ),
    (OptimizerVariant(weights="bf16_residual", states="int8"), "bf16", "lossy"),
    *((OptimizerVariant("adafactor"), precision, "lossy") for precision in ("fp32", "bf16", "fp16")),
]


@pytest.mark.parametrize(("variant", "precision", "expected"), ACCURACIES, ids=words)
def test_what_a_variant_does_to_what_is_learnt(variant: OptimizerVariant, precision: Precision, expected: Accuracy):
    """fp32 from step to step or not: two bf16 hold 16 bits and a sign, less than 24."""
    assert accuracy_of(variant, precision) == expected


def test_a_second_build_is_not_updated_by_the_first_ones_hooks():
    workload = small_workload("llama")
    first = build(workload, optimizer=OptimizerVariant(update="backward"))
    again = build(workload, model=first.model, max_grad_norm=1.0)
    fresh = build(workload, max_grad_norm=1.0)
    batch = random_batch(workload)
    found, expected = again([batch]), fresh([batch])
    assert found.gradient_norm == expected.gradient_norm
    for one, other in zip(again.model.parameters(), fresh.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "variant",
    [
        OptimizerVariant(weights="bf16_stochastic"),
        OptimizerVariant(weights="bf16_residual", states="int8"),
        OptimizerVariant(weights="bf16_master", states="fp8"),
    ],
    ids=lambda v: f"{v.weights}-{v.states}",
)
def test_a_state_dict_comes_back_in_its_dtypes(variant: OptimizerVariant):
    """torch's own load_state_dict gives every state the dtype of its parameter."""
    torch.manual_seed(0)
    model, optimizer = stored(variant)
    train(model, optimizer, 3)
    torch.manual_seed(0)
    other, fresh = stored(variant)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(other.parameters(), model.parameters()):
        for name, value in optimizer.state[theirs].items():
            assert fresh.state[mine][name].dtype == value.dtype
            assert torch.equal(fresh.state[mine][name].float(), value.float())
    train(model, optimizer, 2)
    train(other, fresh, 2)
    for mine, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(mine, theirs)


class Odd(nn.Module):
    """A number, a transposed matrix and an empty one, as parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.empty = nn.Parameter(torch.randn(0, 3))


@pytest.mark.parametrize(
    "variant",
    [OptimizerVariant(update="backward"), OptimizerVariant(states="int8"), OptimizerVariant(weights="bf16_residual")],
    ids=lambda v: f"{v.weights}-{v.states}-{v.update}",
)
def test_parameters_of_any_shape_are_updated(variant: OptimizerVariant):
    model, plain = Odd(), Odd()
    beside = store_weights(model, model, variant)
    optimizer = make_optimizer(model.named_parameters(), SETTINGS, variant, beside=beside)
    reference = make_optimizer(plain.named_parameters(), SETTINGS)
    for _ in range(3):
        for one, other in zip(model.parameters(), plain.parameters()):
            other.grad = torch.full_like(other, 0.5)
            one.grad = torch.full_like(one, 0.5, dtype=torch.float32)
        optimizer.step()
        reference.step()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert one.shape == other.shape
        # A constant gradient takes whole steps, whatever the moments are kept in; bf16 has 8 bits.
        assert_close(one.float(), other, rtol=2**-8 if variant.weights != "fp32" else 1e-3, atol=1e-6)


def test_the_norm_of_half_gradients_is_that_of_fp32():
    workload = small_workload("llama")
    variants = [OptimizerVariant(weights="bf16_residual", gradients=sums) for sums in ("fp32", "half")]
    steps = [build(workload, optimizer=each, precision="bf16", max_grad_norm=1.0) for each in variants]
    norms = [step([random_batch(workload)]).gradient_norm for step in steps]
    # One micro batch: the same gradients, which bf16 holds as they are.
    assert_close(norms[1], norms[0], rtol=1e-6, atol=0)
    assert norms[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"mesh": Mesh(pipeline=2), "accumulation_steps": 2}, "does not work with mesh.pipeline 2"),
    ],
)
def test_half_weights_in_pipelines_are_refused(knobs: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        Strategy(1, precision="bf16", optimizer=OptimizerVariant(weights="bf16_residual"), **knobs)


def test_norms_that_would_mix_dtypes_are_refused():
    workload = with_frozen(tiny_workload("gpt2"), ["*wte*"])
    variant = OptimizerVariant(weights="bf16_residual")
    with pytest.raises(RecipeError, match="frozen_weights: half"):
        build(workload, "keep", optimizer=variant, precision="bf16")
    step = build(workload, "keep", optimizer=variant, precision="bf16", frozen_weights="half")
    assert step([random_batch(workload)]).loss > 0
    with pytest.raises(RecipeError, match="train whole or not at all"):
        build(with_frozen(tiny_workload("gpt2"), ["*ln_1.bias"]), "keep", optimizer=variant, precision="bf16")
