"""Sources given as text: their keys, headers, places in errors, and processes that share them."""

import linecache
import multiprocessing
import os
import re
from functools import partial

import pytest
import torch
from helpers import H100, run_cell, run_threads

import jitkern
from jitkern import jit
from jitkern.declare import Cpp, Cuda, Extension, Triton, kernel
from jitkern.errors import CompileError, DeclarationError
from jitkern.source.kinds import Variant
from jitkern.target import Target

_SCALE = "void scale(float* out, const float* x, long n) { for (; n--;) out[n] = 2 * x[n]; }\n"


def test_a_text_is_compiled_and_called():
    scale = jitkern.cpp_kernel(text=_SCALE, name="scale")
    out, x = torch.empty(4), torch.arange(4.0)
    scale(out, x, 4)
    assert torch.equal(out, 2 * x)


def test_a_text_of_a_package_in_an_archive_is_compiled(tmp_path):
    (archive := tmp_path / "pack.zip").touch()
    source = Cpp(text=_SCALE, folder=str(archive / "pack"))
    assert jit.ensure(Variant("x::scale", source, "scale"), Target.current("cpu"))


def test_a_text_has_one_key_wherever_it_is_declared(tmp_path):
    target = Target.current("cpu")
    keys = set()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        source = Cpp(text=_SCALE, folder=str(tmp_path / folder))
        keys.add(jit.key_of(Variant("x::scale", source, "scale"), target).digest)
    assert len(keys) == 1
    other = Cpp(text=_SCALE + "//", folder=str(tmp_path))
    assert jit.key_of(Variant("x::scale", other, "scale"), target).digest not in keys


def test_a_text_includes_headers_beside_its_declaration(tmp_path):
    (tmp_path / "two.h").write_text("#define TWO 2\n")
    text = '#include "two.h"\n' + _SCALE.replace("2 *", "TWO *")
    source = Cpp(text=text, folder=str(tmp_path))
    variant, target = Variant("x::scale", source, "scale"), Target.current("cpu")
    first = jit.ensure(variant, target)
    (tmp_path / "two.h").write_text("#define TWO 3\n")
    assert jit.ensure(variant, target).path != first.path


@pytest.mark.parametrize("kind", [Cuda, Cpp, Triton])
def test_a_text_is_named_after_its_kind(kind):
    assert kind(text="x").files[0].endswith(kind.suffixes)


def test_an_error_names_the_cell_and_the_line():
    cell = 'import jitkern\n\nscale = jitkern.cpp_kernel(name="scale", text="""\n// first\nvoid scale(float* x) { x[0] = nothing; }\n""")\n'
    scale = run_cell("<cell of test_an_error>", cell, {})["scale"]
    with pytest.raises(CompileError, match=r"<cell of test_an_error>:5:\d+: error.*nothing"):
        scale(torch.ones(1))


def test_an_error_in_a_computed_text_names_the_line_of_the_text():
    text = "\n".join(["// generated", f"void scale(float* x) {{ x[0] = {'no' * 2}; }}"])
    with pytest.raises(CompileError, match=r"the text of raw::scale:2:\d+: error.*nono"):
        jitkern.cpp_kernel(text=text, name="scale")(torch.ones(1))


@pytest.mark.long
def test_a_kernel_made_by_closure_has_an_identity_of_its_own():
    """Kernels that a function generates: each text is one kernel, the same text the same one."""

    def scaled(factor):
        text = _SCALE.replace("2 *", f"{factor} *")
        op = kernel(f"texts::scaled{factor}(Tensor x) -> Tensor", cpu=Cpp(text=text))

        @op.launch("cpu")
        def _(k, x):
            out = torch.empty_like(x)
            k.scale(out, x, x.numel())
            return out

        return op

    x = torch.arange(3.0)
    for op, factor in [(scaled(factor), factor) for factor in (3, 5)]:
        assert torch.equal(op(x), factor * x)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_reads_the_text_too():
    scale = jitkern.cpp_kernel(text=_SCALE.replace("2 *", "7 *"), name="scale")
    scale.source.folder  # noqa: B018  the parent has written the text

    def child(queue):
        out = torch.empty(2)
        scale(out, torch.ones(2), 2)
        queue.put(out.tolist())

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get() == [7.0, 7.0]
    process.join()


_TRITON = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)
TYPE = tl.float32


@triton.jit
def times(x):
    return (x * FACTOR).to(TYPE)
"""
_KERNEL = """
@triton.jit
def scale(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, times(tl.load(x + i, mask=i < n)), mask=i < n)
"""


def _compiled(variables, name="scale"):
    pytest.importorskip("triton")
    x = torch.empty(8, device="meta")
    scale = jitkern.triton_kernel(variables[name])
    return scale.compile(x, x, 8, grid=1, BLOCK=16, target=H100)[0]


@pytest.mark.long
def test_a_cells_triton_function_is_compiled_with_what_it_uses():
    pytest.importorskip("triton")
    variables = run_cell("<triton 1>", _TRITON, {"__name__": "__main__"})
    first = _compiled(run_cell("<triton 2>", _KERNEL, variables))
    again = _compiled(run_cell("<triton 3>", _KERNEL, variables))
    assert first.path == again.path  # another cell, the same text
    run_cell("<triton 4>", _TRITON.replace("(3)", "(4)"), variables)
    assert _compiled(run_cell("<triton 5>", _KERNEL, variables)).path != first.path


def test_a_triton_function_of_a_cell_in_an_op():
    pytest.importorskip("triton")
    variables = run_cell("<triton op>", _TRITON + _KERNEL, {"__name__": "__main__"})
    op = kernel("texts::triton(Tensor x) -> Tensor", cuda=Triton(variables["scale"]))
    (source,) = op.sources["cuda"]
    assert "def times" in source.text
    assert "def scale" in source.text
    compile(source.text, "text", "exec")


@pytest.mark.long
def test_an_error_of_triton_names_the_cell_and_the_line():
    pytest.importorskip("triton")
    text = _TRITON + _KERNEL.replace("times(", "missing(")
    variables = run_cell("<triton error>", text, {"__name__": "__main__"})
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "missing(" in row)
    with pytest.raises(CompileError, match=rf"<triton error>\({line}\).*missing"):
        _compiled(variables)


def test_a_global_that_no_text_can_hold_is_refused_by_name():
    pytest.importorskip("triton")
    text = _TRITON.replace("tl.constexpr(3)", "object()") + _KERNEL
    variables = run_cell("<triton global>", text, {"__name__": "__main__"})
    with pytest.raises(DeclarationError, match="`times` reads the global `FACTOR`, a object"):
        _compiled(variables)


def test_a_triton_function_without_a_text_is_refused():
    pytest.importorskip("triton")
    variables = {"__name__": "__main__"}
    linecache.cache.pop("<no text>", None)
    text = _TRITON.replace("@triton.jit\n", "")  # Triton itself wants the text
    exec(compile(text, "<no text>", "exec"), variables)
    with pytest.raises(DeclarationError, match=re.escape("<no text>")):
        Triton(type("Jit", (), {"fn": staticmethod(variables["times"])})())


def test_a_function_called_like_a_builtin_is_no_builtin():
    pytest.importorskip("triton")
    text = _TRITON + "@triton.jit\ndef max(a, b):\n    return a * 100 + b\n"
    text += _KERNEL.replace("times(", "max(1.0, ")
    (source,) = (Triton(run_cell("<triton max>", text, {"__name__": "__main__"})["scale"]),)
    assert "a * 100 + b" in source.text


def test_what_decorators_of_a_cell_declare_is_in_the_text():
    pytest.importorskip("triton")
    text = _TRITON + "CONFIGS = [triton.Config({'BLOCK': 16}, num_warps=2)]\n"
    text += _KERNEL.replace("@triton.jit", "@triton.autotune(CONFIGS, key=[])\n@triton.jit")
    source = Triton(run_cell("<triton configs>", text, {"__name__": "__main__"})["scale"])
    assert '"configs": [[[["BLOCK", 16]], [["num_warps", 2], ["num_stages", 3]]]]' in source.text
    assert "# @triton.autotune(CONFIGS, key=[])" in source.text


def test_threads_may_write_one_text_at_once():
    def read(text):
        assert Cpp(text=text).paths[0].read_text() == text

    for number in range(20):
        run_threads(*[partial(read, f"// {number} of {os.getpid()}")] * 8)


def test_a_text_is_written_again_if_its_file_is_gone():
    source = Cpp(text=_SCALE)
    source.paths[0].unlink()
    assert source.paths[0].read_text() == _SCALE


REFUSED = {
    "a text of two files": (lambda: Extension(["a.cpp", "b.cpp"], text="x", function="f"), "one file"),
    "a text and a file": (lambda: jitkern.cpp_kernel("scale.cpp", "scale", text=_SCALE), "either a file and a function"),
    "a text without a name": (lambda: jitkern.cpp_kernel(text=_SCALE), "either a file and a function"),
    "a name with a folder": (lambda: Cpp("sub/x.cpp", text=_SCALE), "no folder"),
    "bytes": (lambda: Cpp(text=b"bytes"), "is not a string"),
    "a number for a text": (lambda: Cpp(text=5), "is not a string"),
    "None": (lambda: Cpp(text=None), "is not a string"),
    "a number for a file": (lambda: Cuda(5), "takes names of files"),
    "a dict": (lambda: Cuda({"a": 1}), "takes names of files"),
    "a function without jit": (lambda: Triton(run_cell), r"is not a `@triton\.jit` function"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_source_is_refused(what):
    make, says = REFUSED[what]
    with pytest.raises(DeclarationError, match=says):
        make()
