"""Two beliefs that a tiny model settles: checkpointing an embedding, and 1e-8 times a loss scale of 65536 in fp16."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class EmbeddingGradients:
    """Norms of an embedding's gradient. reentrant: None where it got no gradient at all; warning: what torch said.

    frozen_head_error: what backward says when nothing behind the embedding trains either.
    """

    plain: float
    non_reentrant: float
    reentrant: float | None
    equal: bool
    warning: str
    frozen_head_error: str


def embedding_gradients() -> EmbeddingGradients:
    """A table of 11 rows of 4 and a linear head, with the embedding as it is and under both kinds of checkpoint."""
    plain, _ = _gradient(None)
    kept, _ = _gradient(False)
    lost, warning = _gradient(True)
    assert plain is not None
    assert kept is not None
    return EmbeddingGradients(
        plain=float(plain.norm()),
        non_reentrant=float(kept.norm()),
        reentrant=None if lost is None else float(lost.norm()),
        equal=torch.equal(plain, kept),
        warning=warning,
        frozen_head_error=_frozen_head_error(),
    )


def _tiny() -> tuple[nn.Embedding, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding, head = nn.Embedding(11, 4), nn.Linear(4, 11)
    for parameter in (*embedding.parameters(), *head.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return embedding, head, torch.randint(11, (2, 6), generator=generator)


def _gradient(use_reentrant: bool | None) -> tuple[Tensor | None, str]:
    """The embedding's gradient and torch's warning; None: without checkpoint."""
    embedding, head, ids = _tiny()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hidden = embedding(ids) if use_reentrant is None else checkpoint(embedding, ids, use_reentrant=use_reentrant)
        head(hidden).logsumexp(-1).sum().backward()
    return embedding.weight.grad, str(caught[0].message) if caught else ""


def _frozen_head_error() -> str:
    embedding, head, ids = _tiny()
    head.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hidden = checkpoint(embedding, ids, use_reentrant=True)
    try:
        head(hidden).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class HalfNumbers:
    """What fp16 makes of numbers, as Python floats that hold it exactly."""

    tiny: float  # 1e-8 in fp16
    scaled: float  # 1e-8 x 65536 in fp16
    scaled_after: float  # the same, but 1e-8 went to fp16 before it was scaled
    smallest: float  # above zero
    smallest_normal: float
    largest: float


def half_numbers(value: float = 1e-8, scale: float = 65536.0) -> HalfNumbers:
    half, facts = torch.float16, torch.finfo(torch.float16)
    as_half = torch.tensor(value, dtype=torch.float64).to(half)
    return HalfNumbers(
        tiny=float(as_half),
        scaled=float(torch.tensor(value * scale, dtype=torch.float64).to(half)),
        scaled_after=float(as_half * scale),
        smallest=float(torch.nextafter(torch.zeros((), dtype=half), torch.ones((), dtype=half))),
        smallest_normal=facts.smallest_normal,
        largest=facts.max,
    )
