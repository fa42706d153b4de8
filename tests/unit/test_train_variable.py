"""Documents of several lengths: every one once, micro batches within their tokens, the same after a resume."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.train.packing import Position, epoch_order, windows
from trainfit.train.variable import DocumentTokens
from trainfit.workload.batch import IGNORED_LABEL, PADDED_TO

LONGEST = 64
FEW = settings(max_examples=30)
document_lengths = st.lists(st.integers(1, 200), min_size=1, max_size=40).filter(lambda lengths: max(lengths) > 1)


def documents(lengths, *, update_tokens=100, batch_tokens=0, seq_len=LONGEST) -> DocumentTokens:
    """Documents of so many tokens each; a token's value is its place in the text."""
    ends = np.cumsum(lengths)
    data = DocumentTokens.of(np.arange(ends[-1], dtype=np.uint32), ends, seq_len, update_tokens)
    return data.in_batches_of(batch_tokens)


@FEW
@given(document_lengths)
def test_every_token_but_each_documents_first_is_predicted_once(lengths):
    data = documents(lengths)
    labels = torch.cat([data.rows([index]).labels.flatten() for index in range(data.num_sequences)])
    firsts = {0, *np.cumsum(lengths)[:-1].tolist()}
    expected = [place for place in range(sum(lengths)) if place not in firsts]
    assert sorted(labels[labels != IGNORED_LABEL].tolist()) == expected


@FEW
@given(document_lengths, st.integers(1, 400), st.integers(1, 300), st.integers(0, 3), st.integers(1, 3))
def test_micro_batches_hold_every_sequence_of_an_epoch_once_within_their_tokens(
    lengths, update_tokens, batch_tokens, seed, ranks
):
    data = documents(lengths, update_tokens=update_tokens, batch_tokens=batch_tokens)
    seen: list[int] = []
    counts = []
    for rank in range(ranks):
        source = windows(data, 1, 1, Position(), seed, share=(rank, ranks))
        own = []
        for window, after in source:
            own.append(len(window))
            for batch in window:
                rows, width = batch.labels.shape
                assert rows == 1 or rows * width <= batch_tokens
                assert width <= LONGEST
                assert width % PADDED_TO == 0 or width == LONGEST
                assert batch.num_tokens == int((batch.labels != IGNORED_LABEL).sum())
                seen += batch.labels[batch.labels != IGNORED_LABEL].tolist()
            if after.epoch == 1:
                break
        counts.append(own)
    assert all(each == counts[0] for each in counts), "ranks take as many micro batches in every update"
    firsts = {0, *np.cumsum(lengths)[:-1].tolist()}
    assert sorted(seen) == [place for place in range(sum(lengths)) if place not in firsts]


@FEW
@given(document_lengths, st.integers(1, 400), st.integers(0, 3))
def test_an_update_has_the_tokens_asked_for_whatever_the_micro_batch(lengths, update_tokens, seed):
    contents = []
    for batch_tokens in (1, 64, 1000):
        data = documents(lengths, update_tokens=update_tokens, batch_tokens=batch_tokens)
        updates = list(islice(windows(data, 1, 1, Position(), seed), 4))
        tokens = [sum(batch.num_tokens for batch in window) for window, _ in updates]
        for count, (_, after) in zip(tokens, updates):
            last_of_epoch = after.index == 0
            assert last_of_epoch or update_tokens <= count < update_tokens + LONGEST
        valid = [[batch.labels[batch.labels != IGNORED_LABEL] for batch in window] for window, _ in updates]
        contents.append([sorted(torch.cat(window).tolist()) for window in valid])
    assert contents[0] == contents[1] == contents[2]


@FEW
@given(document_lengths, st.integers(1, 300), st.integers(0, 3), st.integers(0, 6))
def test_a_source_goes_on_where_another_stopped(lengths, batch_tokens, seed, stopped_after):
    data = documents(lengths, batch_tokens=batch_tokens)
    whole = list(islice(windows(data, 1, 1, Position(), seed), stopped_after + 3))
    position = whole[stopped_after - 1][1] if stopped_after else Position()
    for (window, after), (again, then) in zip(whole[stopped_after:], windows(data, 1, 1, position, seed)):
        assert after == then
        assert [batch.inputs.tolist() for batch in window] == [batch.inputs.tolist() for batch in again]


def test_updates_of_epochs_are_as_many_as_windows():
    data = documents([7, 90, 33, 21, 64, 64, 5, 130], update_tokens=70)
    found = data.updates((epoch_order(data, 3, epoch) for epoch in range(2)), 1)
    positions = [after for _, after in islice(windows(data, 1, 1, Position(), 3), found)]
    assert positions[-1] == Position(2, 0)
    assert sum(after.index == 0 for after in positions) == 2


def test_similar_lengths_go_together():
    data = documents([61, 5, 60, 9, 33, 4], batch_tokens=128)
    groups = data.groups(np.arange(6), 1)
    assert [sorted(data.lengths[group].tolist()) for group in groups] == [[59, 60], [3, 4, 8, 32]]
