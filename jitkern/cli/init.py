"""Write a new kernel folder: a declaration, a CUDA kernel and a C++ kernel that work as they are.

`jitkern init scale` makes `scale/`; `python -c "import scale.kernel"` declares the op
`scale::scale`.
"""

from __future__ import annotations

import argparse
import keyword
import sys
from pathlib import Path

KERNEL = '''"""out = alpha * x"""

import torch

from jitkern.declare import Cpp, Cuda, kernel

{name} = kernel(
    "{name}::{name}(Tensor x, float alpha) -> Tensor",
    cuda=Cuda("{name}.cu"),
    cpu=Cpp("{name}.cpp"),
)


@{name}.reference
def _(x, alpha):
    return alpha * x


@{name}.launch("cuda")
def _(k, x, alpha):
    x = x.contiguous()
    out = torch.empty_like(x)
    k.{name}[{{"T": x.dtype}}](out, x, alpha, x.numel(), grid=(x.numel() + 255) // 256, block=256)
    return out


@{name}.launch("cpu")
def _(k, x, alpha):
    x = x.contiguous()
    out = torch.empty_like(x)
    k.{name}[{{"T": x.dtype}}](out, x, alpha, x.numel())
    return out


@{name}.backward
def _(grad, alpha):
    return {name}(grad, alpha)


@{name}.samples
def _(device):
    for dtype in (torch.float32, torch.float64):
        yield torch.randn(1000, dtype=dtype, device=device), 0.5
'''
CUDA = """// out[i] = alpha * x[i]
template <typename T>
__global__ void {name}(T* out, const T* x, double alpha, long long n) {{
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = T(alpha) * x[i];
}}
"""
CPP = """// out[i] = alpha * x[i]
#include <cstdint>

extern "C" void {name}(T* out, const T* x, double alpha, int64_t n) {{
  for (int64_t i = 0; i < n; i++) out[i] = T(alpha) * x[i];
}}
"""


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        type=_identifier,
        help="a Python identifier: the folder's and the op's name",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.name)
    if folder.exists():
        print(f"jitkern: {folder} exists already; nothing was written", file=sys.stderr)
        return 1
    folder.mkdir()
    for name, text in (("kernel.py", KERNEL), (f"{args.name}.cu", CUDA), (f"{args.name}.cpp", CPP)):
        (folder / name).write_text(text.format(name=args.name))
        print(folder / name)
    return 0


def _identifier(text: str) -> str:
    if (
        not text.isidentifier()
        or keyword.iskeyword(text)
        or text.startswith("_")
        or text in sys.stdlib_module_names
    ):
        raise argparse.ArgumentTypeError(f"`{text}` is not a usable module name")
    return text
