"""What is rehearsed and planned for the page, and the commands that give the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from trainfit.hardware import Hardware, find_device
from trainfit.plan import Plan, Target, choose
from trainfit.plan.layout import default_layouts
from trainfit.profile import Mesh, OptimizerVariant, Precision, Profile, Zero
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import Workload, resolve_workload
from trainfit.workload.adapter import LoRASettings, with_adapter


def variant_text(variant: OptimizerVariant) -> str:
    """What --optimizer reads: the keys that are not at their defaults."""
    plain = OptimizerVariant()
    values = ((each.name, getattr(variant, each.name)) for each in fields(variant))
    return ",".join(f"{name}={value}" for name, value in values if value != getattr(plain, name))


@dataclass(frozen=True)
class Setting:
    """Model, shape and cards; adapter: LoRA beside every linear, where there is one."""

    model: str
    seq_len: int
    device: str
    devices: int
    adapter: bool = False

    @property
    def hardware(self) -> Hardware:
        return find_device(self.device, self.devices)

    @property
    def workload(self) -> Workload:
        plain = resolve_workload(self.model, self.seq_len)
        return with_adapter(plain, LoRASettings(targets="all-linear")) if self.adapter else plain

    @property
    def options(self) -> str:
        devices = f" --devices {self.devices}" if self.devices > 1 else ""
        return f"{self.model} --seq-len {self.seq_len} --device {self.device}{devices}"


@dataclass(frozen=True)
class Case:
    """One step to rehearse. activation: as --activation takes it. name: how the page calls it."""

    name: str
    setting: Setting
    micro_batch: int
    accumulation: int = 1
    activation: str = "keep"
    loss_chunks: int = 1
    zero_stage: int = 0
    precision: Precision = "bf16"
    optimizer: OptimizerVariant = OptimizerVariant()
    frozen: str = "fp32"
    clips: bool = True

    @property
    def strategy(self) -> Strategy:
        devices = self.setting.devices
        blocks = len(self.setting.workload.anatomy().blocks)
        return Strategy(
            self.micro_batch,
            self.accumulation,
            self.precision,
            parse_tiers(self.activation, blocks),
            self.loss_chunks,
            optimizer=self.optimizer,
            cast="block" if self.optimizer.weights == "fp32" else "operator",
            frozen_weights=self.frozen,  # type: ignore[arg-type]
            mesh=Mesh(shard=devices) if self.zero_stage else Mesh(replicate=devices),
            zero=Zero(self.zero_stage),
        )

    @property
    def command(self) -> str:
        """The same rehearsal on the command line."""
        said = [
            ("--zero-stage", self.zero_stage, 0),
            ("--micro-batch", self.micro_batch, 1),
            ("--accumulation", self.accumulation, 1),
            ("--activation", self.activation, "keep"),
            ("--loss-chunks", self.loss_chunks, 1),
            ("--cast", self.strategy.cast, "operator"),
            ("--optimizer", variant_text(self.optimizer), ""),
        ]
        options = "".join(f" {name} {value}" for name, value, default in said if value != default)
        return f"trainfit rehearse {self.setting.options} --precision {self.precision}{options}"


@dataclass(frozen=True)
class Question:
    """One plan to choose: so many sequences a step within all that a card leaves to tensors."""

    setting: Setting
    sequences: int
    precision: Precision = "bf16"
    optimizer: OptimizerVariant = OptimizerVariant()
    may_change: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        return self.sequences * self.setting.seq_len

    @property
    def target(self) -> Target:
        return Target(
            self.setting.hardware.usable_bytes,
            self.tokens,
            self.setting.seq_len,
            self.precision,
            self.may_change,
            default_layouts(self.setting.devices),
            self.optimizer,
            cast="block",
        )

    @property
    def command(self) -> str:
        variant = variant_text(self.optimizer)
        said = [
            f"--tokens-per-step {self.tokens} --precision {self.precision} --cast block",
            *([f"--optimizer {variant}"] if variant else []),
            *(f"--may-change {what}" for what in sorted(self.may_change)),
        ]
        return f"trainfit plan {self.setting.options} {' '.join(said)}"


Job = Case | Question
Answer = Profile | Plan


def answer(job: Job) -> Answer:
    setting = job.setting
    if isinstance(job, Case):
        norm = 1.0 if job.clips else None
        return rehearse(setting.workload, job.strategy, setting.hardware, max_grad_norm=norm)
    return choose(setting.workload, setting.hardware, job.target)


def allowed_bytes(setting: Setting) -> int:
    """What a prediction may reach of all that a card leaves to tensors."""
    return Question(setting, 1).target.allowed_bytes(setting.hardware.spec.kind)


# The five cases of the articles: name, accumulation, activation.
TECHNIQUES: Mapping[str, tuple[int, str]] = {
    "no technique": (1, "keep"),
    "accumulation 8": (8, "keep"),
    "checkpoint every 2": (1, "every:2"),
    "both": (8, "every:2"),
    "accumulation 4": (4, "keep"),
}
BATCHES = (128, 256, 512)
FOREACH = OptimizerVariant(kernel="foreach")  # fused AdamW of NPUs ignores loss scaling, and is refused in fp16

BIG = Setting("llama-2-13b", 4096, "ascend-910b3", 8)
SMALL = Setting("llama-2-13b", 4096, "ascend-910a", 8)
SEVEN = Setting("llama-2-7b", 4096, "ascend-910b3", 8)
SEVEN_SMALL = replace(SEVEN, device="ascend-910b4")
GPT = Setting("gpt-13b", 2048, "ascend-910b4", 1)
GPT_SHARED = replace(GPT, devices=8)
GPT_ADAPTER = replace(GPT, adapter=True)
LLAMA_ADAPTER = replace(GPT_ADAPTER, model="llama-2-13b")


def technique_case(setting: Setting, sequences: int, name: str) -> Case:
    accumulation, activation = TECHNIQUES[name]
    micro_batch = sequences // setting.devices // accumulation
    case = Case(name, setting, micro_batch, accumulation, activation, zero_stage=3)
    return case if setting is BIG else replace(case, precision="fp16", optimizer=FOREACH)


def stage_case(setting: Setting, stage: int, *, recompute: bool) -> Case:
    """One sequence a card, with whole logits and all saved, or recomputed and the loss in pieces."""
    case = Case(f"ZeRO {stage}", setting, 1, zero_stage=stage)
    return replace(case, activation="full", loss_chunks=8) if recompute else case


_HALF_ON_HOST = OptimizerVariant(weights="bf16_master", gradients="half", place="host")
_SMALLEST = OptimizerVariant(weights="bf16_stochastic", states="int8", update="backward")
_one = partial(Case, micro_batch=1, loss_chunks=4)
GPT_CASES: tuple[Case, ...] = (
    Case("plain AdamW in fp32", GPT, 1),
    _one("+ every block recomputed, loss in 4 pieces", GPT, activation="full"),
    _one("+ masters and moments in host memory, half gradients", GPT, activation="full", optimizer=_HALF_ON_HOST),
    _one("bf16 weights, int8 moments, update in backward", GPT, activation="full", optimizer=_SMALLEST, clips=False),
    _one("LoRA on a half base, all kept", GPT_ADAPTER, frozen="half"),
    _one("LoRA on a half base, every block recomputed", GPT_ADAPTER, activation="full", frozen="half"),
    _one("LoRA on llama-2-13b in NF4, every block recomputed", LLAMA_ADAPTER, activation="full", frozen="nf4"),
    _one("8 such cards, ZeRO 3, recomputed", GPT_SHARED, activation="full", zero_stage=3),
    _one(
        "8 such cards, ZeRO 3, recomputed, int8 moments",
        GPT_SHARED,
        activation="full",
        zero_stage=3,
        optimizer=OptimizerVariant(states="int8"),
    ),
)
GPT_PLAN = Question(GPT, 8, may_change=frozenset({"optimizer"}))
BIG_PLANS = {sequences: Question(BIG, sequences) for sequences in BATCHES}
SMALL_EXACT = Question(SMALL, BATCHES[0], "fp16", FOREACH)
SMALL_PLAN = replace(SMALL_EXACT, may_change=frozenset({"optimizer"}))
SEVEN_PLAN = Question(SEVEN_SMALL, BATCHES[0])


def all_jobs() -> list[Job]:
    big = [technique_case(BIG, sequences, name) for sequences in BATCHES for name in TECHNIQUES]
    small = [technique_case(SMALL, BATCHES[0], name) for name in TECHNIQUES]
    stages = [stage_case(BIG, stage, recompute=True) for stage in range(4)]
    seven = [stage_case(SEVEN, stage, recompute=recompute) for stage in range(4) for recompute in (False, True)]
    plans = [*BIG_PLANS.values(), SMALL_EXACT, SMALL_PLAN, SEVEN_PLAN, GPT_PLAN]
    return [*plans, *big, *small, *stages, *seven, *GPT_CASES]
