"""Decorators that follow from more than a file's text, kept for processes without Triton."""

from __future__ import annotations

import json

import pytest
from helpers import H100, needs_triton

import jitkern
from jitkern import jit

KERNELS = """
import os
import torch
import triton
import triton.language as tl
from .sizes import sizes

WIDE = os.environ.get("WIDE_BLOCKS", "") == "1"

@triton.autotune(configs=[triton.Config({"B": b}) for b in sizes(WIDE)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["B"] == 0})
@triton.jit
def k(out, x, n, B: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)
"""
SIZES = "def sizes(wide):\n    return [128, 256] if wide else [64]\n"
ASK = """
import json, sys
import torch
import jitkern

k = jitkern.triton_kernel("keptlib.ops.kernels:k")
x = torch.zeros(200, device="meta")
blocks = [dict(variant.template)["B"] for variant in k.variants(x, x, 192)]
if {build}:
    k.compile(x, x, 192, target="{target}")
print(json.dumps([blocks, "triton" in sys.modules, "keptlib.ops.kernels" in sys.modules]))
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "keptlib" / "ops"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "sizes.py").write_text(SIZES)
    return folder


@pytest.fixture
def asked(run_python):
    """What another process finds: the blocks, and whether it has imported Triton to know them."""

    def ask(*, build=False, ask=ASK, **environment):
        done = run_python(ask.format(build=build, target=H100), **environment)
        assert done.returncode == 0, done.stderr
        blocks, *imported = json.loads(done.stdout.splitlines()[-1])
        assert imported in ([True, True], [False, False])
        return blocks, imported[0]

    return ask


@needs_triton
def test_what_an_import_said_is_kept_for_its_variables(package, asked):
    assert [asked(), asked()] == [([64], True), ([64], False)]
    assert asked(WIDE_BLOCKS="1") == ([128, 256], True)
    assert asked(WIDE_BLOCKS="1") == ([128, 256], False)


@pytest.mark.long
@needs_triton
def test_what_an_import_said_is_kept_for_its_files(package, asked):
    assert [asked(), asked()] == [([64], True), ([64], False)]
    (package / "sizes.py").write_text(SIZES.replace("[64]", "[32]"))
    assert [asked(), asked()] == [([32], True), ([32], False)]
    (package.parent / "__init__.py").write_text("import os\nos.environ['WIDE_BLOCKS'] = '1'\n")
    assert [asked(), asked()] == [([128, 256], True)] * 2  # the text alone says otherwise
    (package.parent / "__init__.py").write_text("")
    assert asked() == ([32], False)


@pytest.mark.long
@needs_triton
def test_a_warm_process_compiles_nothing_and_imports_no_triton(package, asked):
    assert asked(build=True) == ([64], True)
    kernels = [entry for _, entry in jit.open_cache().entries()]
    assert asked(build=True) == ([64], False)
    assert len(kernels) == len([*jit.open_cache().entries()])


MORE = [
    ("WIDE =", "os.environ.setdefault('WIDE_BLOCKS', '1')\nWIDE =", True),
    ("WIDE =", "from packaging.version import Version\nWIDE = Version(torch.__version__) < Version('2') or", True),
    ("WIDE =", "import random\nWIDE = random.random() < 0 or", False),
    ("WIDE =", "WIDE = os.path.exists('/nowhere') or", False),
    ("WIDE =", "WIDE = len(os.environ) < 0 or", False),
    ("WIDE =", "WIDE = open('/dev/null').read() or", False),
    ("WIDE =", "WIDE = tl.float32.primitive_bitwidth == 64 or", False),
    ("WIDE =", "import strangers\nWIDE =", False),
    ("WIDE =", "try:\n    import time\n    WIDE = time.time() < 0\nexcept Exception:\n    WIDE = False\nWIDE = WIDE or", False),
    ("WIDE =", "import shutil\nWIDE = shutil.which('no_such_program') is not None and not shutil or", False),
    ("WIDE =", "def arch():\n    try:\n        return triton.runtime.driver.active.get_current_target().arch\n    except Exception:\n        return 0\nWIDE = arch() > 90 or", False),
    ("WIDE =", "import time\nMORE = []\ndef more():\n    if time.time() < 0: MORE.append(1)\nmore()\nWIDE = bool(MORE) or", False),
    ("WIDE =", "import time\ndef setup():\n    if time.time() < 0: os.environ['WIDE_BLOCKS'] = '1'\nsetup()\nWIDE =", False),
    ("WIDE =", "import time\ndef same(f): return f\n@(same if time.time() else None)\ndef narrow(): return False\nWIDE = narrow() or", False),
    ("WIDE =", "def given(x=None):\n    return x is None\nWIDE = not given() or", True),
    ("lambda args: args", "lambda args: tl.float32.primitive_bitwidth and args", False),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("WIDE =", "WIDE = torch.cuda.is_available() and torch.cuda.get_device_properties(0).warp_size == 64 or", True),
        ("WIDE =", "import time\nWIDE = time.time() < 0 or", False),
        ("lambda args: args", "lambda args: os.environ and args", False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in MORE),
    ],
)  # fmt: skip
@pytest.mark.long
def test_what_follows_from_more_is_imported_in_each_process(package, asked, before, after, kept):
    (package.parents[1] / "strangers.py").touch()
    (package / "kernels.py").write_text(KERNELS.replace(before, after, 1))
    first, *rest = [asked() for _ in range(2)]
    assert first == ([128, 256] if "setdefault" in after else [64], True)
    assert rest == [(first[0], not kept)]


@pytest.mark.long
@needs_triton
def test_a_helper_that_the_program_has_changed_counts(package, asked):
    changed = "import keptlib.ops.sizes as s\ns.sizes = lambda wide: [512]\n"
    assert [asked(), asked()] == [([64], True), ([64], False)]
    assert asked(ask=changed + ASK) == ([512], True)
    assert asked(ask="import keptlib.ops.sizes\n" + ASK) == ([64], False)


@pytest.mark.long
@needs_triton
def test_a_reading_holds_while_its_files_do(package, asked, monkeypatch, tmp_path):
    assert asked() == ([64], True)
    monkeypatch.syspath_prepend(str(tmp_path))
    import torch

    k = jitkern.triton_kernel("keptlib.ops.kernels:k")
    x = torch.zeros(200, device="meta")
    for blocks in ([64], [32, 16]):
        (package / "sizes.py").write_text(SIZES.replace("[64]", str(blocks)))
        asked()
        assert [dict(v.template)["B"] for v in k.variants(x, x, 192)] == blocks
