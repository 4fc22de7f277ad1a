"""Errors of calls through the launch runtime: type, attributes and text."""

import contextlib
import signal

import pytest
import torch
from calls_of_ops import INC, SQUARE, X

from jitkern import config
from jitkern.errors import CompileError, LaunchError, NotCached
from jitkern.runtime import specializer


def test_not_cached_has_its_attributes_and_its_text_in_torch(scale):
    op = scale()
    with config.using(compile="never"):
        with pytest.raises(NotCached) as typed:
            op(X)
        with pytest.raises(RuntimeError) as plain:
            op.overload(X)
    assert "scale.f32" in typed.value.path
    assert typed.value.variant.function == "scale"
    assert str(plain.value).splitlines()[0] == str(typed.value)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "recorded"])
def test_a_compile_error_has_attributes_and_its_text_in_torch(declare, needs_grad):
    op = declare("(Tensor x) -> Tensor", "nonsense;", lambda k, x: k.scale(x) or x.clone())
    if needs_grad:
        op.backward(lambda grad: grad)
    x = torch.ones(3, requires_grad=needs_grad)
    with pytest.raises(CompileError) as typed:
        op(x)
    with pytest.raises(RuntimeError) as plain:
        op.overload(x)
    assert typed.value.op == op.name
    assert "nonsense" in typed.value.log
    assert typed.value.command.startswith(config.current().cxx)
    assert str(typed.value).splitlines()[0] in str(plain.value)


def test_the_public_op_raises_launch_error_and_torch_its_text(declare):
    op = declare(
        "(Tensor x) -> ()", INC, lambda k, x: k.inc(x), lambda x: pytest.fail("no reference")
    )
    with pytest.raises(LaunchError, match="takes 2 arguments") as typed:
        op(X)
    with pytest.raises(RuntimeError) as plain:
        op.overload(X)
    assert str(typed.value) in str(plain.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError, KeyError, MemoryError])
@pytest.mark.parametrize("text", [(), ("a reason",)], ids=["bare", "said"])
def test_what_a_launch_function_raises_reaches_the_caller(declare, kind, text):
    def launch(k, x):
        raise kind(*text)

    op = declare("(Tensor x) -> Tensor", INC, launch)
    with pytest.raises(kind) as raised:
        op(X)
    assert raised.value.args == text
    if kind is not KeyboardInterrupt:  # of that one, see below
        with pytest.raises(RuntimeError, match=kind.__name__):
            op.overload(X)


def test_ctrl_c_passes_those_who_catch_errors(declare):
    def launch(k, x):
        raise KeyboardInterrupt

    op = declare("(Tensor x) -> Tensor", INC, launch)

    def swallow():
        with contextlib.suppress(Exception):
            op.overload(X)
        return sum(map(abs, range(10)))  # more code, in which Python sees what came meanwhile

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            swallow()
    finally:
        signal.signal(signal.SIGINT, before)


TEXTS = {
    "long": "x" * 10_000,
    "long and not ASCII": "a" + "é" * 5000,
    "of format signs": "%s %n %d",
    "with a NUL": "before\0after",
    "with a surrogate": "a\udc80b",
    "of several lines": "one\ntwo\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_an_error_of_any_text_keeps_its_type(declare, text):
    def launch(k, x):
        raise LaunchError(text)

    op = declare("(Tensor x) -> Tensor", INC, launch)
    with pytest.raises(RuntimeError):
        op.overload(X)
    with pytest.raises(RuntimeError) as raised:
        op(X)
    assert raised.type is LaunchError
    assert raised.value.args == (text,)


@pytest.mark.long
def test_an_error_in_a_backward_keeps_its_type(declare, square):
    def launch(k, x):
        raise LaunchError("in a backward")

    inner, op = declare("(Tensor x) -> Tensor", INC, launch), square()
    outer = declare("(Tensor x) -> Tensor", SQUARE, lambda k, x: op(x), lambda x: x * x)
    outer.backward(lambda grad: (inner(grad),))
    result = outer(X.clone().requires_grad_())
    with pytest.raises(LaunchError, match="in a backward"):
        result.sum().backward()


def test_an_error_of_torch_is_not_taken_for_an_earlier_one(declare):
    def launch(k, x):
        raise ValueError

    op = declare("(Tensor x) -> Tensor", INC, launch)
    with pytest.raises(RuntimeError):
        op.overload(X)
    with pytest.raises(RuntimeError, match="argument"):
        op("not a tensor")


@pytest.mark.long
def test_an_error_that_a_launch_function_handles_is_forgotten(declare, scale):
    inner = scale()

    def launch(k, x):
        with pytest.raises(RuntimeError, match="unlucky"):
            inner(x, 13.0)
        return inner(x)

    op = declare("(Tensor x) -> Tensor", INC, launch)
    for _ in range(2):
        assert torch.equal(op(X), 2 * X)
        specializer.settle()
