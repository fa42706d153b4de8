"""The page, section by section. Sentences are made from figures, so that they stay true when figures move."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llama_13b.cases import (
    BATCHES,
    BIG,
    BIG_PLANS,
    SMALL,
    SMALL_EXACT,
    SMALL_PLAN,
    TECHNIQUES,
    Answer,
    Case,
    Job,
    Question,
    Setting,
    allowed_bytes,
    stage_case,
    technique_case,
)
from llama_13b.tables import arrangement, fits, gib, memory_table, needs, plan_rows, speed_table, table
from trainfit.plan import Plan
from trainfit.profile import Profile
from trainfit.step.strategy_text import format_tiers


@dataclass(frozen=True)
class Answers:
    """What was rehearsed and chosen, by what was asked."""

    found: Mapping[Job, Answer]

    def profile(self, case: Case) -> Profile:
        profile = self.found[case]
        assert isinstance(profile, Profile)
        return profile

    def plan(self, question: Question) -> Plan:
        plan = self.found[question]
        assert isinstance(plan, Plan)
        return plan

    def plans(self, questions: Mapping[int, Question]) -> dict[int, Plan]:
        return {batch: self.plan(question) for batch, question in questions.items()}

    def technique(self, sequences: int, name: str, setting: Setting = BIG) -> Profile:
        return self.profile(technique_case(setting, sequences, name))

    @property
    def allowed(self) -> int:
        """What a plan may take of the 64 GB card."""
        return allowed_bytes(BIG)

    @property
    def allowed_small(self) -> int:
        """The same of the 32 GB card."""
        return allowed_bytes(SMALL)


def prose(text: str) -> str:
    """Paragraphs of lines of at most 120 characters."""
    paragraphs = (" ".join(each.split()) for each in text.strip().split("\n\n"))
    return "\n\n".join(textwrap.fill(p, 120, break_long_words=False, break_on_hyphens=False) for p in paragraphs)


def bullets(text: str) -> str:
    """A bullet for each paragraph."""
    return "\n".join(bullet(" ".join(each.split())) for each in text.strip().split("\n\n"))


def listed(words: Iterable[str], empty: str = "none") -> str:
    *most, last = list(words) or [empty]
    return f"{', '.join(most)} and {last}" if most else last


def code(commands: Iterable[str]) -> str:
    return "\n".join(f"    {command}" for command in commands)


def intro(answers: Answers) -> str:
    return "# LLaMA-13B on 8 Ascend 910 cards\n\n" + prose(
        f"""
        A well-known example in articles on saving memory: LLaMA-13B on 8 cards, sequences of {BIG.seq_len} tokens,
        global batches of {listed(map(str, BATCHES))} sequences; first without any technique, then with gradient
        accumulation, with activation checkpointing of every second block, and with both. Here is what each of them
        needs, part by part, what the cards send to each other, how fast it is beside the others, whether it fits, and
        what trainfit would do instead.

        No figure on this page was typed in. `make article` rehearses every case (the real training step, on tensors
        without memory, as one of 8 ranks) and writes page and pictures; under the tables stand commands that give
        single figures. Nothing here was run on a card: bytes are counted, seconds are a model's, and serve to
        compare.
        """
    )


def short_answer(answers: Answers) -> str:
    batch = BATCHES[0]
    plain = answers.profile(stage_case(BIG, 0, recompute=True))
    shared = answers.profile(stage_case(BIG, 3, recompute=True))
    plan, exact = answers.plan(BIG_PLANS[batch]), answers.plan(SMALL_EXACT)
    first = answers.technique(batch, "no technique")
    good = [name for name in TECHNIQUES if answers.technique(batch, name).needed_bytes <= answers.allowed]
    lines = [
        f"One copy of the model with AdamW in fp32 takes {gib(plain.resident_bytes)} GiB of parameters and moments "
        f"between steps, and {gib(plain.peak_bytes)} GiB at the peak of the smallest step. No card holds that, and "
        "neither accumulation nor checkpointing changes it: it has to be shared. ZeRO 3 over 8 cards brings the two "
        f"down to {gib(shared.resident_bytes)} and {gib(shared.peak_bytes)} GiB.",
        f"With that in place, {batch} sequences without any technique still need {gib(first.peak_bytes)} GiB a card, "
        f"{first.categories['activations'] / first.peak_bytes:.0%} of it activations.",
        f"Of the five cases {listed(good)} {'fit' if len(good) != 1 else 'fits'} on a 64 GB card "
        f"(`{BIG.device}`, {gib(answers.allowed)} GiB allowed) at a global batch of {batch}.",
        _best_line(plan, answers),
        f"On the 32 GB card (`{exact.device}`, fp16 only, {gib(exact.allowed_bytes)} GiB allowed) "
        f"{_small_line(answers)}",
    ]
    return "## The short answer\n\n" + "\n".join(bullet(line) for line in lines)


def bullet(line: str) -> str:
    return textwrap.fill(line, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _best_line(plan: Plan, answers: Answers) -> str:
    strategy = plan.strategy
    if not plan.fits:
        return f"No plan fits there: {plan.reason}."
    both = answers.technique(BATCHES[0], "both")
    ratio = both.step_seconds / plan.predicted.step_seconds
    return (
        f"What trainfit takes there: {strategy.accumulation_steps} micro batches of {strategy.micro_batch_size}, "
        f"`{format_tiers(strategy.tiers)}` from the first block to the last, the loss in {strategy.loss_chunks} "
        f"pieces, {arrangement(plan)}: {gib(plan.predicted.peak_bytes)} GiB, at {ratio:.2f} times the speed of "
        "accumulation 8 with every second block checkpointed."
    )


def _small_line(answers: Answers) -> str:
    exact, changed = answers.plan(SMALL_EXACT), answers.plan(SMALL_PLAN)
    if exact.fits:
        return f"AdamW in fp32 fits: {arrangement(exact)}, {gib(exact.predicted.peak_bytes)} GiB."
    missing = gib(exact.predicted.needed_bytes - exact.allowed_bytes)
    line = f"no plan with AdamW's states in fp32 on the card fits; the smallest misses by {missing} GiB."
    if changed.fits:
        line += f" With {arrangement(changed)} it does, in {gib(changed.predicted.peak_bytes)} GiB."
    return line


def how_to_read(answers: Answers) -> str:
    usable = BIG.hardware.usable_bytes
    total = BIG.hardware.total_bytes
    return "## How to read it\n\n" + bullets(
        f"""
        **GiB** are 2^30 bytes, of one card (rank 0 of {BIG.devices}), at the moment at which most is live. Parts add
        up to the peak.

        **params**: the card's share of fp32 parameters, and what is gathered of other shares just then. **grads**:
        its share of fp32 gradients, and whole ones on their way. **states**: its share of AdamW's two moments.

        **comm**: buffers that collectives read or write. **logits**: logits, their logarithms and their gradients.
        **activations**: what forward keeps for backward. **other**: temporaries.

        **held**: what the device's caching allocator has taken from the card by then, where the rehearsal replays it;
        else the peak again.

        **fits?**: whether that stays within what is allowed, or by how many GiB it does not. A 64 GB card reports
        {gib(total)} GiB and leaves {gib(usable)} to tensors (`trainfit devices --json` names sources);
        {gib(usable - answers.allowed)} of them stay free as a margin.

        **every 2**: blocks 0, 2, 4, ... keep their input alone and run again in backward; the others keep all.

        **gathers**, **reduces**, **sums**: all-gathers of parameters, reduce-scatters of gradients and all-reduces of
        one step: how often, and the bytes of whole tensors; over a ring each card sends 7/8 of them. **waits**: time
        that no computation hides.

        **speed**: tokens a second over those of no technique at the same batch, which has to be imagined where that
        does not fit.

        Matmuls run in half precision; weights are gathered in it (`cast: block`), but kept and updated in fp32.
        Attention is fused: its scores never exist.
        """
    )


def states(answers: Answers) -> str:
    rows = []
    for stage in range(4):
        profile = answers.profile(stage_case(BIG, stage, recompute=True))
        parts = [profile.categories[part] for part in ("parameters", "gradients", "optimizer")]
        rows.append(
            [
                f"ZeRO {stage}",
                gib(profile.resident_bytes),
                *map(gib, parts),
                gib(profile.peak_bytes - sum(parts)),
                *needs(profile),
                fits(profile, answers.allowed),
                fits(profile, answers.allowed_small),
            ]
        )
    heads = ["stage", "between steps", "params", "grads", "states", "rest", "peak", "held", "64 GB", "32 GB"]
    case = stage_case(BIG, 3, recompute=True)
    return "\n\n".join(
        [
            "## First the states: 13 billion parameters do not fit one card",
            prose(
                """
                The smallest step there is: one sequence a card, every block recomputed, the loss in 8 pieces. What is
                left is nearly all states: 4 bytes a parameter, 4 of its gradient and 8 of AdamW's moments. Stage 0 is
                what people call data parallel; a stage shares moments (1), gradients too (2), parameters too (3).
                """
            ),
            table(heads, rows),
            code([case.command]),
            prose(
                """
                Stages 1 and 2 still gather the whole model in every step. So all that follows is ZeRO 3, and "no
                technique" means none beside it.
                """
            ),
        ]
    )


def five_cases(answers: Answers) -> str:
    rows = [(str(b), name, answers.technique(b, name)) for b in BATCHES for name in TECHNIQUES]
    base = {str(batch): answers.technique(batch, "no technique") for batch in BATCHES}
    last = technique_case(BIG, BATCHES[0], "both")
    return "\n\n".join(
        [
            f"## The five cases on 8 x `{BIG.device}`, 64 GB, bf16",
            "![Memory of the five cases and of the plan](images/llama-13b-memory.svg)",
            memory_table(rows, answers.allowed),
            code([last.command]),
            prose(_growth(answers)),
            "### What the cards say to each other, and how fast it is",
            speed_table(rows, base),
            prose(_traffic(answers)),
        ]
    )


def _growth(answers: Answers) -> str:
    small, large = (answers.technique(batch, "no technique") for batch in (BATCHES[0], BATCHES[-1]))
    eight, both = (answers.technique(BATCHES[0], name) for name in ("accumulation 8", "both"))
    full = answers.profile(stage_case(BIG, 3, recompute=True))
    return f"""
        Activations and logits grow with the micro batch: from {BATCHES[0]} to {BATCHES[-1]} sequences the peak
        without a technique goes from {gib(small.peak_bytes)} to {gib(large.peak_bytes)} GiB. Accumulation divides
        them by its steps and leaves the states as they are; from the second micro batch on, gradients are there
        during forward. Every second block checkpointed about halves what accumulation left
        ({gib(eight.categories["activations"])} to {gib(both.categories["activations"])} GiB of activations), no more:
        the other half of the blocks keeps everything. All blocks recomputed at one sequence come to
        {gib(full.peak_bytes)} GiB in all. A number of accumulation steps that is fixed beforehand is right for one
        batch only; the next larger one needs more steps, not a larger micro batch.
        """


def _traffic(answers: Answers) -> str:
    one, eight = (answers.technique(BATCHES[0], name) for name in ("no technique", "accumulation 8"))
    gathers = [profile.collectives["all_gather"] for profile in (one, eight)]
    hidden = 1 - eight.exposed_communication_seconds / eight.communication_seconds
    return f"""
        With ZeRO 3 each micro batch gathers every block twice, for forward and for backward, and reduces its
        gradients once: {gathers[0].count} gathers of {gib(gathers[0].bytes)} GiB become {gathers[1].count} of
        {gib(gathers[1].bytes)} GiB with 8 micro batches. So accumulation is not free over cards:
        {eight.communication_seconds:.1f} s of a step's {eight.step_seconds:.1f} s are under way on the links, of
        which {hidden:.0%} hide behind computation if links reach the catalogue's figure. Checkpointing adds no
        traffic, it adds arithmetic. Neither the batch nor the sequence length changes the bytes of one micro batch.
        """


def best_plans(answers: Answers) -> str:
    plans = answers.plans(BIG_PLANS)
    return "\n\n".join(
        [
            "### The best plan",
            prose(
                """
                What `choose()` takes: micro batch, accumulation, ZeRO stage, tier of each block and pieces of the
                loss, the fastest that fits. Nothing that is learnt changes.
                """
            ),
            plan_rows(plans),
            code([BIG_PLANS[BATCHES[0]].command]),
            prose(" ".join(_beside(batch, plan, answers) for batch, plan in plans.items())),
        ]
    )


def _beside(batch: int, plan: Plan, answers: Answers) -> str:
    if not plan.fits:
        return f"At {batch} sequences {plan.reason}."
    cases = {name: answers.technique(batch, name) for name in TECHNIQUES}
    fitting = {name: each for name, each in cases.items() if each.needed_bytes <= plan.allowed_bytes}
    ideal = cases["no technique"].step_seconds / plan.predicted.step_seconds
    line = f"At {batch} sequences it runs at {ideal:.2f} of the speed that no technique would have if it fitted"
    if not fitting:
        return line + "; none of the five does."
    name, fastest = min(fitting.items(), key=lambda item: item[1].step_seconds)
    return line + f", and at {fastest.step_seconds / plan.predicted.step_seconds:.2f} of that of {name}."


def small_card(answers: Answers) -> str:
    setting, batch = SMALL_EXACT.setting, BATCHES[0]
    rows = [(str(batch), name, answers.technique(batch, name, setting)) for name in TECHNIQUES]
    exact, plans = answers.plan(SMALL_EXACT), {batch: answers.plan(SMALL_PLAN)}
    verdict = "fits" if exact.fits else exact.reason
    return "\n\n".join(
        [
            f"## The first 910: 8 x `{setting.device}`, 32 GB, fp16",
            prose(
                """
                The card of most such articles has no bf16. The step runs in fp16 with a loss scale, and AdamW without
                its fused kernel, since the NPU's ignores that scale. Bytes are otherwise those from above.
                """
            ),
            memory_table(rows, exact.allowed_bytes),
            prose(f"With AdamW's states in fp32 on the card, what `choose()` finds for {batch} sequences {verdict}."),
            prose("With `--may-change optimizer` it may keep weights and states in another way:"),
            plan_rows(plans),
            code([SMALL_PLAN.command]),
            prose(" ".join(_notes(plans.values()))),
        ]
    )


def _notes(plans: Iterable[Plan]) -> list[str]:
    notes = dict.fromkeys(note for plan in plans if plan.fits for note in plan.notes)
    return [f"{note[0].upper()}{note[1:]}." for note in notes] or ["None of these fits."]
