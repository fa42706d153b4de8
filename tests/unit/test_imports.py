"""Who may import whom: DESIGN section 2, over the import statements themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainfit
from trainfit.techniques import TECHNIQUES, Stage

ROOT = Path(trainfit.__file__).parent
# A room imports from rooms on earlier lines only; rooms on one line do not import each other.
ORDER = (
    ("errors",),
    ("units", "profile", "second_process"),
    ("operators",),
    ("hardware",),
    ("workload",),
    ("techniques",),
    ("step",),
    ("rehearsal",),
    ("plan",),
    ("train", "report", "export"),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in LEVEL)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> Iterator[str]:
    """Rooms named in any import of the file, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "trainfit" else [module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "trainfit" and rest:
                yield rest.split(".")[0]


def violations(source: str, room: str) -> list[str]:
    return [
        other
        for other in imported_rooms(ast.parse(source))
        if other != room and other in LEVEL and LEVEL[other] >= LEVEL[room]
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_rooms_above_it(path: Path):
    assert room_of(path) in LEVEL, f"{path} is in no room; add it to ORDER"
    assert violations(path.read_text(), room_of(path)) == []


def test_the_rule_finds_what_it_should():
    assert violations("from trainfit.plan import Plan", "step") == ["plan"]
    assert violations("def f():\n    import trainfit.cli.main", "train") == ["cli"]
    assert violations("from trainfit import plan", "plan") == []
    assert violations("from trainfit.report import x", "train") == ["report"]
    assert violations("from trainfit.step import Strategy", "plan") == []


def test_every_room_is_there_and_has_its_line():
    assert {room_of(path) for path in FILES} == set(LEVEL)


def test_the_package_exports_at_most_fifteen_names_and_all_of_them_exist():
    assert len(trainfit.__all__) <= 15
    for name in trainfit.__all__:
        assert getattr(trainfit, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        trainfit.nonsense  # noqa: B018


def test_techniques_stand_in_the_order_of_their_stages():
    stages = [technique.stage for technique in TECHNIQUES]
    assert stages == sorted(stages)
    assert set(stages) <= set(Stage)
    assert list(Stage) == [Stage.MODULE, Stage.BLOCK, Stage.SHARD, Stage.OPTIMIZER, Stage.STEP]
    assert len({technique.setting for technique in TECHNIQUES}) == len(TECHNIQUES)
