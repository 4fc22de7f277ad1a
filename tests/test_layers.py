"""Imports go down only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Lower number, lower layer; a module may import its own layer and those below.
LAYERS = [
    ("errors", "named_tuple", "config", "config_file", "signature", "trust"),
    ("target", "dtypes", "flags", "kernel"),
    (
        "closure",
        "cxx",
        "units",
        "key",
        "manifest",
        "layout",
        "durable",
        "private",
        "package",
        "lock",
        "cache",
        "entry",
        "counters",
        "events",
        "compilers",
        "inline",
        "inputs",
        "bindings",
        "cuda_arch",
        "library",
        "receipts",
        "used",
        "launch.arguments",
        "launch.driver",
        "launch.loaded",
        "launch.triton",
    ),
    ("request",),
    ("jit",),
    (
        "trace",
        "runtime",
        "trampoline",
        "launch.variants",
        "launch.python",
        "launch.symbols",
        "launch.tensors",
        "launch.recorder",
        "launch.trace",
        "launch.stub",
        "launch.plans",
        "launch.slot",
        "launch.tune",
        "launch.autotune",
        "launch.packing",
        "launch.runtime",
        "launch.linker",
    ),
    (
        "autograd",
        "gradient",
        "compile_caches",
        "compile_cache_key",
        "mega_cache_entries",
        "elsewhere",
        "mega_cache",
        "record",
        "samples",
        "needs",
        "autograd",
        "backend",
        "implementation",
        "register",
    ),
    ("raw_kernel", "raw", "raw_triton"),
    ("declare", "ahead", "prewarm", "inlined", "drop_in"),
    ("ops",),
    ("cli",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = {
    path: ".".join(path.relative_to(ROOT / "jitkern").with_suffix("").parts).removesuffix(
        ".__init__"
    )
    for path in sorted((ROOT / "jitkern").rglob("*.py"))
}


def imported(path):
    """Names of jitkern modules that a file imports when it runs (not only for types)."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for n in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module in ("jitkern", "jitkern.launch")
                else [node.module]
            )


def level(module):
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in LEVEL:
            return LEVEL[".".join(parts[:end])]
    return None


@pytest.mark.parametrize(
    "path",
    [p for p, name in MODULES.items() if name not in ("__init__", "__main__", "launch")],
    ids=str,
)
def test_imports_go_down_only(path):
    own = level(MODULES[path])
    assert own is not None, f"{path} belongs to no layer"
    for name in imported(path):
        if name.startswith("jitkern."):
            below = level(name.removeprefix("jitkern."))
            if name.startswith("jitkern.cache_tools"):
                below = LEVEL["cache"]
            assert name == "jitkern.__version__" or (below is not None and below <= own), (
                f"{path} imports {name}"
            )


def test_cache_tools_need_only_the_cache():
    allowed = {
        f"jitkern.{name}"
        for name in (
            "__version__",
            "cache",
            "cache_tools",
            "config",
            "counters",
            "durable",
            "entry",
            "errors",
            "layout",
            "lock",
            "manifest",
            "package",
            "receipts",
            "signature",
            "target",
            "trust",
        )
    }
    for path in (ROOT / "cache_tools").glob("*.py"):
        for name in imported(path):
            assert not name.startswith("jitkern") or any(
                name == a or name.startswith(f"{a}.") for a in allowed
            ), f"{path} imports {name}"


def test_kernels_need_only_declare():
    for path in (ROOT / "kernels_src").rglob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] in ("torch", "triton", "math") or name == "jitkern.declare", (
                f"{path} imports {name}"
            )


def test_only_the_command_line_prints_or_exits():
    children = {"triton_worker.py", "__main__.py"}
    for path in MODULES:
        if "cli" not in path.parts and path.name not in children:
            called = {
                ast.unparse(node.func)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call)
            }
            assert not called & {"print", "sys.exit", "exit"}, path
