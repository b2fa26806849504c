"""The policy-gradient loss with a clipped ratio, on the very tokens that were sampled.

Source: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7; clip-higher from Yu et al.,
"DAPO", 2025, section 3.1; the mean runs over all response tokens of the global batch.
"""
from __future__ import annotations

import torch


def policy_loss(logprob_R: torch.Tensor, old_logprob_R: torch.Tensor, advantage_R: torch.Tensor, total_tokens: int,
                eps_clip: float, eps_clip_high: float) -> torch.Tensor:
    """``-sum(min(ratio * A, clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A)) / total_tokens``.

    Args:
        logprob_R: fp32, with gradient, one per response token of this microbatch.
        old_logprob_R, advantage_R: fp32, no gradient.
        total_tokens: response tokens of the global batch, so that microbatches simply add up.

    Returns:
        The share of this microbatch in the loss, a scalar.
    """
    ratio_R = torch.exp(logprob_R - old_logprob_R)
    clipped_R = ratio_R.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    objective_R = torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R)
    return -objective_R.sum() / total_tokens
