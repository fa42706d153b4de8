"""Plans as other systems' settings: files that those systems read, and nothing lost without a note."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from dataclasses import asdict, fields, replace

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trainfit.errors import RecipeError
from trainfit.export import SYSTEMS, Job, check_system
from trainfit.export.base import changed_settings
from trainfit.export.tiers import Tiers
from trainfit.hardware.allocator import conf_of
from trainfit.operators import KeptOperators
from trainfit.profile import (
    FROZEN_STORAGES,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    STATE_STORAGES,
    TIERS,
    WEIGHT_STORAGES,
    AllocatorSettings,
    LossScale,
    Mesh,
    OptimizerVariant,
    Pipeline,
    TensorParallel,
    Zero,
)
from trainfit.step import Strategy, format_tiers, parse_tiers
from trainfit.step.strategy_rules import settings_without_effect

KINDS = ("cuda", "npu", "cpu")
BLOCKS = 8
TITLE = "trainfit plan"


def export(system: str, strategy: Strategy, kind: str = "cuda", norm: float | None = 1.0):
    return SYSTEMS[system](Job(strategy, 128, kind, "llama-x", "h100", "0123456789ab", norm))


def arguments_of(text: str) -> dict[str, list[str]]:
    """The array of a sourced file as bash has it, as options with their values."""
    name = next(line.split("=(")[0] for line in text.splitlines() if "=(" in line)
    script = f'{text}\nprintf "%s\\n" "${{{name}[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in options, f"{word} is given twice"
            options[word] = []
        else:
            options[next(reversed(options))].append(word)
    return options


def parse(system: str, text: str):
    if system == "deepspeed":
        return json.loads(text)
    if system == "torchtitan":
        return tomllib.loads(text)
    return arguments_of(text) if system in ("megatron", "mindspeed") else yaml.safe_load(text)


@st.composite
def strategies(draw) -> Strategy:
    """Any strategy that is valid; drawn value by value from what each knob takes."""

    def pick(*values):
        return draw(st.sampled_from(values))

    precision = pick(*PRECISIONS)
    half = [kept for kept in WEIGHT_STORAGES if kept.startswith(precision)] if precision != "fp32" else []
    mesh = Mesh(pick(1, 1, 2), pick(1, 1, 2), pick(1, 2, 4), pick(1, 1, 2))
    steps = 4 if mesh.pipeline > 1 else pick(1, 4)
    weights = pick("fp32", *half) if mesh.pipeline == 1 else "fp32"
    states, place = pick("fp32", *STATE_STORAGES), pick("device", "device", "host")
    gradients = pick("fp32", "half") if weights.startswith("bf16") else "fp32"
    update = pick("step", "backward") if (steps, precision, place) == (1, "bf16", "device") else "step"
    variant = OptimizerVariant("adamw", weights, gradients, states, place, update, pick("fused", "foreach"))
    if variant == OptimizerVariant(kernel=variant.kernel):
        variant = replace(variant, kind=pick("adamw", "adafactor"))
    scale = LossScale(
        pick(2.0**16, 1000.0), pick(2.0, 4.0), pick(0.5, 0.25), pick(2000, 9), pick(25, 5), pick(False, True)
    )
    schedule = pick(*PIPELINE_SCHEDULES)
    stage = pick(1, 2, 3) if mesh.shard > 1 else pick(0, 0, 1)
    tiers = st.one_of(st.lists(st.sampled_from(TIERS), min_size=BLOCKS, max_size=BLOCKS), st.sampled_from(RUNS))
    try:
        return Strategy(
            micro_batch_size=pick(1, 2, 3),
            accumulation_steps=steps,
            precision=precision,
            tiers=tuple(draw(tiers)),
            loss_chunks=pick(1, 4),
            optimizer=variant,
            cast=pick("operator", "block") if weights == "fp32" != precision else "operator",
            loss_scale=scale if precision == "fp16" else None,
            frozen_weights=pick("fp32", *FROZEN_STORAGES),
            mesh=mesh,
            zero=Zero(
                stage=stage,
                gradient_sync=pick(None, "step", "micro_batch"),
                reshard_size=pick(0, 2) if stage == 3 and mesh.shard == 4 and mesh.tensor == 1 else 0,
                prefetch=pick(1, 1, 3),
                reduce_dtype=pick("fp32", "fp32", "fp32", "bf16", precision),
            ),
            tensor=TensorParallel(mesh.tensor > 1 and schedule != "interleaved" and pick(False, True)),
            pipeline=Pipeline(schedule, 2 if schedule == "interleaved" else 1),
            allocator=AllocatorSettings(pick(False, False, True), 0, pick(0.0, 0.8), pick(0, 0, 8)),
        )
    except RecipeError:
        assume(False)
        raise


RUNS = [
    list(parse_tiers(text, BLOCKS)) for text in ("keep", "full", "every:2", "3*full,5*keep", "pointwise", "attention")
]
RANDOM = settings(
    max_examples=int(os.environ.get("EXAMPLES", 60)), deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


def with_setting(strategy: Strategy, name: str, value: object) -> Strategy:
    head, _, tail = name.partition(".")
    return replace(strategy, **{head: replace(getattr(strategy, head), **{tail: value}) if tail else value})


def default_of(name: str) -> object:
    value: object = Strategy(1)
    for part in name.split("."):
        value = LossScale() if part == "loss_scale" else getattr(value, part)
    return ("keep",) * BLOCKS if name == "tiers" else value


def changes_nothing(strategy: Strategy, other: Strategy, name: str) -> bool:
    """Two ways to write the same run."""
    if any(line.startswith(f"{name} ") for line in settings_without_effect(strategy)):
        return True
    sync = strategy.zero.reduces_each_micro_batch == other.zero.reduces_each_micro_batch
    same_time = strategy.accumulation_steps == 1 or sync
    stages = {strategy.zero.stage, other.zero.stage}
    return same_time and (name == "zero.gradient_sync" or (name == "zero.stage" and stages == {1, 2}))


def body_of(made) -> str:
    """Without the title, which counts devices."""
    return "\n".join(line for line in made.text.splitlines() if TITLE not in line)


@pytest.mark.parametrize("system", SYSTEMS)
@RANDOM
@given(data=st.data())
def test_no_setting_of_a_strategy_is_lost_silently(system, data):
    strategy = data.draw(strategies())
    wanted = export(system, strategy)
    for name, _ in changed_settings(strategy):
        try:
            other = with_setting(strategy, name, default_of(name))
        except RecipeError:
            continue  # that setting cannot be undone alone
        if changes_nothing(strategy, other, name):
            continue
        without = export(system, other)
        assert body_of(wanted) != body_of(without), f"{system} says nothing of {name}: {wanted.text}"


@pytest.mark.parametrize("system", SYSTEMS)
@RANDOM
@given(strategy=strategies(), kind=st.sampled_from(KINDS), norm=st.sampled_from([None, 1.0, 0.5]))
def test_every_export_is_read_back_with_its_notes_in_it(system, strategy, kind, norm):
    made = export(system, strategy, kind, norm)
    if system not in ("megatron", "mindspeed"):  # bash is asked below, one process each
        assert parse(system, made.text)
    plain = " ".join(made.text.replace("#", "").replace("\\u", " ").split())
    for note in made.notes:
        assert " ".join(note.split()) in plain or system == "deepspeed"
    if system == "deepspeed":
        assert json.loads(made.text)["trainfit"]["notes"] == list(made.notes)


def leaves(value: object, name: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        leaf: each for key, part in value.items() for leaf, each in leaves(part, f"{name}.{key}".strip(".")).items()
    }


@RANDOM
@given(strategy=strategies())
def test_every_setting_that_is_not_the_default_is_looked_at(strategy):
    default = leaves({**Strategy(1).to_json(), "loss_scale": asdict(LossScale())})
    said = {name: value for name, value in leaves(strategy.to_json()).items() if name not in ("loss_scale", "tiers")}
    different = {name for name, value in said.items() if value != default[name]}
    named = {name for name, _ in changed_settings(strategy)}
    assert named - {"tiers"} == different
    assert ("tiers" in named) == any(tier != "keep" for tier in strategy.tiers)


def test_a_plain_strategy_on_one_device_has_no_losses_but_what_a_script_does():
    plain = Strategy(4, 2, "bf16", ("keep",) * BLOCKS)
    assert export("torchtitan", plain).notes == ()
    assert export("trl", plain).notes == ()
    assert [note.split()[0] for note in export("deepspeed", plain).notes] == ["seq_len"]


@given(st.lists(st.sampled_from(TIERS), min_size=1, max_size=12))
def test_tiers_are_written_as_a_recipe_has_them(names):
    assert Tiers(names).text == format_tiers(names)


@given(st.integers(1, 24), st.integers(1, 24))
def test_every_k_blocks_is_found(blocks, every):
    tiers = Tiers(parse_tiers(f"every:{every}", blocks))
    assert parse_tiers(f"every:{tiers.every}", blocks) == tuple(tiers.names)


@given(st.lists(st.sampled_from(TIERS), min_size=1, max_size=12))
def test_the_nearest_step_recomputes_as_many_blocks_at_least(names):
    tiers = Tiers(names)
    assume(not tiers.keeps_all)
    assert len(names) // tiers.step >= tiers.recomputed
    larger = tiers.step + 1
    assert len(names) // larger < tiers.recomputed


def test_deepspeed_says_the_batch_thrice_and_they_agree():
    made = parse("deepspeed", export("deepspeed", Strategy(3, 4, mesh=Mesh(shard=4, replicate=2), zero=Zero(3))).text)
    assert made["train_batch_size"] == 3 * 4 * 8
    assert made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] * 8 == made["train_batch_size"]
    assert made["zero_optimization"]["mics_shard_size"] == 4


def test_unclipped_is_said_in_each_systems_way():
    strategy = Strategy(1)
    said = {system: parse(system, export(system, strategy, norm=None).text) for system in SYSTEMS}
    assert said["deepspeed"]["gradient_clipping"] == said["trl"]["max_grad_norm"] == 0.0
    assert said["torchtitan"]["training"]["max_norm"] == float("inf")
    assert said["megatron"]["--clip-grad"] == said["mindspeed"]["--clip-grad"] == ["0"]
    assert "no clipping" in export("accelerate", strategy, norm=None).text


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        ("full", {"--recompute-method": ["uniform"], "--recompute-num-layers": ["1"]}),
        ("3*full,5*keep", {"--recompute-method": ["block"], "--recompute-num-layers": ["3"]}),
        ("pointwise", {"--recompute-granularity": ["selective"], "--recompute-modules": ["layernorm", "mlp"]}),
        (
            "5*pointwise,3*discard",
            {"--recompute-granularity": ["selective"], "--recompute-modules": ["layernorm", "mlp"]},
        ),
        ("6*full,2*attention", {"--recompute-method": ["uniform"], "--recompute-num-layers": ["1"]}),
        ("2*attention,6*keep", {"--recompute-method": ["block"], "--recompute-num-layers": ["2"]}),
    ],
)
def test_tiers_in_megatrons_words(activation, words):
    options = arguments_of(export("megatron", Strategy(1, tiers=parse_tiers(activation, BLOCKS))).text)
    assert words.items() <= options.items()


def test_blocks_are_counted_by_pipeline_stage():
    tiers = parse_tiers("3*full,5*keep", BLOCKS)
    strategy = Strategy(1, 4, tiers=tiers, mesh=Mesh(pipeline=2))
    assert arguments_of(export("megatron", strategy).text)["--recompute-num-layers"] == ["3"]
    assert any("of each stage" in note for note in export("megatron", strategy).notes)
    even = replace(strategy, tiers=("full", "full", "keep", "keep") * 2)
    assert arguments_of(export("megatron", even).text)["--recompute-num-layers"] == ["2"]
    assert not any("tiers" in note for note in export("megatron", even).notes)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("keep", {"mode": "none"}),
        ("full", {"mode": "full", "early_stop": True}),
        ("every:2", {"mode": "selective", "selective_ac_option": "2", "early_stop": True}),
        ("pointwise", {"mode": "selective", "selective_ac_option": "op", "early_stop": True}),
        ("5*pointwise,2*discard,1*keep", {"mode": "selective", "selective_ac_option": "op", "early_stop": True}),
        ("attention", {"mode": "full", "early_stop": True}),
        ("2*full,6*keep", {"mode": "selective", "selective_ac_option": "4", "early_stop": True}),
    ],
)
def test_tiers_in_torchtitans_words(activation, expected):
    made = parse("torchtitan", export("torchtitan", Strategy(1, tiers=parse_tiers(activation, BLOCKS))).text)
    assert made["activation_checkpoint"] == expected


@pytest.mark.parametrize(
    ("kind", "said"), [("cuda", "PYTORCH_CUDA_ALLOC_CONF"), ("npu", "PYTORCH_NPU_ALLOC_CONF"), ("cpu", "allocator")]
)
def test_the_allocator_is_set_in_the_environment(kind, said):
    strategy = Strategy(1, allocator=AllocatorSettings(expandable_segments=True))
    assert all(said in export(system, strategy, kind).text for system in SYSTEMS)
    if kind != "cpu":
        assert parse("trl", export("trl", strategy, kind).text)["env"] == {said: conf_of(strategy.allocator)}
        text = export("megatron", strategy, kind).text
        done = subprocess.run(["bash", "-c", f"{text}\nenv"], capture_output=True, text=True, check=True)
        assert f"{said}={conf_of(strategy.allocator)}\n" in done.stdout


def test_residual_weights_are_megatrons_remainders_and_mindspeeds_reused_copies():
    strategy = Strategy(1, precision="bf16", optimizer=OptimizerVariant(weights="bf16_residual"))
    options = arguments_of(export("megatron", strategy).text)
    assert {"--bf16", "--use-precision-aware-optimizer", "--use-distributed-optimizer"} <= set(options)
    assert "--reuse-fp32-param" in arguments_of(export("mindspeed", strategy, "npu").text)
    for system in ("megatron", "mindspeed"):
        assert not any("optimizer.weights" in note for note in export(system, strategy).notes)


@RANDOM
@given(strategy=strategies(), kind=st.sampled_from(KINDS))
def test_accelerate_loads_its_file_and_sizes_agree(strategy, kind, tmp_path_factory):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    path = tmp_path_factory.mktemp("accelerate") / "config.yaml"
    path.write_text(export("accelerate", strategy, kind).text)
    loaded = config_args.load_config_from_file(str(path))
    mesh = strategy.mesh
    assert loaded.num_processes == mesh.size // mesh.pipeline
    prefix = "parallelism_config_"
    sizes = {key.removeprefix(prefix): value for key, value in loaded.parallelism_config.items()}
    if sizes:
        assert parallelism.ParallelismConfig(**sizes).total_size == loaded.num_processes


@pytest.mark.parametrize("activation", ["keep", "full", "2*full,6*keep"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerates_launcher_turns_the_file_into_the_plugin_that_was_meant(activation, stage, tmp_path, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch")
    environment = pytest.importorskip("accelerate.utils.launch")
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses")
    tiers = parse_tiers(activation, BLOCKS)
    strategy = Strategy(1, 4, "bf16", tiers, mesh=Mesh(shard=4), zero=Zero(stage))
    (tmp_path / "config.yaml").write_text(export("accelerate", strategy).text)
    words = ["--config_file", str(tmp_path / "config.yaml"), "script.py"]
    arguments, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    for name, value in environment.prepare_multi_gpu_env(arguments).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    plugin = dataclasses.FullyShardedDataParallelPlugin()
    assert (arguments.num_processes, arguments.mixed_precision, plugin.fsdp_version) == (4, "bf16", 2)
    assert plugin.reshard_after_forward == (stage == 3)
    assert plugin.activation_checkpointing == (activation != "keep")
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy"  # which offloads nothing


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(2, 4, "bf16", parse_tiers("every:2", BLOCKS), 4),
        Strategy(2, 4, "fp32", parse_tiers("full", BLOCKS), optimizer=OptimizerVariant(states="int8")),
        Strategy(2, 4, "bf16", parse_tiers("full", BLOCKS), mesh=Mesh(shard=4), zero=Zero(3)),
        Strategy(2, 4, "bf16", parse_tiers("every:2", BLOCKS), mesh=Mesh(shard=4), zero=Zero(2)),
        Strategy(2, 1, "fp32", optimizer=OptimizerVariant("adafactor")),
        Strategy(2, 1, "fp32", optimizer=OptimizerVariant(place="host")),
    ],
    ids=format,
)
def test_transformers_takes_what_trl_has_from_it(strategy, tmp_path):
    transformers = pytest.importorskip("transformers")
    made = parse("trl", export("trl", strategy, "cpu").text)
    made.pop("env", None)
    of_trl = {"max_length", "packing", "packing_strategy", "loss_type"}  # SFTConfig's own
    of_model = {"dtype", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type"}  # ModelConfig's
    known = {each.name for each in fields(transformers.TrainingArguments)}
    assert set(made) <= known | of_trl | of_model
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **{key: value for key, value in made.items() if key in known}
    )
    assert (
        arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 2 * strategy.accumulation_steps
    )
    assert arguments.activation_checkpointing == made["gradient_checkpointing"]
    assert bool(arguments.fsdp) == (strategy.mesh.shard > 1)
    if arguments.fsdp:
        assert arguments.fsdp_plugin_args["reshard_after_forward"] == (strategy.zero.stage == 3)


def test_every_second_layer_is_the_same_layers_in_transformers():
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=BLOCKS, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    tiers = parse_tiers("every:3", BLOCKS)
    words = parse("trl", export("trl", Strategy(1, tiers=tiers)).text)["gradient_checkpointing_kwargs"]
    every = words.pop("every_n_layers")
    model.activation_checkpointing_enable(words, every_n_layers=every)
    blocks = [module for module in model.modules() if isinstance(module, layers.GradientCheckpointingLayer)]
    assert [block.gradient_checkpointing for block in blocks] == [tier == "full" for tier in tiers]


def test_an_unknown_system_names_the_nearest():
    with pytest.raises(RecipeError, match="--export deepsped is not known; did you mean deepspeed"):
        check_system("deepsped")
    with pytest.raises(RecipeError, match="there are deepspeed, accelerate, torchtitan, megatron, mindspeed, trl"):
        check_system("xyz")


@pytest.mark.parametrize("system", SYSTEMS)
def test_chosen_tiers_are_counted_and_not_listed(system: str):
    rules = KeptOperators("chosen_1", ("aten.mm.default#1", "aten.mm.default#2"), ("aten.pow.Tensor_Scalar#1",))
    job = Job(Strategy(4, tiers=("chosen_1", "keep"), kept_operators=(rules,)), 128, "cuda", "llama-x", "h100", "0123")
    notes = SYSTEMS[system](job).notes
    assert any(note.startswith("kept_operators.chosen_1 keeps the outputs of 2 operators: ") for note in notes)
    assert not any("aten." in note for note in notes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_batch_that_is_not_the_one_asked_for_is_said(system: str):
    job = Job(Strategy(4, 8, mesh=Mesh(shard=8), zero=Zero(3)), 128, "cuda", "llama-x", "h100", "0123", sequences=244)
    note = "batch: 256 sequences a step, not 244: every micro batch of a rank is full"
    assert note in SYSTEMS[system](job).notes
    assert note not in SYSTEMS[system](replace(job, sequences=256)).notes
