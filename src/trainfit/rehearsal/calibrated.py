"""Which tables of a calibration an operator's kernel is made of. Kernels that nobody timed are priced as copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainfit.hardware.calibration import Calibration, Table
from trainfit.hardware.kernels import NARROW, NARROW_ROW
from trainfit.hardware.microbenchmarks import ATTENTION_HEADS
from trainfit.hardware.runtime import PRECISION_OF
from trainfit.rehearsal.flops import ATTENTION, GROUPED_MM, is_causal
from trainfit.rehearsal.traffic import base_name, inner_loops, tensors_of, traffic_bytes

_ROWS_AT = 2**18  # elements in rows of 16

# Kernels by operator, where the largest operand's elements are their size.
_BY_LARGEST: Mapping[str, str] = {
    "sqrt": "sqrt",
    "sqrt_": "sqrt",
    "rsqrt": "sqrt",
    "exp": "exp",
    "sigmoid": "exp",
    "cos": "exp",
    "sin": "exp",
    "log": "exp",
    "tanh": "tanh",
    "tanh_backward": "tanh_backward",
    "silu": "silu",
    "silu_backward": "silu_backward",
    "bernoulli_": "random",
    "uniform_": "random",
    "normal_": "random",
    "native_dropout": "random",
    "_safe_softmax": "safe_softmax",
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward",
    "nll_loss_backward": "nll_loss_backward",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "cumsum": "cumulate",
    "sort": "sort",
    "topk": "topk",
    "_foreach_norm": "foreach_norm",
    "_foreach_mul_": "foreach_scale",
}
_SOFTMAX: Mapping[str, str] = {"_softmax": "softmax", "_softmax_backward_data": "softmax_backward"}
_HALVES = frozenset({torch.bfloat16, torch.float16})
_REDUCTIONS = frozenset({"sum", "mean", "amax", "max", "min", "var", "linalg_vector_norm", "norm", "any", "all"})
_COPIES = frozenset({"clone", "copy_", "_to_copy", "cat", "stack", "contiguous", "repeat", "constant_pad_nd"})
_FILLS = frozenset({"zeros", "zeros_like", "new_zeros", "fill_", "zero_", "full", "full_like", "ones", "ones_like"})
_COMPARES = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_not"})
_PICKS = {"embedding": "embedding", "index": "index", "index_select": "index", "gather": "index"}
_MATMULS: Mapping[str, int] = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1}


@dataclass(frozen=True)
class CalibratedKernels:
    """Seconds of kernels above those of calling an operator that does next to nothing.

    near: the share of what they go through, by bytes, that was touched just before.
    """

    calibration: Calibration
    near: float = 0.0

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        name = base_name(func)
        if func in ATTENTION:
            return self._attention(func, args, kwargs)
        if func is GROUPED_MM:
            return self._grouped(args[0], args[1], output)
        if name in _MATMULS:
            return self._matmul(name, args, output)
        for names, price in _HANDLERS:
            if name in names:
                return price(self, name, args, kwargs, output)
        if torch.Tag.pointwise in func.tags or name in _COPIES or name in _COMPARES:
            return self._pointwise(name, args, kwargs, output)
        return self._kernel("copy", "fp32", traffic_bytes(func, args, kwargs, output) // 8)

    def _kernel(self, name: str, dtype: torch.dtype | str, elements: float) -> float:
        """Above the smallest call. A dtype without a table takes that of fp32 for as many bytes."""
        precision = dtype if isinstance(dtype, str) else PRECISION_OF.get(dtype, "")
        tables = self.calibration.tables
        if f"{name}.{precision}" not in tables:
            size = dtype.itemsize if isinstance(dtype, torch.dtype) else 4
            precision, elements = "fp32", elements * size / 4
        far = _above_smallest(tables[f"{name}.{precision}"], elements)
        if not self.near or (table := tables.get(f"{name}.near.{precision}")) is None:
            return far
        # What is larger than anything that was timed does not lie there whole.
        share = self.near * min(1.0, table.axes[0][-1] / max(1.0, elements))
        return far + share * (_above_smallest(table, elements) - far)

    def _far(self, name: str, dtype: torch.dtype | str, elements: float) -> float:
        """_kernel on memory that was touched long ago, to take one from another that was timed there only."""
        return replace(self, near=0.0)._kernel(name, dtype, elements)

    def _rows(self, loops: int) -> float:
        """What so many inner loops take more than one."""
        plain = self._far("unary", "fp32", _ROWS_AT)
        return max(0.0, self._far("rows", "fp32", _ROWS_AT) - plain) * (loops - 1) / (_ROWS_AT / 16)

    def _matmul(self, name: str, args: tuple[Any, ...], output: Tensor) -> float:
        first, second = args[_MATMULS[name]], args[_MATMULS[name] + 1]
        batch = int(first.shape[0]) if first.dim() == 3 else 1
        seconds = batch * self._product(first, second)
        if name in ("addmm", "baddbmm"):  # the bias is spread over the output first
            seconds += self._kernel("fill", output.dtype, output.numel())
        return seconds

    def _product(self, first: Tensor, second: Tensor) -> float:
        (m, k), n = first.shape[-2:], second.shape[-1]
        return self._sized(_layout(first, second), first.dtype, m, n, k)

    def _sized(self, layout: str, dtype: torch.dtype, m: float, n: float, k: float) -> float:
        if 0 in (m, n, k):
            return 0.0
        table, share = self._table(f"matmul.{layout}", dtype)
        return share * max(0.0, float(table.at(m, n, k) - table.smallest))

    def _table(self, name: str, dtype: torch.dtype) -> tuple[Any, float]:
        """A table by precision, and what its seconds are multiplied by: one that is not there is fp32's, by bytes."""
        if (own := self.calibration.table(f"{name}.{PRECISION_OF.get(dtype, '')}")) is not None:
            return own, 1.0
        return self.calibration.tables[f"{name}.fp32"], dtype.itemsize / 4

    def _grouped(self, first: Tensor, second: Tensor, output: Tensor) -> float:
        """A matmul for each group, all of the same size, and a call of it for each."""
        layout = _layout(first, second)
        if first.dim() == 2 and second.dim() == 3:  # (tokens, in) x (groups, in, out)
            groups = second.shape[0]
            m, n, k = float(first.shape[0] / groups), second.shape[2], float(first.shape[1])
        else:  # (in, tokens) x (tokens, out)
            groups = output.shape[0]
            m, n, k = float(first.shape[0]), second.shape[-1], first.shape[1] / groups
        call = self._table(f"matmul.{layout}", first.dtype)[0].smallest
        return float(groups * (call + self._sized(layout, first.dtype, m, n, k)))

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        at, backward = ATTENTION[func]
        query, key = args[at], args[at + 1]
        batch, heads, length, dim = query.shape
        kind = "causal" if is_causal(func, args, kwargs) else "whole"
        direction = "backward" if backward else "forward"
        table, share = self._table(f"attention.{direction}.{kind}", query.dtype)
        # Beyond what was timed, and where keys are not as many as queries, in proportion to the scores.
        most = table.axes[0][-1]
        beyond = max(1.0, length / most) * key.shape[2] / length
        return float(share * table.at(length, dim) * beyond * batch * heads / ATTENTION_HEADS)

    def _pointwise(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        made = tensors_of(output)
        if not made:
            made = tensors_of(args)[:1]
        target = made[0]
        count = target.numel()
        sources = [tensor for tensor in tensors_of(args) if tensor is not target or name.endswith("_")]
        if name == "copy_":
            sources = sources[1:]
        if name in ("cat", "stack"):
            loops = target.numel() // max(1, max(s.shape[-1] for s in sources)) if name == "cat" else len(sources)
            return self._kernel("copy", target.dtype, count) + self._rows(loops)
        full = [tensor for tensor in sources if tensor.numel() == count]
        loops = inner_loops(target.shape, [target, *sources])
        computed = torch.float32 if any(s.dtype == torch.float32 for s in sources) else target.dtype
        seconds = self._rows(loops)
        if name in _COPIES:
            return seconds + self._cast(sources[0] if sources else target, target.dtype, count)
        for source in sources:
            if source.dtype != computed and source.is_floating_point() and source.dim():
                seconds += self._cast(source, computed, source.numel())
        return seconds + self._kernel(_arithmetic(name, args, kwargs, len(full)), computed, count)

    def _cast(self, source: Tensor, dtype: torch.dtype, count: int) -> float:
        if source.dtype == dtype:
            return self._kernel("copy", dtype, count)
        # Codes of one byte, and whatever else was not timed, as halves.
        if dtype == torch.float32:
            return self._kernel("to_fp32", source.dtype if source.dtype in _HALVES else torch.bfloat16, count)
        return self._kernel("from_fp32", dtype if dtype in _HALVES else torch.bfloat16, count)

    def _by_largest(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        tensors = tensors_of(args)
        if name.startswith("_foreach"):
            total = sum(tensor.numel() for tensor in tensors_of(args[0]))
            each = self.calibration.tables[f"{_BY_LARGEST[name]}.fp32"].smallest
            return self._kernel(_BY_LARGEST[name], args[0][0].dtype, total) + each * len(args[0])
        largest = max(tensors, key=Tensor.numel)
        return self._kernel(_BY_LARGEST[name], largest.dtype, largest.numel())

    def _softmax(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """Of experts' scores, over a few elements, it takes as long by rows, not by elements."""
        scores, dim = args[0], args[2] if name == "_softmax_backward_data" else args[1]
        width = scores.shape[dim] if scores.dim() else 1
        if width >= NARROW:
            return self._kernel(_SOFTMAX[name], scores.dtype, scores.numel())
        return self._kernel(f"{_SOFTMAX[name]}_narrow", scores.dtype, NARROW_ROW * scores.numel() // max(1, width))

    def _gelu(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        words = name.replace("gelu", "gelu_tanh") if kwargs.get("approximate") == "tanh" else name
        return self._kernel(words, args[0].dtype, args[0].numel())

    def _reduced(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        source, made = args[0], tensors_of(output)[0]
        along_rows = made.dim() == 0 or (made.dim() == source.dim() and made.shape[-1] != source.shape[-1])
        along_rows = along_rows or made.shape[-1:] != source.shape[-1:]
        if name == "mean" and along_rows:
            return self._kernel("mean_rows", source.dtype, source.numel())
        if name in ("linalg_vector_norm", "norm"):
            form = "norm" if made.numel() == 1 else "norm_rows" if along_rows else "norm_columns"
            return self._kernel(form, source.dtype, source.numel())
        return self._kernel("sum_rows" if along_rows else "sum_columns", source.dtype, source.numel())

    def _looked_up(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """One element of each row."""
        return self._kernel("index", "fp32", args[1].numel())

    def _filled(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        made = tensors_of(output)[0]
        return self._kernel("fill", made.dtype, made.numel())

    def _spread(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """Backward of a slice: zeros, and what was sliced copied into them."""
        gradient = args[0]
        loops = inner_loops(gradient.shape, [gradient]) if not gradient.is_contiguous() else 1
        loops = max(loops, gradient.numel() // max(1, gradient.shape[-1])) if gradient.dim() else 1
        copied = self._kernel("copy", gradient.dtype, gradient.numel())
        return self._filled(name, args, kwargs, output) + copied + self._rows(loops)

    def _picked(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        made = tensors_of(output)[0]
        return self._kernel(_PICKS[name], made.dtype, made.numel())

    def _embedding_backward(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """The table was timed with as many rows in the gradient as in the weight; here they differ."""
        gradient, made = args[0], tensors_of(output)[0]
        more = self._far("fill", made.dtype, made.numel()) - self._far("fill", made.dtype, gradient.numel())
        return max(0.0, self._kernel("embedding_backward", gradient.dtype, gradient.numel()) + more)

    def _put(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """As the embedding's backward; out of place it copies what it writes into first."""
        values, made = args[2], tensors_of(output)[0]
        accumulates = len(args) > 3 and bool(args[3])
        copied = self._kernel("copy", made.dtype, made.numel()) if not name.endswith("_") else 0.0
        if not accumulates:
            return self._kernel("index", values.dtype, values.numel()) + copied
        same = self._far("copy", values.dtype, values.numel())
        return max(0.0, self._far("index_put", values.dtype, values.numel()) - same) + copied

    def _scattered(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """As many elements as there are indices; out of place what they are put into is copied first."""
        made, index = tensors_of(output)[0], tensors_of(args)[1]
        copied = self._kernel("copy", made.dtype, made.numel()) if not name.endswith("_") else 0.0
        return self._kernel("index_put", made.dtype, index.numel()) + copied

    def _updated(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
        """Fused AdamW, with the optimizer's Python for each parameter."""
        parameters = tensors_of(args[0])
        each = self.calibration.per_operator["no_grad"].smallest * len(parameters)
        return self._kernel("adamw", "fp32", sum(map(Tensor.numel, parameters))) + each


def _above_smallest(table: Table, elements: float) -> float:
    return max(0.0, table.at(max(1.0, elements)) - table.smallest)


def _arithmetic(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], full: int) -> str:
    """Which light kernel an element-wise operator is like."""
    base = name.rstrip("_")
    if base in _COMPARES:
        return "compare" if full > 1 else "compare_number"
    if base == "pow" and isinstance(args[1], int | float) and args[1] not in (0.5, 1, 2):
        return "power"
    in_place = "_" if name.endswith("_") else ""
    return ("binary" if full > 1 else "unary") + in_place


def _layout(first: Tensor, second: Tensor) -> str:
    if first.stride()[-2] == 1 and first.stride()[-1] != 1:
        return "tn"
    return "nt" if second.stride()[-2] == 1 and second.stride()[-1] != 1 else "nn"


_Price = Callable[[CalibratedKernels, str, tuple[Any, ...], Mapping[str, Any], Any], float]
_HANDLERS: tuple[tuple[Any, _Price], ...] = (
    (_BY_LARGEST, CalibratedKernels._by_largest),
    (("gelu", "gelu_backward"), CalibratedKernels._gelu),
    (_SOFTMAX, CalibratedKernels._softmax),
    (_REDUCTIONS, CalibratedKernels._reduced),
    (_FILLS, CalibratedKernels._filled),
    (("nll_loss_forward",), CalibratedKernels._looked_up),
    (("slice_backward", "select_backward"), CalibratedKernels._spread),
    (_PICKS, CalibratedKernels._picked),
    (("embedding_dense_backward",), CalibratedKernels._embedding_backward),
    (("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_"), CalibratedKernels._put),
    (("scatter", "scatter_", "scatter_add", "scatter_add_"), CalibratedKernels._scattered),
    (("_fused_adamw_",), CalibratedKernels._updated),
)
