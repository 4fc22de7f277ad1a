"""The child process that compiles one kernel: reads a request, and writes `result.json`."""

from __future__ import annotations

from ctypes import sizeof
from pathlib import Path
from typing import Any

from jitkern.compilers import kernel_worker
from jitkern.compilers.cutile.cubin import parameter_sizes
from jitkern.compilers.kernel_modules import KernelModules
from jitkern.compilers.kernel_worker import NotBuilt
from jitkern.source.argument_classes import ALIGNMENT, ONE, ZERO, TensorClass
from jitkern.source.dtypes import DTYPES

CUBIN = "kernel.cubin"
GRID_LIMIT = 1 << 24  # as cuTile has it: the number of a tile would be wrong in a larger grid


def _compiled(request: dict[str, Any], modules: KernelModules, staging: Path) -> dict[str, Any]:
    """Write the cubin, and return the metadata for launches."""
    from cuda.tile import compilation
    from cuda.tile._compile import _find_compiler_bin

    found = _find_compiler_bin().path
    if Path(found).resolve() != Path(request["tileiras"]).resolve():
        raise NotBuilt(f"cuTile takes {found}, and not the tileiras of its package")
    kernel = _kernel(modules, request["function"])
    signature, parameters = _signature(kernel, request)
    compilation.export_kernel(
        kernel, [signature], str(staging / CUBIN), gpu_code=request["arch"], output_format="cubin"
    )
    has = parameter_sizes((staging / CUBIN).read_bytes(), signature.symbol)
    sizes = tuple(8 if code[0] == "*" else sizeof(DTYPES[code].ctype) for code in parameters)
    if has != sizes:
        raise NotBuilt(f"its cubin takes parameters of {has} bytes, and not of {sizes}")
    return {  # the driver takes blocks, clusters and shared memory from the cubin, as for cuTile
        "artifact": CUBIN, "symbol": signature.symbol, "parameters": parameters, "block": 1,
        "smem": 0, "cluster": 1, "grid_limit": GRID_LIMIT, "resources": {},
    }  # fmt: skip


def _kernel(modules: KernelModules, function: str) -> Any:
    import cuda.tile

    found = vars(modules.module())
    kernel = found.get(function)
    if not isinstance(kernel, cuda.tile.kernel):
        has = ", ".join(n for n, v in found.items() if isinstance(v, cuda.tile.kernel)) or "none"
        raise NotBuilt(f"it has no @ct.kernel function `{function}`; it has: {has}")
    return kernel


def _signature(kernel: Any, request: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return cuTile's signature of a launch, and the codes of the parameters of the cubin."""
    from cuda.tile.compilation import CallingConvention, KernelSignature

    annotated = kernel._annotated_function
    names, constants = [*annotated.pysig.parameters], dict(request["template"])
    nodes = dict(zip(names, annotated.parameter_annotations))
    needed = [name for name, node in nodes.items() if node.KIND == "leaf" and node.constant]
    what, passed = kernel_worker.passed(request, names, needed)
    given = iter(request["signature"])
    for name in passed:
        if nodes[name].KIND != "leaf" or nodes[name].list:
            raise NotBuilt(f"{what}: `{name}` is a tuple or a list: give each item a parameter")
    codes: list[str] = []
    constraints = [
        constants[name] if name in constants else _constraint(next(given), nodes[name], codes)
        for name in names
    ]
    convention = CallingConvention.cutile_python_v1()
    return KernelSignature(constraints, convention, request["function"]), codes


def _constraint(argument: str, node: Any, codes: list[str]) -> Any:
    """Return what cuTile may assume of an argument, as `ct.launch` does; adds its parameters."""
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ScalarConstraint

    if argument[:1] != "*":
        plain = {"bool": ct.bool_, "int": ct.int32, "float": ct.float32}[argument]
        scalar = node.scalar.dtype if node.scalar else plain
        code = next((c for c, d in DTYPES.items() if d.torch == scalar.name.rstrip("_")), "")
        if not code or not DTYPES[code].ctype:
            raise NotBuilt(f"a launch cannot pass a number as {scalar.name}: use a tensor")
        codes.append(code)
        return ScalarConstraint(scalar)
    tensor = TensorClass.parse(argument)
    index = node.array.index_dtype if node.array and node.array.index_dtype else ct.int32
    word = {"int32": "i32", "int64": "i64"}[index.name]
    codes += [f"*{tensor.dtype}", *[word] * (2 * len(tensor.sizes))]
    known = [1 if stride == ONE else None for stride in tensor.strides]
    dtype = DTYPES[tensor.dtype].torch
    return ArrayConstraint(
        getattr(ct, {"bool": "bool_"}.get(dtype, dtype)), len(tensor.sizes), index_dtype=index,
        stride_lower_bound_incl=[None if one else 0 for one in known], alias_groups=(),
        may_alias_internally=ZERO in tensor.strides, stride_constant=known,
        stride_divisible_by=[
            1 if s == ONE else ALIGNMENT if s == ZERO else int(s) for s in tensor.strides
        ],
        shape_divisible_by=tensor.sizes, base_addr_divisible_by=tensor.alignment,
    )  # fmt: skip


if __name__ == "__main__":
    kernel_worker.main(_compiled, programs=("tileiras",))
