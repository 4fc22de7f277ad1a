"""A function under torch.compile."""

import sys

import torch

device = sys.argv[1]
function = torch.compile(lambda x: (x.sin() * 2 + x.cos()).sum(-1))
x = torch.arange(4096.0, device=device).reshape(64, 64)
assert torch.allclose(function(x), (x.sin() * 2 + x.cos()).sum(-1), atol=1e-4)
