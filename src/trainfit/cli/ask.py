"""trainfit ask: questions that one command answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli.console import notes, output, print_json, print_notes, status
from trainfit.cli.options import (
    MAX_ACCUMULATION,
    MAX_DEVICES,
    MAX_MICRO_BATCH_TOKENS,
    MAX_SEQ_LEN,
    POLICY_NAMES,
    JsonOption,
    QuestionOptions,
    Verb,
    check_range,
    question_options,
    takes,
)
from trainfit.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNPRICED = POLICY_NAMES.replace("memory, cost, ", "")  # these two go by the prices of a plan
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens-per-step", metavar="N", show_default="one micro batch", help="Tokens of a step."),
]
GranularityOption = Annotated[int, typer.Option(metavar="N", help="The answer is a multiple of it.")]
WayOption = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="POLICY", help=f"Also with this one; may be repeated. {_UNPRICED}."),
]
AtMostOption = Annotated[int, typer.Option(metavar="N", help="Devices that there are.")]
MicroBatchOption = Annotated[int, typer.Option("--micro-batch", metavar="N", help="Sequences at once.")]
CardsOption = Annotated[
    list[str], typer.Option("--device", metavar="NAME", help="A device that `trainfit devices` lists; two or more.")
]


_SHARED = question_options(TokensOption)


def _takes(*left_out: str) -> Callable[[Verb], Verb]:
    """Turns verb(options: QuestionOptions, *, ...) into a command with what questions share and the verb's own."""
    return takes(QuestionOptions, {name: option for name, option in _SHARED.items() if name not in left_out})


ask = typer.Typer(no_args_is_help=True, help="Answer a question: sequence, batch, devices, savings, cards.")


@ask.command()
@_takes("seq_len")
def sequence(options: QuestionOptions, *, granularity: GranularityOption = 256, json: JsonOption = False) -> int:
    """The longest sequence that fits, one at a time on each device.

    [dim]trainfit ask sequence llama-3.1-8b --device h100 --devices 8[/]
    """
    check_range("--granularity", granularity, 1, MAX_SEQ_LEN)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.asking import open_question
        from trainfit.plan.questions import longest_sequence
        from trainfit.report.question_view import sequence_view

        asked = open_question(options, say, finds_length=True)
        answer = longest_sequence(asked.setting, granularity=granularity)
    return _print(asked, "the longest sequence that fits", answer.to_json(), sequence_view(answer), json=json)


@ask.command()
@_takes("tokens_per_step")
def batch(options: QuestionOptions, *, policy: WayOption = None, json: JsonOption = False) -> int:
    """The largest micro batch that fits, plain and at the leanest.

    [dim]trainfit ask batch llama-2-7b --device ascend-910b3 --devices 8 --seq-len 4096[/]
    """
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.asking import open_question
        from trainfit.plan.policies import parse_policy
        from trainfit.plan.questions import LEANEST, PLAIN, largest_batches
        from trainfit.report.question_view import batches_table

        ways = (PLAIN, *(str(parse_policy(text)) for text in policy or ()), LEANEST)
        asked = open_question(options, say)
        answer = largest_batches(asked.setting, ways)
    found = {"batches": [each.to_json() for each in answer]}
    return _print(asked, "the largest micro batch that fits", found, batches_table(answer), json=json)


@ask.command("devices")
@_takes("devices", "tokens_per_step")
def devices_(options: QuestionOptions, *, at_most: AtMostOption = 1024, json: JsonOption = False) -> int:
    """The fewest devices that can train it, all that stays shared among them (ZeRO 3).

    [dim]trainfit ask devices llama-2-13b --device ascend-910b3 --seq-len 4096[/]
    """
    check_range("--at-most", at_most, 1, MAX_DEVICES)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.asking import open_question, sharded_over
        from trainfit.plan.questions import fewest_devices
        from trainfit.report.question_view import devices_view

        asked = open_question(options, say)
        answer = fewest_devices(asked.setting, sharded_over, at_most=at_most)
    return _print(asked, "the fewest devices", answer.to_json(), devices_view(answer), json=json)


@ask.command()
@_takes("tokens_per_step", "optimizer")
def savings(options: QuestionOptions, *, micro_batch: MicroBatchOption = 1, json: JsonOption = False) -> int:
    """What each technique saves and costs here: one change at a time against plain training.

    [dim]trainfit ask savings llama-2-7b --device ascend-910b3 --devices 8 --seq-len 4096 --micro-batch 4[/]
    """
    check_range(
        "--micro-batch", micro_batch, 1, min(MAX_ACCUMULATION, MAX_MICRO_BATCH_TOKENS // (options.seq_len or 1))
    )
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.asking import open_question
        from trainfit.plan.savings import savings as list_savings
        from trainfit.report.question_view import savings_table

        asked = open_question(options, say)
        plain, rows = list_savings(asked.setting, micro_batch)
    found = {"plain": plain.to_json(), "savings": [row.to_json() for row in rows]}
    return _print(asked, "what each technique saves", found, savings_table(plain, rows), json=json)


@ask.command()
@_takes("device", "memory", "optimizer")
def cards(options: QuestionOptions, *, device: CardsOption, json: JsonOption = False) -> int:
    """Devices side by side: the best plan of each for the same step.

    [dim]trainfit ask cards llama-2-7b --device ascend-910b3 --device h100 --devices 8 --seq-len 4096 \
--tokens-per-step 1M[/]
    """
    if len(set(device)) < 2:
        raise RecipeError(
            f"--device names {device[0]} alone; give two or more, such as --device ascend-910b3 --device h100"
        )
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.asking import open_question
        from trainfit.plan.questions import compare_cards
        from trainfit.report.question_view import cards_table

        names = list(dict.fromkeys(device))
        each = [open_question(replace(options, device=name), say) for name in names]
        first = each[0].setting
        pairs = [(asked.setting.hardware, asked.every_layout()) for asked in each]
        answer = compare_cards(first.workload, pairs, max_grad_norm=first.max_grad_norm, on_progress=say)
    if json:
        print_json({"model": first.workload.name, "cards": [card.to_json() for card in answer]})
        return 0
    output().print(cards_table(answer))
    return 0


def _print(asked: Any, what: str, answer: dict[str, Any], view: RenderableType, *, json: bool) -> int:
    setting = asked.setting
    name, device, count = setting.workload.name, setting.hardware.spec.name, setting.hardware.count
    if json:
        print_json({**answer, "model": name, "device": device, "devices": count, "notes": list(asked.notes)})
        return 0
    console = output()
    on = device if count == 1 else f"{count} x {device}"
    console.print(f"[bold]{name}[/] on {on}: {what}")
    console.print(view)
    print_notes(asked.notes, console)
    return 0
