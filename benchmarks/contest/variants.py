"""Who takes part: by family, what builds each, and whose virtual environment it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Role = Literal["plain", "peer", "beside", "plan"]
BUDGETS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2)


@dataclass(frozen=True)
class Variant:
    """One way to do the step.

    role: "plain" is what all are compared with, a "peer" is to be beaten, one "beside" is shown alone.
    builder: module:function of the contest, called with the case and `arguments`.
    environment: folder of its virtual environment; None is the one that runs this.
    about: what its row says besides.
    """

    family: str
    name: str
    role: Role
    builder: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PLAIN = Variant("plain", "plain", "plain", "hand_written:plain")


def _peers() -> Iterable[Variant]:
    yield Variant("plain", "plain, torch's default AdamW", "beside", "hand_written:plain", {"fused": False})
    for count in (2, 4, 8):
        name = f"plain, {count} micro batches"
        yield Variant("plain", name, "beside", "hand_written:plain", {"micro_batches": count})
    for k in (1, 2, 3, 4):
        name = "checkpoint, all blocks" if k == 1 else f"checkpoint, 1 of {k} blocks"
        yield Variant("checkpoint", name, "peer", "hand_written:every", {"k": k})
    yield Variant("selective", "save matmuls, attention", "peer", "hand_written:selective", {"matmuls": True})
    yield Variant("selective", "save attention", "peer", "hand_written:selective", {"matmuls": False})
    yield Variant("save_on_cpu", "save_on_cpu", "peer", "hand_written:on_host", {"checkpointed": False})
    yield Variant("save_on_cpu", "checkpoint, save_on_cpu", "peer", "hand_written:on_host", {"checkpointed": True})
    for how, word in (("whole", "model"), ("blocks", "blocks")):
        for budget in BUDGETS:
            yield Variant("compile", f"compile {word}, {budget}", "peer", f"compiled:{how}", {"budget": budget})
    yield Variant("huggingface", "HF", "peer", "huggingface:llama", {"checkpointed": False})
    yield Variant("huggingface", "HF checkpointing", "peer", "huggingface:llama", {"checkpointed": True})
    every = {"checkpointed": True, "every_n_layers": 2}
    yield Variant("huggingface", "HF checkpointing, 1 of 2", "peer", "huggingface:llama", every)
    names = {"full": "FullAC", "selective": "SelectiveAC", "selective_cpu_attention": "SelectiveAC, CPU attention"}
    for name, words in names.items():
        yield Variant("torchtitan", f"torchtitan {words}", "peer", "titan:policy", {"name": name}, "torchtitan")
    builder = "deepspeed_checkpoint:every_block"
    yield Variant("deepspeed", "DeepSpeed checkpointing", "peer", builder, environment="deepspeed")
    for share in (0.25, 0.5, 0.9):
        name = f"ckptplan, saves {share:.0%}"
        yield Variant("ckptplan", name, "peer", "ckptplan_blocks:saving", {"share": share}, "ckptplan")


PEERS: tuple[Variant, ...] = tuple(_peers())
FAMILIES = (*dict.fromkeys(variant.family for variant in PEERS), "plans")


def plan_variant(plan: dict[str, Any]) -> Variant:
    shares = ", ".join(f"{share:.0%}" for share in plan["shares"])
    about = {name: plan[name] for name in ("words", "predicted_ratio", "predicted_peak")}
    return Variant("plans", f"plan for {shares}", "plan", "plans:run", {"strategy": plan["strategy"]}, about=about)
