"""A program with any words is refused, or interpreted without reading or writing beyond its own."""

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import H100, ran

import jitkern.ops  # noqa: F401  which announces the shipped ops
from jitkern import jit
from jitkern.compilers.cuda import toolkit
from jitkern.declare import Cpp, Cuda, kernel
from jitkern.launch.geometry import Compiled
from jitkern.launch.runner import CachedKernels
from jitkern.op.all_ops import all_ops
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.call_traces import traces_of
from jitkern.runtime import binding
from jitkern.source.kinds import Variant
from jitkern.target import Target
from jitkern.trace.program import parameter_kind
from jitkern.trace.trace import trace
from jitkern.trace.tracer import metadata_of

ON_GPUS = ("vec_add", "kv_cache_append", "nonfinite_flag_")
SHIPPED = (*ON_GPUS, "softmax", "rms_norm", "rope_", "topk")
TIMES = int(os.environ.get("JITKERN_FUZZ", "1000000"))
byte_in_c = r"\{:03o}".format
F, D = torch.float32, torch.float64
DEVICES = {"cpu": Target.current("cpu"), "cuda": Target.parse(H100)}
KERNELS = {  # of the ops below: what their kernels take
    "fill": ["*f32", "*f32", "f64", "i64", "i64"],
    "narrow": ["*f64", "f32", "i32", "bool"],
    "pair": ["*", "*i64", "i64", "*", "*i64", "i64", "f32"],
    "table": ["@f32:32", "@f32:32", "f32"],
    "map": ["*f32", "tensor_map", "i32"],
    "tell": ["*f64", "i64"],
}


def numbers(k, x, b, n, f, flag, m, s):
    torch._check(m != 13)
    x = x.contiguous()
    out = torch.empty_like(x)
    more = (n if n is not None else 0) + (1 if flag else 0) + min(m, 7) * m // 3
    scale = f * (s if s is not None else 1.0) / 2 if f > 0 else abs(f) ** 2
    k.fill(out, b, scale, more, x.numel(), grid=-(-x.numel() // 64), block=64)
    return out


def views(k, x, y, n):
    x[1:].copy_(y[:-1].expand(x[1:].shape) if y.shape[0] == x.shape[0] else x[:-1])
    room = k.workspace(256 * y.numel(), dtype=F)
    half = y.t().contiguous().to(D)
    k.fill(x, room, 0.5, n, k.workspace(64, dtype=torch.uint8).data_ptr() % 16, grid=1, block=32)
    k.narrow(half, 1.5, n % 7, True, grid=(1, 2, x.shape[0]), block=(32, 2), smem=n % 99, pdl=True)
    x[0].zero_()
    torch.zeros(x.shape, dtype=F, device=x.device)[: x.shape[0] // 2].copy_(x[: x.shape[0] // 2])
    return half, x.narrow(0, 0, 1).clone(), torch.zeros(2, 3, dtype=F, device=x.device)[:, 1:]


def lists(k, ps, gs, lr):
    for p, g in k.tables(ps, gs):
        if p.aligned(16):
            (k.table if ps[0].is_cuda else k.pair)(p, g, lr, grid=p.chunks, block=64)
    ps[0].zero_()
    gs[-1].contiguous()


def many_tables(k, xs):  # so that their memory is none of the stack
    out = torch.empty(1, dtype=D)
    k.tell(out, sum(table.chunks for chunk in range(1, 60) for table in k.tables(xs, chunk=chunk)))
    return out


def strings(k, x, mode, other, ns, fs, bs, more):
    out = torch.empty(len(ns) + 1, dtype=D, device=x.device)
    value = sum(ns) + (sum(more) if more is not None else 0) + (int(fs[0]) if fs else 0)
    k.tell(out, value if mode == "twice" or bs[0] else -value, grid=1, block=32)
    if other == "none":
        return None, out
    return x.new_zeros(3), out


def maps(k, x, y):
    out = torch.empty(16 * 64, dtype=F, device=x.device)
    tile = k.tensor_map(x, (16, 64))
    grid = k.multiprocessors * 2
    k.map(out, tile, 3, grid=grid, block=128, smem=40 << 10, cluster=2, cooperative=True)
    k.fill(out, y, 0.0, 0, 0 if y is x else 1, grid=1, block=32, carveout=50)
    return out


X, ROWS = torch.ones(4, 4), torch.ones(4, 4)
OPS = (
    (numbers, "(Tensor x, Tensor? b, int? n, float f, bool? flag, int m, float? s) -> Tensor",
     [(X, None, None, 1.0, None, 2, None), (X.t(), X, 3, -1.0, True, 8, 2.0)]),
    (views, "(Tensor(a!) x, Tensor y, int n) -> (Tensor, Tensor, Tensor)", [(X, ROWS, 3)]),
    (lists, "(Tensor(a!)[] ps, Tensor[] gs, float lr) -> ()", [([X, X], [ROWS, ROWS], 0.5)]),
    (many_tables, "(Tensor[] xs) -> Tensor", [([X, X],)]),
    (strings, "(Tensor x, str mode, str? other, int[] ns, float[] fs, bool[] bs, int[]? more) -> (Tensor?, Tensor)",
     [(X, "twice", None, [1, 2], [0.5], [True], None), (X, "ü\0", "none", [], [], [False], [4])]),
    (maps, "(Tensor x, Tensor y) -> Tensor", [(torch.ones(100, 64), X)]),
)  # fmt: skip


class Kernels(CachedKernels):
    """Kernels that were never compiled."""

    def compiled(self, call):
        """The kernel of a call, as its table of parameters has it."""
        meta = {"parameters": KERNELS[call.function]}
        return Compiled(Variant(self.op, self.source), None, meta, ("", "", ""))


@functools.cache
def own_seeds():
    """The programs of the ops above, on the CPU and for a GPU."""
    seeds = []
    for number, (launch, schema, calls) in enumerate(OPS):
        sources = {"cpu": Cpp(text="//"), "cuda": Cuda(text="//")}
        op = kernel(f"jitkern_fuzz::f{number}{schema}", **sources)
        for device in [*sources][launch is maps : 2 - (launch is many_tables)]:
            op.launch(device)(launch)
            (source,) = op.sources[device]
            kernels = Kernels(op.name, source, DEVICES[device], "", {})
            place = torch.device("cuda:0" if device == "cuda" else "cpu")
            for call in calls:
                traced = trace(op.signature, launch, metadata_of(call), frozenset(), place, kernels)
                seeds.append((op.signature, device == "cuda", traced))
    return seeds


def shipped_seeds():
    """The programs of the samples of some shipped ops, on the CPU and for a GPU."""
    for op in all_ops().values():
        name = op.name.removeprefix("jitkern::")
        on_gpu = name in ON_GPUS and bool(toolkit.nvrtc_libraries())
        for device in [*DEVICES][: (name in SHIPPED) + on_gpu]:
            for source in op.sources.get(device, ()):
                if not isinstance(source, (Cpp, Cuda)):
                    continue
                variants, calls, _ = needs_of(op, source, device, DEVICES[device])
                for variant in variants:
                    jit.ensure(variant, DEVICES[device])
                for traced, _ in traces_of(op, source, DEVICES[device], calls, {}).traces:
                    yield op.signature, device == "cuda", traced


def in_c(number, signature, cuda, traced):
    """A program as the initializer of a `Seed`, and the arrays that it points to."""
    program = traced.program
    kinds = [
        [*map(parameter_kind, (*k.parameters, *("*" for _ in k.meta.get("scratch", ())))), 0]
        for k in traced.kernels
    ]
    texts = [
        f'{{"{"".join(map(byte_in_c, text))}", {len(text)}}}'
        for text in map(str.encode, program.texts)
    ]
    arrays = "".join(
        f"static {kind} {name}{number}[] = {{{items or '0'}}};\n"
        for kind, name, items in (
            ("i32", "words", ", ".join(map(str, program.words))),
            ("u64", "constants", ", ".join(f"{n}ull" for n in program.constants)),
            ("i32", "parameters", ", ".join(str(kind) for kernel in kinds for kind in kernel)),
            ("Text", "texts", ", ".join(texts) or "{0, 0}"),
        )
    )  # fmt: skip
    counts = (
        len(program.words), len(program.constants), len(texts), len(kinds), *program[3:],
    )  # fmt: skip
    pointers = f"words{number}, constants{number}, texts{number}, parameters{number}"
    given = "".join(p.kind for p in signature.parameters)
    seed = f'{{"{given}", "{signature.results}", {int(cuda)}, {{{pointers}, {", ".join(map(str, counts))}}}}}'
    return arrays, seed


def compiled(folder, seeds, *flags):
    """A library or a program that changes, checks and interprets these programs."""
    made = [in_c(i, *seed) for i, seed in enumerate(seeds)]
    listed = "".join(arrays for arrays, _ in made)
    listed += f"static const Seed seeds[] = {{{', '.join(seed for _, seed in made)}}};\n"
    text = Path(__file__).with_name("program_fuzz.c").read_text()
    unit = folder / "fuzz.c"
    unit.write_text(binding.variant().source.text + text.replace("\nSEEDS\n", f"\n{listed}\n"))
    command = ["cc", "-w", "-fwrapv", "-fno-math-errno", *flags, "-o", "fuzz", unit]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "fuzz"


def check(refused, counts, times, seeds):
    """Check what `fuzz` counted: that programs were refused, and others served, as often as planned."""
    tried, sound, as_made, served, done, *_ = counts
    assert refused == -1 and tried == times, (refused, counts)
    assert sound - as_made > times / 10, counts
    assert done > times / 20 and (times < 100_000 or served > len(seeds) / 2), counts


OVER_TORCH = """
import ctypes, mmap, resource, torch
from jitkern.runtime.symbols import symbols
library, table = ctypes.CDLL(LIBRARY), symbols().table()
library.jitkern_bind(table, ctypes.c_ulonglong(ctypes.sizeof(table)))
kept = []
for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
    for rank in range(4):
        for fixed, access in enumerate((mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ)):
            block = mmap.mmap(-1, 1 << 14, prot=access)
            x = torch.frombuffer(block, dtype=dtype)[: 4**rank].view((4,) * rank)
            others = (x.mT, x[..., :1].expand(*x.shape[:-1], 9), x[:0]) if rank > 1 else (x, x, x)
            for variant, each in enumerate((x, x, *others)):
                handle, place = ctypes.c_void_p(), ctypes.byref(ctypes.c_void_p(each._cdata))
                symbols().library("torch_cpu").aoti_torch_new_tensor_handle(place, ctypes.byref(handle))
                library.fuzz_add(handle, fixed, variant)
                kept.append((block, each))
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28),) * 2)
counts = (ctypes.c_longlong * 8)()
print(library.fuzz(ctypes.c_longlong(TIMES), ctypes.c_ulonglong(1), counts), *counts)
"""


@pytest.mark.parametrize("times", [3000, pytest.param(TIMES, marks=pytest.mark.long)])
def test_a_changed_program_over_torch_ends_no_process(times, tmp_path, run_python):
    seeds = [seed for seed in own_seeds() if not seed[1]]
    library = compiled(tmp_path, seeds, "-shared", "-fPIC")
    done = run_python(f"LIBRARY, TIMES = {str(library)!r}, {times}\n{OVER_TORCH}")
    assert done.returncode == 0, done
    refused, *counts = map(int, done.stdout.split())
    check(refused, counts, times, seeds)


@pytest.mark.long
def test_a_changed_program_reads_and_writes_nothing_but_its_own(tmp_path):
    seeds = [*own_seeds(), *shipped_seeds()]
    sanitized = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize=alignment")
    program = compiled(tmp_path, seeds, "-DALONE", *sanitized, "-fno-sanitize-recover=all")
    options = {"LD_PRELOAD": "", "ASAN_OPTIONS": "allocator_may_return_null=1"}
    out = ran(program, str(TIMES), "1", env={**os.environ, **options})
    refused, leaked, *counts = map(int, out.split())
    assert not leaked
    check(refused, counts, TIMES, seeds)
