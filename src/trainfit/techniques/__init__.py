"""One file for each way to save memory; TECHNIQUES is their order."""

from trainfit.techniques.activation import ActivationTiers
from trainfit.techniques.attention import AttentionKind
from trainfit.techniques.base import Build, Observer, Stage, Technique
from trainfit.techniques.block_cast import BlockCasts
from trainfit.techniques.chunked_loss import ChunkedLoss
from trainfit.techniques.compiled import CompiledBlocks
from trainfit.techniques.frozen_weights import FrozenWeights
from trainfit.techniques.loss_scaling import LossScaling
from trainfit.techniques.offload import Offloading
from trainfit.techniques.optimizer import OptimizerStates
from trainfit.techniques.pipeline import PipelineStages
from trainfit.techniques.precision import MixedPrecision
from trainfit.techniques.recompute_ahead import RecomputeAhead
from trainfit.techniques.tensor_parallel import TensorSplit
from trainfit.techniques.tier_table import TierTable
from trainfit.techniques.zero import ZeroStages

TECHNIQUES: tuple[Technique, ...] = (
    FrozenWeights(),
    PipelineStages(),
    TensorSplit(),
    AttentionKind(),
    BlockCasts(),
    Offloading(),
    ActivationTiers(),
    TierTable(),
    CompiledBlocks(),
    RecomputeAhead(),
    ZeroStages(),
    OptimizerStates(),
    ChunkedLoss(),
    MixedPrecision(),
    LossScaling(),
)

__all__ = ["TECHNIQUES", "Build", "Observer", "Stage", "Technique"]
