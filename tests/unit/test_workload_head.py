"""Both halves of a model together are the model: to the bit, for every kind of head."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainfit.workload import HeadSplit, dissect, run_model, split_head, workload_from_module
from trainfit.workload.huggingface import build_model, make_config

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# name -> (config, whether the head is one Linear and nothing else)
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": (COMMON, True),
    "qwen2": (COMMON, True),
    "qwen3": (COMMON | {"head_dim": 8}, True),
    "mistral": (COMMON, True),
    "phi3": (COMMON | {"pad_token_id": 0}, True),
    "gpt2": (GPT, True),
    "gptj": (GPT | {"rotary_dim": 4}, True),
    "phi": (COMMON, True),
    "mixtral": (COMMON | {"num_local_experts": 4}, True),
    "qwen3_moe": (COMMON | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}, True),
    "gemma2": (COMMON | {"head_dim": 8, "final_logit_softcapping": 0.3}, False),
    "cohere": (COMMON | {"logit_scale": 0.3, "pad_token_id": 0}, False),
    "granite": (COMMON | {"logits_scaling": 7.0}, False),
    "mamba": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, False),  # casts its logits to fp32
    "opt": (COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32}, True),  # calls past its backbone's forward
}


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(5))


def make(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    # A cache of keys and values copies them into another layout, which some CPUs' attention sums in another order.
    settings = {"model_type": family, "use_cache": False} | FAMILIES[family][0] | changes
    return build_model(make_config(settings, family))


def split_of(model: nn.Module, vocab_size: int = VOCAB) -> HeadSplit:
    split = split_head(model, dissect(model, vocab_size))
    assert isinstance(split, HeadSplit), split
    return split


def output_and_gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(1)
    model.zero_grad()
    output = run()
    output.float().logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    return output.detach(), [parameter.grad for parameter in model.parameters()]


def assert_same_to_the_bit(model: nn.Module, split: HeadSplit, whole: Callable[[], Tensor], inputs: Tensor) -> None:
    expected, expected_gradients = output_and_gradients(model, whole)
    actual, actual_gradients = output_and_gradients(model, lambda: split.logits(split.hidden(inputs)))
    assert torch.equal(actual, expected)
    assert any(gradient is not None and gradient.any() for gradient in expected_gradients)
    for actual_gradient, expected_gradient in zip(actual_gradients, expected_gradients):
        assert (actual_gradient is None) == (expected_gradient is None)
        if actual_gradient is not None and expected_gradient is not None:
            assert torch.equal(actual_gradient, expected_gradient)


@pytest.mark.parametrize("family", FAMILIES)
def test_halves_equal_the_model_to_the_bit(family: str, token_ids: Tensor) -> None:
    model = make(family)
    split = split_of(model)
    assert_same_to_the_bit(model, split, lambda: model(token_ids).logits, token_ids)
    assert (split.linear is not None) == FAMILIES[family][1]
    assert split.hidden(token_ids).shape == (*token_ids.shape, split.dim)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba"])
def test_halves_equal_the_model_under_autocast(family: str, token_ids: Tensor) -> None:
    model = make(family)
    split = split_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_to_the_bit(model, split, lambda: model(token_ids).logits, token_ids)


@pytest.mark.parametrize("family", ["gemma2", "gptj"])
def test_logits_go_token_by_token(family: str, token_ids: Tensor) -> None:
    split = split_of(make(family))
    with torch.no_grad():
        hidden = split.hidden(token_ids).reshape(1, 32, 32)
        pieces = torch.cat([split.logits(piece) for piece in torch.tensor_split(hidden, 5, dim=1)], dim=1)
        # A matmul of other sizes may sum in another order.
        torch.testing.assert_close(pieces, split.logits(hidden), rtol=0, atol=1e-6)
    assert pieces.shape == (1, 32, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_splitting_leaves_no_trace(family: str) -> None:
    model = make(family)
    names = [name for name, _ in model.named_modules()]
    before = torch.get_rng_state()
    split_of(model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert names == [name for name, _ in model.named_modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_split_under_fake_tensors_is_the_same_split(family: str, token_ids: Tensor) -> None:
    with FakeTensorMode(), torch.device("cpu"):
        split = split_of(make(family))
        logits = split.logits(split.hidden(torch.zeros(2, 16, dtype=torch.long)))
    assert logits.shape == (2, 16, VOCAB)
    assert (split.linear is not None) == FAMILIES[family][1]


class DroppingHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(hidden, 0.5, self.training))


def test_head_with_a_forward_of_its_own_is_no_plain_linear(token_ids: Tensor) -> None:
    model = make("llama")
    model.set_output_embeddings(DroppingHead(32, VOCAB))  # type: ignore[operator]
    before = torch.get_rng_state()
    split = split_of(model)
    assert torch.equal(before, torch.get_rng_state())
    assert split.linear is None
    assert_same_to_the_bit(model, split, lambda: model(token_ids).logits, token_ids)


def test_head_with_a_hook_is_no_plain_linear() -> None:
    for model in (make("llama"), Mlp()):
        head = model.get_submodule(dissect(model, VOCAB).head or "")
        handle = head.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))
        assert split_of(model).linear is None
        handle.remove()
        assert split_of(model).linear is head


def test_parameters_are_those_that_logits_trains() -> None:
    for family in ("llama", "gpt2", "gptj", "cohere"):
        model = make(family)
        split = split_of(model)
        split.logits(torch.randn(1, 3, 32)).sum().backward()  # type: ignore[no-untyped-call]
        trained = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
        assert {id(parameter) for parameter in split.parameters()} == trained


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every call of transformers' search for packed rows, which waits for the device."""
    from transformers import masking_utils

    seen: list[Tensor] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: seen.append(ids))
    return seen


def test_no_forward_looks_for_packed_rows(token_ids: Tensor, rows_seen: list[Tensor]) -> None:
    model = make("llama")
    split = split_of(model)
    split.hidden(token_ids)
    run_model(model, token_ids)
    assert rows_seen == []
    model(token_ids, use_cache=False)
    assert len(rows_seen) == 1


class Wrapper(nn.Module):
    """A user's module with a transformers model inside: nobody passes use_cache=False there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.caches: list[object] = []

    def forward(self, token_ids: Tensor) -> Tensor:
        output = self.inner(token_ids)
        self.caches.append(output.cache)
        logits: Tensor = output.logits
        return logits


def test_cache_is_off_in_training_and_the_flag_comes_back(token_ids: Tensor) -> None:
    """User report CK-08: a cache filled in training is filled again by recomputation."""
    inner = make("llama", use_cache=True)
    model = Wrapper(inner)
    split = split_of(model)
    model(token_ids)
    assert model.caches.pop() is not None
    run_model(model, token_ids)
    assert model.caches.pop() is None
    split.hidden(token_ids)
    split_of(inner).hidden(token_ids)
    assert inner.config.use_cache is True  # type: ignore[union-attr]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.embed = nn.Embedding(VOCAB, 16)
        self.head = nn.Linear(16, VOCAB)
        self.counter = nn.Buffer(torch.zeros(()))
        self.offsets = torch.ones(16)  # neither a parameter nor a buffer

    def body(self, token_ids: Tensor) -> Tensor:
        self.counter.add_(1)
        hidden: Tensor = self.embed(token_ids) + self.offsets
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(token_ids))
        return logits


class Capped(Mlp):
    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids).tanh()


class Twice(Mlp):
    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.body(token_ids)
        self.head(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class OwnAutocast(Mlp):
    def forward(self, token_ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(token_ids)


class Pooled(Mlp):
    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(token_ids).mean(1))
        return logits


class Branching(Mlp):
    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) if token_ids.sum() >= 0 else super().forward(-token_ids)


def test_halves_of_a_users_module_equal_it_to_the_bit(token_ids: Tensor) -> None:
    torch.manual_seed(0)
    model = Mlp()
    before = torch.get_rng_state()
    split = split_of(model)
    assert torch.equal(before, torch.get_rng_state())
    assert model.counter == 0
    assert split.linear is model.head
    assert_same_to_the_bit(model, split, lambda: model(token_ids), token_ids)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Capped, "not what its output layer returns"),
        (Twice, "called 2 times"),
        (OwnAutocast, "own autocast"),
        (Pooled, "shape"),
        (Branching, "cannot be tried out"),
    ],
)
def test_modules_that_cannot_be_halved_say_why(module: type[nn.Module], reason: str, token_ids: Tensor) -> None:
    model = module()
    answer = split_head(model, dissect(model, VOCAB))
    assert isinstance(answer, str)
    assert reason in answer
    assert run_model(model, token_ids).shape[-1] == VOCAB


def test_what_a_users_forward_held_is_freed(token_ids: Tensor) -> None:
    """Leaving a forward by an exception must not keep its local tensors in the traceback."""
    seen: list[weakref.ref[Tensor]] = []

    class Holding(Mlp):
        def forward(self, token_ids: Tensor) -> Tensor:
            scratch = torch.ones(1000)
            seen.append(weakref.ref(scratch))
            return super().forward(token_ids)

    split = split_of(Holding())
    seen.clear()
    gc.disable()
    hidden = split.hidden(token_ids)
    gc.enable()
    assert hidden.requires_grad
    assert [reference() for reference in seen] == [None]


def test_users_module_is_halved_under_fake_tensors_too() -> None:
    workload = workload_from_module(Mlp(), seq_len=16, vocab_size=VOCAB)
    with FakeTensorMode(), torch.device("cpu"):
        model = workload.make_model()
        split = split_head(model, workload.anatomy())
        assert isinstance(split, HeadSplit)
        assert split.hidden(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 16)


def test_a_block_that_stands_twice_in_a_list_stays_real():
    """Trying a module out on fake tensors must leave no fake behind under a second name."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.layers = nn.ModuleList([block, block, nn.Sequential(nn.Linear(8, 8), nn.ReLU())])

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.embedding(ids)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden)

    model = Twice()
    split_head(model, dissect(model, vocab_size=11))
    assert not any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    assert model(torch.zeros(1, 2, dtype=torch.long)).abs().sum().item() > 0
