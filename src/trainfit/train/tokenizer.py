"""The tokenizer of a run: a byte-level BPE trained on its text, or one that the user names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainfit.errors import DataError
from trainfit.train.documents import Document
from trainfit.train.recipe import TokenizerSettings

END_OF_TEXT = "<|endoftext|>"
_USUAL_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# 4 MB of source instead of 12 give 1.5% more tokens; the time to train is about linear, 0.1 s a MB.
SAMPLE_BYTES = 16 * 10**6
_PIECE_CHARS = 2**15


def train_tokenizer(
    documents: Sequence[Document], training_text: Callable[[Document], str], vocab_size: int, seed: int
) -> Any:
    """Byte-level BPE of at most vocab_size tokens (fewer when the text is too small for more merges).

    It sees a seeded sample of documents, and of each only training_text: nothing that is held out.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents, training_text, seed), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Any:
    """The tokenizer.json at path. Raises DataError when it is missing or not one."""
    if not path.is_file():
        raise DataError(f"no tokenizer at {path}; data.tokenizer.path takes the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json: {' '.join(str(error).split())[:120]}") from None


def end_of_text_id(tokenizer: Any, settings: TokenizerSettings) -> int:
    """Id of the token put after each document. Raises DataError when the tokenizer has none of the usual names."""
    names = (settings.end_of_text,) if settings.end_of_text else _USUAL_END_OF_TEXT
    for name in names:
        if (token_id := tokenizer.token_to_id(name)) is not None:
            return int(token_id)
    raise DataError(f"the tokenizer has no token {' or '.join(names)}; set data.tokenizer.end_of_text")


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, in order.

    Long texts are cut at line ends into pieces that all cores share. A special token that a text spells out is read as
    plain text, so no document can end another.
    """
    tokenizer.encode_special_tokens = True
    owned = [(owner, piece) for owner, text in enumerate(texts) for piece in _pieces(text)]
    encodings = tokenizer.encode_batch_fast([piece for _, piece in owned], add_special_tokens=False)
    ids: list[list[int]] = [[] for _ in texts]
    for (owner, _), encoding in zip(owned, encodings, strict=True):
        ids[owner].extend(encoding.ids)
    return ids


def _sample(documents: Sequence[Document], training_text: Callable[[Document], str], seed: int) -> Iterator[str]:
    order = list(documents)
    Random(seed).shuffle(order)
    remaining = SAMPLE_BYTES
    for document in order:
        if remaining <= 0:
            return
        text = training_text(document)[:remaining]
        remaining -= len(text)
        yield text


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = min(start + _PIECE_CHARS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
