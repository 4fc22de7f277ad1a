"""The RMS norm of FlashInfer, which nvcc and ninja compile at the first call."""

import flashinfer
import torch

x = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
weight = torch.randn(4096, device="cuda", dtype=torch.float16)
expected = torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-6)
torch.testing.assert_close(
    flashinfer.norm.rmsnorm(x, weight).float(), expected, rtol=1e-2, atol=1e-2
)
