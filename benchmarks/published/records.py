"""Measured runs of other people, read from a JSON file and put into words of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainfit.errors import RecipeError

Framework = Literal["transformers", "torchtitan", "torchtune", "litgpt", "megatron", "deepspeed", "plain"]
Wrap = Literal["none", "ddp", "fsdp1", "fsdp2", "zero3", "dist_optimizer"]
Recompute = Literal["none", "full", "reentrant", "selective"]
Loss = Literal[
    "hf", "triton", "liger", "chunked_head", "chunked_logits", "float", "output_float", "fused", "parallel", "bf16"
]
Metric = Literal["allocated", "active", "reserved", "nvidia-smi"]

# Repositories and the framework whose behaviour a run of theirs shows; the first that the source names.
_FRAMEWORKS: Sequence[tuple[str, Framework]] = (
    ("fms-acceleration", "transformers"),
    ("torchtitan", "torchtitan"),
    ("pytorch/ao", "torchtitan"),
    ("torchtune", "torchtune"),
    ("litgpt", "litgpt"),
    ("lightning-thunder", "litgpt"),
    ("Megatron", "megatron"),
    ("DeepSpeed", "deepspeed"),
    ("transformers", "transformers"),
    ("fsdp_qlora", "transformers"),
    ("peft", "transformers"),
    ("trl", "transformers"),
)


@dataclass(frozen=True)
class Dims:
    """Of a decoder. experts 1: dense. gated: swiglu, else gelu. learned_positions: how many; 0 for rotary ones."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    gated: bool = True
    bias: bool = False
    layernorm: bool = False
    qk_norm: bool = False
    experts: int = 1
    active_experts: int = 1
    learned_positions: int = 0


@dataclass(frozen=True)
class Lora:
    """dtype of the adapters is theirs in `Run.adapter_dtype`; targets: q k v o gate up down."""

    rank: int
    targets: frozenset[str]
    dropout: float
    quant: Literal["", "nf4", "nf4-dq", "gptq"]


@dataclass(frozen=True)
class Run:
    """What is known of one run before it is rehearsed: all that `steps.py` reads, and nothing measured."""

    framework: Framework
    dims: Dims
    wrap: Wrap
    shard: int
    replicate: int
    tensor: int
    pipeline: int
    context: int
    reshard: bool
    seq_len: int
    micro_batch: int
    accumulation: int
    param_dtype: str
    compute_dtype: str
    autocast: bool
    master_dtype: str
    grad_dtype: str
    state_bytes: int
    optimizer: Literal["foreach", "fused", "8bit"]
    update_in_backward: bool
    recompute: Recompute
    offload: bool
    attention: Literal["flash", "unfused", "mha"]
    loss: Loss
    triton: bool
    compiled: bool
    float8: Literal["", "tensorwise", "rowwise"]
    lora: Lora | None
    keeps_logits: bool
    dropout: float
    sequence_parallel: bool = False
    expandable: bool = False
    stages: int = 1  # of the pipeline whose last one this is, where dims.layers are its own


@dataclass(frozen=True)
class Record:
    """A run with what was measured of it. device_bytes: 0 where nobody says."""

    id: str
    source: str
    run: Run
    metric: Metric
    peak_bytes: int
    fits: bool | None
    device: str
    device_bytes: int

    @property
    def group(self) -> str:
        """Who measured it, for a split by source."""
        return self.source.split()[0]


def read_records(path: Path) -> list[Record]:
    """Raises RecipeError for a file that is not a list of records, naming the record and the key."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read as JSON ({error}); give a file like benchmarks/data/measured_runs.json"
        ) from None
    if not isinstance(rows, list):
        raise RecipeError(f"{path} is not a list of records; see benchmarks/data/measured_runs.json")
    return [_record(row, index, path) for index, row in enumerate(rows)]


def _record(row: Any, index: int, path: Path) -> Record:
    name = row.get("id", f"number {index}") if isinstance(row, dict) else f"number {index}"
    try:
        fits = row.get("fits")
        return Record(
            id=str(name),
            source=row["source"],
            run=translate(row),
            metric=_metric(row["metric"]),
            peak_bytes=int(row.get("peak_bytes") or 0),
            fits=None if fits is None else bool(fits),
            device=row["device"],
            device_bytes=round(float(row.get("device_mem_gb") or 0) * 2**30),
        )
    except KeyError as error:
        raise RecipeError(
            f"record {name} of {path} has no key {error}; see benchmarks/data/measured_runs.json"
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise RecipeError(f"record {name} of {path} cannot be understood: {error}") from None


def translate(row: Mapping[str, Any]) -> Run:
    """A record's own words into a Run. Raises KeyError, TypeError or ValueError for what is missing or no number."""
    precision, parallel, model = row["precision"], row["parallel"], row["model"]
    framework = _framework(row["source"])
    compute, zero, notes = str(precision["compute"]), str(row["zero_or_fsdp"]), str(row.get("notes") or "")
    wrap = _wrap(zero)
    lora = _lora(row.get("lora"), framework)
    param = _dtype(str(precision["param"])) if lora is None or not lora.quant else "bf16"
    compute_dtype = "fp16" if "fp16" in compute else "fp32" if compute.startswith("fp32") else "bf16"
    return Run(
        framework=framework,
        dims=_dims(model, framework, notes),
        wrap=wrap,
        shard=int(parallel.get("dp_shard") or 1) * (int(parallel.get("cp") or 1) if wrap == "fsdp2" else 1),
        replicate=int(parallel.get("dp_replicate") or 1),
        tensor=int(parallel.get("tp") or 1),
        pipeline=int(parallel.get("pp") or 1),
        context=int(parallel.get("cp") or 1),
        reshard=not ("never" in zero or "zero2" in zero.lower().replace("-", "")),
        seq_len=int(row["seq_len"]),
        micro_batch=int(row["micro_batch"]),
        accumulation=_accumulation(row.get("grad_accum"), int(row["micro_batch"])),
        param_dtype=param,
        compute_dtype=compute_dtype,
        autocast="autocast" in compute,
        master_dtype=_master(str(precision["master"])),
        grad_dtype="fp32" if str(precision["grads"]).startswith("fp32") else param,
        state_bytes=_state_bytes(str(precision["state"])),
        optimizer=_optimizer(str(precision["optimizer"]), framework),
        update_in_backward="freed per param" in str(precision["grads"]) or "optimizer_in_bwd" in notes,
        recompute=_recompute(str(row["activation_checkpointing"]), framework),
        offload="offload" in str(row["activation_checkpointing"]),
        attention=_attention(str(row["attention"])),
        loss=_loss(str(row["loss"]), framework),
        triton=_has_triton(row, notes),
        compiled=bool(row.get("compile")),
        float8="" if "float8" not in compute else "rowwise" if "rowwise" in compute else "tensorwise",
        lora=lora,
        keeps_logits=_keeps_logits(notes),
        sequence_parallel=framework == "torchtitan" or "sequence parallel" in notes.lower(),
        # Its run script sets it, but did not yet when its models returned fp32 logits.
        expandable=framework == "torchtitan" and "output.float()" not in str(row["loss"]),
        dropout=0.1 if framework == "megatron" and "dropout 0;" not in notes + ";" else 0.0,
    )


def _framework(source: str) -> Framework:
    return next((framework for name, framework in _FRAMEWORKS if name.lower() in source.lower()), "plain")


def _dims(model: Mapping[str, Any], framework: Framework, notes: str) -> Dims:
    mlp, norm = str(model.get("mlp") or "swiglu"), str(model.get("norm") or "rmsnorm")
    experts = re.search(r"moe (\d+)e top(\d+)", mlp)
    note = str(model.get("note") or "")
    padded = re.search(r"padded to (\d+)", note)
    positions = re.search(r"learned pos emb (\d+)", note)
    return Dims(
        layers=int(model["layers"]),
        hidden=int(model["hidden"]),
        heads=int(model["heads"]),
        kv_heads=int(model.get("kv_heads") or model["heads"]),
        head_dim=int(model.get("head_dim") or int(model["hidden"]) // int(model["heads"])),
        ffn=int(model["ffn"]),
        vocab=int(padded[1]) if padded else int(model["vocab"]),
        tied=bool(model.get("tied")),
        gated="swiglu" in mlp or re.search(r"\bswiglu\b", notes.lower()) is not None,
        bias="bias" in mlp or framework == "deepspeed",
        layernorm=norm == "layernorm",
        qk_norm=bool(model.get("qk_norm")),
        experts=int(experts[1]) if experts else 1,
        active_experts=int(experts[2]) if experts else 1,
        learned_positions=int(positions[1]) if positions else 0,
    )


def _lora(lora: Mapping[str, Any] | None, framework: Framework) -> Lora | None:
    if not lora:
        return None
    words = re.split(r"[\s,]+", str(lora.get("targets") or "q_proj v_proj"))
    targets = {word.removesuffix("_proj") for word in words} & {"q", "k", "v", "o", "gate", "up", "down"}
    quant = str(lora.get("quant") or "").lower()
    kind: Literal["", "nf4", "nf4-dq", "gptq"] = ""
    if "gptq" in quant:
        kind = "gptq"
    elif quant:
        kind = "nf4" if quant == "bnb.nf4" else "nf4-dq"
    dropout = lora.get("dropout")
    if dropout is None:
        dropout = 0.05 if framework in ("litgpt", "torchtune") else 0.0  # as their recipes have it
    return Lora(int(lora["r"]), frozenset(targets), float(dropout), kind)


def _wrap(zero: str) -> Wrap:
    lower = zero.lower()
    for word, wrap in (
        ("fsdp1", "fsdp1"),
        ("fsdp2", "fsdp2"),
        ("zero-3", "zero3"),
        ("distributed optimizer", "dist_optimizer"),
    ):
        if word in lower:
            return wrap  # type: ignore[return-value]
    return "fsdp1" if "full_shard" in lower else "fsdp2" if "fsdp" in lower else "ddp" if "ddp" in lower else "none"


def _dtype(words: str) -> str:
    return next((dtype for dtype in ("fp32", "fp16", "bf16") if words.startswith(dtype)), "bf16")


def _master(words: str) -> str:
    return "" if words in ("none", "None") or "the fp32" in words or "fp32 params" in words else words.split()[0]


def _state_bytes(words: str) -> int:
    return 1 if "int8" in words else 4 if "fp32" in words else 2


def _optimizer(words: str, framework: Framework) -> Literal["foreach", "fused", "8bit"]:
    if "8bit" in words:
        return "8bit"
    if framework == "torchtune" and words == "AdamW":
        return "fused"  # as its recipes set
    return "fused" if re.search(r"fused(?!.*later)|FusedAdam", words) and "later fused" not in words else "foreach"


def _accumulation(value: Any, micro_batch: int) -> int:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)/mbs", value)):
        return max(1, int(match[1]) // micro_batch)
    return int(value or 1)


def _recompute(words: str, framework: Framework) -> Recompute:
    lower = words.lower()
    if lower.startswith("full"):
        return "reentrant" if "hf" in lower or framework == "transformers" or "reentrant" in lower else "full"
    return "selective" if lower.startswith("selective") else "none"


def _attention(words: str) -> Literal["flash", "unfused", "mha"]:
    if "MultiheadAttention" in words:
        return "mha"
    return "unfused" if "unfused" in words else "flash"


def _loss(words: str, framework: Framework) -> Loss:
    lower = words.lower()
    rules: Sequence[tuple[str, Loss]] = (
        ("liger", "liger"),
        ("triton ce", "triton"),
        ("compiled f.cross_entropy", "fused"),
        ("output.float()", "output_float"),
        ("vocab-parallel", "parallel"),
        ("chunked-output", "chunked_logits"),
        ("lm_head_chunk", "chunked_head"),
        ("bf16 logits", "bf16"),
        ("hf", "hf"),
    )
    return next((loss for word, loss in rules if word in lower), "float")


def _has_triton(row: Mapping[str, Any], notes: str) -> bool:
    """Fused norm and rotary kernels of fms-acceleration's foak plugin, or of Liger."""
    return "triton" in str(row["loss"]).lower() or "liger" in str(row["loss"]).lower()


def _keeps_logits(notes: str) -> bool:
    """transformers from 4.46 upcasts in a loss function whose caller still holds the logits of the head."""
    version = re.search(r"transformers (\d+)\.(\d+)", notes)
    return version is not None and (int(version[1]), int(version[2])) >= (4, 46)


def _metric(words: str) -> Metric:
    lower = words.lower()
    if "smi" in lower:
        return "nvidia-smi"
    return (
        "reserved" if "reserved" in lower or "did not fit" in lower else "active" if "active" in lower else "allocated"
    )
