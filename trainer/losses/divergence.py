"""How far the policy is from another one, estimated on sampled tokens."""

from __future__ import annotations

from torch import Tensor

from rlbridge.trainer.config import KlEstimator
from rlbridge.trainer.losses.tokens import bounded_exp, log_ratio


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: KlEstimator) -> Tensor:
    """An estimate of ``KL(pi || pi_ref)`` per token, from tokens that ``pi`` sampled (nats).

    With ``r = pi_ref / pi`` (Schulman 2020, "Approximating KL divergence"): ``k1 = -log r`` is unbiased and of either
    sign; ``k2 = (log r)^2 / 2`` is never negative and biased, but its *gradient* is that of the true KL; ``k3 = r - 1 -
    log r`` is unbiased and never negative, the choice of DeepSeekMath (arXiv:2402.03300, equation 4).

    Args:
        logprobs, reference: ``[B, T]``; as a loss, gradient flows through the first. mask: ``[B, T]``.

    Returns:
        ``[B, T]``, 0 where masked.
    """
    log_r = log_ratio(reference, logprobs, mask)
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return 0.5 * log_r.square()
        case "k3":
            return bounded_exp(log_r) - 1.0 - log_r
