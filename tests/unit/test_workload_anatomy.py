"""Where blocks, embedding, head and ties are, in transformers models and in modules that users write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainfit.errors import ModelError, RecipeError
from trainfit.workload import Anatomy, dissect, workload_from_module
from trainfit.workload.huggingface import build_model, make_config

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
}


def transformers_anatomy(model_type: str, **settings: Any) -> Anatomy:
    return dissect(build_model(make_config({"model_type": model_type, **COMMON, **settings}, model_type)))


def test_gemma2_has_two_kinds_of_blocks() -> None:
    anatomy = transformers_anatomy("gemma2", num_hidden_layers=4)
    assert anatomy.blocks == tuple(f"model.layers.{layer}" for layer in range(4))
    assert anatomy.structures == (0, 1, 0, 1)
    assert (anatomy.embedding, anatomy.head, anatomy.backbone) == ("model.embed_tokens", "lm_head", "model")
    assert anatomy.ties == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_qwen2_sliding_layers_are_another_structure() -> None:
    settings = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert transformers_anatomy("qwen2", num_hidden_layers=3, **settings).structures == (0, 1, 1)


def test_dense_and_expert_layers_are_told_apart_and_experts_are_no_blocks() -> None:
    anatomy = transformers_anatomy(
        "qwen3_moe", num_hidden_layers=4, num_experts=8, moe_intermediate_size=64, mlp_only_layers=[0, 2]
    )
    assert anatomy.structures == (0, 1, 0, 1)
    assert anatomy.blocks == tuple(f"model.layers.{layer}" for layer in range(4))


def test_one_layer_is_one_block() -> None:
    assert transformers_anatomy("llama", num_hidden_layers=1).blocks == ("model.layers.0",)


def test_experts_run_as_one_grouped_matmul() -> None:
    """The loop over experts depends on the data, so it could not be rehearsed."""
    config = make_config({"model_type": "mixtral", **COMMON, "num_hidden_layers": 2, "num_local_experts": 4}, "mixtral")
    assert build_model(config).config._experts_implementation == "grouped_mm"  # type: ignore[union-attr]


def block(dim: int = 16, dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=dropout, batch_first=True)


class Language(nn.Module):
    """A user's model: positions as a second embedding, a stem of its own, a tied head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.positions = nn.Embedding(512, 16)
        self.tokens = nn.Embedding(VOCAB, 16)
        self.stem = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.blocks = nn.ModuleList(block(dropout=dropout) for dropout in (0.0, 0.1, 0.2))
        self.other = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.table = torch.arange(4.0)
        self.tables = [torch.ones(2), {"scale": torch.full((2,), 3.0)}]
        if tied:
            self.head.weight = self.tokens.weight
        self.positions.weight.requires_grad_(False)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.stem(self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]])
        for part in self.blocks:
            hidden = part(hidden)
        logits: Tensor = self.head(self.other(hidden))
        return logits


def test_parts_of_a_users_module_are_found() -> None:
    model = Language()
    anatomy = dissect(model, vocab_size=VOCAB)
    assert anatomy.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert anatomy.structures == (0, 1, 1)  # dropout of 0 saves no mask
    assert (anatomy.embedding, anatomy.head, anatomy.backbone) == ("tokens", "head", None)
    assert anatomy.ties == (("tokens.weight", "head.weight"),)
    assert anatomy.num_parameters == sum(p.numel() for p in set(model.parameters()))


def test_blocks_of_a_sequential_are_the_repeated_ones() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, 16), block(), block(), nn.LayerNorm(16), nn.Linear(16, VOCAB))
    anatomy = dissect(model, vocab_size=VOCAB)
    assert anatomy.blocks == ("1", "2")
    assert (anatomy.embedding, anatomy.head) == ("0", "4")


def test_nothing_repeated_means_no_blocks() -> None:
    anatomy = dissect(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert anatomy == Anatomy((), (), None, None, None, (), 4 * 8 + 8 + 8 * 8 + 8 + 8 * 2 + 2)


def test_one_block_used_many_times_is_one_block() -> None:
    shared = block()
    assert dissect(nn.Sequential(nn.ModuleList([shared, shared, shared]))).blocks == ("0.0",)


def test_copies_are_equal_separate_and_tied() -> None:
    model = Language()
    copied = workload_from_module(model, seq_len=8, vocab_size=VOCAB).make_model()
    assert isinstance(copied, Language)
    assert copied.head.weight is copied.tokens.weight
    assert not copied.positions.weight.requires_grad
    originals = {id(parameter) for parameter in model.parameters()}
    assert originals.isdisjoint(id(parameter) for parameter in copied.parameters())
    for (name, expected), actual in zip(model.state_dict().items(), copied.state_dict().values()):
        assert torch.equal(actual, expected), name
        assert actual.data_ptr() != expected.data_ptr(), name
    assert torch.equal(copied.table, model.table)
    assert copied.table is not model.table
    assert torch.equal(copied.tables[1]["scale"], model.tables[1]["scale"])  # type: ignore[index]


@pytest.mark.parametrize("tied", [True, False])
def test_fake_and_meta_copies_keep_ties(tied: bool) -> None:
    workload = workload_from_module(Language(tied), seq_len=8, vocab_size=VOCAB)
    with torch.device("meta"):
        on_meta = workload.make_model()
    with FakeTensorMode(), torch.device("cpu"):
        fake = workload.make_model()
        fake(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    assert all(isinstance(parameter, FakeTensor) for parameter in fake.parameters())
    for model in (on_meta, fake):
        assert isinstance(model, Language)
        assert (model.head.weight is model.tokens.weight) == tied


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_tied_transformers_weights_are_one_object_wherever_they_are_made(family: str) -> None:
    config = make_config({"model_type": family, **COMMON, "num_hidden_layers": 1, "n_embd": 32, "n_head": 4}, family)
    real = build_model(config)
    with torch.device("meta"):
        on_meta = build_model(config)
    with FakeTensorMode(), torch.device("cpu"):
        fake = build_model(config)
    for model in (real, on_meta, fake):
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]


def test_factory_and_instance_make_the_same_workload() -> None:
    from_factory = workload_from_module(Language, seq_len=8, vocab_size=VOCAB)
    from_instance = workload_from_module(Language(), seq_len=8, vocab_size=VOCAB)
    assert from_factory.name == from_instance.name == "Language"
    assert from_factory.anatomy() == from_instance.anatomy()


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ModelError, match="a int is no module"):
        workload_from_module(3, seq_len=8, vocab_size=VOCAB)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="factory returned a str"):
        workload_from_module(lambda: "model", seq_len=8, vocab_size=VOCAB).anatomy()  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="vocab_size of Language is 0"):
        workload_from_module(Language, seq_len=8, vocab_size=0)
    with pytest.raises(RecipeError, match="seq_len is 0"):
        workload_from_module(Language, seq_len=0, vocab_size=VOCAB)
