"""The calibration runs on a device: through the facade's queue, with copies to and from the host."""

from trainfit.hardware import accelerator
from trainfit.hardware.microbenchmarks import Grids, calibrate
from trainfit.rehearsal.operator_cost import kernel_prices


def test_a_device_is_calibrated():
    grids = Grids(elements=(1, 2**10), matmul=((16, 64),) * 3, lengths=(16,), head_dims=(16,), copies=(2**10, 2**16))
    seen = []
    made = calibrate(
        accelerator("npu"), price_of=kernel_prices, grids=grids, report=lambda what, share: seen.append(share)
    )
    assert made.kind == "npu"
    assert {"to_device", "to_host", "host_adamw.fp32", "matmul.nt.fp16", "silu.bf16", "rows.fp32"} <= set(made.tables)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
