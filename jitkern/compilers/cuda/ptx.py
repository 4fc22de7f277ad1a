"""Facts of a CUDA kernel in the compiler's output: parameter types, and resources that it takes.

PTX `.param` lines tell sizes but not pointer types, so a probe kernel whose template argument is
the kernel's own type is compiled along: its mangled name spells the types of every parameter.
"""

from __future__ import annotations

import ctypes
import math
import re

from jitkern.source import cpp_text
from jitkern.source.dtypes import DTYPES, SYNONYMS, TENSOR_MAP

PROBE = '#line 1 "jitkern probe"\ntemplate <typename T, T F> __global__ void jitkern_probe() {}\n'
VERBOSE = "-Xptxas=-v"  # makes the assembler print what kernels take
_ENTRY = r"\.entry\s+(\w+)"
_CODES = {dtype.cuda: code for code, dtype in DTYPES.items()} | SYNONYMS
_THREADS, _OF_A_WARP = 1024, 32  # threads: of a block, at most, and of a warp
_REGISTER_FILE = 65536  # registers that a block may have
_REGISTER_STEP = 256  # registers of which a warp gets a multiple


def probe(expression: str) -> str:
    """The name expression of the probe for the kernel `expression`."""
    return f"jitkern_probe<decltype(&{expression}), &{expression}>"


def signature(text: str, symbol: str = "") -> tuple[str, list[str]]:
    """Return (symbol, parameter codes) of the probed kernel in a PTX text; symbol "" if none.

    A code is a dtype's short name, `*` and a short name for a pointer, `*` for a pointer to
    anything else, TENSOR_MAP for a CUtensorMap, that of a table (`dtypes.table_of`), or "" for a
    parameter that no argument can be passed for (another struct, or a half, by value).
    """
    entries = re.findall(_ENTRY, text)
    spelled = {entry: demangled(entry) for entry in entries}
    name = next(name for name in spelled.values() if name.startswith("void jitkern_probe<"))
    types, _, kernel = name.removeprefix("void jitkern_probe<void (*)").rpartition(", &")
    kernel = kernel.removesuffix(">()")
    if kernel.startswith("(") and kernel.endswith("))"):
        kernel = kernel[1:-1]
    if symbol not in spelled:
        alike = (
            e
            for e, s in spelled.items()
            if s == kernel or s.startswith(f"{kernel}(") or kernel.startswith(f"{e}(")
        )
        symbol = next(alike, "")
    parameters = cpp_text.split(types[1 : cpp_text.closing(types, 0)])
    return symbol, [_code(parameter) for parameter in parameters]


def parameter_count(text: str, symbol: str) -> int:
    """The number of parameters of the entry `symbol`."""
    match = re.search(rf"\.entry\s+{re.escape(symbol)}\s*\((.*?)\)", text, re.DOTALL)
    return match.group(1).count(".param") if match else 0


def resources(text: str, symbol: str, log: str) -> dict[str, int]:
    """Return what the kernel `symbol` in PTX `text` takes; {} if the assembler did not print it.

    log: what the assembler printed. registers: of a thread. local: bytes of a thread in local
    memory, which lies in global memory: arrays with an index of run time, and registers that were
    spilled. spills: bytes that instructions move to spill registers, or to load them again.
    shared: bytes of static shared memory of a block. max_threads: of a block, as
    `__launch_bounds__` or the registers allow.
    """
    name = re.escape(symbol)
    of_kernel = log.partition(f"entry function '{symbol}'")[2].partition("entry function")[0]
    used = re.search(r"Used (\d+) registers(.*)", of_kernel)
    moved = re.search(
        rf"properties for {name}\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)",
        of_kernel,
    )
    if not used or not moved:
        return {}
    registers = int(used[1])
    shared = re.search(r"(\d+) bytes smem", used[2])
    of_a_warp = -(-max(registers, 1) * _OF_A_WARP // _REGISTER_STEP) * _REGISTER_STEP
    bound = re.search(rf"\.entry\s+{name}\b[^{{]*\.(?:max|req)ntid\s+([\d, ]+)", text)
    threads = math.prod(map(int, bound[1].split(","))) if bound else _THREADS
    return {
        "registers": registers,
        "local": int(moved[1]),
        "spills": int(moved[2]) + int(moved[3]),
        "shared": int(shared[1]) if shared else 0,
        "max_threads": min(threads, _THREADS, _REGISTER_FILE // of_a_warp * _OF_A_WARP),
    }


def _code(parameter: str) -> str:
    """The code of a parameter; an array counts as its elements, and a pointer as an address."""
    table = re.fullmatch(r"jitkern::(Table|Pointers)<(.*), (\d+)>", parameter.strip())
    if table:
        element = _CODES.get(re.sub(r"\bconst\b", "", table[2]).strip(), "")
        return f"{'@' if table[1] == 'Table' else '&'}{element}:{table[3]}"
    base, templated = parameter, 1
    while templated:  # `Pair<int*>` is not a pointer
        base, templated = re.subn(r"<[^<>]*>", "", base)
    base = re.sub(r"\b(const|volatile|__restrict__|restrict)\b", "", base)
    base, pointers = re.subn(r"\*|\(\*\) \[.*", "", base)
    if base.strip() == "CUtensorMap_st" and not pointers:
        return TENSOR_MAP
    code = _CODES.get(base.strip(), "")
    if pointers > 1:
        return "*i64"
    if pointers:
        return "" if "(" in base else f"*{code}"
    return code if code and DTYPES[code].ctype else ""  # halves are structs


def demangled(symbol: str) -> str:
    """The C++ name of a symbol; the symbol itself if it has no C++ name."""
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    try:
        return ctypes.string_at(text).decode()
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))
