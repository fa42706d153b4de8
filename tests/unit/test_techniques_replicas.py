"""How replicas group the gradients that they sum."""

from __future__ import annotations

from torch import nn

from trainfit.techniques.replicas import _buckets


def test_what_two_blocks_share_is_summed_once_with_the_first_of_them():
    """Backward completes it there; in both buckets it would be summed twice."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model[2].weight = model[1].weight
    model[3].bias.requires_grad_(False)
    buckets = _buckets(model, [model[0], model[1], model[2]])
    expected = [[model[2].bias], [model[1].weight, model[1].bias], [model[0].weight, model[0].bias], [model[3].weight]]
    assert [list(map(id, bucket)) for bucket in buckets] == [list(map(id, bucket)) for bucket in expected]
