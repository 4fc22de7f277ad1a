"""First calls of processes that a record serves: when it does, and that it is never stale."""

import json
import os
import shutil
from pathlib import Path

import pytest

from jitkern.cache.key import digest_of
from jitkern.cache.manifest import Manifest
from jitkern.runtime import code_version
from jitkern.runtime.records import STALE
from jitkern.source.kinds import shared_include

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
by_record = "jitkern.launch.runner" not in sys.modules
sys.served = True
jitkern.config.background.settle()
print(json.dumps([answer, by_record, recalled.op(torch.ones(2), {n}).tolist(), jitkern.stats()["compiles"]]))
"""
COUNTED = """
import collections, sys, torch, jitkern, recalled
entered = collections.Counter()
def count(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename == recalled.__file__:
        entered["launch function"] += code.co_varnames[:1] == ("k",)
    elif event == "call" and code.co_name in ("calls_like", "launch_function"):
        entered[code.co_name] += 1
sys.setprofile(count)
answer = recalled.op(torch.ones(1), 3).item()
sys.setprofile(None)
jitkern.config.background.settle()
print(answer, entered["calls_like"], entered["launch_function"], entered["launch function"])
"""
LOOKUP = ("launch.runner", "cache.store", "source.closure", "jit.get_or_compile", "source.key")


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
        """The factor of the op in a new process, and whether a record served the first call."""
        done = self.python(CALL.format(before=before, n=n), **environment)
        assert done.returncode == 0, done.stderr
        answer, by_record, again, self.compiles = json.loads(done.stdout.splitlines()[-1])
        assert len({*answer, *again}) == 1
        self.stderr = done.stderr
        return answer[0], by_record

    def python(self, code: str, **environment: str):
        """A process that may import the package."""
        place = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return self.run(code, **place, **environment)

    def leaves_a_record(self, factor: float = 2.0, before: str = "") -> None:
        """Call in two processes, of which the record of the first serves the second."""
        assert self.call(before) == (factor, False)
        assert self.call(before) == (factor, True)

    @property
    def records(self) -> list[Path]:
        return sorted(self.cache.glob("v1/*torch*/*.call.*"))


@pytest.fixture
def package(tmp_path, run_python, cache_dir) -> Package:
    return Package(tmp_path, run_python)


@pytest.fixture
def recalled(package) -> Package:
    """The package, after one process that left a record and one that it served."""
    package.leaves_a_record()
    return package


@pytest.mark.long
def test_a_second_process_needs_no_search_and_no_compiler(package):
    assert package.call() == (2.0, False)
    assert len(package.records) == 1
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
def test_what_serves_a_first_call_is_decided_once(package):
    cold, warm = (package.python(COUNTED) for _ in range(2))
    assert cold.stdout == "6.0 1 1 2\n", cold.stderr  # it runs, and is traced
    assert warm.stdout == "6.0 1 1 0\n", warm.stderr


@pytest.mark.long
def test_a_record_serves_other_sizes_and_numbers_of_the_class(recalled):
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
def test_an_edit_is_never_answered_by_a_record(recalled, edit):
    wanted, change = EDITS[edit]
    change(recalled)
    recalled.leaves_a_record(wanted)


@pytest.mark.long
def test_a_link_that_leads_elsewhere_is_answered_by_no_record(package):
    header = package.folder / "headers" / "factor.h"
    header.unlink()
    header.symlink_to(package.write("two.h", "#define FACTOR 2\n"))
    package.leaves_a_record()
    header.unlink()
    header.symlink_to(package.write("three.h", "#define FACTOR 3\n"))
    assert package.call() == (3.0, False)


@pytest.mark.long
def test_a_value_that_is_rebound_is_read_as_it_is_now(recalled):
    rebound = "import recalled; recalled.FACTOR = 10.0"
    assert recalled.call(rebound)[0] == 20.0
    code = (
        "import sys, torch, recalled\n"
        "x = torch.ones(1)\n"
        "print(recalled.op(x).item(), 'jitkern.launch.runner' not in sys.modules)\n"
        "recalled.FACTOR = 3.0\n"
        "print(recalled.op(x).item())\n"
        "@recalled.op.launch('cpu')\n"
        "def _(k, x, n):\n"
        "    return torch.full_like(x, 7.0)\n"
        "print(recalled.op(x).item())\n"
    )
    done = recalled.python(code)
    assert done.stdout.split() == ["2.0", "True", "6.0", "7.0"], done.stderr


def damaged(package: Package, what: str) -> None:
    kernel = next(path for path in package.cache.glob("v1/*/*.f32*") if ".call." not in path.name)
    artifact = next(path for path in kernel.iterdir() if path.suffix == ".so")
    (record,) = package.records
    if what == "record":
        manifest = record / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-1])
    elif what == "artifact":
        artifact.chmod(0o644)
        artifact.write_bytes(artifact.read_bytes()[:-1] + b"x")
    elif what == "mode":
        artifact.chmod(0o666)
    elif what == "entry":
        shutil.rmtree(kernel)
    else:
        for runtime in package.cache.glob("v1/*/runtime-*"):
            shutil.rmtree(runtime)


@pytest.mark.long
@pytest.mark.parametrize("what", ["record", "artifact", "mode", "entry", "runtime"])
def test_what_is_odd_leads_to_the_search(recalled, what):
    damaged(recalled, what)
    recalled.leaves_a_record()
    assert len(recalled.records) == 1


@pytest.mark.long
def test_another_state_of_jitkern_itself_has_records_of_its_own(recalled):
    other = "from jitkern.runtime import code_version; code_version.digest = lambda: 'another'"
    assert recalled.call(other) == (2.0, False)
    assert len(recalled.records) == 2
    newer = "from jitkern.runtime import code_version; code_version.digest, code_version.is_what_runs = lambda: 'newer', bool"
    assert recalled.call(newer) == (2.0, False)
    assert len(recalled.records) == 2, "code that was just changed may not be what runs"


def test_a_record_depends_on_all_files_that_decide_what_it_says():
    package = Path(code_version.__file__).parent.parent
    paths = {str(Path(path).relative_to(package)) for path in code_version.paths()}
    assert {
        "cache/key.py", "compilers/cuda/nvrtc_build.py", "runtime/program.c", "target.py",
        "trace/trace.py",
    } <= paths  # fmt: skip


@pytest.mark.long
def test_other_settings_do_not_share_a_record_where_they_matter(recalled):
    assert recalled.call(JITKERN_COMPILER="exact") == (2.0, False)
    assert recalled.call(JITKERN_RECORD=str(recalled.folder / "calls.jsonl")) == (2.0, False)
    assert (recalled.folder / "calls.jsonl").read_text().count("\n") >= 1
    assert recalled.call(JITKERN_VERIFY="size") == (2.0, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('"kernels/k.cpp", include=["headers"], environment=["CFLAGS"]', TEXT),
        ('"kernels/k.cpp", flags=["-I{folder}/headers"]', TEXT),
        ('"kernels/k.cpp", include=["headers"]', TEXT.replace('"factor.h"', "NAME").join(('#define NAME "factor.h"\n', ""))),
    ],
    ids=["environment", "a path in a flag", "a macro's include"],
)  # fmt: skip
def test_where_more_than_files_decides_key_inputs_are_compared(package, source, text):
    package.write(
        "recalled.py", KERNEL.format(source=source.replace("{folder}", str(package.folder)))
    )
    package.write("kernels/k.cpp", text)
    package.leaves_a_record()
    package.write("headers/factor.h", "#define FACTOR 3\n")
    package.leaves_a_record(3.0)
    if "CFLAGS" in source:
        assert package.call(CFLAGS="-DX") == (3.0, False)


OTHER = """
import jitkern
from jitkern import target
target.isa_level, target.processor = lambda: "_v2", lambda: {"flags": "none"}
"""


@pytest.mark.long
@pytest.mark.parametrize("native", ["native=True", 'flags=["-march=native"]'])
def test_a_native_kernel_has_a_record_for_each_instruction_set(package, native):
    source = f'"kernels/k.cpp", include=["headers"], {native}'
    package.write("recalled.py", KERNEL.format(source=source))
    package.leaves_a_record()
    assert package.call(OTHER) == (2.0, False), "this processor may not run that kernel"


@pytest.mark.long
def test_records_of_a_layer_serve_and_nothing_is_written(package, tmp_path):
    assert package.call() == (2.0, False)
    layer = package.cache.rename(tmp_path / "layer")
    layer.chmod(0o755)
    before = sorted((path, path.lstat().st_mtime_ns) for path in layer.rglob("*"))
    below = {"JITKERN_SYSTEM_CACHE": str(layer), "JITKERN_COMPILE": "never"}
    assert package.call(**below) == (2.0, True)
    assert not package.cache.exists(), "a process that needs no user root makes none"
    assert sorted((path, path.lstat().st_mtime_ns) for path in layer.rglob("*")) == before
    next(p for p in layer.glob("v1/*/*.f32*") if ".call." not in p.name).chmod(0o777)
    assert package.call(JITKERN_SYSTEM_CACHE=str(layer)) == (2.0, False)


@pytest.mark.long
def test_a_record_serves_a_package_and_cache_that_moved(recalled, tmp_path):
    """No absolute path is in it: it is as good in a bundle or a wheel."""
    moved = tmp_path / "moved"
    shutil.copytree(recalled.folder, moved / "package")
    shutil.copytree(recalled.cache, moved / "cache")
    recalled.folder = moved / "package"
    there = {"JITKERN_CACHE_DIR": str(moved / "cache"), "JITKERN_COMPILE": "never"}
    assert recalled.call(**there) == (2.0, True)
    (record,) = recalled.records
    assert str(tmp_path) not in (record / "manifest.json").read_text()


@pytest.mark.long
def test_prewarm_leaves_what_a_process_leaves(package):
    done = package.python(
        "import recalled, torch, jitkern\n"
        "recalled.op.samples(lambda device: iter([torch.ones(3, device=device)]))\n"
        "jitkern.prewarm(['jitkern_recall::op'])\n"
    )
    assert done.returncode == 0, done.stderr
    assert package.call(PATH="/nonexistent", JITKERN_COMPILE="never") == (2.0, True)


@pytest.mark.long
def test_a_text_has_a_record_too(package):
    package.write("recalled.py", KERNEL.format(source=f"text={TEXT!r}, include=['headers']"))
    package.leaves_a_record()
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
        "print(wrong, len(recalled.op.programs['cpu'].known))\n"
    )
    done = recalled.python(code, JITKERN_COMPILE="never")
    assert done.stdout == "[] 1\n", done.stderr


@pytest.mark.long
def test_a_closed_cache_serves_by_its_records_and_gets_none(recalled):
    for folder, _, _ in os.walk(recalled.cache):
        os.chmod(folder, 0o555)
    assert recalled.call() == (2.0, True)
    recalled.write("headers/factor.h", "#define FACTOR 3\n")
    read_only = not os.access(recalled.cache, os.W_OK)  # root may write all the same
    assert recalled.call() == (3.0, False)
    assert len(recalled.records) == (1 if read_only else 2)


@pytest.mark.long
def test_a_file_that_changes_while_a_record_is_kept_leaves_none(package):
    edit = (
        "import pathlib\n"
        "from jitkern.runtime import freshness\n"
        "real = freshness.dependencies\n"
        "def dependencies(*args):\n"
        f"    pathlib.Path({str(package.folder / 'headers/factor.h')!r}).write_text('#define FACTOR 7\\n')\n"
        "    return real(*args)\n"
        "freshness.dependencies = dependencies\n"
    )
    assert package.call(edit) == (2.0, False) and package.records == []
    assert package.call() == (7.0, False)


@pytest.mark.long
def test_a_link_out_of_a_folder_is_followed_as_compilers_do(package):
    """`../` in a header behind a link leads elsewhere than in the path as it is written."""
    shutil.rmtree(package.folder / "headers")
    package.write("real/common.h", "#define FACTOR 2\n")
    package.write("common.h", "#define FACTOR 2\n")
    (package.folder / "real" / "v1").mkdir()
    package.write("real/v1/factor.h", '#include "../common.h"\n')
    (package.folder / "headers").symlink_to(package.folder / "real" / "v1")
    package.leaves_a_record()
    package.write("real/common.h", "#define FACTOR 9\n")
    assert package.call() == (9.0, False)


@pytest.mark.long
def test_a_header_included_for_a_type_is_one_of_its_files(package):
    half = "torch.set_default_dtype(torch.float16)"
    package.leaves_a_record(before=half)
    shipped = Path(shared_include(), "float16.h").read_text()
    package.write("kernels/float16.h", f"{shipped}\n#undef FACTOR\n")
    assert package.call(half) == (2.0, False), "the kernel includes another float16.h now"


@pytest.mark.long
def test_code_that_is_newer_than_what_runs_finds_no_record(recalled):
    newer = "from jitkern.runtime import code_version; code_version.IMPORTED = 0"
    assert recalled.call(newer) == (2.0, False)
    assert len(recalled.records) == 1


@pytest.mark.long
def test_a_runtime_that_is_none_is_not_used(recalled):
    (record,) = recalled.records
    manifest = Manifest.decode((record / "manifest.json").read_bytes())
    content = {**manifest.meta["content"], "runtime": manifest.meta["content"]["kernels"][0]}
    inputs = {**manifest.inputs, "which": digest_of(content)}
    (record / "manifest.json").write_bytes(
        manifest._replace(inputs=inputs, meta={"content": content}).encode()
    )
    record.rename(record.with_name(f"{record.name.rpartition('-')[0]}-{digest_of(inputs)[:16]}"))
    assert recalled.call() == (2.0, True)


@pytest.mark.long
def test_records_of_earlier_states_of_a_file_are_few(package):
    for number in range(STALE + 4):
        package.write("headers/factor.h", f"#define FACTOR {number}\n")
        assert package.call() == (number, False)
    assert len(package.records) == STALE + 1


@pytest.mark.long
def test_each_number_that_is_a_constant_has_a_record(package):
    text = KERNEL.replace('"T": x.dtype', '"T": x.dtype, "N": n')
    package.write("recalled.py", text.format(source='"kernels/k.cpp", include=["headers"]'))
    for n in (1, 2, 3):
        assert package.call(n=n) == (2.0 * n, False)
    code = (
        "import sys, torch, recalled\n"
        "for n in (3, 1, 2):\n"
        "    print(recalled.op(torch.ones(1), n).item(), 'jitkern.launch.runner' not in sys.modules)\n"
    )
    done = package.python(code)
    assert done.stdout.splitlines() == ["6.0 True", "2.0 True", "4.0 True"], done.stderr


@pytest.mark.long
def test_a_folder_where_no_file_may_be_is_none(recalled):
    (recalled.folder / "kernels" / "factor.h").mkdir()
    assert recalled.call() == (2.0, True)


@pytest.mark.long
def test_a_listener_may_wait_for_a_thread_that_calls_the_op(recalled):
    code = (
        "import threading, torch, jitkern, recalled\n"
        "mine, heard = threading.Lock(), threading.Event()\n"
        "def listen(event):\n"
        "    heard.set()\n"
        "    with mine: pass\n"
        "jitkern.on_compile(listen)\n"
        "def call():\n"
        "    with mine:\n"
        "        heard.wait(100)\n"
        "        recalled.op(torch.ones(2))\n"
        "thread = threading.Thread(target=call)\n"
        "thread.start()\n"
        "while not mine.locked(): pass\n"
        "recalled.op(torch.ones(2))\n"
        "thread.join()\n"
        "print('done')\n"
    )
    done = recalled.python(code)
    assert done.stdout == "done\n", done.stderr
