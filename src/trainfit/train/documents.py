"""Documents: which texts a run reads, in a fixed order, and which of them are held out."""

from __future__ import annotations

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

from trainfit.errors import DataError
from trainfit.train.recipe import PYTHON_STDLIB, DataSettings
from trainfit.units import format_bytes

# Tests and vendored packages of a Python installation are not the library itself.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

# With fewer documents than this a split by document would hold out nothing, or far too much.
MIN_DOCUMENTS_TO_SPLIT = 20


@dataclass(frozen=True, slots=True)
class Document:
    """num_bytes at offset in the file at path; a line of JSONL when text_key is set. name orders and splits."""

    name: str
    path: Path
    offset: int
    num_bytes: int
    text_key: str | None = None

    def read(self) -> str:
        """Its text; bytes that are not UTF-8 become U+FFFD. Raises DataError when it cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                text = file.read(self.num_bytes).decode("utf-8", errors="replace")
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}; check data.paths") from None
        return text if self.text_key is None else self._from_line(text, self.text_key)

    def _from_line(self, line: str, text_key: str) -> str:
        file, _, number = self.name.rpartition(":")
        where = f"{file} line {int(number)}"
        try:
            entry = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno}); correct that line") from None
        text = entry.get(text_key) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
            raise DataError(f"{where}: no text at key {text_key!r}, the line has {keys}; set data.text_key")
        return text


def list_documents(settings: DataSettings, resolve: Callable[[str], Path]) -> list[Document]:
    """Every document that settings name, sorted by name, at most max_bytes of them.

    Raises DataError when a path is missing or nothing is found.
    """
    documents: dict[str, Document] = {}
    for path in settings.paths:
        for document in _of_path(path, settings, resolve):
            documents.setdefault(document.name, document)
    if not documents:
        raise DataError(
            f"{', '.join(settings.paths)} has no text; name files, folders or {PYTHON_STDLIB} in data.paths"
        )
    return sorted(_capped(list(documents.values()), settings.max_bytes), key=lambda document: document.name)


def split_documents(documents: Sequence[Document], held_out_fraction: float) -> frozenset[str]:
    """Names of the held-out documents: those whose names hash lowest, at least one; none when there are too few.

    It depends on names alone, so neither the order of paths nor the seed moves a document across.
    """
    if len(documents) < MIN_DOCUMENTS_TO_SPLIT:
        return frozenset()
    count = max(1, round(len(documents) * held_out_fraction))
    return frozenset(sorted((document.name for document in documents), key=_rank)[:count])


def split_text(text: str, held_out_fraction: float) -> tuple[str, str]:
    """Start and tail of one document, cut at a line end where there is one: the tail is held out."""
    cut = round(len(text) * (1 - held_out_fraction))
    line_end = text.rfind("\n", 0, cut) + 1
    cut = line_end if line_end > cut // 2 else cut
    return text[:cut], text[cut:]


def fingerprint(documents: Sequence[Document]) -> str:
    """Changes when a document is added, removed, resized or rewritten."""
    digest = sha256()
    modified: dict[Path, int] = {}
    for document in documents:
        if document.path not in modified:
            modified[document.path] = document.path.stat().st_mtime_ns
        digest.update(f"{document.name}\0{document.offset}\0{document.num_bytes}\0{modified[document.path]}\n".encode())
    return digest.hexdigest()[:16]


def _rank(name: str) -> bytes:
    return sha256(name.encode("utf-8", errors="surrogateescape")).digest()


def _capped(documents: list[Document], max_bytes: int | None) -> list[Document]:
    if max_bytes is None:
        return documents
    kept, total = [], 0
    for document in sorted(documents, key=lambda document: _rank(document.name)):
        if total + document.num_bytes <= max_bytes:
            kept.append(document)
            total += document.num_bytes
    if not kept:
        smallest = min(document.num_bytes for document in documents)
        raise DataError(
            f"data.max_bytes {format_bytes(max_bytes)} is less than the smallest document, "
            f"{format_bytes(smallest)}; raise it"
        )
    return kept


def _of_path(path: str, settings: DataSettings, resolve: Callable[[str], Path]) -> Iterator[Document]:
    if path == PYTHON_STDLIB:
        library = Path(sysconfig.get_paths()["stdlib"])
        yield from _of_folder(library, PYTHON_STDLIB, ("*.py",), settings.text_key, _STDLIB_SKIPPED)
        return
    location = resolve(path)
    if location.is_dir():
        yield from _of_folder(location, path, settings.patterns, settings.text_key, frozenset())
    elif location.is_file():
        yield from _of_file(location, path, settings.text_key)
    else:
        raise DataError(f"no file or folder at {location}; check data.paths (relative to the recipe's folder)")


def _of_folder(
    folder: Path, prefix: str, patterns: Sequence[str], text_key: str, skipped: frozenset[str]
) -> Iterator[Document]:
    suffixes: Counter[str] = Counter()
    found = False
    for directory, subfolders, files in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            path = Path(directory, name)
            relative = path.relative_to(folder).as_posix()
            suffixes[path.suffix] += 1
            if any(fnmatch(relative, pattern) for pattern in patterns):
                found = True
                yield from _of_file(path, f"{prefix.rstrip('/')}/{relative}", text_key)
    if not found:
        common = ", ".join(f"{count} *{suffix}" for suffix, count in suffixes.most_common(3)) or "no files"
        raise DataError(f"no file under {folder} matches {', '.join(patterns)}; it has {common}: set data.patterns")


def _of_file(path: Path, name: str, text_key: str) -> Iterator[Document]:
    try:
        if path.suffix != ".jsonl":
            if num_bytes := path.stat().st_size:
                yield Document(name, path, 0, num_bytes)
            return
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    # The number is padded so that sorting by name keeps the order of the lines.
                    yield Document(f"{name}:{number:09d}", path, offset, len(line), text_key)
                offset += len(line)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check data.paths") from None
