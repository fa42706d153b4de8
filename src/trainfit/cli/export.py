"""trainfit export: a run's weights as a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainfit.cli.console import notes, output, print_json, print_notes, status
from trainfit.cli.options import JsonOption
from trainfit.errors import RecipeError
from trainfit.units import format_bytes, format_count, parse_bytes

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder (its last checkpoint) or a checkpoint's.")
]
FolderArgument = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.")]
ShardOption = Annotated[str, typer.Option(metavar="SIZE", help="Size at which a file is full.")]


AdapterOption = Annotated[
    bool, typer.Option("--adapter-only", help="Write the adapter alone, for peft.PeftModel.from_pretrained.")
]


def export(
    run: RunArgument,
    folder: FolderArgument,
    max_shard: ShardOption = "5GB",
    adapter_only: AdapterOption = False,
    json: JsonOption = False,
) -> int:
    """Write a run's weights as safetensors that transformers loads with from_pretrained.

    One tensor at a time is in memory, however many ranks saved. An adapter is merged into its weights.

    [dim]trainfit export runs/quickstart model[/]
    """
    try:
        max_shard_bytes = parse_bytes(max_shard)
    except ValueError as error:
        raise RecipeError(f"--max-shard is {max_shard!r}: {error}") from None
    with status(notes(), "Importing torch") as say:
        from trainfit.train.export import export_safetensors, find_checkpoint

        checkpoint = find_checkpoint(run.expanduser())
        say(f"Exporting {checkpoint}")
        exported = export_safetensors(checkpoint, folder.expanduser(), max_shard_bytes, adapter_only=adapter_only)
    if json:
        print_json(exported.to_json())
        return 0
    console = output()
    console.print(
        f"step {exported.step} of {exported.checkpoint}: {format_count(exported.num_parameters)} parameters, "
        f"{format_bytes(exported.num_bytes)} in {exported.folder}",
        markup=False,
    )
    print_notes(exported.notes, console)
    return 0
