"""HeadSplit of a model: hidden states and logits apart, so that the loss can be computed in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainfit.errors import ModelError
from trainfit.workload.anatomy import Anatomy
from trainfit.workload.forward import HeadSplit, run_model
from trainfit.workload.huggingface import training_call
from trainfit.workload.probe import HeadWatch, ambient, evaluating, plain_linear, run_fake


def split_head(model: nn.Module, anatomy: Anatomy, *, seq_len: int = 2) -> HeadSplit | str:
    """The model's two halves, or one short reason why it cannot be halved.

    seq_len: tokens to try a user's module on; one with position tables of a fixed length takes no other.
    """
    if anatomy.head is None:
        return "no output layer was found"
    head = model.get_submodule(anatomy.head)
    if anatomy.backbone is not None:
        split = _split_transformers(model, anatomy.backbone, head)
        if isinstance(split, HeadSplit):
            return split
        # A few, such as OPT, call into their backbone past its forward; those are stopped at the head like others.
    if not isinstance(head, nn.Linear):
        return f"the output layer is a {type(head).__name__}, not a Linear"
    if anatomy.embedding is None:
        return "no token embedding was found, so the split cannot be tried out"
    stopped = _StoppedModule(model, head)
    reason = _reason_against(stopped, seq_len)
    return stopped if reason is None else reason


# ---- transformers models -------------------------------------------------------------------------------------------


class _GivenOutput:
    """What a backbone returns: hidden states by name or as item 0; whatever else a forward asks for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenBackbone(nn.Module):
    """Stands in for the backbone and returns given hidden states, so that only the model's code after it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.output: _GivenOutput | None = None

    def forward(self, *arguments: object, **keywords: object) -> _GivenOutput:
        assert self.output is not None
        return self.output


class _TransformersSplit(HeadSplit):
    def __init__(self, model: nn.Module, backbone_name: str, dim: int) -> None:
        self.dim = dim
        self._model = model
        self._name = backbone_name
        self._backbone = model.get_submodule(backbone_name)
        self._given = _GivenBackbone()
        self.linear = None

    def hidden(self, inputs: Tensor) -> Tensor:
        with training_call():
            hidden: Tensor = self._backbone(inputs, use_cache=False)[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        # The forward of the whole model runs, with its backbone swapped for one that returns `hidden`: a cap, a scale
        # or a bias after the head comes out right whatever the model is.
        self._given.output = _GivenOutput(hidden)
        self._model._modules[self._name] = self._given
        try:
            logits: Tensor = self._model(use_cache=False).logits
        finally:
            self._model._modules[self._name] = self._backbone
            self._given.output = None
        return logits

    def parameters(self) -> list[nn.Parameter]:
        others = [module for name, module in self._model.named_children() if name != self._name]
        unique = {id(p): p for module in others for p in module.parameters()}
        return list(unique.values()) + list(self._model.parameters(recurse=False))


def _split_transformers(model: nn.Module, backbone_name: str, head: nn.Module) -> HeadSplit | str:
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return f"the output layer is a {type(head).__name__} without a weight matrix"
    vocab_size, dim = weight.shape
    split = _TransformersSplit(model, backbone_name, dim)
    outside = [module for name, child in model.named_children() if name != backbone_name for module in child.modules()]
    with torch.no_grad(), evaluating(outside), HeadWatch(head) as watch:
        hidden = weight.new_zeros(1, 2, dim)
        try:
            logits = split.logits(hidden)
        except Exception as error:
            return f"its forward does not run on given hidden states ({type(error).__name__})"
    if logits.shape != (1, 2, vocab_size):
        return f"its logits for 2 tokens have shape {tuple(logits.shape)}, not (1, 2, {vocab_size})"
    if watch.was_all(hidden, logits):
        split.linear = plain_linear(head)
    return split


# ---- any other module ----------------------------------------------------------------------------------------------


class _StopAtHead(Exception):  # noqa: N818  (a jump, not an error)
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StoppedModule(HeadSplit):
    """Runs the module's own forward and leaves it where it enters the head; the graph up to there stays whole."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self._model = model
        self._head = head
        self.dim = head.in_features
        self.linear = plain_linear(head)

    def hidden(self, inputs: Tensor) -> Tensor:
        handle = self._head.register_forward_pre_hook(_stop)
        try:
            run_model(self._model, inputs)
        except _StopAtHead as stop:
            return stop.hidden
        finally:
            handle.remove()
        raise ModelError("the module did not reach its output layer; train it with loss_chunks=1")

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits

    def parameters(self) -> list[nn.Parameter]:
        return list(self._head.parameters())


def _stop(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    raise _StopAtHead(arguments[0])


def _reason_against(split: _StoppedModule, seq_len: int) -> str | None:
    """Why head(hidden) would not be the module's output; None if it would."""
    head = split._head
    try:
        with HeadWatch(head) as watch:
            output = run_fake(split._model, seq_len)
    except Exception as error:
        return f"its forward cannot be tried out on fake tensors ({type(error).__name__})"
    if watch.calls != 1:
        return f"its output layer is called {watch.calls} times in a forward"
    if watch.output is not output:
        return "its output is not what its output layer returns"
    if watch.seen_ambient != ambient(head):
        return "its output layer runs under its own autocast or no_grad"
    expected = (1, seq_len, head.out_features)
    if output.shape != expected:
        return f"its output for {seq_len} tokens has shape {tuple(output.shape)}, not {expected}"
    return None
