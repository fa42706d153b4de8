"""One stage as PyTorch's pipeline schedules run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

# The base of PipelineStage, which would ask its neighbours for shapes: more than a rehearsal without neighbours can do.
from torch.distributed.pipelining._utils import _make_tensor_from_meta, _TensorMeta
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from trainfit.profile import PipelineSchedule
from trainfit.techniques.pipeline_cut import Part

# (stage, micro batch, hidden states received) -> hidden states to send, or the loss
ForwardFunction = Callable[[Part, int, Tensor | None], Tensor]


def wire_tensor(shape: Sequence[int], dtype: torch.dtype) -> _TensorMeta:
    """What hidden states look like on their way between stages."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return _TensorMeta(shape=torch.Size(shape), stride=stride, dtype=dtype, requires_grad=True)


class StageRunner(_PipelineStageBase):
    """Tells its owner which micro batch runs, and holds buffers only while something is in them.

    PyTorch's own stages allocate what they will receive for all micro batches of a window at once, and keep it.
    """

    def __init__(
        self,
        part: Part,
        device: torch.device,
        group: dist.ProcessGroup,
        forward: ForwardFunction,
        before_backward: Callable[[Part, int], None],
    ) -> None:
        super().__init__(_Stage(part, forward), part.number, part.count, device, group)
        self.part = part
        self._before_backward = before_backward
        _meet(super()._get_init_p2p_neighbors_ops())

    def begin(self, micro_batches: int, receives: _TensorMeta, sends: _TensorMeta) -> None:
        """Called before each window."""
        self.chunks = micro_batches
        meta = self._stage_meta
        meta.inputs = meta.input_grads = () if self.is_first else (receives,)
        meta.outputs = meta.output_grads = (sends,)
        number, chunks = self.stage_index, range(micro_batches)
        self.act_send_info = {0: [] if self.is_last else [number + 1]}
        self.args_recv_info = {c: () if self.is_first else _from("hidden states", number - 1, receives) for c in chunks}
        self.grad_recv_info = {c: () if self.is_last else _from("gradients", number + 1, sends) for c in chunks}

    def drop(self) -> None:
        """Forget a window that failed half-way."""
        for held in (self.fwd_cache, self.bwd_cache, self.args_recv_info, self.grad_recv_info):
            held.clear()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None: ...

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None: ...

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # they met when the stages were made, once for the schedules of all numbers of micro batches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[_RecvInfo, ...]:
        raise AssertionError("begin() has made it")

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, args, {"number": fwd_chunk_id}, save_forward_output)
        _release(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._before_backward(self.part, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _release(self.grad_recv_info[bwd_chunk_id])


def _meet(greetings: list[dist.P2POp]) -> None:
    """Set up the connections between neighbours, which all ranks do at once."""
    for work in dist.batch_isend_irecv(greetings) if greetings else ():
        work.wait()


def _from(what: str, stage: int, meta: _TensorMeta) -> tuple[_RecvInfo, ...]:
    return (_RecvInfo(f"{what} of stage {stage}", stage, None, meta),)


def _allocate(infos: Sequence[_RecvInfo], device: torch.device) -> None:
    for info in infos:
        assert isinstance(info.tensor_meta, _TensorMeta)
        info.buffer = _make_tensor_from_meta(info.tensor_meta, device)


def _release(infos: Sequence[_RecvInfo]) -> None:
    for info in infos:
        info.buffer = None


class _Stage(nn.Module):
    def __init__(self, part: Part, run: ForwardFunction) -> None:
        super().__init__()
        self._part, self._run = part, run

    def forward(self, *hidden: Tensor, number: int) -> Tensor:
        return self._run(self._part, number, hidden[0] if hidden else None)


def make_schedule(kind: PipelineSchedule, stages: list[StageRunner], micro_batches: int) -> Any:
    """PyTorch's schedule of a window. The last stage's output is the loss; it is divided by the window's tokens, so
    gradients must not be divided again."""
    settings: dict[str, Any] = {"loss_fn": _the_output_itself, "scale_grads": False}
    if kind == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), micro_batches, **settings)
    return (Schedule1F1B if kind == "1f1b" else ScheduleGPipe)(stages[0], micro_batches, **settings)


def _the_output_itself(output: Tensor, target: Tensor) -> Tensor:
    return output
