"""Ops that are declared again: by a cell that runs again, or a module that is reloaded."""

import linecache
import subprocess
import sys
import threading

import pytest
import torch
from helpers import LONGEST

from jitkern import config
from jitkern.declare import kernel
from jitkern.errors import CompileError, DeclarationError
from jitkern.op import compile_cache_key
from jitkern.op.op import OPS
from jitkern.runtime import specializer
from tests.helpers import served

_CELL = """
from jitkern.declare import Cpp, kernel
import torch

scale = kernel("{name}(Tensor x) -> Tensor", cpu=Cpp(text='''
template <typename T> void scale(T* out, const T* x, long n) {{
  for (long i = 0; i < n; i++) out[i] = x[i] * {factor};
}}
'''), fusible={fusible})


@scale.reference
def _(x):
    return x * {factor}


@scale.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.scale[{{"T": x.dtype}}](out, x, x.numel())
    return out
"""


class Notebook:
    """Cells that run one after the other in the globals of one module."""

    def __init__(self) -> None:
        self.globals = {"__name__": "__main__"}
        self.count = 0

    def run(self, text: str) -> None:
        self.count += 1
        file = f"<cell {self.count} of {id(self)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), self.globals)

    def declare(self, name: str, factor: object, *, fusible: bool = False) -> None:
        self.run(_CELL.format(name=name, factor=factor, fusible=fusible))


@pytest.fixture
def notebook():
    return Notebook()


@pytest.mark.long
def test_a_cell_run_again_replaces_kernel_and_launch_function(notebook):
    x = torch.arange(5.0)
    notebook.declare("nb::again", 2)
    op = notebook.globals["scale"]
    assert torch.equal(op(x), x * 2)
    assert torch.equal(served(op, x), x * 2)
    notebook.declare("nb::again", 3)
    assert notebook.globals["scale"] is op
    assert torch.equal(op(x), x * 3)
    assert torch.equal(torch.ops.nb.again(x), x * 3)
    assert torch.equal(served(op, x), x * 3)
    notebook.declare("nb::again", 2)  # and back
    assert torch.equal(op(x), x * 2)


def test_what_the_new_declaration_leaves_out_is_gone(notebook):
    notebook.declare("nb::less", 2)
    op = notebook.globals["scale"]
    op.backward(lambda grad, x: grad * 2)
    assert op.declaration.reference
    assert op.gradient
    notebook.run(
        "from jitkern.declare import kernel\nscale = kernel('nb::less(Tensor x) -> Tensor')"
    )
    assert not op.declaration.reference
    assert op.gradient is None
    with pytest.raises(DeclarationError, match="has no reference"):
        op(torch.ones(2))


@pytest.mark.long
def test_a_gradient_of_the_new_declaration_counts(notebook):
    notebook.declare("nb::gradient", 2)
    op = notebook.globals["scale"]
    op.backward(lambda grad, x: grad * 2)
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    notebook.declare("nb::gradient", 5)
    op.backward(lambda grad, x: grad * 5)
    y = torch.ones(3, requires_grad=True)
    op(y).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([2.0] * 3, [5.0] * 3)


@pytest.mark.long
@pytest.mark.parametrize("fusible", [False, True])
def test_compiled_code_that_used_the_old_op_is_compiled_again(notebook, fusible):
    x = torch.arange(4.0)
    notebook.declare("nb::compiled", 2, fusible=fusible)
    op = notebook.globals["scale"]
    graph = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(x), x * 2 + 1)
    notebook.declare("nb::compiled", 7, fusible=fusible)
    assert torch.equal(graph(x), x * 7 + 1)
    notebook.declare("nb::compiled", 4, fusible=not fusible)
    assert torch.equal(graph(x), x * 4 + 1)


def test_another_schema_is_refused_and_nothing_is_lost(notebook):
    notebook.declare("nb::schema", 2)
    with pytest.raises(
        DeclarationError, match=r"nb::schema\(Tensor x, int n\).*restart the kernel"
    ):
        notebook.run(
            "from jitkern.declare import kernel\nkernel('nb::schema(Tensor x, int n) -> Tensor')"
        )
    x = torch.ones(2)
    assert torch.equal(notebook.globals["scale"](x), x * 2)


def test_one_run_of_a_module_declares_an_op_once(notebook):
    with pytest.raises(DeclarationError, match="declared twice"):
        notebook.run(
            "from jitkern.declare import kernel\n"
            "for _ in range(2):\n    kernel('nb::twice(Tensor x) -> Tensor')"
        )


def test_another_module_is_refused(notebook):
    notebook.declare("nb::other", 2)
    other = Notebook()
    other.globals["__name__"] = "elsewhere"
    with pytest.raises(DeclarationError, match="declared twice, by `__main__` and `elsewhere`"):
        other.declare("nb::other", 3)


@pytest.mark.long
def test_a_script_that_is_imported_declares_twice(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from jitkern.declare import kernel\n"
        "kernel('nb::script(Tensor x) -> Tensor')\n"
        "import script\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "by `__main__` and `script`: a script is imported, too: put its ops" in done.stderr


def test_a_function_called_twice_declares_twice():
    def declare():
        kernel("nb::function(Tensor x) -> Tensor")

    declare()
    with pytest.raises(DeclarationError, match="declared twice"):
        declare()


def test_a_compile_error_names_the_line_of_the_cell(notebook):
    notebook.declare("nb::wrong", "nonsense")
    with pytest.raises(CompileError, match=rf"<cell 1 of {id(notebook)}>:7:.*nonsense"):
        notebook.globals["scale"](torch.ones(2))


_RELOADED = """
import torch
from jitkern.declare import Cpp, kernel

FACTOR = {factor}
scale = kernel("reloaded::scale(Tensor x) -> Tensor", cpu=Cpp("scale.cpp"))


@scale.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.scale(out, x, x.numel())
    return out
"""
_RELOADING = """
import importlib, pathlib, sys, torch
sys.dont_write_bytecode = True  # its time has seconds alone
sys.path.insert(0, "")
folder = pathlib.Path("reloaded")
folder.mkdir()

def write(factor):
    loop = f"for (long i = 0; i < n; i++) out[i] = x[i] * {{factor}};"
    (folder / "scale.cpp").write_text(
        f"void scale(float* out, const float* x, long n) {{{{ {{loop}} }}}}"
    )
    (folder / "__init__.py").write_text({module!r}.replace("FACTOR = 2", f"FACTOR = {{factor}}"))

write(2)
import reloaded
x = torch.arange(4.0)
for _ in range(3):
    assert torch.equal(reloaded.scale(x), x * 2)
write(3)
importlib.reload(reloaded)
assert reloaded.FACTOR == 3
assert torch.equal(reloaded.scale(x), x * 3)
"""


@pytest.mark.long
def test_reload_picks_up_edited_files(run_python):
    done = run_python(_RELOADING.format(module=_RELOADED.format(factor=2)))
    assert done.returncode == 0, done.stderr


def test_a_background_build_of_the_old_declaration_never_serves(notebook):
    x = torch.arange(3.0)
    notebook.declare("nb::background", 2)
    op = notebook.globals["scale"]
    with config.using(compile="background"):
        op(x)
        notebook.declare("nb::background", 3)
        for _ in range(20):
            assert torch.equal(op(x), x * 3)


def test_ops_stay_as_they_were_in_the_registry(notebook):
    notebook.declare("nb::registry", 2)
    op = OPS["nb::registry"]
    notebook.declare("nb::registry", 3)
    assert OPS["nb::registry"] is op


@pytest.mark.long
def test_a_call_under_way_builds_nothing_for_the_new_declaration(notebook):
    inside, go_on = threading.Event(), threading.Event()

    def hook():
        inside.set()
        go_on.wait(LONGEST)

    notebook.globals["hook"] = hook
    text = _CELL.format(name="nb::under_way", factor=2, fusible=False)
    notebook.run(text.replace("    out =", "    hook()\n    out ="))
    op, x, results = notebook.globals["scale"], torch.ones(3), []
    thread = threading.Thread(target=lambda: results.append(op(x)))
    thread.start()
    assert inside.wait(LONGEST)
    notebook.declare("nb::under_way", 3)
    go_on.set()
    thread.join()
    specializer.settle()
    assert torch.equal(results[0], x * 2)
    for _ in range(4):
        assert torch.equal(op(x), x * 3)
        specializer.settle()


def test_the_compile_cache_digest_tells_cells_functions_apart(notebook):
    digests = set()
    for body in ("x.sin()", "x.cos()", "x * ALPHA", "x * ALPHA"):
        notebook.globals["ALPHA"] = len(digests)
        notebook.declare("nb::digest", 2)
        notebook.run(f"@scale.backward\ndef _(grad, x):\n    return grad * {body}")
        digests.add(compile_cache_key.digest({"nb::digest": OPS["nb::digest"]}))
    assert len(digests) == 4


def test_a_file_of_another_module_is_refused(notebook):
    notebook.globals["__name__"] = "kernel"
    notebook.declare("nb::file", 2)
    with pytest.raises(DeclarationError, match="declared twice"):
        notebook.declare("nb::file", 3)
