"""The page's other sections: three beliefs, GPT-13B on one card, Llama-2-7B on eight."""

from __future__ import annotations

from llama_13b.beliefs import EmbeddingGradients, HalfNumbers
from llama_13b.block import BlockStory, tensor_bytes
from llama_13b.cases import (
    BATCHES,
    BIG,
    GPT,
    GPT_CASES,
    GPT_PLAN,
    SEVEN,
    SEVEN_PLAN,
    Case,
    stage_case,
    technique_case,
)
from llama_13b.page import Answers, code, listed, prose
from llama_13b.tables import GIB, arrangement, case_rows, fits, gib, needs, table
from trainfit.plan import Plan
from trainfit.step.strategy_text import format_tiers

GB = 10**9


def beliefs(answers: Answers, story: BlockStory, embedding: EmbeddingGradients, half: HalfNumbers) -> str:
    return "\n\n".join(
        [
            "## Three things that are easily taken for true",
            prose(
                """
                Each of these has a good reason behind it, and each is a little off. The figures come from code that
                runs when this page is made, and tests run it too.
                """
            ),
            one_block(answers, story),
            an_embedding(embedding),
            small_numbers(half),
        ]
    )


def one_block(answers: Answers, story: BlockStory) -> str:
    whole = technique_case(BIG, BATCHES[0], "no technique")
    share = answers.profile(whole).categories["activations"] / len(whole.strategy.tiers)
    rows = [
        [
            " x ".join(map(str, shape)),
            dtype,
            str(count),
            f"{count * tensor_bytes(shape, dtype) / GB:.2f}",
        ]
        for (shape, dtype), count in sorted(story.kinds.items(), key=lambda item: -item[1] * tensor_bytes(*item[0]))
    ]
    tiers = [
        [f"`{tier}`", f"{saved / GB:.2f}", f"{saved / story.hidden_bytes:.1f}"] for tier, saved in story.saved.items()
    ]
    return "\n\n".join(
        [
            f'### "At batch 16 the activations of one block take {story.hidden_bytes / GB:.1f} GB"',
            prose(
                f"""
                That is the size of one hidden tensor in half precision, 16 x 4096 x 5120 x 2 bytes =
                {story.hidden_bytes / GB:.2f} GB, and it is what a block keeps when it is checkpointed with
                half-precision hidden states. A block that keeps everything saves queries, keys, values, the output of
                attention, three tensors of the wide middle layer, and more: {story.saved["keep"] / GB:.1f} GB, or
                {story.saved["keep"] / story.hidden_bytes:.0f} hidden tensors. By
                [tier](techniques/activation-tiers.md), one block at batch 16 on one device:
                """
            ),
            "![What one block saves](images/llama-13b-block.svg)",
            table(["tier", "GB", "in hidden tensors"], tiers),
            prose(
                f"""
                And tensor by tensor, as autograd's own hook sees `keep`, each memory once. They add up to
                {story.listed_bytes / GB:.3f} GB; this card's attention keeps another
                {story.kernel_bytes / GB:.3f} GB that PyTorch does not list, the largest score and the sum of each row
                eight times over. The tracer's figure has both, {story.saved["keep"] / GB:.3f} GB:
                """
            ),
            table(["shape", "dtype", "tensors", "GB"], rows, left=2),
            prose(
                f"""
                Norms compute in fp32, so some tensors weigh 4 bytes an element. On 8 cards whose weights are gathered
                in bf16, hidden states are bf16 from the embedding on: there a block saves {share / GB:.1f} GB
                ({gib(share)} GiB) in the rehearsal of "no technique" above.
                """
            ),
        ]
    )


def an_embedding(found: EmbeddingGradients) -> str:
    reentrant = "none at all (`None`)" if found.reentrant is None else f"{found.reentrant:.4f}"
    same = "equal to the bit" if found.equal else "NOT equal"
    rows = [
        ["no checkpoint", f"{found.plain:.4f}"],
        ["`checkpoint(embedding, ids, use_reentrant=False)`", f"{found.non_reentrant:.4f}"],
        ["`checkpoint(embedding, ids, use_reentrant=True)`", reentrant],
    ]
    return "\n\n".join(
        [
            '### "Checkpointing an embedding loses its gradient"',
            prose(
                """
                It did, with the older, reentrant kind of checkpoint. That one runs the module without recording, and
                records again in backward if one of its *inputs* needs a gradient. Token ids are integers and never
                do, so backward does not come by. The newer kind hooks saved tensors and does not ask. A table of 11
                rows, a head behind it, the norm of the embedding's gradient:
                """
            ),
            table(["embedding runs", "gradient's norm"], rows),
            prose(
                f"""
                The first two are {same}. PyTorch warns: "{found.warning}"; and where nothing behind the embedding
                trains, backward stops with "{found.frozen_head_error}". trainfit's recomputation is of the newer
                kind, and leaves embeddings alone for another reason: an embedding saves only ids, so there is nothing
                to win.
                """
            ),
        ]
    )


def small_numbers(half: HalfNumbers) -> str:
    rows = [
        ["1e-8, to fp16", f"{half.tiny:.4g}"],
        ["1e-8 x 65536 = 6.5536e-4, to fp16", f"{half.scaled:.4g}"],
        ["1e-8, to fp16, then x 65536", f"{half.scaled_after:.4g}"],
        ["the smallest fp16 above zero, 2^-24", f"{half.smallest:.4g}"],
        ["the smallest with all its digits, 2^-14", f"{half.smallest_normal:.4g}"],
        ["the largest", f"{half.largest:.0f}"],
    ]
    return "\n\n".join(
        [
            '### "1e-8 x 65536 underflows in fp16"',
            prose(
                f"""
                1e-8 itself does; its product with the usual loss scale does not, and that is just what the scale is
                for. It comes out {half.scaled / half.smallest:,.0f} times above the smallest fp16 number. What
                matters is the order: the *loss* is scaled, before backward makes small numbers of it. Scaling a
                gradient that has already become zero brings nothing back.
                """
            ),
            table(["number", "in fp16"], rows),
            prose(
                "[Loss scaling](techniques/loss-scaling.md) has what happens when the other end, infinity, is reached."
            ),
        ]
    )


def gpt(answers: Answers) -> str:
    plan = answers.plan(GPT_PLAN)
    profiles = {case: answers.profile(case) for case in GPT_CASES}
    good = [case for case, profile in profiles.items() if profile.needed_bytes <= plan.allowed_bytes]
    one, many = ([f'"{c.name}"' for c in good if (c.setting.devices == 1) is single] for single in (True, False))
    plain = profiles[GPT_CASES[0]]
    return "\n\n".join(
        [
            f"## GPT-13B on one 32 GB card (`{GPT.device}`)",
            prose(
                f"""
                One sequence of {GPT.seq_len} tokens, {gib(plan.allowed_bytes)} GiB allowed. The card has bf16, so
                that every way to keep weights and states can be tried; on one with fp16 alone there are fewer. Plain
                training needs {plain.needed_bytes / plan.allowed_bytes:.0f} times what there is.
                """
            ),
            case_rows(GPT_CASES, profiles, plan.allowed_bytes),
            code(c.command for c in (GPT_CASES[3], GPT_CASES[-1])),
            prose(f"{_full_tuning(plan)} On one card {_what_fits(one)}. On eight, {_what_fits(many)}."),
            prose(
                """
                Recomputing gives back activations and no states; states on the host give back moments and masters,
                and what stays is 2 bytes for each weight and 2 for its gradient. LoRA has neither moments nor
                gradients for the base, so the base's own bytes decide: 2 in half, about half a byte in NF4. (NF4
                takes `nn.Linear` layers; GPT-2's are another class, so that row is Llama's 13B.) See
                [optimizer](techniques/optimizer.md) and [adapters](techniques/adapters.md).
                """
            ),
        ]
    )


def _full_tuning(plan: Plan) -> str:
    if plan.fits:
        return (
            f"With `--may-change optimizer` the planner finds {arrangement(plan)}, "
            f"`{format_tiers(plan.strategy.tiers)}`: {gib(plan.predicted.peak_bytes)} GiB."
        )
    return f"Training all weights on one such card, whatever may change, {plan.reason}."


def _what_fits(names: list[str]) -> str:
    if not names:
        return "nothing in the table fits"
    verb = "fits" if len(names) == 1 else "fit"
    return f"{verb} {listed(names)}"


def seven(answers: Answers) -> str:
    plan = answers.plan(SEVEN_PLAN)
    big, small = answers.allowed, plan.allowed_bytes
    rows = []
    for recompute in (False, True):
        for stage in range(4):
            profile = answers.profile(stage_case(SEVEN, stage, recompute=recompute))
            what = "all recomputed" if recompute else "all kept"
            verdicts = [fits(profile, allowed) for allowed in (big, small)]
            rows.append([f"ZeRO {stage}", what, gib(profile.resident_bytes), *needs(profile), *verdicts])
    heads = ["stage", "blocks", "between steps", "peak", "held", "64 GB", "32 GB"]
    return "\n\n".join(
        [
            "## Llama-2-7B on 8 cards, ZeRO 0 to 3",
            prose(
                f"""
                One sequence of {SEVEN.seq_len} tokens a card in bf16; where blocks are recomputed, the loss is in 8
                pieces too. Allowed are {gib(big)} GiB of a 64 GB card and {gib(small)} of one of 32.
                """
            ),
            table(heads, rows, left=2),
            code(stage_case(SEVEN, stage, recompute=True).command for stage in (0, 3)),
            prose(_stages_that_fit(answers, big, small)),
            prose(_seven_plan(SEVEN_PLAN.setting.device, plan)),
            code([SEVEN_PLAN.command]),
        ]
    )


def _stages_that_fit(answers: Answers, big: int, small: int) -> str:
    def good(allowed: int, recompute: bool) -> str:
        cases: list[Case] = [stage_case(SEVEN, stage, recompute=recompute) for stage in range(4)]
        return listed(case.name for case in cases if answers.profile(case).needed_bytes <= allowed)

    return (
        f"On 64 GB fit: {good(big, False)} with all kept, {good(big, True)} with all recomputed. "
        f"On 32 GB: {good(small, False)} with all kept, {good(small, True)} with all recomputed. "
        "Stages 0 to 2 hold the whole model while they compute, so recomputing cannot bring them below its size."
    )


def _seven_plan(device: str, plan: Plan) -> str:
    if not plan.fits:
        return f"For {BATCHES[0]} sequences on `{device}` {plan.reason}."
    strategy = plan.strategy
    return (
        f"For {BATCHES[0]} sequences the planner takes on `{device}` micro batches of {strategy.micro_batch_size}, "
        f"{arrangement(plan)}, `{format_tiers(strategy.tiers)}`, the loss in {strategy.loss_chunks} pieces: "
        f"{plan.predicted.peak_bytes / GIB:.1f} GiB."
    )
