"""choose(): the plan fits when it runs, a larger budget is never slower, and what does not fit is said with numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tiny_models import TINY_CONFIGS
from trainfit.errors import DeviceError, RecipeError
from trainfit.hardware import accelerator, find_device, this_machine
from trainfit.plan import Plan, Target, choose
from trainfit.plan.choose import _decided
from trainfit.plan.reasons import allocator_note
from trainfit.plan.rehearsals import _PASSES, Rehearsals
from trainfit.plan.search import Candidate, Search, best_of_each
from trainfit.plan.space import micro_batch_sizes
from trainfit.plan.variants import MUST_WIN, Tracers, weight_of
from trainfit.profile import TIER_ACCURACY, AllocatorSettings, Layout, Mesh, OptimizerVariant, Profile
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy
from trainfit.techniques.optimizer import accuracy_of
from trainfit.units import format_bytes, parse_bytes
from trainfit.workload import workload_from_config

LLAMA = workload_from_config(TINY_CONFIGS["llama"], seq_len=128, name="tiny-llama")
SMALL = workload_from_config(TINY_CONFIGS["llama"] | {"num_hidden_layers": 2}, seq_len=128, name="small-llama")
CPU = this_machine("cpu")


def target(budget: str, **changes) -> Target:
    return Target(**{"budget_bytes": parse_bytes(budget), "tokens_per_step": 8 * 128, "seq_len": 128} | changes)


def few(budget: str, **changes) -> Target:
    """For SMALL: a step of two sequences, in a third of the time."""
    return target(budget, **{"tokens_per_step": 2 * 128} | changes)


@cache
def tight_plan() -> Plan:
    return choose(LLAMA, CPU, target("23MiB"))


def test_the_plan_stays_within_its_budget_when_it_runs():
    plan = tight_plan()
    assert plan.fits
    assert plan.plain.peak_bytes > plan.budget_bytes  # else there was nothing to do
    measured = measure(LLAMA, plan.strategy, accelerator("cpu"), steps=0)
    assert measured.peak_bytes <= plan.budget_bytes
    assert plan.predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    assert plan.strategy.micro_batch_size * plan.strategy.accumulation_steps == 8
    if "block" in plan.binds:  # it is the rehearsal's, not the fast model's
        assert plan.predicted.peak_place.startswith(f"{plan.binds.partition(' of ')[2]}, ")


def test_compressed_activations_are_taken_only_where_they_may_be():
    """11 MiB are too few for every exact tier."""
    exact = choose(SMALL, CPU, few("11MiB"))
    plan = choose(SMALL, CPU, few("11MiB", may_change=frozenset({"activations"})))
    assert not exact.fits
    assert not set(exact.strategy.tiers) & set(TIER_ACCURACY)
    assert plan.fits
    assert set(plan.strategy.tiers) & set(TIER_ACCURACY)
    assert any("blocks keep saved tensors in fewer bits" in note for note in plan.notes)
    assert not any("too little for what is exact" in each.why for each in plan.alternatives)


def test_plain_training_is_chosen_where_it_fits():
    plan = choose(SMALL, CPU, few("4GiB"))
    assert set(plan.strategy.tiers) == {"keep"}
    assert plan.predicted.step_seconds <= plan.plain.step_seconds


def test_a_larger_budget_is_never_slower():
    """By the fast model, from which the search takes its order."""
    seconds, tracers = [], Tracers(LLAMA, CPU, target("1GiB"))  # which keeps its traces
    for megabytes in (21, 24, 28, 34, 48, 80):
        best = next(Search(tracers, CPU, target("1GiB"), megabytes * 10**6).best_first())
        assert best.peak_bytes <= megabytes * 10**6
        seconds.append(best.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_the_fast_model_is_close_to_the_rehearsal(family: str):
    """It leaves out what lives beside the blocks: rotary tables, masks and the embedding's own output."""
    workload = workload_from_config(TINY_CONFIGS[family], seq_len=128, name=family)
    search = Search(Tracers(workload, CPU, target("1GiB")), CPU, target("1GiB"), 10**9)
    for bounded in search.points[:: max(1, len(search.points) // 5)]:
        room = (search.smallest_of(bounded.point).peak_bytes + search.estimated(bounded).peak_bytes) // 2
        candidate = search.solve(bounded.point, room)
        assert candidate is not None
        assert candidate.peak_bytes <= room
        exact = rehearse(workload, candidate.strategy, CPU)
        assert candidate.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.03), candidate.strategy
        # All micro batches of a rehearsal are full; the last one of a window may be short.
        share = 8 / (candidate.strategy.micro_batch_size * candidate.strategy.accumulation_steps)
        assert candidate.step_seconds == pytest.approx(exact.step_seconds * share, rel=0.05), candidate.strategy


def test_nothing_fits_says_by_how_much_and_what_would():
    plan = choose(SMALL, CPU, few("1MiB"))
    assert not plan.fits
    missing = plan.predicted.peak_bytes - plan.allowed_bytes
    assert f"{missing / 2**20:.1f} MiB more than" in plan.reason
    needed = parse_bytes(plan.reason.split("give it ")[1].split(",")[0].replace(" ", ""))
    assert choose(SMALL, CPU, few(f"{int(needed * 1.01)}")).fits


def test_alternatives_say_why_they_lost():
    plan = tight_plan()
    assert plan.alternatives
    for alternative in plan.alternatives:
        over = alternative.peak_bytes > plan.allowed_bytes
        assert ("more than allowed" in alternative.why) == over
        assert over or alternative.step_seconds >= plan.predicted.step_seconds
        assert alternative.strategy != plan.strategy


def test_a_plan_survives_json():
    plan = choose(SMALL, CPU, few("12MiB", may_change=frozenset({"precision"})))
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.hash == plan.hash
    changed = plan.to_json() | {"device": "h100"}
    with pytest.raises(RecipeError, match="hash"):
        Plan.from_json(changed)
    with pytest.raises(RecipeError, match="make it again"):
        Plan.from_json({"fits": True})


def test_precision_changes_only_where_it_may():
    slow_fp32 = find_device("ascend-910b3")
    assert choose(SMALL, slow_fp32, few("1GiB")).strategy.precision == "fp32"
    allowed = few("1GiB", may_change=frozenset({"precision"}))
    assert choose(SMALL, slow_fp32, allowed).strategy.precision in ("fp32", "bf16")
    with pytest.raises(DeviceError, match="bf16"):
        choose(LLAMA, find_device("ascend-910a"), target("1GiB", precision="bf16"))


def test_a_target_that_contradicts_the_workload_is_refused():
    with pytest.raises(RecipeError, match="seq_len is 64"):
        choose(LLAMA, CPU, target("1GiB", seq_len=64))
    for wrong in ({"budget": "0"}, {"budget": "1GiB", "tokens_per_step": -5}):
        with pytest.raises(RecipeError):
            target(**wrong)
    with pytest.raises(RecipeError, match="may_change"):
        target("1GiB", may_change=frozenset({"model"}))


@pytest.mark.parametrize("layouts", [(Layout(),), ()], ids=["one device", "every layout of two"])
def test_settings_that_do_not_go_together_are_named(layouts: tuple[Layout, ...]):
    """With layouts to choose from it was an IndexError, with one a word on pipelines."""
    asked = target("60GiB", precision="fp16", optimizer=OptimizerVariant(weights="bf16_master"), layouts=layouts)
    with pytest.raises(RecipeError, match=r"bf16_master computes in bf16, precision is fp16"):
        choose(SMALL, replace(find_device("h100"), count=2), asked)


def test_too_few_micro_batches_for_a_pipeline_are_counted():
    asked = Target(2**36, 128, 128, "bf16", layouts=(Layout(Mesh(pipeline=2)),))
    with pytest.raises(RecipeError, match=r"are 1 sequences for each pipeline of 2 stages.* give 256, or fewer stages"):
        choose(SMALL, replace(find_device("h100"), count=2), asked)


def test_tokens_that_are_no_whole_sequences_are_rounded_and_said():
    plan = choose(SMALL, CPU, few("1GiB", tokens_per_step=200))
    assert plan.target.sequences_per_step == 2
    assert "256 tokens" in plan.notes[0]


def test_a_device_leaves_a_larger_margin_than_the_host():
    wanted = target("1GiB")
    assert wanted.allowed_bytes("npu") < wanted.allowed_bytes("cpu") < wanted.budget_bytes


def test_micro_batches_share_the_sequences_evenly():
    """Each size is the smallest that makes do with its number of micro batches, so that none is mostly empty."""
    assert micro_batch_sizes(1) == [1]
    assert micro_batch_sizes(12) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_sizes(13) == [1, 2, 3, 4, 5, 7, 13]
    assert set(micro_batch_sizes(1000)) >= {1, 2, 4, 5, 8, 10, 20, 25, 125, 250, 500, 1000}


CHANGES = {"precision": "bf16", "may_change": frozenset({"optimizer"})}


def test_the_optimizer_changes_only_where_it_may():
    tight = "9MiB"  # of the 9.5 MiB that weights, gradients and fp32 states take
    assert not choose(SMALL, CPU, few(tight, precision="bf16")).fits
    plan = choose(SMALL, CPU, few(tight, **CHANGES))
    assert plan.fits
    assert plan.strategy.optimizer != OptimizerVariant()
    assert any("bytes a parameter" in note for note in plan.notes)
    measured = measure(SMALL, plan.strategy, accelerator("cpu"), steps=0)
    assert plan.predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_a_lossy_variant_must_be_a_tenth_faster():
    """With room for fp32 AdamW, eight bits and rounding by chance are seen, and lose."""
    plan = choose(SMALL, CPU, few("4GiB", **CHANGES))
    assert accuracy_of(plan.strategy.optimizer, plan.strategy.precision) == "rounding"
    search = Search(Tracers(SMALL, CPU, few("4GiB", **CHANGES)), CPU, few("4GiB", **CHANGES), 2**32)
    assert {bounded.weight for bounded in search.points} == {1.0, MUST_WIN["rounding"], MUST_WIN["lossy"]}
    found = [candidate.weighed_seconds for _, candidate in zip(range(6), search.best_first())]
    assert found == pytest.approx(sorted(found), rel=0.02)  # straight lines order what has not been traced


@pytest.mark.parametrize("accuracy", ["rounding", "lossy"])
def test_what_is_less_exact_wins_only_by_what_it_must(accuracy: Any):
    """Just short of it loses, just beyond it wins; so a lossy one wins when 11 % faster, not when 9 %."""
    variants = {"rounding": OptimizerVariant(weights="bf16_residual"), "lossy": OptimizerVariant(states="int8")}
    wanted = target("1GiB", **CHANGES)
    variant = variants[accuracy]
    assert accuracy_of(variant, "bf16") == accuracy
    asked = Candidate(Strategy(1, precision="bf16"), 10**6, 1.0, weight_of(wanted, "bf16", OptimizerVariant()))

    def winner(times_faster: float) -> Candidate:
        strategy = Strategy(1, precision="bf16", optimizer=variant)
        other = Candidate(strategy, 10**6, 1.0 / times_faster, weight_of(wanted, "bf16", variant))
        return min(asked, other, key=lambda candidate: candidate.weighed_seconds)

    needed = {"rounding": 0.02, "lossy": 0.10}[accuracy]
    assert winner(1.0 + 0.9 * needed) is asked
    assert winner(1.0 + 1.1 * needed).strategy.optimizer == variant
    # What the target asks for owes nothing.
    assert weight_of(replace(wanted, optimizer=variant), "bf16", variant) == 1.0


ASKED = {
    "residual": {"optimizer": OptimizerVariant(weights="bf16_residual")},
    "kahan": {"optimizer": OptimizerVariant(weights="bf16_kahan")},
    "stochastic": {"optimizer": OptimizerVariant(weights="bf16_stochastic")},
    "update in backward": {"optimizer": OptimizerVariant(update="backward")},
    "cast by block": {"cast": "block"},
    "cast by block, update in backward": {"cast": "block", "optimizer": OptimizerVariant(update="backward")},
}


@pytest.mark.parametrize(
    ("device", "budget", "asked"),
    [
        *(("h100", "70MiB", asked) for asked in ASKED),  # 64 MiB of it are the matmul library's
        ("ascend-910b1", "10MiB", "residual"),
        ("ascend-910b1", "10MiB", "cast by block, update in backward"),
    ],
)
def test_whatever_was_asked_for_there_is_a_plan(device: str, budget: str, asked: str):
    """Beside it only variants that go together with the rest of what the target asks for."""
    wanted = few(budget, **CHANGES, **ASKED[asked], tokens_per_step=128)
    plan = choose(SMALL, find_device(device), wanted, max_grad_norm=None)
    assert plan.plain.peak_bytes > plan.allowed_bytes
    assert plan.fits == (plan.predicted.peak_bytes <= plan.allowed_bytes)
    others = [alternative.strategy.optimizer for alternative in plan.alternatives]
    assert any(variant != wanted.optimizer for variant in [plan.strategy.optimizer, *others])


def test_an_update_in_backward_is_found_where_nothing_is_clipped():
    """With one sequence a step there is one micro batch, which is all that an update in backward can take."""
    wanted = target("1GiB", tokens_per_step=128, **CHANGES)
    tracers = Tracers(SMALL, CPU, wanted)
    points = Search(tracers, CPU, wanted, 10**9).points
    assert all(bounded.point.strategy.optimizer.update == "step" for bounded in points)
    search = Search(tracers, CPU, wanted, 10**9, clips=False)
    smallest: dict[OptimizerVariant, int] = {}
    for bounded in search.points:
        variant = bounded.point.strategy.optimizer
        found = search.smallest_of(bounded.point).peak_bytes
        smallest[variant] = min(found, smallest.get(variant, found))
    in_backward = [variant for variant in smallest if variant.update == "backward"]
    assert len(in_backward) >= 4
    for variant in in_backward:
        assert smallest[variant] < smallest[replace(variant, update="step")], variant
    tight = int(min(smallest[v] for v in smallest if v.update == "step"))
    for norm, update in ((1.0, "step"), (None, "backward")):
        plan = choose(SMALL, CPU, replace(wanted, budget_bytes=tight), max_grad_norm=norm)
        assert plan.strategy.optimizer.update == update


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_fast_model_is_close_for_every_variant(precision: str):
    wanted = target("1GiB", precision=precision, may_change=frozenset({"optimizer"}))
    search = Search(Tracers(SMALL, CPU, wanted), CPU, wanted, 10**9, clips=False)
    best = best_of_each(search.points, lambda point: point.strategy.optimizer)
    by_variant = {variant: search.estimated(bounded) for variant, bounded in best.items()}
    assert len(by_variant) >= (4 if precision == "fp32" else 16)
    for candidate in by_variant.values():
        exact = rehearse(SMALL, candidate.strategy, CPU, max_grad_norm=None)
        # Temporaries of one piece of an update are not in the table.
        assert candidate.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.12), candidate.strategy


def test_fp16_on_a_device_whose_fused_adamw_does_not_skip():
    """Where the optimizer may change foreach is taken; else the plan says which device and what to set."""
    card = find_device("ascend-910a")
    asked = few("4GiB", precision="fp16", may_change=frozenset({"optimizer"}))
    plan = choose(SMALL, card, asked)
    assert plan.strategy.optimizer.kernel == "foreach"
    with pytest.raises(RecipeError, match=r"fused AdamW on npu .* optimizer\.kernel: foreach"):
        choose(SMALL, card, few("4GiB", precision="fp16"))


def test_expandable_segments_are_taken_where_only_fragmentation_is_too_much(monkeypatch: pytest.MonkeyPatch):
    """The caching allocator's usual segments hold 13 % more than is in use here, expandable ones 3 %."""
    workload, hardware = LLAMA.with_seq_len(512), find_device("h100")
    strategy = Strategy(16, tiers=("keep",) * 4)
    usual = rehearse(workload, strategy, hardware)
    allowed = (usual.peak_bytes + usual.reserved_bytes) // 2

    def exact(tried: Strategy, model: Any = None) -> Profile:
        return usual if tried == strategy else rehearse(workload, tried, hardware)

    def rehearsed(**settled: Any) -> tuple[Rehearsals, Profile]:
        wanted = target("1GiB", tokens_per_step=16 * 512, seq_len=512, **settled)
        search = Search(Tracers(workload, hardware, wanted), hardware, wanted, allowed)
        points = [bounded.point for bounded in search.points]
        (point,) = [p for p in points if (p.strategy.micro_batch_size, p.strategy.loss_chunks) == (16, 1)]
        keep = next(search.uniform(search.sketched(point)))
        rehearsals = Rehearsals(search, exact, allowed)
        profile = rehearsals._rehearse(keep)
        assert profile is not None
        return rehearsals, profile

    rehearsals, profile = rehearsed()
    chosen = rehearsals.expanded[strategy].strategy
    assert chosen == replace(strategy, allocator=AllocatorSettings(expandable_segments=True))
    assert profile.needed_bytes <= allowed < usual.needed_bytes
    (note,) = allocator_note(usual, profile, profile, allowed)
    assert note.startswith("expandable segments: with PyTorch's default ones")
    assert format_bytes(usual.needed_bytes - allowed) in note
    smallest = replace(rehearsals.expanded[strategy], strategy=strategy)
    monkeypatch.setattr(rehearsals, "best", lambda: (smallest, profile))  # where nothing else was found to fit
    assert _decided(rehearsals, exact)[1:] == (profile, (note,))
    later = replace(profile, reserved_bytes=profile.reserved_bytes - 2**20)  # as chosen operators may need
    (note,) = allocator_note(usual, profile, later, allowed)
    assert note.endswith(f"{format_bytes(later.needed_bytes)} with what was chosen after that")
    rehearsals, profile = rehearsed(allocator=AllocatorSettings())
    assert not rehearsals.expanded
    assert allocator_note(profile, profile, profile, allowed) == ()


@pytest.mark.parametrize(
    ("more_excess", "a_block", "passes", "rehearsed", "taken"),
    [
        *((0, 0.1, 0, [1], 1), (80, 0.1, 0, [1, 2], 2), (200, 0.1, 0, [1], 3)),
        *((0, 0.001, 0, [], 3), (80, 0.1, _PASSES - 4, [1], 3), (0, 0.1, _PASSES - 3, [], 3)),
    ],
    ids=["fits", "the next one fits", "does not fit", "nothing to win", "enough for one", "enough was rehearsed"],
)
def test_the_best_is_solved_again_in_the_room_that_its_rehearsal_leaves(
    more_excess: int, a_block: float, passes: int, rehearsed: list[int], taken: int
):
    """Of 1000 bytes; a block kept takes 100 and saves a_block seconds of ten. The best recomputes three of four blocks,
    and needs 50 bytes more than the fast model says; those that recompute fewer need more_excess besides. passes: what
    rehearsals took before."""
    hardware, case = find_device("h100"), SimpleNamespace(point=SimpleNamespace(kind="one"))
    profile = rehearse(LLAMA, Strategy(1, tiers=("keep",) * 4), hardware)

    def candidate(full: int) -> Candidate:
        strategy = Strategy(1, tiers=(*("full",) * full, *("keep",) * (4 - full)))
        return Candidate(strategy, 1000 - 100 * full, 10 + a_block * full, case=case)  # type: ignore[arg-type]

    tried: list[int] = []

    def exact(strategy: Strategy) -> Profile:
        tried.append(strategy.tiers.count("full"))
        fast = candidate(tried[-1])
        needs = fast.peak_bytes + 50 + (more_excess if tried[-1] < 3 else 0)
        return replace(profile, peak_bytes=needs, reserved_bytes=0, step_seconds=fast.step_seconds)

    search: Any = SimpleNamespace(
        tracers=SimpleNamespace(workload=LLAMA),
        target=few("4GiB", allocator=AllocatorSettings()),
        hardware=hardware,
        emitted=[],
        layouts=(Layout(), Layout()),
        excess_of=lambda point: 50,
        learn=lambda found, excess: None,
        solve=lambda point, room: next((one for one in map(candidate, range(5)) if one.peak_bytes <= room), None),
    )
    rehearsals = Rehearsals(search, exact, 1000)
    best = candidate(3)
    rehearsals.consider(best, exact(best.strategy))
    rehearsals._passes = passes
    found = rehearsals._with_all_room(best)
    assert tried[1:] == rehearsed
    assert found.strategy.tiers.count("full") == taken


def test_a_target_keeps_its_allocator_settings():
    settled = target("23MiB", allocator=AllocatorSettings(max_split_size_mb=64))
    assert Target.from_json(json.loads(json.dumps(settled.to_json()))) == settled
    assert Target.from_json(json.loads(json.dumps(target("23MiB").to_json()))).allocator is None


def test_recompute_is_ahead_of_time_only_where_that_is_faster_and_fits():
    """Tensor ranks wait inside of blocks; a single device never idles."""

    def taken(mesh: Mesh, tier: str = "full", allowed: int = 2**40, wanted: int | None = None) -> int:
        hardware = find_device("h100", mesh.size)
        search: Any = SimpleNamespace(target=few("4GiB", recompute_ahead=wanted), hardware=hardware)
        rehearsals = Rehearsals(search, lambda strategy: rehearse(LLAMA, strategy, hardware), allowed)
        strategy = Strategy(1, tiers=(tier,) * 4, mesh=mesh)  # type: ignore[arg-type]
        late = rehearsals.profiles[strategy] = rehearsals.exact(strategy)
        chosen = rehearsals.ahead(Candidate(strategy, late.peak_bytes, late.step_seconds)).strategy
        if chosen != strategy:
            early = rehearsals.profiles[chosen]
            assert early.step_seconds < late.step_seconds
            assert early.communication_seconds == pytest.approx(late.communication_seconds)
            assert early.exposed_communication_seconds < late.exposed_communication_seconds
            (note,) = rehearsals.notes
            assert note.startswith("recompute one block ahead: ")
        return chosen.recompute_ahead

    pair = Mesh(tensor=2)
    assert taken(pair) == 1
    assert taken(Mesh()) == taken(pair, "keep") == taken(pair, allowed=1) == taken(pair, wanted=0) == 0


def test_time_of_early_recompute_on_a_device_that_never_idles_is_that_of_late():
    hardware = find_device("h100")
    late = Strategy(2, 2, tiers=("full",) * 4)
    one, other = (rehearse(LLAMA, each, hardware) for each in (late, replace(late, recompute_ahead=1)))
    assert other.step_seconds == pytest.approx(one.step_seconds)
    assert other.peak_bytes > one.peak_bytes
    assert one.reserved is not None
    assert other.reserved is not None
    assert one.reserved.other_streams_bytes == 0 < other.reserved.other_streams_bytes
