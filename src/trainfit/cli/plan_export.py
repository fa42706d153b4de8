"""`--export` of trainfit plan: a plan as other systems' settings, to stdout or to files. Imports torch late."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.cli.console import notes, output, print_notes
from trainfit.errors import RecipeError
from trainfit.export import Export, check_system, export_plan

if TYPE_CHECKING:
    from trainfit.hardware import Hardware
    from trainfit.plan import Plan


@dataclass(frozen=True)
class Exports:
    """Which systems a plan is written for, and where: None is stdout."""

    systems: Sequence[str]
    to: Path | None

    def __post_init__(self) -> None:
        for name in self.systems:
            check_system(name)
        if self.to is None:
            return
        if not self.systems:
            raise RecipeError(f"--export-to {self.to} says where; say what with --export, such as --export deepspeed")
        folder = self.to if self.is_folder else self.to.parent
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"--export-to {self.to}: {folder} is a file; name a folder or a new file")
        if not self.is_folder and not folder.exists():
            raise RecipeError(f"--export-to {self.to}: there is no folder {folder}; make it first")

    def check_stdout(self) -> None:
        """One system's file at most goes to stdout. Raises RecipeError for more."""
        if self.to is None and len(self.systems) > 1:
            raise RecipeError(f"{len(self.systems)} --export make as many files; give --export-to FOLDER, or --json")

    @property
    def fill_stdout(self) -> bool:
        """Whether stdout is the file, and nothing else."""
        return bool(self.systems) and self.to is None

    @property
    def is_folder(self) -> bool:
        return self.to is not None and (len(self.systems) > 1 or self.to.is_dir())

    def make(self, plan: Plan, hardware: Hardware, max_grad_norm: float | None) -> list[Export]:
        return [export_plan(plan, name, hardware.spec.kind, max_grad_norm=max_grad_norm) for name in self.systems]

    def write(self, made: Sequence[Export]) -> dict[str, Path]:
        """The files, by system; none where they go to stdout."""
        if self.to is None:
            return {}
        paths = {each.system: self.to / each.file_name if self.is_folder else self.to for each in made}
        try:
            for each in made:
                paths[each.system].parent.mkdir(parents=True, exist_ok=True)
                paths[each.system].write_text(each.text)
        except OSError as error:
            raise RecipeError(f"--export-to {self.to} cannot be written: {error.strerror}") from None
        return paths


def exports_json(made: Sequence[Export], paths: dict[str, Path]) -> dict[str, Any]:
    """The key "exports" of `plan --json`; nothing where none was asked for."""
    if not made:
        return {}
    files = {each.system: str(paths[each.system]) if each.system in paths else None for each in made}
    return {"exports": {each.system: {**each.to_json(), "file": files[each.system]} for each in made}}


def print_exports(made: Sequence[Export], paths: dict[str, Path]) -> None:
    """The file itself on stdout and its notes beside; or where files are, with their notes."""
    for each in made:
        if each.system not in paths:
            sys.stdout.write(each.text)
            print_notes(each.notes, notes())
            continue
        console = output()
        console.print(f"\n{each.system}: {paths[each.system]}", markup=False, soft_wrap=True)
        print_notes(each.notes, console)
