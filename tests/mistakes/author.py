"""A package as README.md has it, and mistakes that its author may make in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

KERNEL = """
import torch
from jitkern.declare import Cpp, Cuda, Triton, kernel

scale = kernel(
    "{package}::scale(Tensor x, float alpha) -> Tensor",
    cuda=Cuda("scale.cu"),
    cpu=Cpp("scale.cpp"),
)

@scale.reference
def _(x, alpha):
    return alpha * x

@scale.launch("cuda")
def _(k, x, alpha):
    x = x.contiguous()
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, alpha, x.numel(), grid=(x.numel() + 255) // 256, block=256)
    return out

@scale.launch("cpu")
def on_cpu(k, x, alpha):
    x = x.contiguous()
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, alpha, x.numel())
    return (out)

@scale.backward
def gradient(grad, alpha):
    return scale(grad, alpha)

@scale.samples
def samples(device):
    yield torch.randn(1000, device=device), 0.5
"""
CUDA = """template <typename T>
__global__ void scale(T* out, const T* x, double alpha, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = T(alpha) * x[i];
}
"""
CPP = """#include <cstdint>

extern "C" void scale(T* out, const T* x, double alpha, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = T(alpha) * x[i];
}
"""
TRITON = """import triton
import triton.language as tl

@triton.jit
def scale(out, x, alpha, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, alpha * tl.load(x + i, mask=mask), mask=mask)
"""
FILES = {"kernel.py": KERNEL, "scale.cu": CUDA, "scale.cpp": CPP, "scale_triton.py": TRITON}
IN_TRITON = [
    ('Cuda("scale.cu")', 'Triton("scale_triton.py")'),
    ('launch("cuda")', 'launch("triton")'),
    ('k.scale[{"T": x.dtype}](out, x, alpha, x.numel(), grid', 'k.scale[{"BLOCK": 256}](out, x, alpha, x.numel(), grid'),
    (", block=256)", ")"),
]  # fmt: skip


class Mistake(NamedTuple):
    """What is changed in the package, and what its author is told of it.

    file, old, new: the change; each `old` to its `new`. at: a text in the line of the package that
    is named, after its file where that is not kernel.py: `scale.cu: out[i]`; "" for the line that
    calls the op. says: what it says, the remedy among it; nothing if it is not a mistake.
    """

    name: str
    file: str
    old: str
    new: str
    at: str
    says: tuple[str, ...]
    call: str = "scale(torch.ones(30), 3.0)"
    triton: bool = False

    def write(self, folder: Path) -> Path:
        """Write the package, named after the mistake, and return its folder."""
        package = folder / self.name
        package.mkdir()
        (package / "__init__.py").touch()
        for file, right in FILES.items():
            if file == self.file and not self.old:
                continue  # the mistake is that it is missing
            text = right
            changes = IN_TRITON if self.triton and file == "kernel.py" else []
            for old, new in [*changes, (self.old, self.new)] if file == self.file else changes:
                assert old in text, old
                text = text.replace(old, new)
            (package / file).write_text(text.replace("{package}", self.name))
        return package

    def place(self, package: Path) -> tuple[Path, int]:
        """Return the file and the line that are named."""
        file, _, text = (
            self.at.rpartition(": ")
            if re.match(r"scale\S+: ", self.at)
            else ("kernel.py", "", self.at)
        )
        path = package / file
        lines = path.read_text().split("\n")
        return path, next(n for n, line in enumerate(lines, 1) if text in line)


CUDA_LAUNCH = (
    'k.scale[{"T": x.dtype}](out, x, alpha, x.numel(), grid=(x.numel() + 255) // 256, block=256)'
)
CPU_LAUNCH = 'k.scale[{"T": x.dtype}](out, x, alpha, x.numel())\n'
BACKWARD = "scale(torch.ones(3, requires_grad=True), 2.0).sum().backward()"
COMPARED = (
    "torch.testing.assert_close(scale(torch.ones(9), 2.0), scale.run_reference(torch.ones(9), 2.0))"
)


def _of(name, file, old, new, at, *says, **more):
    return Mistake(name, file, old, new, at, says, **more)


def _cpp(name, old, new, at, *says):
    return _of(name, "scale.cpp", old, new, at, *says)


def _host(name, old, new, at, *says, **more):
    return _of(name, "kernel.py", old, new, at, *says, **more)


def _cpu(name, launch, *says):
    return _host(name, CPU_LAUNCH, f"{launch}\n", launch, *says)


def _cu(name, old, new, at, *says):
    return _of(name, "scale.cu", old, new, at, *says)


def _gpu(name, old, new, *says):
    launch = CUDA_LAUNCH.replace(old, new)
    return _host(name, CUDA_LAUNCH, launch, launch, *says)


def _tri(name, old, new, at, *says):
    return _of(name, "scale_triton.py", old, new, at, *says, triton=True)


TAKES = "(T* out, const T* x, double alpha, "
CPU = '"cpu")'
CALLS = [
    _host("right_call", "alpha * x", "alpha * x", ""),
    _cpp("syntax_in_cpp", "* x[i];", "* x[i]", "scale.cpp: out[i]", "expected ‘;’", "out[i] = T(alpha) * x[i]\n"),
    _cpp("undeclared_in_cpp", "T(alpha)", "T(alhpa)", "scale.cpp: alhpa", "did you mean ‘alpha’?"),
    _cpp("static_assert_in_cpp", "  for", '  static_assert(sizeof(T) == 8, "only f64");\n  for', "scale.cpp: static_assert", "only f64"),
    _cpp("no_extern_c", 'extern "C" ', "", ""),
    _cpu("cpp_too_few", 'k.scale[{"T": x.dtype}](out, x, alpha)', f"takes 4 arguments {TAKES}int64_t n), got 3"),
    _cpu("cpp_order", 'k.scale[{"T": x.dtype}](out, alpha, x, x.numel())', "argument 2 (`const T* x`) must be a tensor, got float `3.0`", f"it takes {TAKES}"),
    _cpu("cpp_dtype", 'k.scale[{"T": torch.float64}](out, x, alpha, x.numel())', "argument 1 (`T* out`) must be a float64 tensor, got a tensor of torch.float32"),
    _cpu("cpp_name", 'k.scael[{"T": x.dtype}](out, x, alpha, x.numel())', "has no function `scael`; it has: scale"),
    _cpu("cpp_no_template", "k.scale(out, x, alpha, x.numel())", 'pass it in the launch, as in k.scale[{"T": ...}](...); this launch passed: none'),
    _cpu("cpp_other_template", 'k.scale[{"U": x.dtype}](out, x, alpha, x.numel())', 'k.scale[{"T": ...}](...); this launch passed: U=f32'),
    _of("cpp_missing", "scale.cpp", "", "", "scale = kernel(", "the kernel source", "scale.cpp does not exist", "correct the name in the declaration"),
    _host("cpp_misspelt", 'Cpp("scale.cpp")', 'Cpp("scael.cpp")', "scale = kernel(", "scael.cpp does not exist", "its folder has: scale.cpp): correct the name"),
    _host("cpu_no_launch", '@scale.launch("cpu")\n', "", "scale = kernel(", "no launch function for its Cpp: decorate one with the op's `.launch('cpu')`"),
    _host("no_reference", "@scale.reference\n", "", ""),
    _host("reference_raises", "return alpha * x", "raise ValueError('boom')", ""),
    _host("returns_none", "return (out)", "pass", "@scale.launch(" + CPU, "returned None, and its schema says one tensor: does it lack a `return`?"),
    _host("returns_two", "return (out)", "return out, x", "@scale.launch(" + CPU, "returned 2 values, and its schema says one tensor: return that, or correct the schema"),
    _host("returns_float", "return (out)", "return 3.0", "@scale.launch(" + CPU, "returned a float", "return that, or correct the schema"),
    _host("launch_name_error", "return (out)", "return oout", "return oout", "name 'oout' is not defined", "raised in the launch function of"),
    _host("wrong_sum", "return alpha * x", "return alpha + x", "", "Tensor-likes are not close", call=COMPARED),
    _host("wrong_shape", "return alpha * x", "return (alpha * x).sum()", "", "torch.Size([9]) != torch.Size([])", call=COMPARED),
    _host("call_too_few", "alpha * x", "alpha * x", "", "missing value for argument 'alpha'", call="scale(torch.ones(3))"),
    _host("call_str", "alpha * x", "alpha * x", "", "Expected a value of type 'float' for argument 'alpha'", call="scale(torch.ones(3), 'a')"),
    _host("call_list", "alpha * x", "alpha * x", "", "Expected a value of type 'Tensor' for argument 'x'", call="scale([1.0, 2.0], 2.5)"),
    _host("call_int", "alpha * x", "alpha * x", "", call="scale(torch.ones(3, dtype=torch.int32), 2.0)"),
    _host("call_complex", "alpha * x", "alpha * x", CPU_LAUNCH[:-1], "template argument T: no kernel knows torch.complex64", "kernels know are float16, bfloat16, float32", "convert the tensor, or refuse its dtype", call="scale(torch.ones(3).to(torch.complex64), 2.5)"),
    _host("backward_too_many", "return scale(grad, alpha)", "return scale(grad, alpha), None, None", "@scale.backward", "returned 3 gradients for the tensors x: return one gradient, or None, for each", call=BACKWARD),
    _host("backward_shape", "return scale(grad, alpha)", "return scale(grad, alpha).sum()", "@scale.backward", "and `x` has the shape [3]: return a gradient of that shape", call=BACKWARD),
    _host("flag_of_no_cpp", 'Cpp("scale.cpp")', 'Cpp("scale.cpp", flags=["-fno-such-flag"])', CPU_LAUNCH[:-1], "unrecognized command-line option ‘-fno-such-flag’", "scale.cpp is declared with flags=['-fno-such-flag']: correct them"),
]  # fmt: skip
DECLARATIONS = [
    _host("schema_type", "Tensor x,", "Tenser x,", "scale = kernel(", "is not a Torch schema: unknown type specifier. Common valid schema types include Tensor"),
    _host("schema_syntax", ") -> Tensor", ") - Tensor", "scale = kernel(", "is not a Torch schema: expected arrow but found '-'"),
    _host("schema_no_namespace", "{package}::scale", "scale", "scale = kernel(", "has no namespace", "write `schema_no_namespace::scale(Tensor x"),
    _host("launch_too_few", "on_cpu(k, x, alpha)", "on_cpu(k, x)", "@scale.launch(" + CPU, "its launch function takes (k, x), but is called with (k, x, alpha)"),
    _host("schema_lacks_one", "Tensor x, float alpha", "Tensor x", "@scale.reference", "its reference takes (x, alpha), but is called with (x)"),
    _host("schema_other_name", "float alpha", "float beta", "@scale.backward", "unknown parameters alpha; it may have: beta, grad"),
    _host("backward_name", "(grad, alpha):\n    return scale(grad, alpha)", "(grad, beta):\n    return scale(grad, beta)", "@scale.backward", "unknown parameters beta; it may have: alpha, grad"),
    _host("source_of_cpu", 'cuda=Cuda("scale.cu")', 'cuda=Cpp("scale.cpp")', "scale = kernel(", "cuda= takes Cuda, Triton, CuTile, Cute, Extension, got Cpp(", "write cpu="),
    _host("source_string", 'cuda=Cuda("scale.cu")', 'cuda="scale.cu"', "scale = kernel(", "is a string: write cuda=Cuda('scale.cu')"),
    _host("launch_no_kind", '"cpu")', '["cpu"])', '@scale.launch(["cpu"])', "launch() takes cc, cpu, cuda, cute, cutile, nvrtc, triton, got (['cpu'],)"),
    _host("launch_kind", '"cpu")', '"cpp")', '@scale.launch("cpp")', "launch() takes cc, cpu, cuda, cute, cutile, nvrtc, triton, got ('cpp',); did you mean 'cpu'?"),
    _host("kernel_keyword", "cpu=Cpp", "cpus=Cpp", "scale = kernel(", "kernel() takes cpu, cuda, fusible, nondifferentiable, prewarm, got cpus; did you mean cpu?"),
    _host("source_keyword", 'Cpp("scale.cpp")', 'Cpp("scale.cpp", openMP=True)', "openMP", "Cpp('scale.cpp') takes environment, flags, include, min_compiler, native, openmp, strided, text, got openMP; did you mean openmp?"),
    _host("flags_string", 'Cpp("scale.cpp")', 'Cpp("scale.cpp", flags="-O3")', "flags=", "flags='-O3' is a string: give a list, ['-O3']"),
]  # fmt: skip
PREWARMED = [
    _host("right", "alpha * x", "alpha * x", ""),
    _host("samples_listed", "yield torch.randn(1000, device=device), 0.5", "return [(torch.randn(1000, device=device), 0.5)]", ""),
    _host("samples_single", "yield torch.randn(1000, device=device), 0.5", "yield torch.randn(1000, device=device)", "@scale.samples", "sample 1 does not fit the op: got no alpha for", "yield all of its arguments, as a tuple"),
    _host("samples_too_few", "yield torch.randn(1000, device=device), 0.5", "yield (torch.randn(1000, device=device),)", "@scale.samples", "sample 1 does not fit the op: got no alpha for", "yield all of its arguments, as a tuple"),
    _host("samples_none", "@scale.samples\n", "", "scale = kernel(", "no sample calls: add `@op.samples`"),
    _cu("syntax_in_cu", "* x[i];", "* x[i]", "scale.cu: }", 'expected a ";"'),
    _cu("undeclared_in_cu", "T(alpha)", "T(alhpa)", "scale.cu: alhpa", 'identifier "alhpa" is undefined', "out[i] = T(alhpa) * x[i];"),
    _cu("no_global", "__global__ ", "", "scale.cu: void scale", "is not a kernel: write `__global__` before its `void`"),
    _cu("no_such_header", "template", '#include "util.cuh"\ntemplate', "scale.cu: util", "<util.cuh> is in no include root: declare its directory with include=[...]"),
    _cu("header_of_the_host", "template", "#include <vector>\ntemplate", ""),
    _cu("int_for_long", "long long n)", "int n)", ""),
    _gpu("cu_too_few", "alpha, x.numel(), grid", "alpha, grid", f"takes 4 arguments {TAKES}long long n), got 3"),
    _gpu("cu_order", "out, x, alpha", "out, alpha, x", "argument 2 (`const T* x`) must be a tensor, got float `0.5`"),
    _gpu("cu_dtype", "x.dtype", "torch.float64", "argument 1 (`T* out`) must be a float64 tensor"),
    _gpu("cu_name", "k.scale", "k.scael", "has no function `scael`; it has: scale<T>"),
    _gpu("cu_no_template", '[{"T": x.dtype}]', "", '`scale` is a template of <T>: name all of them, as `scale[{"T": ...}](...)` does'),
    _gpu("cu_other_template", '"T"', '"U"', "has no template parameter `U`; it has: T"),
    _gpu("cu_more_templates", "x.dtype}", 'x.dtype, "N": 4}', "has no template parameter `N`; it has: T"),
    _gpu("no_grid", "grid=(x.numel() + 255) // 256, ", "", "`grid` must be one to three sizes, got None: pass grid="),
    _gpu("no_block", ", block=256", "", "`block` must be one to three sizes, got None: pass block="),
    _gpu("block_2048", "block=256", "block=2048", "no GPU takes more than 1024 in a block: use a smaller block, and a larger grid"),
    _gpu("grid_float", "(x.numel() + 255) // 256", "x.numel() / 256", "`grid` must be one to three sizes, got 3.90625: divide with //"),
    _gpu("blocks", "block=256", "blocks=256", "unknown keyword `blocks`; there are: block, carveout, cluster", "did you mean block?", "`k.scale[{'blocks': …}](…)`"),
    _gpu("name_error", "out, x", "undefined, x", "NameError: name 'undefined' is not defined"),
    _host("cuda_no_launch", '@scale.launch("cuda")\n', "", "scale = kernel(", "no launch function for its Cuda: decorate one with the op's `.launch('cuda')`"),
    _of("cu_missing", "scale.cu", "", "", "scale = kernel(", "scale.cu does not exist", "correct the name in the declaration"),
    _host("flag_of_no_cuda", 'Cuda("scale.cu")', 'Cuda("scale.cu", flags=["--bogus"])', CUDA_LAUNCH, "--bogus", "flag"),
    _tri("right_triton", "alpha * tl", "alpha * tl", ""),
    _tri("syntax_in_triton", "mask = i < n", "mask = i <", "scale_triton.py: mask = i <", "invalid syntax"),
    _tri("undefined_in_triton", "tl.load(x", "tl.laod(x", "scale_triton.py: tl.laod", "has no attribute 'laod'"),
    _tri("type_in_triton", "alpha * tl", "alpha @ tl", "scale_triton.py: alpha @", "error: "),
    _of("triton_missing", "scale_triton.py", "", "", "scale = kernel(", "scale_triton.py does not exist", "correct the name in the declaration", triton=True),
    _host("triton_too_few", "alpha, x.numel(), grid", "alpha, grid", 'k.scale[{"BLOCK"', "`scale(out, x, alpha, n, BLOCK)` takes 4 arguments (out, x, alpha, n), got 3", triton=True),
    _host("triton_no_constexpr", '[{"BLOCK": 256}]', "", "k.scale(out, x, alpha, x.numel(), grid", "needs the constexpr `BLOCK`, so pass it", triton=True),
    _host("triton_constexpr", '"BLOCK"', '"BLOK"', "BLOK", "needs the constexpr `BLOCK`, so pass it in brackets: k.scale[{'BLOCK': …}](…), and has no parameter `BLOK`", triton=True),
    _host("triton_name", 'k.scale[{"BLOCK', 'k.scael[{"BLOCK', "k.scael", "has no @triton.jit function `scael`; it has: scale", triton=True),
    _host("triton_power", '"BLOCK": 256', '"BLOCK": 300', 'BLOCK": 300', "arange's range must be a power of 2", triton=True),
]  # fmt: skip
