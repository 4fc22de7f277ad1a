"""Kernels around a formula: the text for CUDA and for C++.

Each text has two kernels: `<name>_flat` for tensors that lie in one order without gaps, and
`<name>_strided` for all others. On an H200, one 16-byte vector of each operand a thread, in blocks
of 128, is the quickest of 67 forms; more vectors a thread, or a persistent grid, is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitkern.composition.arrange import MAX_RANK
from jitkern.composition.formula import Formula
from jitkern.composition.helpers import helpers_for
from jitkern.composition.launch import BITS, BLOCK

_DIMS = range(MAX_RANK)
_NUMBERS = {"float": "double", "int": "i64", "bool": "bool"}

_CUDA = """// {title}: written by jitkern.pointwise
{headers}typedef long long i64;
{helpers}
{formula}
template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {{ T at[V]; }};

// Tensors of n elements in one order: V elements a thread, one by one where fewer are left. All
// loads stand below one `if`, so that they are in flight together.
template <{template}, int V>
__global__ void __launch_bounds__({block}) {name}_flat({parameters}, i64 n) {{
  const i64 first = (blockIdx.x * {block}LL + threadIdx.x) * V, left = n - first;
  if (left <= 0) return;
{vectors}
  if (left >= V) {{
{flat_loads}
  }} else {{
#pragma unroll
    for (int j = 0; j < V; j++) {{
{last_loads}
    }}
  }}
#pragma unroll
  for (int j = 0; j < V; j++) {call}
  if (left >= V) {{
{flat_stores}
  }} else {{
#pragma unroll
    for (int j = 0; j < V; j++) {{
      if (j >= left) break;
{last_stores}
    }}
  }}
}}

// V elements of a row, which lie side by side (step 1) or are one (step 0); for V = 1 any step.
template <int V, typename T>
__device__ __forceinline__ Vector<T, V> read(const T* from, i64 step) {{
  if (V == 1 || step == 1) return *(const Vector<T, V>*)from;
  Vector<T, V> all;
  const T one = load_(*from);
#pragma unroll
  for (int j = 0; j < V; j++) all.at[j] = one;
  return all;
}}

// Tensors of any strides, over RANK dimensions, innermost first; I: an integer for all positions.
template <{template}, int V, int RANK, typename I>
__global__ void __launch_bounds__({block}) {name}_strided({parameters}, i64 n, {steps}) {{
  const i64 size[] = {{{sizes}}};
{step_arrays}
  i64 {offsets};
  i64 first = blockIdx.x * {block}LL + threadIdx.x;
  if (first >= n) return;
  I rest = I(first);
#pragma unroll
  for (int d = 0; d < RANK; d++) {{
    const I next = d + 1 < RANK ? rest / I(size[d]) : 0;
    const I i = (rest - next * I(size[d])) * (d ? 1 : V);
    rest = next;
{advances}
  }}
{strided_loads}
#pragma unroll
  for (int j = 0; j < V; j++) {call}
{strided_stores}
}}
"""

_CPP = """// {title}: written by jitkern.pointwise
#include <cmath>
#include <cstdint>
// Of these the C library has a form for vectors, which the compiler takes within `omp simd`.
#if defined(__GLIBC__) && defined(__x86_64__) && !defined(__clang__) && __GLIBC_PREREQ(2, 22)
#define VECTORS _Pragma("omp declare simd notinbranch") extern "C"
VECTORS float sinf(float) noexcept;
VECTORS float cosf(float) noexcept;
VECTORS float powf(float, float) noexcept;
#endif
{headers}using namespace std;
typedef int64_t i64;
{helpers}
{formula}
// Tensors of n elements in one order.
template <{template}>
void {name}_flat({parameters}, i64 n) {{
#pragma omp parallel for simd if (n >= {grain})
  for (i64 i = 0; i < n; i++) {flat_call}
}}

// Tensors of any strides. INNER: a bit for each tensor whose rows lie side by side (step 1), where
// the others' elements of a row are one (step 0); -1 for any steps.
template <{template}, int RANK, i64 INNER>
void {name}_strided({parameters}, i64 n, {steps}) {{
  const i64 size[] = {{{sizes}}};
{step_arrays}
  const i64 rows = n / size[0];
#pragma omp parallel for if (n >= {grain})
  for (i64 row = 0; row < rows; row++) {{
    i64 {offsets}, rest = row;
    for (int d = 1; d < RANK; d++) {{
      const i64 i = rest % size[d];
      rest /= size[d];
  {advances}
    }}
{row_steps}
#pragma omp simd
    for (i64 i = 0; i < size[0]; i++) {strided_call}
  }}
}}
"""
GRAIN = 32768  # elements from which a kernel for the CPU uses several threads, as Torch's do


def cuda_text(formula: Formula, numbers: Sequence[tuple[str, str]]) -> str:
    """Return the text of the kernels for CUDA. numbers: names and kinds of scalar inputs."""
    parts = _parts(formula, numbers, "cuda")
    read, written = parts.pop("read"), formula.outputs
    every = [*written, *read]
    vectors = {name: f"{name}_s.at[j]" for name in every}
    zero = "\n".join(f"  Vector<T_{name}, V> {name}_s;" for name in written)
    return _CUDA.format(
        **parts,
        call=_call(formula, vectors),
        vectors="\n".join(f"  Vector<T_{name}, V> {name}_s;" for name in every),
        flat_loads="\n".join(
            f"    {name}_s = *(const Vector<T_{name}, V>*)({name} + first);" for name in read
        ),
        last_loads="\n".join(
            f"      {name}_s.at[j] = load_({name}[first + (j < left ? j : 0)]);" for name in read
        ),
        flat_stores="\n".join(
            f"    *(Vector<T_{name}, V>*)({name} + first) = {name}_s;" for name in written
        ),
        last_stores="\n".join(f"      {name}[first + j] = {name}_s.at[j];" for name in written),
        advances="\n".join(f"    {name}_at += i64(i) * {name}_step[d];" for name in every),
        strided_loads=zero + "".join(
            f"\n  const auto {name}_s = read<V>({name} + {name}_at, {name}_step[0]);"
            for name in read
        ),
        strided_stores="\n".join(
            f"  *(Vector<T_{name}, V>*)({name} + {name}_at) = {name}_s;" for name in written
        ),
    )  # fmt: skip


def cpp_text(formula: Formula, numbers: Sequence[tuple[str, str]]) -> str:
    """Return the text of the kernels in C++. numbers: names and kinds of scalar inputs."""
    parts = _parts(formula, numbers, "cpp")
    every = [*formula.outputs, *parts.pop("read")]
    flat = {name: f"{name}[i]" for name in every}
    strided = {name: f"{name}[{name}_at + i * {name}_inner]" for name in every}
    return _CPP.format(
        **parts,
        grain=GRAIN,
        flat_call=_call(formula, flat),
        advances="\n".join(f"    {name}_at += i * {name}_step[d];" for name in every),
        row_steps="\n".join(
            f"    const i64 {name}_inner = INNER < 0 ? {name}_step[0] : INNER >> {bit % BITS} & 1;"
            for bit, name in enumerate(every)
        ),
        strided_call=_call(formula, strided),
    )


def _call(formula: Formula, places: dict[str, str]) -> str:
    inputs = [f"load_({places[name]})" if name in places else name for name in formula.inputs]
    return formula.call(inputs, [places[name] for name in formula.outputs])


def _parts(formula: Formula, numbers: Sequence[tuple[str, str]], language: str) -> dict[str, Any]:
    """Return what both languages fill in."""
    plain = dict(numbers)
    read = [name for name in formula.inputs if name not in plain]
    every = [*formula.outputs, *read]
    restrict = " " if language == "cuda" else " __restrict "
    pointers = [f"T_{name}*{restrict}{name}" for name in formula.outputs]
    pointers += [f"const T_{name}*{restrict}{name}" for name in read]
    types = [*(f"typename T_{name}" for name in every), *(["bool FAST"] if formula.fast else [])]
    types += ["typename A", *(f"typename {name}" for name, *_ in formula.types)]
    return {
        "title": formula.name,
        "name": formula.name,
        "headers": "".join(f"#include <{header}>\n" for header in formula.headers),
        "helpers": helpers_for([*formula.lines, "load_()"], language),
        "formula": formula.text,
        "template": ", ".join(types),
        "parameters": ", ".join([*pointers, *(f"{_NUMBERS[k]} {n}" for n, k in numbers)]),
        "block": BLOCK,
        "read": read,
        "sizes": ", ".join(f"size{d}" for d in _DIMS),
        "steps": ", ".join(
            [f"i64 size{d}" for d in _DIMS] + [f"i64 {n}_step{d}" for n in every for d in _DIMS]
        ),
        "step_arrays": "\n".join(
            f"  const i64 {n}_step[] = {{{', '.join(f'{n}_step{d}' for d in _DIMS)}}};"
            for n in every
        ),
        "offsets": ", ".join(f"{n}_at = 0" for n in every),
    }
