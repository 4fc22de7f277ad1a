"""What a kernel on the CPU does to its process: exceptions, and the modes of floating-point numbers."""

import ctypes
import itertools
import struct
import sys

import pytest
import torch
from calls_of_ops import through, warmed
from helpers import programs_of

import jitkern
from jitkern.declare import Cpp, kernel
from jitkern.errors import CompileError, LaunchError
from jitkern.runtime import specializer

_number = itertools.count()
X = torch.arange(4.0)
THROWS = r"""
#include <new>
#include <stdexcept>
#include <string>
struct Own : std::exception { const char* what() const noexcept override { return "my own"; } };
struct Other {};
extern "C" void pick(float* out, const float* x, long i) {
  if (i == 1) throw std::runtime_error("boom \xe7\xb4\xa2\xe5\xbc\x95");
  if (i == 2) throw Own();
  if (i == 3) throw Other();
  if (i == 4) throw 7;
  if (i == 5) throw "only words";
  if (i == 6) throw std::bad_alloc();
  if (i == 7) throw std::runtime_error(std::string(5000, 'x'));
  if (i == 8) throw std::runtime_error("no \xff\xe0\x80 text \xed\xa0\x80");
  if (i == 9) throw std::runtime_error(std::string(1021, 'x') + "\xe7\xb4\xa2");
  out[0] = x[i];
}
"""
TEXTS = {
    1: "boom 索引", 2: "my own", 3: "no std::exception", 4: "no std::exception",
    5: "only words", 6: "bad_alloc", 7: "xxxxx", 8: "text", 9: "xxxxx",
}  # fmt: skip


def pick(k, x, i):
    out = torch.empty(1)
    k.pick(out, x, i)
    return out


def declared(schema, text, launch, **options):
    name = f"jitkern_test::raising{next(_number)}"
    op = kernel(name + schema, cpu=Cpp(text=text, **options))
    op.launch("cpu")(launch)
    return op


@pytest.fixture
def picking():
    return declared("(Tensor x, int i) -> Tensor", THROWS, pick)


@pytest.mark.parametrize("served", [False, True], ids=["python", "c"])
@pytest.mark.parametrize("way", ["public", pytest.param("torch.ops", marks=pytest.mark.long)])
def test_an_exception_is_a_runtime_error_with_op_and_text(picking, served, way):
    if served:
        warmed(picking, X, 0)
    misses = programs_of(picking).misses
    for i, text in TEXTS.items():
        with pytest.raises(RuntimeError, match=text) as caught:
            through(picking, way)(X, i)
        assert picking.name in str(caught.value)
    assert programs_of(picking).misses == misses if served else True, "Python ran a kernel again"
    assert through(picking, way)(X, 0).item() == 0, "the next call is served"


def test_a_raw_kernel_raises_launch_error():
    raw = jitkern.cpp_kernel(text=THROWS, name="pick")
    with pytest.raises(LaunchError, match="`pick`.*raised an exception: my own") as caught:
        raw(torch.empty(1), X, 2)
    assert caught.value.launched == 1


def test_results_and_lists_of_a_call_that_raises_are_freed():
    text = """#include <stdexcept>
    extern "C" void f(float* out, const float* x, long i) { if (i) throw std::runtime_error("boom"); *out = *x; }"""

    def launch(k, xs, names, i):
        out, other = torch.empty(1), torch.empty(1)
        k.f(other, xs[0], 0)
        k.f(out, other, i)
        return out

    op = declared("(Tensor[] xs, str names, int i) -> Tensor", text, launch)
    xs = [torch.ones(1), torch.ones(2)]
    warmed(op, xs, "ab", 0)
    held = [x._use_count() for x in xs]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom"):
            op(xs, "ab", 1)
    assert [x._use_count() for x in xs] == held
    assert op(xs, "ab", 0).item() == 1


CHANGES = """#include <stdexcept>
extern "C" void change(float* x, long i) { x[0] += 1; if (i) throw std::runtime_error("boom"); }"""


@pytest.mark.parametrize("served", [False, True], ids=["python", "c"])
@pytest.mark.parametrize("schema", ["(Tensor(a!) x, int i) -> ()", "(Tensor(a!)[] x, int i) -> ()"])
def test_what_was_changed_counts_as_changed(served, schema):
    def launch(k, x, i):
        k.change(x[0] if isinstance(x, list) else x, i)

    def given(x):
        return [x] if "[]" in schema else x

    op = declared(schema, CHANGES, launch)
    if served:
        warmed(op, given(torch.ones(1)), 0)
    w = torch.ones(2, requires_grad=True)
    h = w * 2
    y = (h * h).sum()
    with torch.no_grad(), pytest.raises(RuntimeError, match="boom"):
        op(given(h), 1)
    assert h.tolist() == [3, 2], "the kernel ran once"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_kernel_without_exceptions_compiles():
    text = 'extern "C" void f(float* out) { *out = 3; }'

    def launch(k, x):
        out = torch.empty(1)
        k.f(out)
        return out

    op = declared("(Tensor x) -> Tensor", text, launch, flags=["-fno-exceptions", "-fno-rtti"])
    assert op(X).item() == 3


def test_an_exception_in_a_backward_is_raised_there(picking):
    op = declared("(Tensor x) -> Tensor", THROWS, lambda k, x: pick(k, x, 0))
    op.backward(lambda grad, x: picking(grad.contiguous(), 2) + grad)
    x = torch.ones(4, requires_grad=True)
    for _ in range(3):
        y = op(x)
        specializer.settle()
        with pytest.raises(RuntimeError, match="my own"):
            y.backward()
    assert x.grad is None


# ------------------------------------------------------------------ floating-point numbers

TINY = 1e-310
FLUSH = """
#include <cfenv>
#include <stdexcept>
#if defined __x86_64__
#include <xmmintrin.h>
static void flush() { _mm_setcsr(_mm_getcsr() | 0x8040); }
#else
static void flush() {}
#endif
extern "C" void f(double* out, double x, long how) {
  if (how & 1) flush();
  if (how & 2) std::fesetround(FE_UPWARD);
  *out = x / 2;
  if (how & 4) throw std::runtime_error("boom");
}
"""


def modes():
    """Results that are others in a thread that flushes denormals, or rounds in another way."""
    tiny = torch.tensor([TINY], dtype=torch.float64)
    return sys.float_info.min / 2, (tiny * 1.0).item(), 1.0 / 3, struct.pack("d", 0.1 + 0.2)


@pytest.fixture
def same_modes():
    before = modes()
    yield
    after = modes()
    torch.set_flush_denormal(False)
    ctypes.CDLL(None).fesetround(0)
    assert after == before


@pytest.mark.parametrize("how", [1, pytest.param(2, marks=pytest.mark.long), 7])
def test_a_kernel_changes_the_modes_for_itself_alone(same_modes, how):
    def launch(k, x, how):
        out = torch.empty(1, dtype=torch.float64)
        k.f(out, 3.0, how)
        return out

    op = declared("(Tensor x, int how) -> Tensor", FLUSH, launch)
    before = modes()
    for _ in range(3):
        if how & 4:
            with pytest.raises(RuntimeError, match="boom"):
                op(X, how)
        else:
            assert op(X, how).item() == 1.5
        specializer.settle()
        assert modes() == before


@pytest.mark.parametrize(
    "flag",
    [
        "-O3 -ffast-math",
        *(
            pytest.param(flag, marks=pytest.mark.long)
            for flag in ("-Ofast", "-funsafe-math-optimizations", "-mpc32")
        ),
    ],
)
def test_no_flag_has_code_linked_that_runs_at_the_start(same_modes, flag):
    text = 'extern "C" void f(float* out, const float* x) { *out = 2 * *x; }'

    def launch(k, x):
        out = torch.empty(1)
        k.f(out, x)
        return out

    op = declared("(Tensor x) -> Tensor", text, launch, flags=flag.split())
    assert op(torch.ones(1)).item() == 2


def test_a_flag_of_the_setting_cxx_is_not_given_to_the_linker(same_modes):
    text = 'extern "C" void g(float* out, const float* x) { *out = 2 * *x; }'
    with jitkern.using(cxx="c++ -Ofast -Wl,-z,now"):
        out = torch.empty(1)
        jitkern.cpp_kernel(text=text, name="g")(out, torch.ones(1))
    assert out.item() == 2


def test_a_constructor_changes_no_floating_point_mode(same_modes):
    text = FLUSH + "__attribute__((constructor)) static void begin() { flush(); }"
    out = torch.empty(1, dtype=torch.float64)
    jitkern.cpp_kernel(text=text, name="f")(out, 3.0, 0)
    assert out.item() == 1.5


def test_code_for_the_address_sanitizer_does_not_end_the_process():
    text = 'extern "C" void f(float* out) { *out = 3; }'
    with pytest.raises(
        (LaunchError, CompileError, jitkern.LoadError), match="LD_PRELOAD"
    ) as caught:
        jitkern.cpp_kernel(text=text, name="f", flags=["-fsanitize=address"])(torch.empty(1))
    assert isinstance(caught.value, jitkern.LoadError)
