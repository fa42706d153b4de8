"""Text to tokens to windows: nothing lost, nothing leaked, the same every time."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from itertools import chain, islice
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfit.errors import DataError, ResumeError
from trainfit.hardware import Ranks
from trainfit.profile import Mesh
from trainfit.train.data import prepare_data
from trainfit.train.documents import list_documents, split_documents, split_text
from trainfit.train.evaluate import held_out_loss
from trainfit.train.packing import PackedTokens, Position, unigram_loss, updates_per_epoch, windows
from trainfit.train.recipe import DataSettings, Recipe, TokenizerSettings
from trainfit.train.tokenizer import END_OF_TEXT, encode, train_tokenizer
from trainfit.workload.batch import IGNORED_LABEL

WORDS = "the cat sat on a mat and the dog ran to the red house by the sea\n"


def recipe(folder, **data):
    settings = {"paths": "text", "tokenizer": {"vocab_size": 300}, "held_out_fraction": 0.1, **data}
    values = {"model": "gpt2", "data": settings, "seq_len": 8, "tokens_per_step": 32, "steps": 1, "run_folder": "run"}
    return Recipe.model_validate(values).located(folder)


def write_text(folder, num_files=30):
    (folder / "text").mkdir()
    for number in range(num_files):
        (folder / "text" / f"{number:02d}.txt").write_text(f"document {number}\n" + WORDS * 5)


def packed(num_sequences, seq_len=4):
    return PackedTokens(np.arange(num_sequences * seq_len + 1, dtype=np.uint16), seq_len)


def test_every_token_but_the_first_is_predicted_once_by_the_one_before():
    data = PackedTokens(np.arange(100, 123, dtype=np.uint16), 4)
    batch = data.rows(range(data.num_sequences))
    assert data.num_sequences == 5
    assert batch.labels.flatten().tolist() == list(range(101, 121))
    assert torch.equal(batch.inputs + 1, batch.labels)
    assert batch.num_tokens == 20


@pytest.mark.parametrize(("num_micro_batches", "expected"), [(10, [4, 4, 2]), (3, [3])])
def test_last_window_of_an_epoch_is_short_and_is_an_update(num_micro_batches, expected):
    """GA-04: 10 micro batches with 4 a window are 3 updates, 3 are one."""
    stream = windows(packed(num_micro_batches), 1, 4, Position(), seed=0)
    epochs = [(len(window), after) for window, after in islice(stream, 2 * len(expected))]
    assert [length for length, _ in epochs] == expected * 2
    assert epochs[len(expected) - 1][1] == Position(1, 0)
    assert updates_per_epoch(num_micro_batches, 4) == len(expected)


def test_an_update_takes_its_sequences_whatever_the_micro_batch():
    """A micro batch that does not divide the update is short at its end; it never makes the update larger."""
    window, after = next(windows(packed(20), 4, 9, Position(), seed=0))
    assert [len(batch.inputs) for batch in window] == [4, 4, 1]
    assert after == Position(0, 9)


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own():
    data = packed(10)
    stream = windows(data, 2, 4, Position(), seed=3)
    firsts = [[row[0].item() for batch in window for row in batch.inputs] for window, _ in islice(stream, 6)]
    one, two = (list(chain.from_iterable(part)) for part in (firsts[:3], firsts[3:]))
    assert sorted(one) == sorted(two) == [4 * i for i in range(10)]
    assert one != two


def test_windows_go_on_from_any_position_whatever_the_micro_batch():
    data = packed(10)
    whole = list(islice(windows(data, 2, 4, Position(), seed=5), 6))
    for number, (_, position) in enumerate(whole[:-1]):
        window, after = next(windows(data, 2, 4, position, seed=5))
        assert after == whole[number + 1][1]
        assert torch.equal(window[0].inputs, whole[number + 1][0][0].inputs)
    rest, _ = next(windows(data, 1, 4, whole[0][1], seed=5))
    assert torch.equal(torch.cat([b.inputs for b in rest]), torch.cat([b.inputs for b in whole[1][0]]))


def test_evaluated_sequences_are_spread_over_the_text():
    assert packed(100).spread(4).tolist() == [0, 25, 50, 75]
    assert packed(3).spread(8).tolist() == [0, 1, 2]


def test_unigram_loss_is_the_cross_entropy_of_smoothed_frequencies():
    train = PackedTokens(np.array([0, 1, 1, 2, 1, 0], dtype=np.uint16), 2)
    held_out = PackedTokens(np.array([0, 1, 3, 2, 1], dtype=np.uint16), 2)
    counts = Counter([0, 1, 1, 2, 1, 0])
    expected = -sum(math.log((counts[label] + 1) / (6 + 4)) for label in [1, 3, 2, 1]) / 4
    assert unigram_loss(train, held_out, held_out.spread(9), 4) == pytest.approx(expected, rel=1e-12)


def test_text_comes_back_from_its_tokens_and_splits_do_not_overlap(tmp_path):
    write_text(tmp_path)
    data = prepare_data(recipe(tmp_path), tmp_path / "run" / "data", max_vocab_size=300)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "run" / "data" / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    seen = []
    for split in (data.train, data.held_out):
        assert split.tokens[-1] == end
        pieces = np.split(split.tokens, np.flatnonzero(split.tokens == end) + 1)
        seen.append({tokenizer.decode(piece[:-1].tolist()) for piece in pieces if len(piece)})
    expected = {path.read_text() for path in (tmp_path / "text").iterdir()}
    assert seen[0] | seen[1] == expected
    assert not seen[0] & seen[1]
    assert len(seen[1]) == 3


def test_tokens_are_made_once_and_made_again_when_the_text_changes(tmp_path):
    write_text(tmp_path)
    folder = tmp_path / "run" / "data"
    calls = []
    for _ in range(2):
        prepare_data(recipe(tmp_path), folder, max_vocab_size=300, progress=lambda *p: calls.append(p))
    once = len(calls)
    assert once == len(set(calls)) > 0
    assert calls[-1][1] == calls[-1][2]
    (tmp_path / "text" / "00.txt").write_text("something new\n" * 10)
    with pytest.raises(ResumeError, match="the text changed since the run began"):
        prepare_data(recipe(tmp_path), folder, max_vocab_size=300, resume=True)
    prepare_data(recipe(tmp_path), folder, max_vocab_size=300, progress=lambda *p: calls.append(p))
    assert len(calls) == 2 * once


def test_the_split_depends_on_names_alone(tmp_path):
    write_text(tmp_path)
    documents = list_documents(DataSettings(paths=("text",)), tmp_path.joinpath)
    assert [document.name for document in documents] == sorted(document.name for document in documents)
    held_out = split_documents(documents, 0.1)
    assert held_out == split_documents(documents[::-1], 0.1)
    assert len(held_out) == 3


def test_one_long_text_holds_out_its_tail(tmp_path):
    (tmp_path / "text.txt").write_text(WORDS * 50)
    data = prepare_data(recipe(tmp_path, paths="text.txt"), tmp_path / "data", max_vocab_size=300)
    ratio = len(data.held_out.tokens) / (len(data.train.tokens) + len(data.held_out.tokens))
    assert ratio == pytest.approx(0.1, abs=0.02)
    start, tail = split_text("one\ntwo\nthree\n", 0.3)
    assert (start, tail) == ("one\ntwo\n", "three\n")


def test_jsonl_reads_one_document_a_line_in_order(tmp_path):
    lines = [json.dumps({"body": f"line {n} {WORDS}"}) for n in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:5]) + "\n\n" + "\n".join(lines[5:]))
    documents = list_documents(DataSettings(paths=("a.jsonl",), text_key="body"), tmp_path.joinpath)
    assert [document.read()[:7].strip() for document in documents] == [f"line {n}" for n in range(12)]
    with pytest.raises(DataError, match=r"a\.jsonl line \d+: no text at key 'text', the line has body"):
        prepare_data(recipe(tmp_path, paths="a.jsonl"), tmp_path / "data", max_vocab_size=300)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a\.jsonl line 2: not JSON \(Expecting value, column 9\)"):
        prepare_data(recipe(tmp_path, paths="a.jsonl"), tmp_path / "data", max_vocab_size=300)


def test_bad_bytes_are_replaced_and_a_spelt_out_special_token_is_plain_text(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good \xff\xfe text " + END_OF_TEXT.encode())
    documents = list_documents(DataSettings(paths=("bad.txt",)), tmp_path.joinpath)
    assert documents[0].read() == f"good �� text {END_OF_TEXT}"
    tokenizer = train_tokenizer(documents, lambda document: document.read(), 300, seed=0)
    (ids,) = encode(tokenizer, [documents[0].read()])
    assert tokenizer.token_to_id(END_OF_TEXT) not in ids
    assert tokenizer.decode(ids) == documents[0].read()


def test_pieces_of_a_long_text_join_to_the_whole():
    tokenizer = train_tokenizer([], lambda document: "", 257, seed=0)
    texts = ["", "x" * 100_000, WORDS * 2000, "é\n"]
    assert [tokenizer.decode(ids) for ids in encode(tokenizer, texts)] == texts


def test_the_tokenizer_sees_nothing_that_is_held_out(tmp_path):
    write_text(tmp_path)
    documents = list_documents(DataSettings(paths=("text",)), tmp_path.joinpath)
    for document in documents:
        if document.name in split_documents(documents, 0.1):
            document.path.write_text("xylophone " * 100)
    prepare_data(recipe(tmp_path, tokenizer={"vocab_size": 400}), tmp_path / "data", max_vocab_size=400)
    vocabulary = json.loads((tmp_path / "data" / "tokenizer.json").read_text())["model"]["vocab"]
    assert any("house" in token for token in vocabulary)
    assert not any("phone" in token for token in vocabulary)


def test_max_bytes_takes_the_same_documents_every_time(tmp_path):
    write_text(tmp_path)
    size = (tmp_path / "text" / "00.txt").stat().st_size
    capped = DataSettings(paths=("text",), max_bytes=10 * size + 20)
    names = [document.name for document in list_documents(capped, tmp_path.joinpath)]
    assert len(names) == 10
    assert names == [document.name for document in list_documents(capped, tmp_path.joinpath)]
    assert names != sorted(f"text/{number:02d}.txt" for number in range(30))[:10]
    with pytest.raises(DataError, match="less than the smallest document"):
        list_documents(DataSettings(paths=("text",), max_bytes=3), tmp_path.joinpath)


def test_text_too_short_says_how_many_tokens_and_leaves_nothing(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(DataError, match=r"\d+ training and \d+ held-out tokens, seq_len 8 needs 9 of each; add text"):
        prepare_data(recipe(tmp_path, paths="short.txt"), tmp_path / "run" / "data", max_vocab_size=300)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"paths": "nowhere"}, "no file or folder at .*nowhere; check data.paths"),
        ({"patterns": "*.rst"}, r"no file under .* matches \*\.rst; it has 30 \*\.txt: set data.patterns"),
        ({"tokenizer": {"path": "none.json"}}, r"no tokenizer at .*none\.json"),
        ({"tokenizer": {"path": "text/00.txt"}}, r"00\.txt is not a tokenizer\.json"),
        (
            {"tokenizer": {"vocab_size": 300, "end_of_text": "<stop>"}},
            "no token <stop>; set data.tokenizer.end",
        ),
    ],
)
def test_bad_data_is_one_line_with_the_next_move(tmp_path, data, match):
    write_text(tmp_path)
    with pytest.raises(DataError, match=match) as caught:
        prepare_data(recipe(tmp_path, **data), tmp_path / "data", max_vocab_size=300)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    write_text(tmp_path)
    with pytest.raises(DataError, match=r"the tokenizer has \d+ tokens, the model's vocab_size is 100"):
        prepare_data(recipe(tmp_path), tmp_path / "data", max_vocab_size=100)


def test_a_given_tokenizer_is_used(tmp_path):
    write_text(tmp_path)
    own = train_tokenizer([], lambda document: "", 257, seed=0)
    own.save(str(tmp_path / "own.json"))
    settings = recipe(tmp_path, tokenizer={"path": "own.json"})
    assert prepare_data(settings, tmp_path / "data", max_vocab_size=300).vocab_size == own.get_vocab_size()
    assert settings.data.tokenizer == TokenizerSettings(path="own.json")


def inputs_of(batch):
    return [row[0].item() for row, labels in zip(batch.inputs, batch.labels) if (labels != IGNORED_LABEL).any()]


@given(
    num_sequences=st.integers(1, 40),
    micro_batch_size=st.integers(1, 5),
    per_update=st.integers(1, 17),
    ranks=st.integers(1, 5),
    start=st.integers(0, 39),
)
def test_the_shares_of_all_ranks_are_the_window_of_one_process(
    num_sequences, micro_batch_size, per_update, ranks, start
):
    """Also in short windows, with more ranks than rows and from any position; every rank has as many micro batches."""
    data, position = packed(num_sequences), Position(0, min(start, num_sequences - 1))
    streams = [windows(data, micro_batch_size, per_update, position, 1, (rank, ranks)) for rank in range(ranks)]
    alone = windows(data, micro_batch_size, per_update, position, 1)
    for _ in range(2 * updates_per_epoch(num_sequences, per_update)):
        whole, after = next(alone)
        shares, positions = zip(*(next(stream) for stream in streams))
        assert set(positions) == {after}
        assert {len(share) for share in shares} == {-(-sum(len(b.inputs) for b in whole) // (micro_batch_size * ranks))}
        assert [row for step in zip(*shares) for batch in step for row in inputs_of(batch)] == [
            row for batch in whole for row in inputs_of(batch)
        ]
        assert all(1 <= len(batch.inputs) <= micro_batch_size for share in shares for batch in share)
        assert sum(batch.num_tokens for share in shares for batch in share) == sum(b.num_tokens for b in whole)
        assert all(batch.num_tokens == int((batch.labels != IGNORED_LABEL).sum()) for s in shares for batch in s)


def test_ranks_evaluate_their_shares_to_the_loss_of_one_process():
    data, batch_size, ranks = packed(50), 3, 4
    indices = data.spread(17)

    def evaluate(batch):
        return batch.inputs[batch.labels != IGNORED_LABEL].double().sqrt().sum(), batch.num_tokens

    class OneOf(Ranks):
        """A rank whose sums are only noted."""

        noted: ClassVar[list[torch.Tensor]] = []
        number = 0

        @property
        def data_index(self):
            return self.number

        def sum(self, values, *dims):
            assert dims == ("replicate", "shard")
            self.noted.append(values.clone())
            return values

    calls = Counter()
    for number in range(ranks):
        rank = OneOf(Mesh(replicate=2, shard=2))
        object.__setattr__(rank, "number", number)

        def counted(batch, number=number):
            calls[number] += 1
            return evaluate(batch)

        # A rank without a valid label divides by zero only because this stand-in adds nothing up.
        with suppress(ZeroDivisionError):
            held_out_loss(counted, data, indices, batch_size, rank)
    assert set(calls.values()) == {2}
    total, tokens = torch.stack(OneOf.noted).sum(0).tolist()
    assert tokens == 17 * 4
    assert total / tokens == pytest.approx(held_out_loss(evaluate, data, indices, batch_size), rel=1e-12)
