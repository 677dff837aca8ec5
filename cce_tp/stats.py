"""What a call can tell about itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossStats:
    """Statistics of one call. Per-token tensors have the target's shape; the same bits on every rank of the group.

    Attributes:
        lse: fp32, log-sum-exp of the final logits, also at ignored positions. Differentiable (nats), except that an
            ignored position passes no gradient.
        target_logprob: fp32, log-probability of the target (nats); NaN where the target is no vocabulary id. Detached.
        correct: bool, the target is the argmax of the logits, the lowest id of equals. False where ignored.
        entropy: fp32, entropy of the softmax (nats). Detached.
        keep_rate: fp32 ``[]``, share of this rank's entries of the logit gradient that the backward pass works on; 1
            for exact. If sampled, beside hot rows and targets; if filtered, those in tiles that may hold an entry of
            eps, as far as bounds can tell: a few more tiles are left out.
        implementation: "triton" or "torch".
    """

    lse: Tensor
    target_logprob: Tensor
    correct: Tensor
    entropy: Tensor
    keep_rate: Tensor
    implementation: str
