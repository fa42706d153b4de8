"""Loss without all logits: head and cross entropy run over pieces of the tokens, gradients included.

NOTE [ Gradients in forward ]
A piece's logits are dead once its gradients are known, so forward computes them at once, and backward only multiplies
by the gradient of the loss. Live at any time are one piece of logits, the gradient of the hidden states and one of each
head parameter. The scale meets products in fp32: put on logits in low precision, 1 / tokens would underflow.
Source for the idea: arXiv:2411.09009.

NOTE [ Half precision has a narrow range ]
In fp16 a row of exp(logits), whose sum may be the size of the vocabulary, would overflow at its target, and 1 / sum is
subnormal. So rows are multiplied by a power of two that puts their sum near 2**8: probabilities down to 2**-22 stay
normal, and a product with the head's weights overflows only where these are above a hundred. The loss scale enters on
the narrow side, so that the head's gradient is what it is with full logits: it underflows and overflows with the scale.
fp32 and bf16 have range enough and are left as they are.

NOTE [ The last word ]
TrainStep calls backward() of a loss once and as it is: the gradient of the loss is 1. Told so, backward multiplies
nothing, and where earlier micro batches left a gradient of the head, forward adds to it: a buffer of its own would take
another vocab * dim, and be scaled and added once for each micro batch. A parameter with hooks keeps its buffer, since
they are to see this micro batch's gradient; hooks after accumulation see what they should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.errors import RecomputeError
from trainfit.techniques.base import Asked, Build, Draft, Observer, Stage
from trainfit.workload import HeadSplit
from trainfit.workload.batch import IGNORED_LABEL, MicroBatch


@dataclass
class GradientSum:
    """A parameter's gradient over the pieces. is_empty: tensor holds garbage, as no piece has been added yet."""

    tensor: Tensor
    is_empty: bool

    def add(self, part: Tensor, alpha: float) -> None:
        if self.is_empty:
            self.tensor.copy_(part).mul_(alpha)  # in the sum's dtype, not in that of part
        else:
            self.tensor.add_(part, alpha=alpha)
        self.is_empty = False

    def add_product(self, first: Tensor, second: Tensor, alpha: float) -> None:
        if self.tensor.dtype == first.dtype:
            self.tensor.addmm_(first, second, beta=0 if self.is_empty else 1, alpha=alpha)
            self.is_empty = False
        else:
            self.add(first @ second, alpha)


# (hidden, labels, where to put the gradient of hidden, where to add the gradients of parameters) -> summed loss
PieceFunction = Callable[[Tensor, Tensor, Tensor | None, Sequence[GradientSum | None]], Tensor]


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed token loss in fp32. logits (..., vocab), labels (...,); IGNORED_LABEL does not count."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def plain_loss(split: HeadSplit, batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
    """scale * summed loss of a micro batch through full logits."""
    observe("forward")
    hidden = mark_backward(split.hidden(batch.inputs), observe)
    observe("loss")
    return cross_entropy_sum(split.logits(hidden), batch.labels) * scale


def mark_backward(hidden: Tensor, observe: Observer) -> Tensor:
    """Tell the observer when backward has left the loss and enters the blocks."""
    if hidden.requires_grad and observe is not ignore_phase:
        hidden.register_hook(lambda _: observe("backward"))
    return hidden


def ignore_phase(phase: Any) -> None:
    """The observer of a step that nobody watches."""


def auto_chunks(tokens: int, vocab_size: int, dim: int) -> int:
    """As many pieces as save memory that shows, and no more.

    tokens: of a micro batch. dim: width of the hidden states. A piece of fp32 logits need not be smaller than fp32
    hidden states of the micro batch (one saved activation), nor than a quarter of the head's gradient, which is live
    beside it; and below 128 tokens matmuls become slow.
    """
    rows = max(-(-tokens * dim // vocab_size), dim // 4, 128)
    return -(-tokens // rows)


class ChunkedLoss:
    """Head and loss in `loss_chunks` pieces."""

    stage: ClassVar[Stage] = Stage.STEP
    setting: ClassVar[str] = "loss_chunks"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[int]:
        """One piece, what `auto` takes, and a quarter and four times as many; one where the head cannot be cut off."""
        tokens = so_far["micro_batch_size"] * asked.workload.seq_len
        auto = auto_chunks(tokens, asked.workload.vocab_size, asked.dim) if asked.can_chunk else 1
        counts = (1, auto // 4, auto, 4 * auto) if asked.can_chunk else (1,)
        yield from sorted({count for count in counts if 1 <= count <= tokens})

    def apply(self, build: Build, setting: int) -> None:
        if setting == 1:
            return
        split = build.split
        if isinstance(split, str):
            build.notes.append(f"loss stays in one piece instead of {setting}: {split}")
            return

        def compute_loss(batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
            observe("forward")
            hidden = mark_backward(split.hidden(batch.inputs), observe)
            observe("loss")
            sums = build.gradient_dtype
            return chunked_loss(split, hidden, batch.labels, setting, scale, is_last_word=True, sums=sums)

        build.compute_loss = compute_loss


def chunked_loss(
    split: HeadSplit,
    hidden: Tensor,
    labels: Tensor,
    num_chunks: int,
    scale: float,
    *,
    is_last_word: bool = False,
    sums: torch.dtype | None = None,
) -> Tensor:
    """scale * summed token loss.

    hidden (batch, sequence, dim), labels (batch, sequence). is_last_word: see NOTE [ The last word ]. sums: dtype in
    which the pieces' gradients of the head add up; None for the head's own. Extra peak with a plain linear head: one
    piece of fp32 logits (tokens / num_chunks * vocab * 4 bytes), the gradients of hidden and, where they are not there
    yet, of the head.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    num_chunks = min(num_chunks, labels.numel())
    # Without grad mode nobody will ask for gradients, but parameters would still say that they want them.
    parameters = split.parameters() if torch.is_grad_enabled() else []
    piece = _linear_piece(split.linear, hidden, scale) if split.linear is not None else _general_piece(split, scale)
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, labels, num_chunks, scale, piece, is_last_word, sums, *parameters
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """See NOTE [ Gradients in forward ]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        num_chunks: int,
        scale: float,
        piece: PieceFunction,
        is_last_word: bool,
        sums: torch.dtype | None,
        *parameters: Tensor,
    ) -> Tensor:
        wants = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants[0] else None
        own: list[Tensor | None] = [None] * len(parameters)
        gradients: list[GradientSum | None] = [None] * len(parameters)
        for index, (parameter, wanted) in enumerate(zip(parameters, wants[7:])):
            if wanted and is_last_word and _may_add_to_grad(parameter):
                assert parameter.grad is not None
                gradients[index] = GradientSum(parameter.grad, is_empty=False)
            elif wanted:
                own[index] = buffer = torch.empty_like(parameter, dtype=sums or parameter.dtype)
                gradients[index] = GradientSum(buffer, is_empty=True)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        pieces = zip(hidden.chunk(num_chunks), labels.chunk(num_chunks), _chunks(hidden_gradient, num_chunks))
        for hidden_piece, label_piece, gradient_piece in pieces:
            loss += piece(hidden_piece, label_piece, gradient_piece, gradients)
        ctx.gradients = (hidden_gradient, *own)
        ctx.is_last_word = is_last_word
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RecomputeError("the loss in chunks can be differentiated once; use loss_chunks=1 for more")
        if not ctx.is_last_word:
            gradients = [None if gradient is None else gradient.mul_(outer[0]) for gradient in gradients]
        return gradients[0], None, None, None, None, None, None, *gradients[1:]


def _may_add_to_grad(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and gradient.layout == torch.strided and not parameter._backward_hooks


def _chunks(tensor: Tensor | None, num_chunks: int) -> Sequence[Any]:
    return [None] * num_chunks if tensor is None else tensor.chunk(num_chunks)


def _linear_piece(head: nn.Linear, hidden: Tensor, scale: float) -> PieceFunction:
    """A head that is one nn.Linear: softmax, loss and gradients in place, in the memory of the logits."""
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else head.weight.dtype
    weight = head.weight.detach().to(dtype)
    bias = None if head.bias is None else head.bias.detach().to(dtype)

    def piece(
        hidden: Tensor, labels: Tensor, hidden_gradient: Tensor | None, gradients: Sequence[GradientSum | None]
    ) -> Tensor:
        with torch.autocast(device_type, enabled=False):
            hidden = hidden.to(dtype)
            logits = F.linear(hidden, weight, bias).float()
            valid = labels != IGNORED_LABEL
            target = torch.where(valid, labels, 0).unsqueeze(1)
            highest = logits.amax(-1, keepdim=True)
            target_logit = logits.gather(1, target) - highest
            exponentials = logits.sub_(highest).exp_()
            total = exponentials.sum(-1, keepdim=True)
            loss = torch.where(valid.unsqueeze(1), total.log() - target_logit, 0.0).sum()
            if hidden_gradient is None and not any(gradient is not None for gradient in gradients):
                return loss
            # d loss / d logits = softmax - one_hot. The row factor 1 / total goes to the narrow side of the matmuls;
            # the -1 at the target is put in before any rounding to a low precision.
            exponentials.scatter_add_(1, target, -total)
            row_scale = torch.where(valid.unsqueeze(1), 1.0 / total, 0.0)
            if dtype == torch.float16:
                power = _into_half_range(total, scale)
                exponentials.mul_(power)
                row_scale.div_(power)
            logits_gradient = exponentials.to(dtype)
            if hidden_gradient is not None:
                _row_scaled_mm(logits_gradient, weight, row_scale * scale, hidden_gradient)
            _accumulate(gradients, logits_gradient, hidden, row_scale, scale)
        return loss

    return piece


def _into_half_range(total: Tensor, scale: float) -> Tensor:
    """Powers of two for rows that add up to total. See NOTE [ Half precision has a narrow range ]."""
    _, exponent = torch.frexp(total)
    # Below 1 the scale itself makes the narrow side small: it gets half of the way back.
    room = 8 + min(0, math.frexp(scale)[1] // 2)
    return torch.ldexp(torch.ones_like(total), room - exponent)


def _row_scaled_mm(logits_gradient: Tensor, weight: Tensor, row_scale: Tensor, out: Tensor) -> None:
    if out.dtype == weight.dtype:
        torch.mm(logits_gradient, weight, out=out).mul_(row_scale)
    else:
        out.copy_(logits_gradient @ weight).mul_(row_scale)


def _accumulate(
    gradients: Sequence[GradientSum | None], logits_gradient: Tensor, hidden: Tensor, row_scale: Tensor, scale: float
) -> None:
    weight_gradient, *rest = gradients
    if logits_gradient.dtype == torch.float16:
        row_scale, scale = row_scale * scale, 1.0
    if weight_gradient is not None:
        weight_gradient.add_product(logits_gradient.t(), (hidden * row_scale).to(hidden.dtype), scale)
    if rest and rest[0] is not None:
        rest[0].add((row_scale.to(logits_gradient.dtype).t() @ logits_gradient).squeeze(0), scale)


def _general_piece(split: HeadSplit, scale: float) -> PieceFunction:
    """A head that caps, scales or biases its logits: the model's own code, differentiated piece by piece."""
    parameters = split.parameters()
    inside, outside = (scale, 1.0) if _is_half(parameters) else (1.0, scale)

    def piece(
        hidden: Tensor, labels: Tensor, hidden_gradient: Tensor | None, gradients: Sequence[GradientSum | None]
    ) -> Tensor:
        wanted = [parameter for parameter, gradient in zip(parameters, gradients) if gradient is not None]
        differentiate = hidden_gradient is not None or bool(wanted)
        with torch.set_grad_enabled(differentiate):
            leaf = hidden.detach().requires_grad_(hidden_gradient is not None)
            loss = cross_entropy_sum(split.logits(leaf.unsqueeze(0)), labels.unsqueeze(0))
            if not differentiate:
                return loss
            sources = [leaf, *wanted] if hidden_gradient is not None else wanted
            scaled = loss if inside == 1.0 else loss * inside
            found = list(torch.autograd.grad(scaled, sources))
        if hidden_gradient is not None:
            torch.mul(found.pop(0), outside, out=hidden_gradient)
        for gradient, part in zip((gradient for gradient in gradients if gradient is not None), found):
            gradient.add(part, outside)
        return loss.detach()

    return piece


def _is_half(parameters: Sequence[Tensor]) -> bool:
    """Whether logits are computed in fp16. See NOTE [ Half precision has a narrow range ]."""
    device_type = parameters[0].device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type) == torch.float16
    return parameters[0].dtype == torch.float16
