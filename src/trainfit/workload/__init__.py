"""What is trained: model factory, shapes, loss, optimizer, and where blocks, head and ties are."""

from trainfit.workload.adapter import LoRASettings, with_adapter
from trainfit.workload.anatomy import Anatomy, dissect
from trainfit.workload.batch import IGNORED_LABEL, MicroBatch
from trainfit.workload.builtin import builtin_names
from trainfit.workload.forward import HeadSplit, run_model
from trainfit.workload.freezing import with_frozen, with_trained_only
from trainfit.workload.head import split_head
from trainfit.workload.module import workload_from_module
from trainfit.workload.resolve import resolve_workload, workload_from_config
from trainfit.workload.start import StartWeights, with_weights
from trainfit.workload.workload import AdamWSettings, Workload

__all__ = [
    "IGNORED_LABEL",
    "AdamWSettings",
    "Anatomy",
    "HeadSplit",
    "LoRASettings",
    "MicroBatch",
    "StartWeights",
    "Workload",
    "builtin_names",
    "dissect",
    "resolve_workload",
    "run_model",
    "split_head",
    "with_adapter",
    "with_frozen",
    "with_trained_only",
    "with_weights",
    "workload_from_config",
    "workload_from_module",
]
