"""First calls that a receipt serves: when one is left, when it serves, and that it is never stale."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jitkern.runtime import binding

pytestmark = pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")
KERNEL = """
import torch
from jitkern.declare import Cpp, kernel
import more
FACTOR = 1.0
op = kernel("jitkern_recall::op(Tensor x, int n=1) -> Tensor", cpu=Cpp({source}))
@op.reference
def _(x, n): return x * FACTOR * n
@op.launch("cpu")
def _(k, x, n):
    out = torch.empty_like(x)
    k.scale[{{"T": x.dtype}}](out, x, FACTOR * n * more.DOUBLE, x.numel())
    return out
"""
TEXT = """
#include "factor.h"
extern "C" void scale(T* y, const T* x, double a, long n) { for (long i = 0; i < n; i++) y[i] = FACTOR * a * x[i]; }
"""
CALL = """
import json, sys, torch
{before}
import jitkern, recalled
answer = recalled.op(torch.ones(3), {n}).tolist()
by_receipt = recalled.op.backends["cpu"]._implementation is None
sys.served = True
jitkern.runtime.builds.settle()
print(json.dumps([answer, by_receipt, recalled.op(torch.ones(2), {n}).tolist(), jitkern.stats()["compiles"]]))
"""
LOOKUP = ("op.dispatch", "runtime.plans", "cache.store", "source.closure", "jit.obtain", "target")


class Package:
    """A package with one op, and processes that call the op."""

    def __init__(self, folder: Path, run) -> None:
        self.folder, self.run = folder / "package", run
        self.cache = folder / "cache"
        (self.folder / "kernels").mkdir(parents=True)
        self.write("recalled.py", KERNEL.format(source='"kernels/k.cpp", include=["headers"]'))
        self.write("more.py", "DOUBLE = 1.0\n")
        self.write("kernels/k.cpp", TEXT)
        self.write("headers/factor.h", "#define FACTOR 2\n")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def call(self, before: str = "", n: int = 1, **environment: str) -> tuple[float, bool]:
        """The factor of the op in a new process, and whether a receipt served the first call."""
        place = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = self.run(CALL.format(before=before, n=n), **place, **environment)
        assert done.returncode == 0, done.stderr
        answer, by_receipt, again, self.compiles = json.loads(done.stdout.splitlines()[-1])
        assert len({*answer, *again}) == 1
        self.stderr = done.stderr
        return answer[0], by_receipt

    @property
    def receipts(self) -> list[Path]:
        return sorted(self.cache.glob("receipts/*"))


@pytest.fixture
def package(tmp_path, run_python, cache_dir) -> Package:
    return Package(tmp_path, run_python)


@pytest.fixture
def recalled(package) -> Package:
    """The package, after one process that left a receipt and one that it served."""
    assert package.call() == (2.0, False)
    assert package.call() == (2.0, True)
    return package


@pytest.mark.long
def test_the_second_process_needs_neither_a_search_nor_a_compiler(package):
    assert package.call() == (2.0, False)
    assert len(package.receipts) == 1
    names = {f"jitkern.{name}" for name in LOOKUP}
    refuse = (
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        f"        assert name not in {names} or hasattr(sys, 'served'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import jitkern.ops\n"
    )
    assert package.call(refuse, PATH="/nonexistent", JITKERN_COMPILE="never") == (2.0, True)
    assert package.compiles == 0 and package.stderr == ""


@pytest.mark.long
def test_a_receipt_serves_calls_of_other_sizes_and_numbers_of_the_class(recalled):
    assert recalled.call(n=7) == (14.0, True)
    assert recalled.compiles == 0


def same_size_and_time(path: Path, text: str) -> None:
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


EDITS = {
    "the kernel": (4.0, lambda p: p.write("kernels/k.cpp", TEXT.replace("= FACTOR", "= 2 * FACTOR"))),
    "the kernel, of one size and time": (
        6.0, lambda p: same_size_and_time(p.folder / "kernels/k.cpp", TEXT.replace("FACTOR *", "6 * 1  *")),
    ),
    "a header": (3.0, lambda p: p.write("headers/factor.h", "#define FACTOR 3\n")),
    "a header that comes earlier": (5.0, lambda p: p.write("kernels/factor.h", "#define FACTOR 5\n")),
    "another place of the headers": (
        3.0,
        lambda p: [
            p.write("others/factor.h", "#define FACTOR 3\n"),
            shutil.rmtree(p.folder / "headers"),
            (p.folder / "headers").symlink_to(p.folder / "others"),
        ],
    ),
    "a global": (6.0, lambda p: p.write("recalled.py", (p.folder / "recalled.py").read_text().replace("FACTOR = 1.0", "FACTOR = 3.0"))),
    "a global of another module": (8.0, lambda p: p.write("more.py", "DOUBLE = 4.0\n")),
    "the launch function": (
        4.0,
        lambda p: p.write("recalled.py", (p.folder / "recalled.py").read_text().replace("FACTOR * n", "2 * FACTOR * n")),
    ),
    "a flag": (
        4.0,
        lambda p: [
            p.write("recalled.py", KERNEL.format(source='"kernels/k.cpp", include=["headers"], flags=["-DTWICE=2"]')),
            p.write("headers/factor.h", "#define FACTOR (2 * TWICE)\n"),
        ],
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_never_answered_by_a_receipt(recalled, edit):
    wanted, change = EDITS[edit]
    change(recalled)
    assert recalled.call() == (wanted, False)
    assert recalled.call() == (wanted, True), "and the new state has a receipt of its own"


@pytest.mark.long
def test_a_link_that_leads_elsewhere_is_never_answered_by_a_receipt(package):
    header = package.folder / "headers" / "factor.h"
    header.unlink()
    header.symlink_to(package.write("two.h", "#define FACTOR 2\n"))
    assert package.call() == (2.0, False)
    assert package.call() == (2.0, True)
    header.unlink()
    header.symlink_to(package.write("three.h", "#define FACTOR 3\n"))
    assert package.call() == (3.0, False)


@pytest.mark.long
def test_a_value_that_is_rebound_is_read_as_it_is_now(recalled):
    rebound = "import recalled; recalled.FACTOR = 10.0"
    assert recalled.call(rebound)[0] == 20.0
    code = (
        "import torch, recalled\n"
        "x = torch.ones(1)\n"
        "print(recalled.op(x).item(), recalled.op.backends['cpu']._implementation is None)\n"
        "recalled.FACTOR = 3.0\n"
        "print(recalled.op(x).item())\n"
        "@recalled.op.launch('cpu')\n"
        "def _(k, x, n):\n"
        "    return torch.full_like(x, 7.0)\n"
        "print(recalled.op(x).item())\n"
    )
    done = recalled.run(code, PYTHONPATH=str(recalled.folder), PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout.split() == ["2.0", "True", "6.0", "7.0"], done.stderr


def damaged(package: Package, what: str) -> None:
    kernel = next(path for path in package.cache.glob("v1/*/*.f32*") if path.is_dir())
    artifact = next(path for path in kernel.iterdir() if path.suffix == ".so")
    (receipt,) = package.receipts
    if what == "receipt":
        receipt.write_bytes(receipt.read_bytes()[:-1])
    elif what == "artifact":
        artifact.chmod(0o644)
        artifact.write_bytes(artifact.read_bytes()[:-1] + b"x")
    elif what == "mode":
        artifact.chmod(0o666)
    elif what == "entry":
        shutil.rmtree(kernel)
    elif what == "plan":
        shutil.rmtree(next(package.cache.glob("v1/*/*.plan.*")))
    else:
        for runtime in package.cache.glob("v1/*/runtime-*"):
            shutil.rmtree(runtime)


@pytest.mark.long
@pytest.mark.parametrize("what", ["receipt", "artifact", "mode", "entry", "plan", "runtime"])
def test_what_is_odd_leads_to_the_search(recalled, what):
    damaged(recalled, what)
    assert recalled.call() == (2.0, False)
    assert recalled.call()[0] == 2.0
    assert recalled.call() == (2.0, True)


@pytest.mark.long
def test_another_state_of_jitkern_itself_has_receipts_of_its_own(recalled):
    other = "from jitkern.runtime import own_code; own_code.look = lambda: ('another', 0)"
    assert recalled.call(other) == (2.0, False)
    assert len(recalled.receipts) == 2
    newer = "import time; from jitkern.runtime import own_code; own_code.look = lambda: ('newer', time.time_ns())"
    assert recalled.call(newer) == (2.0, False)
    assert len(recalled.receipts) == 2, "code that was just changed may not be what runs"


@pytest.mark.long
def test_other_settings_do_not_share_a_receipt_where_they_matter(recalled):
    assert recalled.call(JITKERN_COMPILER="exact") == (2.0, False)
    assert recalled.call(JITKERN_RECORD=str(recalled.folder / "calls.jsonl")) == (2.0, False)
    assert (recalled.folder / "calls.jsonl").read_text().count("\n") >= 1
    assert recalled.call(JITKERN_VERIFY="size") == (2.0, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('"kernels/k.cpp", include=["headers"], environment=["HOME"]', TEXT),
        ('"kernels/k.cpp", flags=["-I{folder}/headers"]', TEXT),
        ('"kernels/k.cpp", include=["headers"]', TEXT.replace('"factor.h"', "NAME").join(('#define NAME "factor.h"\n', ""))),
    ],
    ids=["environment", "a path in a flag", "a macro's include"],
)  # fmt: skip
def test_what_depends_on_more_than_a_receipt_tells_leaves_none(package, source, text):
    package.write(
        "recalled.py", KERNEL.format(source=source.replace("{folder}", str(package.folder)))
    )
    package.write("kernels/k.cpp", text)
    for _ in range(3):
        assert package.call() == (2.0, False)
    assert package.receipts == []


OTHER = """
import jitkern
from jitkern import target
target.isa_level, target._processor = lambda: "_v2", lambda: {"flags": "none"}
"""


@pytest.mark.long
@pytest.mark.parametrize("native", ["native=True", 'flags=["-march=native"]'])
def test_a_native_kernel_has_a_receipt_for_each_instruction_set(package, native):
    source = f'"kernels/k.cpp", include=["headers"], {native}'
    package.write("recalled.py", KERNEL.format(source=source))
    assert package.call() == (2.0, False)
    assert package.call() == (2.0, True)
    assert package.call(OTHER) == (2.0, False), "this processor may not run that kernel"


@pytest.mark.long
def test_entries_of_a_layer_are_served_by_receipts_of_the_user_root(package, tmp_path):
    assert package.call() == (2.0, False)
    (receipt,) = package.receipts
    receipt.unlink()
    layer = package.cache.rename(tmp_path / "layer")
    layer.chmod(0o755)
    below = {"JITKERN_SYSTEM_CACHE": str(layer), "JITKERN_COMPILE": "never"}
    assert package.call(**below) == (2.0, False)
    assert not package.cache.exists(), "a process that needs no user root makes none"
    package.cache.mkdir(mode=0o700)
    before = sorted((path, path.lstat().st_mtime_ns) for path in layer.rglob("*"))
    assert package.call(**below) == (2.0, False)
    assert package.call(**below) == (2.0, True)
    assert sorted((path, path.lstat().st_mtime_ns) for path in layer.rglob("*")) == before
    next(layer.glob("v1/*/*.f32*")).chmod(0o777)
    assert package.call(JITKERN_SYSTEM_CACHE=str(layer)) == (2.0, False)


@pytest.mark.long
def test_a_text_has_a_receipt_too(package):
    package.write("recalled.py", KERNEL.format(source=f"text={TEXT!r}, include=['headers']"))
    assert package.call() == (2.0, False)
    assert package.call() == (2.0, True)
    package.write("headers/factor.h", "#define FACTOR 9\n")
    assert package.call() == (9.0, False)


@pytest.mark.long
def test_many_threads_make_the_first_call_at_once(recalled):
    code = (
        "import threading, torch, recalled\n"
        "start, wrong = threading.Barrier(8), []\n"
        "def call(n):\n"
        "    start.wait()\n"
        "    for _ in range(50):\n"
        "        if recalled.op(torch.ones(2), n).tolist() != [2.0 * n] * 2: wrong.append(n)\n"
        "threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(wrong, len(recalled.op.backends['cpu'].slot.known))\n"
    )
    done = recalled.run(code, PYTHONPATH=str(recalled.folder), JITKERN_COMPILE="never")
    assert done.stdout == "[] 1\n", done.stderr


@pytest.mark.long
def test_a_cache_that_cannot_be_written_serves_by_its_receipts_and_gets_none(package):
    assert package.call() == (2.0, False)
    (receipt,) = package.receipts
    kept = receipt.read_bytes()
    receipt.unlink()
    for folder, _, _ in os.walk(package.cache):
        os.chmod(folder, 0o555)
    read_only = os.access(package.cache, os.W_OK)  # root may write all the same
    assert package.call() == (2.0, False)
    assert read_only or package.receipts == []
    for folder, _, _ in os.walk(package.cache):
        os.chmod(folder, 0o755)
    receipt.write_bytes(kept)
    assert package.call() == (2.0, True)
