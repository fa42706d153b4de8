"""Seconds of operators and collectives, what the model asks for, and how sure a step's time is."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainfit.hardware import accelerator, find_device
from trainfit.hardware.calibration import Table
from trainfit.hardware.microbenchmarks import Grids, calibrate
from trainfit.profile import OptimizerVariant, Profile
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.calibrated import CalibratedKernels
from trainfit.rehearsal.certainty import errors_of, half_width
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.operator_cost import ADAMW_BYTES, OperatorCost, kernel_prices
from trainfit.rehearsal.traffic import inner_loops, traffic_bytes
from trainfit.step import Strategy, parse_tiers
from trainfit.techniques.optimizer import bytes_per_parameter
from trainfit.workload import workload_from_module
from trainfit.workload.resolve import workload_from_config

aten = torch.ops.aten
H100 = find_device("h100")
DIM, BLOCKS, SEQ_LEN, VOCAB = 64, 3, 32, 100
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": SEQ_LEN,
}


def ran(func, *args, **kwargs):
    return func, args, kwargs, func(*args, **kwargs)


def traffic(func, *args, **kwargs) -> int:
    return traffic_bytes(*ran(func, *args, **kwargs))


def test_traffic_is_what_is_read_and_written():
    a, b = torch.ones(8, 16), torch.ones(8, 16)
    size = a.nbytes
    assert traffic(aten.add.Tensor, a, b) == 3 * size
    assert traffic(aten.add_.Tensor, a, b) == 3 * size  # reads both, writes one
    assert traffic(aten.mul_.Scalar, a, 2.0) == 2 * size
    assert traffic(aten.copy_.default, a, b) == 2 * size  # what was there is not read
    assert traffic(aten.fill_.Scalar, a, 1.0) == size
    assert traffic(aten.sum.dim_IntList, a, [1]) == size + 8 * 4
    assert traffic(aten.mul.Tensor, a, torch.ones(8, 1).expand(8, 16)) == 2 * size + 8 * 4  # repeated, read once
    assert traffic(aten.mm.out, a, b.t(), out=torch.empty(8, 8)) == 2 * size + 8 * 8 * 4


def test_of_an_embedding_only_the_rows_that_are_picked_move():
    table, ids = torch.ones(10_000, 16), torch.zeros(5, dtype=torch.long)
    assert traffic(aten.embedding.default, table, ids) == 2 * 5 * 16 * 4 + ids.nbytes
    assert traffic(aten.index.Tensor, table, [ids]) == 2 * 5 * 16 * 4 + ids.nbytes


def test_fused_adamw_moves_28_bytes_a_parameter():
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::_fused_adamw_":
                seen.append(traffic_bytes(func, args, kwargs or {}, output))
            return output

    with Watch():
        torch.optim.AdamW([parameter], fused=True).step()
    assert seen == [pytest.approx(28 * 1000, abs=16)]


def test_inner_loops_join_dimensions_that_lie_beside_each_other_in_all_operands():
    whole = torch.ones(4, 8, 16)
    assert inner_loops(whole.shape, [whole, whole]) == 1
    heads = torch.ones(2, 8, 4, 16).transpose(1, 2)  # (2, 4, 8, 16)
    assert inner_loops(heads.shape, [heads]) == 1  # its own order is one run
    assert inner_loops(heads.shape, [heads, torch.ones(1, 1, 8, 16)]) == 2 * 4 * 8
    assert inner_loops(whole.shape, [whole, torch.ones(4, 8, 1)]) == 4 * 8
    assert inner_loops(whole.shape, [whole, torch.ones(16)]) == 4 * 8
    assert inner_loops((4, 8), [torch.ones(4, 16)[:, :8]]) == 4


@pytest.mark.parametrize("tier", ["keep", "pointwise", "attention", "full"])
@pytest.mark.parametrize(("size", "steps", "chunks"), [(4, 1, 1), (1, 4, 1), (2, 2, 8)])
def test_model_flops_are_6_for_each_weight_and_token_and_do_not_depend_on_the_technique(tier, size, steps, chunks):
    """Recompute is not what the model asks for. Attention is causal, so half its scores: 6 * length * dim a token."""
    workload = workload_from_config(LLAMA, seq_len=SEQ_LEN, name="tiny")
    strategy = Strategy(size, steps, "fp32", parse_tiers(tier, BLOCKS), chunks)
    profile = rehearse(workload, strategy, H100)
    weights = BLOCKS * (4 * DIM * DIM + 3 * DIM * 96) + DIM * VOCAB
    tokens = 4 * SEQ_LEN
    attention = BLOCKS * 6 * SEQ_LEN * DIM
    assert profile.tokens == tokens
    assert profile.model_flops == pytest.approx(tokens * (6 * weights + attention), rel=0.002)  # rotary tables


def test_mfu_of_a_matmul_model_is_that_of_its_matmuls():
    """A model of nothing but large matmuls, on a device whose other figures cost nothing."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 512), *(nn.Linear(512, 512, bias=False) for _ in range(8)))

    spec = H100.spec
    free = replace(spec.memory_bandwidth, value=1e30)
    spec = replace(spec, memory_bandwidth=free, launch_seconds=replace(free, value=1e-30))
    workload = workload_from_module(make, seq_len=64, vocab_size=512)
    profile = rehearse(workload, Strategy(2, 1, "bf16"), replace(H100, spec=spec))
    assert profile.mfu is not None
    assert profile.mfu.expected == pytest.approx(spec.efficiency.value, rel=0.01)
    assert profile.peak_flops_per_second == spec.tflops["bf16"].value * 1e12


def test_tokens_are_those_of_all_replicas():
    from trainfit.profile import Mesh, Zero

    workload = workload_from_config(LLAMA, seq_len=SEQ_LEN, name="tiny")
    alone = rehearse(workload, Strategy(2), H100)
    shared = rehearse(workload, Strategy(2, mesh=Mesh(shard=4), zero=Zero(2)), replace(H100, count=4))
    assert shared.tokens == 4 * alone.tokens
    assert shared.model_flops == pytest.approx(alone.model_flops, rel=1e-6)  # of one rank


def test_the_range_holds_the_figure_and_comes_back_from_json():
    profile = rehearse(workload_from_config(LLAMA, seq_len=SEQ_LEN, name="tiny"), Strategy(2), H100)
    assert 0 < profile.step_seconds_low < profile.step_seconds < profile.step_seconds_high
    for found in (profile.tokens_per_second, profile.mfu):
        assert found.low < found.expected < found.high
    assert profile.tokens_per_second.low == pytest.approx(profile.tokens / profile.step_seconds_high)
    data = profile.to_json()
    assert data["mfu"].keys() == {"low", "expected", "high"}
    assert Profile.from_json(data) == profile


@given(st.dictionaries(st.sampled_from(["arithmetic", "memory", "launch", "link"]), st.floats(0, 1e3)))
def test_figures_err_together_within_one_and_apart_between_two(seconds):
    """No wider than if all erred alike, no narrower than the widest of them."""
    errors = errors_of(H100.spec, "bf16")
    each = [seconds[bound] * errors[bound] for bound in seconds]
    wide = half_width(seconds, errors)
    assert max(each, default=0.0) * (1 - 1e-9) <= wide <= sum(each) * (1 + 1e-9)


def test_surer_figures_make_a_narrower_range():
    workload = workload_from_config(LLAMA, seq_len=SEQ_LEN, name="tiny")

    def width(confidence: str) -> float:
        launch = replace(H100.spec.launch_seconds, confidence=confidence)
        profile = rehearse(workload, Strategy(2), replace(H100, spec=replace(H100.spec, launch_seconds=launch)))
        return profile.step_seconds_high / profile.step_seconds - 1

    assert width("high") < width("medium") < width("low") <= 0.3 + 1e-9


def test_a_ring_takes_its_share_of_the_payload_and_a_latency_for_each_step():
    links = Links(100.0, call=1.0, step=0.5)
    assert links.seconds("all_gather", 800, 4) == pytest.approx(1 + 3 * 0.5 + 3 / 4 * 8)
    assert links.seconds("all_reduce", 800, 4) == pytest.approx(1 + 2 * (3 * 0.5 + 3 / 4 * 8))
    assert links.seconds("send", 800, 2) == pytest.approx(1 + 0.5 + 8)


def test_a_group_within_a_node_takes_the_nodes_links_and_one_across_the_slowest():
    links = Links(100.0, devices_per_node=8, network=10.0, step=1.0, network_step=7.0)
    within = links.seconds("all_gather", 800, 8, range(8, 16))
    assert within == pytest.approx(7 * 1.0 + 7 / 8 * 8)
    # One rank of each node: all steps cross, over one device's share of the network.
    across = links.seconds("all_gather", 800, 8, range(0, 64, 8))
    assert across == pytest.approx(7 * 7.0 + 7 / 8 * 80)
    # Four of each of two nodes: four shares side by side; one step of the ring crosses.
    both = links.seconds("all_gather", 800, 8, (0, 1, 2, 3, 8, 9, 10, 11))
    assert both == pytest.approx(6 * 1.0 + 7.0 + 7 / 8 * 800 / 40)
    assert links.bound(8, range(8, 16)) == "link"
    assert links.bound(8, range(0, 64, 8)) == "network"
    assert links.seconds("send", 800, 2, (7, 8)) == pytest.approx(7.0 + 80)


@given(st.integers(2, 256), st.integers(1, 2**40), st.sampled_from(["all_gather", "all_reduce", "broadcast"]))
def test_more_bytes_or_ranks_never_take_less(ranks, num_bytes, kind):
    links = Links.of(H100.spec)
    assert links is not None
    seconds = links.seconds(kind, num_bytes, ranks)
    assert links.seconds(kind, 2 * num_bytes, ranks) >= seconds
    assert links.seconds(kind, num_bytes, 2 * ranks) >= seconds * (1 - 1e-9) or ranks < 8 <= 2 * ranks


def test_collectives_of_two_nodes_are_rehearsed_over_the_network():
    from trainfit.profile import Mesh, Zero

    workload = workload_from_config(LLAMA, seq_len=SEQ_LEN, name="tiny")

    def seconds(devices: int) -> float:
        strategy = Strategy(1, mesh=Mesh(shard=devices), zero=Zero(3))
        profile = rehearse(workload, strategy, replace(H100, count=devices))
        return profile.collectives["all_gather"].seconds / profile.collectives["all_gather"].count

    assert seconds(16) > seconds(8) + 7 * H100.spec.link_latency.value


@pytest.fixture(scope="module")
def calibration():
    torch.set_num_threads(1)
    grids = Grids(elements=(1, 2**10, 2**14), matmul=((16, 128),) * 3, lengths=(32, 64), head_dims=(32,))
    return calibrate(accelerator("cpu"), price_of=kernel_prices, grids=grids)


def cost_of(calibration, *, runs_ahead: bool) -> OperatorCost:
    return OperatorCost({"fp32": 1e12}, 1e12, 1e-6, calibration=calibration, runs_ahead=runs_ahead)


def test_a_calibrated_operator_takes_what_its_table_says(calibration):
    cost = cost_of(calibration, runs_ahead=False)
    around = calibration.around("forward", 0.0)
    a = torch.ones(64, 256)
    table = calibration.tables["silu.fp32"]
    assert cost.seconds(*ran(aten.silu.default, a)) == pytest.approx(around + table.at(a.numel()) - table.smallest)
    product = calibration.tables["matmul.nt.fp32"]
    left, right = torch.ones(100, 30), torch.ones(50, 30).t()
    expected = around + product.at(100, 50, 30) - product.smallest
    assert cost.seconds(*ran(aten.mm.default, left, right)) == pytest.approx(expected)
    assert cost.seconds(*ran(aten.view.default, a, [-1])) == around


def test_a_scatter_takes_as_long_as_it_has_indices(calibration):
    kernels = CalibratedKernels(calibration)
    index = torch.zeros(64, 1, dtype=torch.long)
    few = kernels.seconds(*ran(aten.scatter_add_.default, torch.zeros(64, 10), 1, index, torch.ones(64, 1)))
    wide = kernels.seconds(*ran(aten.scatter_add_.default, torch.zeros(64, 10_000), 1, index, torch.ones(64, 1)))
    assert few == wide


def test_a_softmax_over_a_few_experts_takes_as_long_as_it_has_rows(calibration):
    """The slope of its tables by rows, not by elements: no vector of a processor is filled by eight of them."""
    kernels = CalibratedKernels(calibration)

    def seconds(rows: int, width: int) -> float:
        scores = torch.zeros(rows, width)
        forward = kernels.seconds(aten._softmax.default, (scores, -1, False), {}, scores)
        backward = kernels.seconds(aten._softmax_backward_data.default, (scores, scores, -1, scores.dtype), {}, scores)
        return forward + backward

    assert seconds(4096, 4) == seconds(4096, 8) == seconds(4096, 16)
    assert seconds(4096, 8) == pytest.approx(_of_tables(calibration, "_narrow", 8 * 4096))
    assert seconds(4096, 64) == pytest.approx(_of_tables(calibration, "", 64 * 4096))
    long = torch.zeros(4096, 8)  # over the first dimension, which is not narrow
    price = kernels.seconds(aten._softmax.default, (long, 0, False), {}, long)
    table = calibration.tables["softmax.fp32"]
    assert price == pytest.approx(table.at(long.numel()) - table.smallest)


def _of_tables(calibration, form: str, elements: int) -> float:
    tables = [calibration.tables[f"{name}{form}.fp32"] for name in ("softmax", "softmax_backward")]
    return sum(table.at(elements) - table.smallest for table in tables)


def test_each_group_of_a_grouped_matmul_is_called(calibration):
    """Of next to no arithmetic, eight groups take eight calls."""
    kernels = CalibratedKernels(calibration)
    tokens, weights = torch.zeros(8, 16), torch.zeros(8, 16, 16)
    ends = torch.arange(1, 9, dtype=torch.int32)
    seconds = kernels.seconds(aten._grouped_mm.default, (tokens, weights, ends), {}, torch.zeros(8, 16))
    table = calibration.tables["matmul.nn.fp32"]
    assert seconds == pytest.approx(8 * table.smallest)


def test_operators_take_longer_around_their_kernels_after_much_was_touched(calibration):
    forward = Table(((1.0, 2.0**26),), (1e-6, 5e-6))
    calibration = replace(calibration, per_operator={**calibration.per_operator, "forward": forward})
    cost = cost_of(calibration, runs_ahead=False)
    view = ran(aten.view.default, torch.ones(4, 4), [-1])
    before = cost.seconds(*view)
    big = ran(aten.neg.default, torch.ones(2**22))
    for _ in range(64):
        cost.seconds(*big)
    touched = 2 * 4 * 2**22 * 63 / 64
    assert before == pytest.approx(1e-6)
    assert cost.seconds(*view) == pytest.approx(calibration.around("forward", touched))
    assert 1e-6 < cost.seconds(*view) < 5e-6


def test_what_is_around_an_operator_does_not_grow_beyond_the_largest_size(calibration):
    table = calibration.per_operator["backward"]
    assert calibration.around("backward", 100 * table.axes[0][-1]) == pytest.approx(table.seconds[-1])


def test_what_was_touched_just_before_is_priced_as_near_by_its_share(calibration):
    tables = dict(calibration.tables)
    for name in ("unary_", "unary"):
        tables[f"{name}.near.fp32"] = replace(tables[f"{name}.fp32"], seconds=(1e-9, 2e-9, 3e-9))
    changed = replace(calibration, tables=tables)
    cost = cost_of(changed, runs_ahead=False)

    def kernel(call, part) -> float:
        return cost.seconds(*call) - calibration.around(part, 0.0)

    a = torch.ones(2**14)
    in_place, out_of_place = ran(aten.mul_.Scalar, a, 1.0), ran(aten.neg.default, a)
    far = CalibratedKernels(changed)
    near = 3e-9 - 1e-9  # above the smallest
    assert kernel(in_place, "forward") == pytest.approx(far.seconds(*in_place))  # touched for the first time
    assert kernel(in_place, "forward") == pytest.approx(near)
    half = (near + far.seconds(*out_of_place)) / 2  # what forward makes lies where nobody was
    assert kernel(out_of_place, "forward") == pytest.approx(half)
    with torch.no_grad():
        assert kernel(out_of_place, "no_grad") == pytest.approx(near)


def test_what_a_compiled_kernel_writes_is_near_and_what_is_made_empty_is_not(calibration):
    """Such a kernel has its outputs among its keywords, and an empty tensor may lie where another one was."""
    tables = {**calibration.tables, "copy.near.fp32": replace(calibration.tables["copy.fp32"], seconds=(1e-9,) * 3)}
    cost = cost_of(replace(calibration, tables=tables), runs_ahead=False)
    read, made = torch.ones(2**14), torch.empty(2**14)
    kernel = (torch.ops.trainfit.fused_kernel.default, ([read],), {"out": [made]}, None)
    reads_it = (torch.ops.trainfit.fused_kernel.default, ([made],), {"out": [torch.empty(2**14)]}, None)
    first = cost.seconds(*kernel)
    assert cost.seconds(*reads_it) < first
    cost.seconds(aten.empty.memory_format, ([2**14],), {}, made)
    cost.seconds(aten.empty.memory_format, ([2**14],), {}, read)
    assert cost.seconds(*kernel) == pytest.approx(first)


def test_a_device_that_runs_behind_its_host_takes_the_longer_of_kernel_and_launch(calibration):
    cost = cost_of(calibration, runs_ahead=True)
    around = calibration.around("forward", 0.0)
    assert cost.seconds(*ran(aten.silu.default, torch.ones(1))) == around
    big = torch.ones(2048, 2048)
    table = calibration.tables["silu.fp32"]
    assert cost.seconds(*ran(aten.silu.default, big)) == pytest.approx(table.at(big.numel()) - table.smallest)
    assert cost.seconds(*ran(aten.view.default, big, [-1])) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "tiers"),
    [
        ("llama", "pointwise"),
        ("gpt2", "pointwise"),
        ("qwen3_moe", "pointwise"),
        ("llama", "2*keep_int8,keep_fp8,keep_bf16"),
        ("llama", "2*discard,attention,full"),
    ],
)
def test_every_operator_of_a_step_has_a_calibrated_time(calibration, kind, tiers, precision):
    from tiny_models import TINY_CONFIGS
    from trainfit.hardware import this_machine

    hardware = this_machine("cpu")
    hardware = replace(hardware, spec=replace(hardware.spec, calibration=calibration))
    workload = workload_from_config(TINY_CONFIGS[kind], seq_len=32, name=kind)
    variant = OptimizerVariant(kernel="foreach")
    profile = rehearse(workload, Strategy(2, 2, precision, parse_tiers(tiers, 4), 2, variant), hardware)
    assert 1e-4 < profile.step_seconds < 10
    assert profile.step_seconds_high / profile.step_seconds == pytest.approx(
        1 + math.hypot(calibration.spread, 0.05), rel=1e-6
    )


def test_the_same_calibration_gives_the_same_seconds(calibration):
    from trainfit.hardware import this_machine

    hardware = this_machine("cpu")
    hardware = replace(hardware, spec=replace(hardware.spec, calibration=calibration))
    workload = workload_from_config(LLAMA, seq_len=SEQ_LEN, name="tiny")
    assert rehearse(workload, Strategy(2), hardware) == rehearse(workload, Strategy(2), hardware)


def test_an_update_in_host_memory_moves_all_that_it_has():
    """Weights and moments twice, gradients once."""
    size = bytes_per_parameter(OptimizerVariant())
    assert 2 * (size.weights + size.moments) + size.gradients == ADAMW_BYTES


def test_marks_for_a_profiler_take_a_device_no_time():
    """FSDP sets two dozen for each block; a launch each would be a millisecond for four blocks."""
    cost = cost_of(None, runs_ahead=True)
    mark = torch.ops.profiler._record_function_enter_new.default
    handle = mark("FSDP::unshard", None)
    assert cost.seconds(mark, ("FSDP::unshard", None), {}, handle) == 0
    end = torch.ops.profiler._record_function_exit._RecordFunction
    assert cost.seconds(end, (handle,), {}, end(handle)) == 0
