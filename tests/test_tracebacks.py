"""What a traceback shows: the frames of the user, and ours when asked for."""

import os
import re
import subprocess
import sys
import traceback

import pytest
import torch
from helpers import REPOSITORY

import jitkern
from jitkern import config
from jitkern.declare import Cpp, kernel
from jitkern.op.op import OPS

KERNEL = """
import torch
from jitkern.declare import Cpp, kernel
from jitkern.op.op import OPS
op = kernel("jitkern_shown::op(Tensor x) -> Tensor", cpu=Cpp(text='extern "C" void op(float* x) {}'))

@op.launch("cpu")
def launch(k, x):
    torch._check(x.dim() != 1, lambda: "one")
    if x.dim() == 2:
        k.op(x, x)  # a line of two
    try:
        inner(x)
    except KeyError as e:
        raise ValueError("three") from e  # a line of three

def inner(x):
    raise KeyError("inner")
"""
MAIN = """
import torch, traceback
from shown_kernel import op
for dimensions in (1, 2, 3):
    try:
        op(torch.empty([1] * dimensions))  # the call
    except Exception:
        traceback.print_exc()
"""


def printed(folder, **variables):
    """The tracebacks of a program."""
    (folder / "shown_kernel.py").write_text(KERNEL)
    (folder / "main.py").write_text(MAIN)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "main.py"], cwd=folder, capture_output=True, text=True,
        check=True, env={**os.environ, **variables},
    )  # fmt: skip
    return done.stderr


def files(text):
    """The names of the files of all frames; of ours, their paths in the repository."""
    return re.findall(rf'(?m)^  File "(?:{REPOSITORY}/|.*/)?(.*)", line', text)


@pytest.mark.long
def test_a_traceback_names_the_lines_of_the_user_alone(tmp_path):
    short = printed(tmp_path)
    user = ["main.py", "shown_kernel.py"]
    assert files(short) == [*user, *user, *["shown_kernel.py"] * 2, *user]
    lines = [line.strip() for line in short.splitlines()]
    assert lines.count("op(torch.empty([1] * dimensions))  # the call") == 3
    for line in (
        'torch._check(x.dim() != 1, lambda: "one")',
        "RuntimeError: one",
        "k.op(x, x)  # a line of two",
        'raise KeyError("inner")',
        "The above exception was the direct cause of the following exception:",
        'raise ValueError("three") from e  # a line of three',
        "ValueError: three",
    ):
        assert line in lines
    assert re.search(r"LaunchError: \S+:\d+: `op` of jitkern_shown::op", short)
    full = printed(tmp_path, JITKERN_TRACEBACK="full")
    assert {"jitkern/op/op.py", "jitkern/op/dispatch.py", "shown_kernel.py"} < {*files(full)}


@pytest.fixture
def declare_failing():
    op = kernel("jitkern_shown::failing(Tensor x) -> Tensor")
    op.reference(torch.clone)

    @op.backward
    def _(grad, x):
        raise ValueError("backward")

    yield op
    del OPS[op.name]


def frames(call):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    error = caught.value
    return error, [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernel("jitkern_shown::wrong(Tensor x"),
        lambda: Cpp("k.cu"),
        lambda: Cpp(natvie=True),
        lambda: jitkern.ops.vec_add.launch("cdua"),
        lambda: jitkern.ops.vec_add(1, 2),
        lambda: jitkern.prewarm(["nothing"]),
        lambda: jitkern.load("name", ["nothing.cpp"]),
        lambda: jitkern.load_inline("name", "", with_sycl=True),
        lambda: jitkern.cuda_kernel("nothing.cu", "name"),
        lambda: jitkern.triton_kernel("nothing.py:name"),
        lambda: jitkern.cpp_kernel(text="void k(float*) {}", name="k")(1, 2, 3),
    ],
)
def test_every_door_shows_its_callers_frame_last(call):
    _, rest = frames(call)
    assert rest == [__file__]
    with config.using(traceback="full"):
        _, rest = frames(call)
    assert rest[0] == __file__ and len(rest) > 1


def test_an_error_of_a_backward_pass_ends_with_its_author(declare_failing):
    _, rest = frames(lambda: declare_failing(torch.ones(3, requires_grad=True)).sum().backward())
    assert rest[-1] == __file__
    assert not [name for name in rest if f"{os.sep}jitkern{os.sep}" in name]


def test_what_an_error_followed_is_kept():
    before = OSError("before")
    try:
        raise before  # noqa: TRY301
    except OSError:
        error, _ = frames(lambda: kernel("jitkern_shown::wrong(Tensor x"))
        again, _ = frames(lambda: jitkern.ops.vec_add(1, 2))
    assert str(error.__cause__).startswith("expected )")
    assert error.__suppress_context__ and not error.__cause__.__traceback__
    assert error.__cause__.__context__ is before and before.__traceback__
    assert again.__context__ is before and again.__cause__ is None


def test_a_mistake_of_ours_is_shown_whole(monkeypatch):
    monkeypatch.delattr("jitkern.declare.Declaration")
    error, rest = frames(lambda: kernel("jitkern_shown::op(Tensor x) -> Tensor"))
    assert isinstance(error, NameError) and rest[-1].endswith("declare.py")
