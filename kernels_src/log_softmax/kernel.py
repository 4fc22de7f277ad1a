"""log_softmax is declared beside softmax, with which it shares its kernels."""

from jitkern.kernels_src.softmax.kernel import log_softmax, log_softmax_backward

__all__ = ["log_softmax", "log_softmax_backward"]
