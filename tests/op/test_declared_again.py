"""Ops that are declared again: by a cell that runs again, or a module that is reloaded."""

import ast
import asyncio
import gc
import linecache
import subprocess
import sys
import threading
import weakref

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


def cell(name: str, factor: object, *, fusible: bool = False) -> str:
    return _CELL.format(name=name, factor=factor, fusible=fusible)


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
        self.run(cell(name, factor, fusible=fusible))


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
    notebook.run("scale = kernel('nb::less(Tensor x) -> Tensor')")
    assert not op.declaration.reference
    assert op.gradient is None
    with pytest.raises(DeclarationError, match="has no reference"):
        op(torch.ones(2))


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
    says = r"nb::schema\(Tensor x, int n\).*restart the kernel"
    with pytest.raises(DeclarationError, match=says):
        notebook.run("kernel('nb::schema(Tensor x, int n) -> Tensor')")
    x = torch.ones(2)
    assert torch.equal(notebook.globals["scale"](x), x * 2)


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


def test_a_file_of_another_module_is_refused(notebook):
    notebook.globals["__name__"] = "kernel"
    notebook.declare("nb::file", 2)
    with pytest.raises(DeclarationError, match="first in .*: two copies of the package"):
        notebook.declare("nb::file", 3)


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


@pytest.mark.long
def test_a_call_under_way_builds_nothing_for_the_new_declaration(notebook):
    inside, go_on = threading.Event(), threading.Event()

    def hook():
        inside.set()
        go_on.wait(LONGEST)

    notebook.globals["hook"] = hook
    text = cell("nb::under_way", 2)
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


_MEANWHILE = """
import torch
from jitkern.declare import Cpp, kernel

NAME = kernel("nb::NAME(Tensor x) -> Tensor", cpu=Cpp(text='''
template <typename T> void scale(T* out, const T* x, long n) {
  for (long i = 0; i < n; i++) out[i] = x[i] * FACTOR;
}
'''))
between("kernel")

@NAME.reference
def _(x):
    return x * FACTOR

between("reference")

@NAME.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, x.numel())
    return out

between("launch")

@NAME.backward
def _(grad, x):
    return grad * FACTOR

between("backward")
"""
_PLACES = ("kernel", "reference", "launch", "backward")


def in_a_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


class Meanwhile:
    """A notebook whose cell declares an op again, while something runs between its statements."""

    def __init__(self, name: str) -> None:
        self.notebook, self.name = Notebook(), name
        self.between = lambda place: None
        self.notebook.globals["between"] = self.run_between

    def run_between(self, place: str) -> None:
        self.between(place)

    def declare(self, factor: int) -> None:
        self.notebook.run(_MEANWHILE.replace("NAME", self.name).replace("FACTOR", str(factor)))

    def factors(self) -> set[float]:
        """The factors that this thread meets: forward, recorded, backward, reference."""
        op, x = self.notebook.globals[self.name], torch.ones(2, requires_grad=True)
        out = op(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        plain, item = op(x.detach()), getattr(torch.ops.nb, self.name)(x.detach())
        values = [out, grad, plain, item, torch.func.vmap(op)(x.detach()[None])]
        return {value.flatten()[0].item() for value in values}


@pytest.fixture
def meanwhile(request):
    return Meanwhile("meanwhile_" + request.node.name.partition("[")[0].removeprefix("test_"))


@pytest.mark.long
def test_other_threads_get_the_whole_old_one_until_the_cell_ends(meanwhile):
    meanwhile.declare(2)
    op, seen = meanwhile.notebook.globals[meanwhile.name], {}
    assert torch.equal(served(op, torch.ones(2)), torch.full((2,), 2.0))
    meanwhile.between = lambda place: seen.update({place: in_a_thread(meanwhile.factors)})
    meanwhile.declare(3)
    assert seen == dict.fromkeys(_PLACES, {2.0})
    assert in_a_thread(meanwhile.factors) == {3.0}
    assert torch.equal(in_a_thread(lambda: served(op, torch.ones(2))), torch.full((2,), 3.0))


@pytest.mark.long
@pytest.mark.parametrize("thread", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("at", _PLACES)
def test_an_exception_in_the_cell_leaves_the_old_one(meanwhile, at, thread):
    meanwhile.declare(2)
    run = in_a_thread if thread else lambda work: work()

    def fail(place):
        if place == at:
            raise KeyError(place)

    meanwhile.between = fail
    with pytest.raises(KeyError):
        meanwhile.declare(3)
    assert run(meanwhile.factors) == {2.0}
    meanwhile.between = lambda place: None
    meanwhile.declare(4)
    assert run(meanwhile.factors) == {4.0}


@pytest.mark.long
def test_an_exception_that_the_cell_handles_changes_nothing(meanwhile):
    meanwhile.declare(2)
    text = _MEANWHILE.replace("NAME", meanwhile.name).replace("FACTOR", "3")
    meanwhile.notebook.run(f"{text}\ntry:\n    raise KeyError\nexcept KeyError:\n    pass\n")
    assert in_a_thread(meanwhile.factors) == {3.0}


@pytest.mark.long
def test_the_cell_itself_calls_the_new_one(meanwhile):
    meanwhile.declare(2)
    seen = []
    op = meanwhile.notebook.globals[meanwhile.name]

    def call(place):
        seen.append([op(torch.ones(())).item(), in_a_thread(lambda: op(torch.ones(())).item())])

    meanwhile.between = lambda place: place == "launch" and call(place)
    meanwhile.declare(3)
    assert seen == [[3.0, 3.0]]
    assert in_a_thread(meanwhile.factors) == {3.0}


def test_a_cell_that_calls_what_it_has_not_completed_is_told(notebook):
    notebook.declare("nb::incomplete", 2)
    text = cell("nb::incomplete", 3)
    begin = text.partition("@scale.reference")[0]
    with pytest.raises(DeclarationError, match=r"no launch function for its Cpp: decorate one"):
        notebook.run(f"{begin}\nscale(torch.ones(2))")


def test_what_gets_no_launch_function_is_told_to_every_thread(notebook):
    notebook.declare("nb::bare", 2)
    text = cell("nb::bare", 3)
    notebook.run(text.partition("@scale.reference")[0])

    def told():
        with pytest.raises(DeclarationError, match=r"no launch function for its Cpp"):
            notebook.globals["scale"](torch.ones(2))
        return True

    assert in_a_thread(told) and told()


@pytest.mark.long
@pytest.mark.parametrize("fusible", [False, True])
def test_code_compiled_meanwhile_is_of_the_old_one_and_dropped(notebook, fusible):
    notebook.declare("nb::graph", 2, fusible=fusible)
    op, x, seen = notebook.globals["scale"], torch.arange(4.0), []
    graph = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    notebook.globals["between"] = lambda: seen.append(in_a_thread(lambda: graph(x)))
    text = cell("nb::graph", 3, fusible=fusible)
    notebook.run(f"{text}\nbetween()\n")
    assert torch.equal(seen[0], x * 2 + 1)
    assert torch.equal(op(x), x * 3)
    assert torch.equal(in_a_thread(lambda: graph(x)), x * 3 + 1)


def test_a_schema_that_changes_leaves_the_other_ops_of_the_cell(notebook):
    notebook.declare("nb::before_schema", 2)
    op = notebook.globals["scale"]
    notebook.declare("nb::of_schema", 2)
    text = cell("nb::before_schema", 3)
    with pytest.raises(DeclarationError, match="restart the kernel"):
        notebook.run(f"{text}\nkernel('nb::of_schema(Tensor x, int n) -> Tensor')")
    x = torch.ones(2)
    assert torch.equal(op(x), x * 2)
    assert torch.equal(notebook.globals["scale"](x), x * 2)


def test_one_run_that_declares_an_op_twice_leaves_the_old_one(notebook):
    notebook.declare("nb::in_a_run", 2)
    op = notebook.globals["scale"]
    text = cell("nb::in_a_run", 3)
    with pytest.raises(DeclarationError, match="declared twice"):
        notebook.run(f"{text}\n{text}")
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))


def test_parts_declared_by_a_later_cell_complete_the_op(notebook):
    notebook.declare("nb::later", 2)
    op = notebook.globals["scale"]
    text = cell("nb::later", 3)
    begin, _, end = text.partition("@scale.launch")
    notebook.run(begin)
    notebook.run("import torch\n@scale.launch" + end)
    assert torch.equal(in_a_thread(lambda: op(torch.ones(2))), torch.full((2,), 3.0))


def test_a_cell_that_awaits_declares_again(notebook):
    notebook.declare("nb::awaits", 2)
    text = cell("nb::awaits", 3) + "\nawait wait()\n"
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    async def wait():
        await asyncio.sleep(0)

    notebook.globals["wait"] = wait
    asyncio.run(eval(compile(text, "<cell that awaits>", "exec", flags), notebook.globals))
    assert torch.equal(notebook.globals["scale"](torch.ones(2)), torch.full((2,), 3.0))


def test_a_declaration_keeps_no_variables_of_its_callers(notebook):
    notebook.declare("nb::frames", 2)
    notebook.declare("nb::frames_beside", 2)

    class Large:
        pass

    def reload():
        large = Large()
        text = cell("nb::frames", 3)
        notebook.run(text + text.replace("nb::frames", "nb::frames_beside"))
        return weakref.ref(large)

    held = reload()
    OPS["nb::frames"](torch.ones(2))  # one of them is enough
    gc.collect()
    assert held() is None


_RELOADS = """
import importlib, pathlib, sys, threading
sys.dont_write_bytecode = True  # its time has seconds alone
sys.path.insert(0, "")

def write(factor):
    pathlib.Path("reloads.py").write_text({module!r}.replace("FACTOR", str(factor)))

write(2)
import reloads, torch
op, wrong, ready, stop = reloads.op, [], threading.Barrier(4), threading.Event()

def work():
    ready.wait()
    while not stop.is_set():
        x = torch.ones(3, requires_grad=True)
        try:
            out = op(x)
            (grad,) = torch.autograd.grad(out.sum(), x)
            if not torch.equal(out, grad) or out[0].item() not in (2.0, 3.0):
                wrong.append((out, grad))
        except Exception as e:
            wrong.append(e)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
ready.wait()
for i in range(60):
    write(2 + i % 2)
    importlib.reload(reloads)
    if i % 3 == 0: op(torch.ones(3))
stop.set()
for thread in threads: thread.join()
print(wrong[:1], op(torch.ones(())).item())
"""


@pytest.mark.long
def test_calls_of_other_threads_bear_reloads(run_python):
    module = _MEANWHILE.replace("nb::NAME", "nb::reloads").replace("NAME", "op")
    done = run_python(_RELOADS.format(module=f"between = len\n{module}"))
    assert done.stdout == "[] 3.0\n", done.stderr
