"""Write a new package of kernels that works as it is; with `--kernel`, one kernel folder.

`jitkern init mypkg` makes the project `mypkg/`, with two ops for CUDA, Triton and C++ in
`src/mypkg`, tests, a bench and a `pyproject.toml` through which `jitkern prewarm` and `jitkern
list` find the ops once it is installed. `jitkern init --kernel relu` makes the folder `relu/` with
the op `relu::relu`, and `--kernel mypkg::relu` one whose op belongs to `mypkg`. With `--kind
cutile` the kernel is written in cuTile, with `--kind cute` in the CuTe DSL.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import sys
import tempfile
from pathlib import Path

from jitkern._version import __version__
from jitkern.cli import clangd
from jitkern.cli.choose import choose_ops
from jitkern.cli.output import print_json, say

# Files named `*.in`, in which `mypkg` and `scale` stand for the names of a package and a kernel,
# and `jitkern_pin` for the versions of jitkern that it takes: names may change until 1.0.
TEMPLATES = Path(__file__).with_name("templates")
PACKAGE, KERNEL, PIN = "mypkg", "scale", "jitkern_pin"
KINDS = ("cutile", "cute")  # which have a template of their own
# Modules that the package or its tests need, which the name would hide, and namespaces of Torch.
TAKEN = """
aten bench jitkern jitkern_python kernels pip prim prims pytest quantized setuptools tests torch
triton
"""
# Names that the kernel templates use: parameters, and names that the compilers declare.
RESERVED = """
T alpha bfloat16 blockDim blockIdx ct cuda cute elements float16 grad gridDim int16_t int32_t
int64_t int8_t main size_t std threadIdx uint16_t uint32_t uint64_t uint8_t warpSize
"""
CXX = """
alignas alignof and_eq asm auto bitand bitor bool case catch char compl concept const constexpr
const_cast decltype default delete do double dynamic_cast else enum explicit export extern false
float friend goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq
private protected public register reinterpret_cast requires short signed sizeof static
static_assert static_cast struct switch template this thread_local throw true typedef typeid
typename union unsigned using virtual void volatile wchar_t xor xor_eq
"""


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a Python identifier: the package's and its namespace's name; of a kernel, NAME or "
        "NAMESPACE::NAME",
    )
    parser.add_argument(
        "--kernel", action="store_true", help="write only a kernel folder, without a package"
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        help="with --kernel: the kind of its source, by default CUDA and C++",
    )
    parser.add_argument(
        "--compile-commands",
        action="store_true",
        help="also write compile_commands.json, for clangd; `jitkern explain` renews it",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    namespace, _, name = args.name.rpartition("::") if args.kernel else ("", "", args.name)
    namespace = namespace or name
    if args.kind and not args.kernel:
        say("--kind is for --kernel: a package begins with kernels in CUDA, Triton and C++")
        return 2
    for text in (namespace, name):
        if reason := _unusable(text):
            say(f"`{text}` is not a usable module name: {reason}")
            return 2
    if args.kernel and name in RESERVED.split():
        say(f"`{name}` cannot name a kernel: it is a parameter or C++ name used in the template")
        return 2
    folder = Path(name)
    if os.path.lexists(folder):
        say(f"{folder} exists already; nothing was written")
        return 1
    with tempfile.TemporaryDirectory(prefix=".jitkern-", dir=".") as staging:  # whole, or not there
        staged = Path(staging, name)
        if args.kernel:
            _write(args.kind or "kernel", staged, {PACKAGE: namespace, KERNEL: name})
        else:
            major, minor = map(int, __version__.split(".")[:2])
            pin = f"jitkern>={major}.{minor},<{major}.{minor + 1}"
            _write("package", staged, {PACKAGE: name, PIN: pin})
            _write("kernel", staged / "src" / name / "kernels" / KERNEL, {PACKAGE: name})
        staged.rename(folder)
    if args.compile_commands:
        clangd.write(choose_ops([name]).ops)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    print_json(files=[*map(str, files)]) if args.json else print(*files, sep="\n")
    now = f"cd {name} && pip install -e '.[test]' && pytest && jitkern prewarm {name}"
    if args.kernel:
        now = _to_check(namespace, name)
    print(f"\nnow: {now}", file=sys.stderr)
    return 0


def _to_check(package: str, kernel: str) -> str:
    """Return how to check a new kernel. A package around this folder has to import it first."""
    here = Path.cwd()
    root = next((p for p in (here, *here.parents) if p.name == package), None)
    if root is None or not (root / "__init__.py").is_file():
        return f"jitkern check {kernel}"
    module = ".".join((package, *here.relative_to(root).parts, kernel))
    line, file = f"from {module}.kernel import {kernel}", root / "__init__.py"
    return f"write `{line}` into {file}, and then jitkern check {module}"


def _write(template: str, folder: Path, names: dict[str, str]) -> None:
    """Copy a folder of templates, and replace these names in paths and texts."""

    def renamed(text: str) -> str:
        return re.sub(
            f"{PACKAGE}|{KERNEL}|{PIN}", lambda match: names.get(match[0], match[0]), text
        )

    root = TEMPLATES / template
    for source in root.rglob("*.in"):
        path = folder / renamed(str(source.relative_to(root).with_suffix("")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(source.read_text(encoding="utf-8")), encoding="utf-8")


def _unusable(name: str) -> str:
    """Return why a module, an op and a C++ function cannot have this name, or ""."""
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name):
        return "use English letters, digits and `_`, beginning with a letter"
    if keyword.iskeyword(name) or name in CXX.split():
        return "it is a keyword of Python or of C++"
    if name in sys.stdlib_module_names or name in TAKEN.split():
        return "there is a module of that name"
    return ""
