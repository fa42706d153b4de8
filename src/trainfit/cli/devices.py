"""trainfit devices: what the catalogue and this machine know."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainfit.cli.console import notes, output, print_json, status
from trainfit.cli.options import JsonOption

if TYPE_CHECKING:
    from trainfit.hardware import DeviceSpec


def devices(json: JsonOption = False) -> int:
    """List the devices that --device takes: usable memory, dense TFLOP/s, bandwidth, and how sure each is.

    Every figure's source is in the output of --json.
    """
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
    console.print(f"this = {here.name}. Sources of every figure: trainfit devices --json", style="dim")
    return 0


def _to_json(name: str, spec: DeviceSpec) -> dict[str, Any]:
    return {"device": name, "usable_bytes": spec.usable_bytes, **asdict(spec)}
