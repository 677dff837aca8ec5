"""Cut cross-entropy over a tensor-parallel group: the language-model loss without the logit matrix."""

from .loss import LinearCrossEntropyLoss, linear_cross_entropy
from .options import Exact, Filtered, Sampled
from .sampler import sampler
from .shard import VocabShard
from .stats import LossStats

__version__ = "0.1.0"

__all__ = [
    "Exact",
    "Filtered",
    "LinearCrossEntropyLoss",
    "LossStats",
    "Sampled",
    "VocabShard",
    "linear_cross_entropy",
    "sampler",
]
