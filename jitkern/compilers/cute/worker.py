"""The child process that compiles one host function to an object, and the C text that calls it."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jitkern.compilers import kernel_worker
from jitkern.compilers.cute.build import FOLDER, OBJECT, UNKNOWN_ARCH
from jitkern.compilers.cute.compiler import PROCESSOR
from jitkern.compilers.kernel_modules import KernelModules
from jitkern.compilers.kernel_worker import NotBuilt
from jitkern.source.argument_classes import ONE, ZERO, TensorClass
from jitkern.source.dtypes import DTYPES

_PREFIX = "jitkern"  # of the object's symbols, as driver.c has them
_ENTRY = rb"\0(_mlir_%b__mlir_ciface_\w+)\0" % _PREFIX.encode()
_ODD_NAMES = {"bf16": "BFloat16", "f8e4m3": "Float8E4M3FN", "f8e5m2": "Float8E5M2"}
_LIBRARY = "cutlass._mlir._mlir_libs._cutlass_ir"


def main() -> None:
    kernel_worker.main(_compiled)


def _compiled(request: dict[str, Any], modules: KernelModules, staging: Path) -> dict[str, Any]:
    """Write the object, and return the parameters, and the C text that calls the function."""
    _load(Path(request["library"]))
    from cutlass import cute
    from cutlass.base_dsl.enums import Arch

    if request["arch"] not in Arch.__members__:
        raise NotBuilt(UNKNOWN_ARCH)
    _refuse_questions()
    host = _function(modules, request["function"])
    arguments, codes, text = _arguments(host, request)
    options = [*request["options"], f"--gpu-arch {request['arch']}",
               f"--host-target 'llvm {PROCESSOR}'"]  # fmt: skip
    code = cute.compile(host, *arguments, options=" ".join(options)).dump_to_object(_PREFIX)
    (staging / FOLDER / OBJECT).write_bytes(code)
    entry = re.search(_ENTRY, code)
    assert entry
    return {"parameters": codes, "call": text.replace("ENTRY", entry[1].decode())}


def _load(library: Path) -> None:
    """Load the compiler for the target's CUDA; the DSL would choose by this machine's driver."""
    spec = importlib.util.spec_from_file_location(_LIBRARY, library)
    assert spec
    assert spec.loader
    module = sys.modules[_LIBRARY] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(importlib.import_module(_LIBRARY.rpartition(".")[0]))["_cutlass_ir"] = module


def _refuse_questions() -> None:
    """Have all questions that the DSL asks a GPU raise NotBuilt: the answer is in no key."""
    from cutlass.base_dsl.runtime import cuda
    from cutlass.utils import HardwareInfo

    def refuse(*_: Any, **__: Any) -> None:
        raise NotBuilt(
            "it asks the GPU of this machine while it is compiled (HardwareInfo, or "
            "min_blocks_per_mp without preferred_smem_carveout): pass the number as an argument "
            "or as a constant, e.g. `k.multiprocessors`"
        )

    HardwareInfo.__init__ = cuda.get_device_attribute = refuse


def _function(modules: KernelModules, name: str) -> Any:
    found = vars(modules.module())
    jitted = [n for n, v in found.items() if getattr(v, "_decorator_kind", "") == "jit"]
    if name not in jitted:
        listed = ", ".join(jitted) or "none"
        raise NotBuilt(f"it has no @cute.jit function `{name}`; it has: {listed}")
    return found[name]


def _arguments(host: Any, request: dict[str, Any]) -> tuple[list[Any], list[str], str]:
    """Return the arguments of cute.compile, the codes of the parameters, and the C text."""
    import cutlass
    from cutlass import cute

    names, annotated = _parameters(host, request["function"])
    constants = [
        name
        for name in names
        if cutlass.Constexpr in (annotated.get(name), typing.get_origin(annotated.get(name)))
    ]
    what, _ = kernel_worker.passed(request, names, constants)
    template, given = dict(request["template"]), iter(request["signature"])
    if runtime := template.keys() - {*constants}:
        name = min(runtime)
        raise NotBuilt(f"{what}: `{name}` is no constant: annotate it as cutlass.Constexpr")
    numbers = [code for code, dtype in DTYPES.items() if dtype.ctype and code != "bool"]
    scalars = {getattr(cutlass, _name_of(code)): code for code in numbers}
    arguments: list[Any] = []
    codes: list[str] = []
    structs, addresses = "", []
    for name in names:
        if name in template:
            arguments.append(template[name])
            continue
        wanted: Any = annotated.get(name)
        argument, at = next(given), len(codes)
        if wanted is cute.Tensor and argument[0] == "*":
            tensor = TensorClass.parse(argument)
            arguments.append(_fake(name, tensor))
            rank = len(tensor.sizes)
            codes += [f"*{tensor.dtype}", *["i32"] * rank, *["i64"] * rank]
            structs += _struct(f"t{at}", at, tensor)
            addresses.append(f"&t{at}")
        elif wanted in scalars and argument[0] != "*":
            arguments.append(wanted(1))
            codes.append(scalars[wanted])
            addresses.append(f"a[{at}]")
        else:
            kind = f"annotated as {inspect.formatannotation(wanted)}" if wanted else "not annotated"
            got, remedy = f"a number, of the class {argument}", "cutlass.Int32, cutlass.Float32 …"
            if argument[0] == "*":
                got, remedy = "a tensor", "cute.Tensor"
            raise NotBuilt(f"{what}: `{name}` is {kind}, and gets {got}: annotate it as {remedy}")
    arguments.append(cute.runtime.make_fake_stream())
    return arguments, codes, _call(len(codes), structs, addresses)


def _call(stream: int, structs: str, addresses: Sequence[str]) -> str:
    """Return the C text of a function of the host. stream: the place of the stream's address."""
    return (
        "void ENTRY(void **, int);\n"
        "int jitkern_function(void **a, char *text) {\n"
        f"  int error = prepare(*(int *)a[{stream + 1}]);\n"
        '  if (error) return explained(error, "loading it", text);\n'
        f"{structs}"
        f"  void *arguments[] = {{{', '.join([*addresses, f'a[{stream}]', '&error'])}}};\n"
        f"  ENTRY(arguments, {len(addresses) + 2});\n"
        '  return error ? explained(error, "launching it", text) : 0;\n}\n'
    )


def _parameters(host: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a host function's parameters before the stream, and all annotations."""
    from cuda.bindings.driver import CUstream

    function = inspect.unwrap(host)
    annotated = typing.get_type_hints(function)
    *names, last = [*inspect.signature(function).parameters] or [""]
    if annotated.get(last) is not CUstream:
        raise NotBuilt(
            f"the last parameter of `{name}` must be the stream: `stream: cuda.CUstream`, of "
            "`import cuda.bindings.driver as cuda`"
        )
    return names, annotated


def _name_of(code: str) -> str:
    """Return the name of an element type in the DSL."""
    kinds = {"f": "Float", "i": "Int", "u": "Uint"}
    return _ODD_NAMES.get(code) or f"{kinds.get(code[0], '')}{code[1:]}"


def _fake(name: str, tensor: TensorClass) -> Any:
    """Return the DSL's description of the tensors of a class."""
    import cutlass
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    dtype = getattr(cutlass, _name_of(tensor.dtype), None)
    if dtype is None:
        kind, view = DTYPES[tensor.dtype].torch, f"{name}.view(torch.uint8)"
        raise NotBuilt(f"`{name}` is a tensor of {kind}: pass a view of its bytes, `{view}`")
    sizes = tuple(sym_int(divisibility=size) for size in tensor.sizes)
    strides = tuple(
        int(stride[1:]) if stride in (ONE, ZERO) else sym_int64(divisibility=int(stride))
        for stride in tensor.strides
    )
    size = max(1, dtype.width // 8)
    return make_fake_tensor(dtype, sizes, strides, assumed_align=max(tensor.alignment, size))


def _struct(name: str, at: int, tensor: TensorClass) -> str:
    """Return the C text of a tensor as the object takes it: address, dynamic sizes and strides."""
    rank = len(tensor.sizes)
    sizes = [f"*(int *)a[{at + 1 + i}]" for i in range(rank)]
    places = [i for i, stride in enumerate(tensor.strides) if stride not in (ONE, ZERO)]
    strides = [f"*(long long *)a[{at + 1 + rank + i}]" for i in places]
    fields = [("void *data", f"*(void **)a[{at}]")]
    for field, kind, values in (("size", "int", sizes), ("stride", "long long", strides)):
        if values:
            fields.append((f"{kind} {field}[{len(values)}]", f"{{{', '.join(values)}}}"))
    declared = " ".join(f"{field};" for field, _ in fields)
    return f"  struct {{ {declared} }} {name} = {{{', '.join(value for _, value in fields)}}};\n"


if __name__ == "__main__":
    main()
