"""prepare_data: the text of a recipe as memory-mapped tokens, and where documents end, made once for a run folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from trainfit.errors import DataError, ResumeError
from trainfit.train.documents import Document, fingerprint, list_documents, split_documents, split_text
from trainfit.train.packing import PackedTokens, Sequences
from trainfit.train.recipe import Recipe
from trainfit.train.tokenizer import encode, end_of_text_id, load_tokenizer, train_tokenizer
from trainfit.train.variable import DocumentTokens
from trainfit.units import format_bytes

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in all."""

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
_BATCH_BYTES = 2**20  # text that is encoded at once: bounds host memory, enough to keep all cores busy


@dataclass(frozen=True)
class TextData:
    """The tokens of a run. vocab_size is the tokenizer's; num_bytes the text's."""

    train: Sequences
    held_out: Sequences
    vocab_size: int
    num_documents: int
    num_bytes: int

    def in_batches_of(self, batch_tokens: int) -> TextData:
        """With micro batches of so many tokens, where documents have lengths of their own."""
        parts = {
            split: each.in_batches_of(batch_tokens)
            for split, each in (("train", self.train), ("held_out", self.held_out))
            if isinstance(each, DocumentTokens)
        }
        return replace(self, **parts)  # type: ignore[arg-type]


def prepare_data(
    recipe: Recipe, folder: Path, *, progress: Progress | None = None, resume: bool = False, max_vocab_size: int
) -> TextData:
    """Tokens of the recipe's text, made in folder (the data/ of a run) or found there from an earlier call.

    Raises DataError when the text is missing or too short, or has ids that a model of max_vocab_size lacks, and
    ResumeError when it changed since the run began. A folder that was not finished never gets its name.
    """
    documents = list_documents(recipe.data, recipe.resolve)
    key = _cache_key(recipe, documents)
    index = _read_index(folder)
    has_ends = recipe.data.lengths == "packed" or all((folder / f"{split}.ends").is_file() for split in SPLITS)
    if index is None or index["key"] != key or not has_ends:
        if resume:
            raise ResumeError(_changed_text(folder, index, documents))
        index = _make(recipe, documents, folder, key, progress or _silent)
    if index["vocab_size"] > max_vocab_size:
        raise DataError(
            f"the tokenizer has {index['vocab_size']} tokens, the model's vocab_size is {max_vocab_size}; "
            f"set the model's vocab_size to {index['vocab_size']} or use a smaller tokenizer"
        )
    _check_length(recipe, index["num_tokens"])
    for split in SPLITS:
        wanted, found = index["num_tokens"][split], (folder / f"{split}.bin").stat().st_size
        if found != wanted * np.dtype(index["dtype"]).itemsize:
            raise DataError(
                f"{folder / split}.bin has {found} bytes, not {wanted} tokens; remove {folder} to make it again"
            )
    train, held_out = (_sequences(recipe, folder, split, index["dtype"]) for split in SPLITS)
    return TextData(train, held_out, index["vocab_size"], index["num_documents"], index["num_bytes"])


def _sequences(recipe: Recipe, folder: Path, split: Split, dtype: str) -> Sequences:
    tokens = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")
    if recipe.data.lengths == "packed":
        return PackedTokens(tokens, recipe.seq_len)
    ends = np.fromfile(folder / f"{split}.ends", dtype=np.int64)
    return DocumentTokens.of(tokens, ends, recipe.seq_len, recipe.tokens_per_step)


def _make(recipe: Recipe, documents: Sequence[Document], folder: Path, key: str, progress: Progress) -> dict[str, Any]:
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        index = {"key": key, **_build(recipe, documents, partial, progress)}
        _check_length(recipe, index["num_tokens"])
        (partial / "data.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise DataError(f"cannot write tokens to {folder} ({error}); free some space or set run_folder=") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def _build(recipe: Recipe, documents: Sequence[Document], folder: Path, progress: Progress) -> dict[str, Any]:
    settings, fraction = recipe.data.tokenizer, recipe.data.held_out_fraction
    held_out = split_documents(documents, fraction)
    if settings.path is not None:
        tokenizer = load_tokenizer(recipe.resolve(settings.path))
    else:
        progress("training the tokenizer", 0, 1)
        assert settings.vocab_size is not None, "TokenizerSettings checks that it has one of the two"
        tokenizer = train_tokenizer(
            documents, lambda document: _parts(document, held_out, fraction)["train"], settings.vocab_size, recipe.seed
        )
        progress("training the tokenizer", 1, 1)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    end_of_text = end_of_text_id(tokenizer, settings)
    num_tokens = dict.fromkeys(SPLITS, 0)
    ends: dict[Split, list[int]] = {split: [] for split in SPLITS}
    with ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        for split, text_ids in _encoded(documents, held_out, fraction, tokenizer, progress):
            np.asarray([*text_ids, end_of_text], dtype=dtype).tofile(files[split])
            num_tokens[split] += len(text_ids) + 1
            ends[split].append(num_tokens[split])
    for split in SPLITS:
        np.asarray(ends[split], dtype=np.int64).tofile(folder / f"{split}.ends")
    return {
        "vocab_size": vocab_size,
        "end_of_text_id": end_of_text,
        "dtype": dtype,
        "num_documents": len(documents),
        "num_bytes": _num_bytes(documents),
        "num_tokens": num_tokens,
    }


def _encoded(
    documents: Sequence[Document], held_out: frozenset[str], fraction: float, tokenizer: Any, progress: Progress
) -> Iterator[tuple[Split, list[int]]]:
    done, total = 0, _num_bytes(documents)
    waiting: list[tuple[Split, str]] = []
    waiting_bytes = 0
    for number, document in enumerate(documents, start=1):
        waiting += [(split, text) for split, text in _parts(document, held_out, fraction).items() if text]
        waiting_bytes += document.num_bytes
        if waiting_bytes >= _BATCH_BYTES or number == len(documents):
            yield from zip((split for split, _ in waiting), encode(tokenizer, [text for _, text in waiting]))
            done += waiting_bytes
            progress("encoding the text", done, total)
            waiting, waiting_bytes = [], 0


def _parts(document: Document, held_out: frozenset[str], fraction: float) -> dict[Split, str]:
    text = document.read()
    if held_out:
        return {"train": "", "held_out": text} if document.name in held_out else {"train": text, "held_out": ""}
    start, tail = split_text(text, fraction)
    return {"train": start, "held_out": tail}


def _check_length(recipe: Recipe, num_tokens: dict[str, int]) -> None:
    # A document may be as short as two tokens, of which one is predicted.
    needed = recipe.seq_len + 1 if recipe.data.lengths == "packed" else 2
    if min(num_tokens.values()) < needed:
        raise DataError(
            f"the text is too short: {num_tokens['train']} training and {num_tokens['held_out']} held-out tokens, "
            f"seq_len {recipe.seq_len} needs {needed} of each; add text, lower seq_len or raise data.held_out_fraction"
        )


def _cache_key(recipe: Recipe, documents: Sequence[Document]) -> str:
    # The seed picks the sample that a tokenizer is trained on, so it is part of what the tokens depend on.
    # How documents become sequences is not.
    settings = json.dumps(
        {**recipe.data.model_dump(mode="json", exclude={"lengths"}), "seed": recipe.seed}, sort_keys=True
    )
    tokenizer = recipe.data.tokenizer.path
    mark = str(path.stat().st_mtime_ns) if tokenizer and (path := recipe.resolve(tokenizer)).is_file() else ""
    return sha256("\n".join([settings, mark, fingerprint(documents)]).encode()).hexdigest()[:16]


def _read_index(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return index if isinstance(index, dict) and "key" in index else None


def _changed_text(folder: Path, index: dict[str, Any] | None, documents: Sequence[Document]) -> str:
    now = f"{len(documents)} documents of {format_bytes(_num_bytes(documents))}"
    if index is None:
        return f"{folder} has no tokens of an earlier run to go on with; start anew in another run_folder"
    then = f"{index['num_documents']} documents of {format_bytes(index['num_bytes'])}"
    return f"the text changed since the run began ({then} then, {now} now); restore it or use another run_folder"


def _num_bytes(documents: Sequence[Document]) -> int:
    return sum(document.num_bytes for document in documents)


def _silent(what: str, done: int, total: int) -> None: ...
