import torch

from jitkern.declare import Cuda, kernel

tile = kernel("guide::tile(Tensor x, int row) -> Tensor", cuda=Cuda("tile.cu"))


@tile.launch("cuda")
def _(k, x, row):
    out = torch.empty(16, 64, dtype=x.dtype, device=x.device)
    k.tile[{"T": x.dtype}](out, k.tensor_map(x, (16, 64)), row, grid=1, block=128)
    return out


@tile.samples
def _(device):
    yield torch.ones(100, 512, device=device, dtype=torch.bfloat16), 20
