"""Ranks that start agree on a name that no earlier life of theirs has used."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch.distributed as dist

from trainfit.errors import DeviceError
from trainfit.hardware.rendezvous import _agree_on_name


def one_life(store, size, seed, *, dies=None):
    """The names that ranks come back with, by rank; one that dies leaves after its token."""
    names, delays = {}, random.Random(seed)

    def start(rank, delay):
        time.sleep(delay)
        if rank == dies:
            store.set(f"token{rank}", "of the dead")
            return
        try:
            names[rank] = _agree_on_name(store, rank, size, 0.5 if dies is not None else 20)
        except DeviceError as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=start, args=(rank, delays.uniform(0, 0.2))) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return names


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_of_a_life_agree_and_no_two_lives_do(seed):
    store = dist.HashStore()
    lives = [one_life(store, 3, seed * 10 + life) for life in range(3)]
    assert all(len(names) == 3 and len(set(names.values())) == 1 for names in lives)
    assert len({names[0] for names in lives}) == 3


def test_a_rank_that_died_before_it_agreed_does_not_spoil_the_next_life():
    store = dist.HashStore()
    failed = one_life(store, 3, 0, dies=1)
    assert set(failed) == {0, 2}
    assert all("waited 0.5 s for the others to start" in text for text in failed.values())
    names = one_life(store, 3, 1)
    assert len(names) == 3
    assert len(set(names.values())) == 1
