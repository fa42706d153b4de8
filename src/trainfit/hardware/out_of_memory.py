"""How a device says that it has no memory left. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.hardware.device import Kind

# torch raises OutOfMemoryError on newer releases of CUDA and torch_npu, a plain RuntimeError with these texts on others
# and always on a CPU.
OUT_OF_MEMORY_TEXTS: Mapping[Kind, tuple[str, ...]] = {
    "cpu": ("you tried to allocate",),
    "cuda": ("CUDA out of memory", "CUDA error: out of memory"),
    "npu": ("NPU out of memory",),
}


def says_out_of_memory(error: BaseException, *kinds: Kind) -> bool:
    """Whether the words of an error are those of such a device without memory; of any device where no kind is given."""
    return any(text in str(error) for kind in kinds or OUT_OF_MEMORY_TEXTS for text in OUT_OF_MEMORY_TEXTS[kind])
