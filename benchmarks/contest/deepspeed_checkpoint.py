"""DeepSpeed's activation checkpointing around every block of a plain loop."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import deepspeed

from contest.setting import Case, Step, WithLoss, loop, wrap_blocks


def every_block(case: Case) -> Step:
    """Inputs stay where they are: with checkpoint_in_cpu it fails in one process (0.19.8)."""
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=False)
    model = case.new_model()
    wrap_blocks(model, deepspeed.checkpointing.checkpoint)
    return loop(case, WithLoss(model), model.parameters())
