"""What the ops of cutile_ops.py and cute_ops.py have in common."""

import sys
import tempfile
from pathlib import Path

import torch

import jitkern
from jitkern import cache_tools, config
from jitkern.declare import kernel
from jitkern.jit import open_cache

SIZES = (1 << 20, 100_003, 1000, 1)


def matrices(device):
    """Matrices of several layouts."""
    x = torch.randn(48, 1000, device=device, dtype=torch.bfloat16)
    return [x, x.t(), x[:, ::2], x[3:, 5:], x[:, :1].expand(48, 300)]


def declared(language, kind, text):
    """Ops of a text of this kind, without their launch functions: scale, scale_by_pairs, row_sums."""

    def vectors(device):
        for n in SIZES:
            yield torch.randn(n, device=device), 0.5

    def with_an_odd_address(device):
        yield from vectors(device)
        yield torch.randn(1001, device=device)[1:], 0.5

    scale, pairs = (
        kernel(f"{language}_test::{name}(Tensor x, float by) -> Tensor", cuda=kind(text=text))
        for name in ("scale", "scale_by_pairs")
    )
    row_sums = kernel(
        f"{language}_test::row_sums(Tensor x) -> Tensor", cuda=kind(text=text, strided=True)
    )

    @scale.backward
    def _(grad, by):
        return scale(grad, by)

    scale.reference(lambda x, by: x * by)
    scale.samples(with_an_odd_address)
    pairs.reference(lambda x, by: x * by)
    pairs.samples(vectors)
    row_sums.reference(lambda x: x.float().sum(1))
    row_sums.samples(lambda device: ((x,) for x in matrices(device)))
    return scale, pairs, row_sums


def bundle(ops):
    """Compile ops for the target of the command line, and write a bundle."""
    path, target = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, config.using(cache_dir=folder):
        for result in jitkern.prewarm([*ops], targets=[target]):
            print(result)
        cache = open_cache()
        packed = cache_tools.chosen(cache, cache_tools.EntryFilter())
        print(cache_tools.pack(cache, packed, Path(path)), "entries")
