"""Links: what joins the devices of a run, and how long a collective takes over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainfit.hardware import DeviceSpec

# Payloads that cross each link, in units of (ranks - 1) / ranks: a ring sends every byte past all ranks but one.
RING_ROUNDS: Mapping[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Links:
    """Bytes a second in each direction, and seconds of latency.

    bandwidth: of one device to the others of its node. network: of one device's share to other nodes; None where only
    the node's links are known, which then stand for all. call: of any collective; step, network_step: of each step of
    its ring, within a node and between nodes.
    """

    bandwidth: float
    devices_per_node: int = 8
    network: float | None = None
    call: float = 0.0
    step: float = 0.0
    network_step: float = 0.0

    @classmethod
    def of(cls, spec: DeviceSpec) -> Links:
        network = spec.network_bandwidth
        return cls(
            spec.link_bandwidth.value,
            spec.devices_per_node,
            None if network is None else network.value,
            spec.call_latency.value,
            spec.link_latency.value,
            spec.network_latency.value,
        )

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks: Sequence[int] = ()) -> float:
        """Of one collective of a group: a ring over the slowest link of it, with the latency of each step.

        Point to point and one to all: of the payload. ranks: whose they are, where that is known; without, they are
        next to each other. Devices of a node that belong to the group send to the next node side by side.
        """
        beside = self._beside(group_size, ranks)
        crosses = self.network is not None and beside < group_size
        bandwidth, step = self.bandwidth, self.step
        if crosses:
            assert self.network is not None
            step = self.network_step
            side_by_side = beside if kind in RING_ROUNDS else 1
            bandwidth = min(bandwidth, side_by_side * self.network)
        if (rounds := RING_ROUNDS.get(kind)) is None:
            return self.call + step + num_bytes / bandwidth
        share = rounds * (group_size - 1) / group_size
        return self.call + self._steps(rounds, group_size, beside, crosses) + share * num_bytes / bandwidth

    def _steps(self, rounds: int, group_size: int, beside: int, crosses: bool) -> float:
        """A ring's steps go on at once over all links; of those in a row, one in every node crosses to the next."""
        steps = group_size - 1
        between = -(-group_size // beside) - 1 if crosses else 0
        return rounds * ((steps - between) * self.step + between * self.network_step)

    def bound(self, group_size: int, ranks: Sequence[int] = ()) -> Literal["link", "network"]:
        """Which figure decides."""
        return "network" if self.network is not None and self._beside(group_size, ranks) < group_size else "link"

    def _beside(self, group_size: int, ranks: Sequence[int]) -> int:
        """How many of the group are in the node that has fewest of them."""
        if not ranks:
            return min(group_size, self.devices_per_node)
        nodes = [rank // self.devices_per_node for rank in ranks]
        return min(map(nodes.count, set(nodes)))
