"""trainfit devices: what the catalogue and this machine know."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from trainfit.cli.console import notes, output, print_json, status
from trainfit.cli.options import JsonOption

if TYPE_CHECKING:
    from trainfit.hardware import DeviceSpec

CalibrateOption = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine first, in under a minute, and keep the figures.")
]


def devices(calibrate: CalibrateOption = False, json: JsonOption = False) -> int:
    """List the devices that --device takes: usable memory, dense TFLOP/s, bandwidth, and how sure each is.

    Every figure's source is in the output of --json.
    """
    if calibrate:
        _calibrate()
    with status(notes(), "Measuring this machine"):
        from trainfit.hardware import catalogue, this_machine
        from trainfit.report import devices_table

        here = this_machine().spec
    rows = [("this", here), *((spec.name, spec) for spec in catalogue())]
    if json:
        print_json({"devices": [_to_json(name, spec) for name, spec in rows]})
        return 0
    console = output()
    console.print(devices_table(rows))
    console.print(f"this = {escape(here.name)}, {_how(here)}. Sources of every figure: --json", style="dim")
    return 0


def _how(spec: DeviceSpec) -> str:
    if spec.calibration is None:
        return "times not calibrated: trainfit devices --calibrate"
    return f"times {spec.calibration.source}, rounds {spec.calibration.spread:.0%} apart"


def _calibrate() -> None:
    """Measures, with a bar on a terminal, and stores."""
    console = notes()
    with status(console, "Importing torch"):
        from functools import partial

        from trainfit.hardware import accelerator
        from trainfit.hardware.calibration_store import save_calibration
        from trainfit.hardware.microbenchmarks import calibrate
        from trainfit.hardware.runtime import best_kind
        from trainfit.rehearsal.operator_cost import kernel_prices
        from trainfit.techniques.activation import CALIBRATED, recompute_block
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("Calibrating"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        device = accelerator(best_kind())
        made = calibrate(
            device,
            price_of=kernel_prices,
            tiers={tier: partial(recompute_block, tier=tier, accelerator=device) for tier in CALIBRATED},
            report=lambda what, share: bar.update(task, completed=share, description=what),
        )
    console.print(f"{escape(made.device)}: {len(made.tables)} tables in {escape(str(save_calibration(made)))}")


def _to_json(name: str, spec: DeviceSpec) -> dict[str, Any]:
    """Tables of a calibration stay in its file."""
    found = spec.calibration
    facts = asdict(replace(spec, calibration=None))
    if found is not None:
        facts["calibration"] = {key: value for key, value in asdict(found).items() if key != "tables"}
    return {"device": name, "usable_bytes": spec.usable_bytes, **facts}
