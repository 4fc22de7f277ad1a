"""Kernels that were never compiled: each takes what it is passed."""

from __future__ import annotations

import torch

from jitkern.launch.call import variant_of
from jitkern.launch.geometry import Compiled
from jitkern.launch.resources.tables import Table
from jitkern.launch.resources.tensor_maps import TensorMap
from jitkern.launch.runner import CachedKernels, arguments_of
from jitkern.source.dtypes import TENSOR_MAP, codes_of_torch


class UncompiledKernels(CachedKernels):
    def reference_to(self, variant):
        """The place of its entry, were it compiled."""
        return ""

    def compiled(self, call):
        variant, positions = variant_of(self.op, self.source, call, self.where, self.target)
        meta = {"block": 128, "smem": 0, "cluster": 1}
        compiled = Compiled(variant, None, meta, self.reference_to(variant), positions)
        meta["parameters"] = [code_of(arg) for arg in arguments_of(compiled, call.args)]
        return compiled


def code_of(arg):
    """The code of a parameter that takes an argument."""
    if isinstance(arg, TensorMap):
        return TENSOR_MAP
    if isinstance(arg, Table):
        return f"@{codes_of_torch()[arg.dtype]}:{arg.capacity}"
    if arg is None or isinstance(arg, torch.Tensor):
        return "*" if arg is None else f"*{codes_of_torch()[arg.dtype]}"
    return "bool" if isinstance(arg, bool) else "i64" if isinstance(arg, int) else "f64"
