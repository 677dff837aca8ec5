"""DeepSpeed: the training loss without the logits at every ZeRO stage, under AutoTP, Ulysses and in pipelines.

``install(engine)`` is the one line a training script needs; ``uninstall(engine)`` takes it back. Pipelines take
``pipeline_loss_fn``; under Ulysses sequence parallelism ``sequence_parallel_mean`` makes the global mean. Importing
this module doesn't import DeepSpeed; using it does where DeepSpeed's layers or groups are needed.
"""

from ..deferred import DeferredLogits, HookStatus
from .hook import install, status, uninstall
from .pipeline import PipelineHead, pipeline_loss_fn, tied_pipeline_head
from .sequence import sequence_parallel_mean

__all__ = [
    "DeferredLogits",
    "HookStatus",
    "PipelineHead",
    "install",
    "pipeline_loss_fn",
    "sequence_parallel_mean",
    "status",
    "tied_pipeline_head",
    "uninstall",
]
