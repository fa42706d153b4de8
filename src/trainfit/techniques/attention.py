"""What computes attention: the model's own code, or blockwise attention in its place.

model      as the model has it
blockwise  softmax a tile at a time, in memory that grows with the sequence: blockwise_attention.py

NOTE [ Where attention is replaced ]
Models of transformers look up a function by a name in their config, and another by the same name for the mask: both are
ours under that name, so no mask of queries x keys is made for what `causal` and `window` say. Models share their
config with the workload, so this one gets a copy of its own. Any other model is taken to call
F.scaled_dot_product_attention in its blocks; those calls are caught.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Kind
from trainfit.profile import Attention
from trainfit.techniques.activation import Patched, forget_recompute, unbound_forward
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.block_cast import forget_cast
from trainfit.techniques.blockwise_attention import blockwise_attention
from trainfit.workload.attention import keep_attention, looks_up_attention, set_attention, window_of

_ATTENTION = F.scaled_dot_product_attention  # a rehearsal of a device puts another in its place


class AttentionKind:
    """Puts blockwise attention where the model's own was."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "attention"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Attention]:
        """Blockwise where the model would hold scores, and it can be put there."""
        wanted = asked.settings["attention"]
        if wanted != "auto":
            yield wanted
            return
        yield "model"
        if asked.attention_holds_scores:
            yield "blockwise"

    def apply(self, build: Build, setting: Attention) -> None:
        for block in build.blocks:
            forget_recompute(block)
            forget_cast(block)
            _forget(block)
        keep_attention(build.model)
        if setting == "model":
            return
        kind = build.accelerator.stands_for
        if looks_up_attention(build.model):
            set_attention(build.model, f"trainfit_blockwise_{kind}", partial(_of_transformers, kind=kind), _mask)
            return
        for name, block in zip(build.anatomy.blocks, build.blocks):
            block.forward = BlockwiseForward(name, block, unbound_forward(block), kind)


@dataclass(frozen=True)
class MaskRule:
    """A causal mask that is no tensor of queries x keys.

    window: 0, or how many keys back a query sees. seen: (batch, 1, 1, keys), False for padding.
    """

    window: int
    seen: Tensor | None


def _mask(**asked: Any) -> MaskRule | Tensor | None:
    """What transformers makes of a mask for our name: a rule where it is one, else a tensor of booleans.

    asked: what its mask functions take. Raises ModelError for a version of it that says something else.
    """
    import transformers
    from transformers.masking_utils import prepare_padding_mask, sdpa_mask

    if missing := {"q_length", "kv_length", "mask_function"} - asked.keys():
        raise ModelError(
            f"transformers {transformers.__version__} asks for a mask without {min(missing)}, which blockwise "
            "attention needs; install a newer one, or set attention: model"
        )
    window, kv_length = window_of(asked["mask_function"]), asked["kv_length"]
    starts = (asked.get("q_offset", 0), asked.get("kv_offset", 0)) == (0, 0)
    if window is None or asked.get("use_vmap") or not asked.get("allow_is_causal_skip", True) or not starts:
        made: Tensor | None = sdpa_mask(**asked)
        return made
    window = window if window < kv_length else 0
    padding = prepare_padding_mask(asked.get("attention_mask"), kv_length, 0)
    if padding is None and not window:
        return None
    return MaskRule(window, None if padding is None else padding[:, None, None, :])


def _of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    *,
    kind: Kind,
    **rest: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: output (batch, queries, heads, dim). s_aux: sinks."""
    if rest.get("output_attentions"):
        raise ModelError(
            f"{type(module).__name__} is asked for its attention weights, which blockwise never has all of; set "
            "attention: model"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    causal = causal and query.shape[2] > 1  # one query after cached keys sees them all; no mask is made for it
    window, mask, bias = 0, None, position_bias
    if isinstance(attention_mask, MaskRule):
        causal, window, mask = True, attention_mask.window, attention_mask.seen
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = attention_mask
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    output = blockwise_attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        sinks=s_aux,
        scale=scaling,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout=dropout,
        kind=kind,
    )
    return output.transpose(1, 2).contiguous(), None


class BlockwiseForward:
    """In the place of a block's forward: runs it with its calls of F.scaled_dot_product_attention caught.

    forward: the block's own, unbound: takes the block first.
    """

    def __init__(self, name: str, block: nn.Module, forward: Callable[..., Any], kind: Kind) -> None:
        # Weak: the block has this in its own attributes.
        self.name, self._block, self.forward, self._kind = name, weakref.ref(block), forward, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None
        with _InsteadOfAttention(self._kind) as mode:
            output = self.forward(block, *args, **kwargs)
        if not mode.calls:
            raise RecipeError(
                f"attention blockwise: {self.name} never calls F.scaled_dot_product_attention; set attention: model"
            )
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockwiseForward:
        # A copied block comes here while it is copied, so memo has it already.
        block = self._block()
        assert block is not None
        return BlockwiseForward(self.name, deepcopy(block, memo), deepcopy(self.forward, memo), self._kind)


def _forget(block: nn.Module) -> None:
    """Undo BlockwiseForward: a model may be built again under another strategy."""
    own = vars(block).get("forward")
    if isinstance(own, BlockwiseForward):
        del block.forward
        if isinstance(own.forward, Patched):
            block.forward = own.forward.forward


class _InsteadOfAttention(TorchFunctionMode):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _ATTENTION:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.calls += 1
        return as_scaled_dot_product(*args, **(kwargs or {}), kind=self.kind)


def as_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    kind: Kind = "cpu",
) -> Tensor:
    """blockwise_attention with the arguments of F.scaled_dot_product_attention."""
    if query.dim() < 4:
        lead = (None,) * (4 - query.dim())
        query, key, value = query[lead], key[lead], value[lead]
        output = as_scaled_dot_product(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, kind=kind
        )
        return output[(0,) * len(lead)]
    if not enable_gqa and query.dim() == 4 == key.dim() and query.shape[1] != key.shape[1]:
        raise ModelError(
            f"attention of {query.shape[1]} query heads over {key.shape[1]} key heads needs enable_gqa=True"
        )
    is_mask = attn_mask is not None and not attn_mask.is_floating_point()
    return blockwise_attention(
        query,
        key,
        value,
        mask=attn_mask if is_mask else None,
        bias=None if is_mask else attn_mask,
        scale=scale,
        causal=is_causal,
        dropout=dropout_p,
        kind=kind,
    )
