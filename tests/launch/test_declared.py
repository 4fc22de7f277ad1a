"""What an import of a Triton file declares: kept for its files and for the facts that it reads."""

import importlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import H100, LONGEST, needs_triton, one_in_four, run_threads, target_of, write_files

import jitkern
from jitkern import jit
from jitkern.cache.manifest import Manifest
from jitkern.errors import CompileError, LaunchError, NotCached
from jitkern.launch.declared import declared_in, functions_for
from jitkern.source.kinds import Triton
from jitkern.source.triton_globals import imported
from jitkern.target import Target

pytestmark = needs_triton
KERNELS = """
import os
import torch
import triton
import triton.language as tl
from .sizes import sizes

WIDE = os.environ.get("WIDE_BLOCKS", "") == "1"

@triton.autotune(configs=[triton.Config({"B": b}) for b in sizes(WIDE)], key=["n"])
@triton.jit
def k(out, x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)
"""
EVEN = ("@triton.jit", '@triton.heuristics({"B": lambda args: args["n"] // 3})\n@triton.jit')
SIZES = "def sizes(wide):\n    return [128, 256] if wide else [64]\n"
ASK = """
import json, sys
import torch
import jitkern

k = jitkern.triton_kernel("keptlib.ops.kernels:k")
x = torch.zeros(200, device="meta")
blocks = [dict(variant.template)["B"] for variant in k.variants(x, x, 192, target="{target}")]
if {build}:
    k.compile(x, x, 192, target="{target}")
names = ("triton", "keptlib.ops.kernels", "jitkern.compilers.triton.build")
print(json.dumps([blocks, *(name in sys.modules for name in names)]))
"""
TARGET = Target.parse(H100)


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
def source(package, monkeypatch):
    """The source of its kernels, which this process may import."""
    monkeypatch.syspath_prepend(package.parents[1])
    return Triton("kernels.py", folder=str(package), package="keptlib.ops")


@pytest.fixture
def asked(run_python):
    """The blocks that another process finds, and whether it has asked the worker for them."""

    def ask(*, build=False, ask=ASK, imports=False, **environment):
        done = run_python(ask.format(build=build, target=H100), **environment)
        assert done.returncode == 0, done.stderr
        blocks, *imported, worker = json.loads(done.stdout.splitlines()[-1])
        assert imported == [imports, imports]
        return blocks, worker

    return ask


def test_what_an_import_said_is_kept_for_its_variables(package, asked):
    assert [asked(), asked()] == [([64], True), ([64], False)]
    for wide in ("1", "0", "1"):
        blocks = [128, 256] if wide == "1" else [64]
        assert asked(WIDE_BLOCKS=wide)[0] == blocks
        assert asked(WIDE_BLOCKS=wide) == (blocks, False)
    assert asked(UNREAD="1") == ([64], False)


@pytest.mark.long
def test_what_an_import_said_is_kept_for_its_files(package, asked):
    assert [asked(), asked()] == [([64], True), ([64], False)]
    (package / "sizes.py").write_text(SIZES.replace("[64]", "[32]"))
    assert [asked(), asked()] == [([32], True), ([32], False)]
    (package / "sizes.py").write_text(SIZES)
    assert asked() == ([64], False)


@pytest.mark.long
def test_a_warm_process_compiles_nothing_and_imports_no_triton(package, asked):
    assert asked(build=True) == ([64], True)
    kernels = [entry for _, entry in jit.open_cache().entries()]
    assert asked(build=True) == ([64], False)
    assert asked(build=True, JITKERN_COMPILE="never") == ([64], False)
    assert len(kernels) == len([*jit.open_cache().entries()])


@pytest.mark.long
def test_functions_of_decorators_are_those_of_the_process(package, asked):
    (package / "kernels.py").write_text(
        KERNELS.replace(*EVEN).replace('{"B": b}) for b in sizes(WIDE)', "{})")
    )
    found = [asked(imports=True) for _ in range(2)]
    assert found == [([64], True), ([64], False)]


READ = [
    ("os.environ.setdefault('WIDE_BLOCKS', '1')\nWIDE =", [128, 256]),
    ("import packaging.version as v\nWIDE = v.Version(torch.__version__) < v.Version('2') or", [64]),
    ("WIDE = torch.cuda.get_device_capability() == (9, 0) or", [128, 256]),
    ("WIDE = torch.cuda.get_device_properties(0).multi_processor_count == 132 or", [128, 256]),
    ("WIDE = getattr(torch.cuda.get_device_properties(0), 'no_such', 1) == 1 or", [128, 256]),
    ("WIDE = 'H100' in torch.cuda.get_device_name() or", [128, 256]),
    ("WIDE = triton.runtime.driver.active.get_current_target().arch >= 90 or", [128, 256]),
    ("import subprocess as s\nWIDE = b'H100' in s.run(['nvidia-smi'], capture_output=True).stdout or", [128, 256]),
    ("WIDE = torch.version.cuda >= '13' or", [128, 256]),
    ("WIDE = os.getenv('OTHER') is not None or 'ANOTHER' in os.environ or", [64]),
]  # fmt: skip


@pytest.mark.parametrize("case", one_in_four(READ, lambda case: f"read{READ.index(case)}"))
def test_an_import_is_answered_as_on_the_machine_of_the_target(package, asked, case):
    text, blocks = case
    (package / "kernels.py").write_text(KERNELS.replace("WIDE =", text, 1))
    assert [asked(build=True), asked(build=True)] == [(blocks, True), (blocks, False)]


ASKED = [
    ("os.path.exists(DATA)", None, "data"),
    ("os.access(DATA, os.R_OK)", None, "data"),
    ("'data' in os.listdir(FOLDER)", None, "data"),
    ("os.path.getsize(DATA) > 2", "01", "012"),
    ("os.path.isdir(DATA)", "a file", ...),
    ("os.path.islink(DATA)", "a file", Path("other")),
    ("os.readlink(DATA) == 'other'", Path("data"), Path("other")),
    ("os.path.lexists(DATA)", None, Path("nowhere")),
]


def _put(path, what):
    """Put nothing, a text, a link or a folder at a path."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if isinstance(what, Path):
        path.symlink_to(what)
    elif what is ...:
        path.mkdir()
    elif what is not None:
        path.write_text(what)


@pytest.mark.long
@pytest.mark.parametrize("case", ASKED, ids=lambda case: case[0])
def test_paths_that_an_import_asks_for_are_facts(package, asked, tmp_path, case):
    asks, before, after = case
    (tmp_path / "data").mkdir()
    head = f"FOLDER = {str(tmp_path / 'data')!r}\nDATA = FOLDER + '/data'\nWIDE = {asks} or"
    (package / "kernels.py").write_text(KERNELS.replace("WIDE =", head, 1))
    for what in (before, after, before):
        _put(tmp_path / "data" / "data", what)
        blocks = [128, 256] if what == after else [64]
        assert asked(build=True)[0] == blocks
        assert asked(build=True) == (blocks, False)


@pytest.mark.long
@pytest.mark.parametrize("place", ["asked_of.py", "asked/of.py"])
def test_whether_a_module_is_found_is_a_fact(package, asked, tmp_path, place):
    (tmp_path / "asked").mkdir()
    name = place.removesuffix(".py").replace("/", ".")
    head = f"from importlib import util\nWIDE = util.find_spec({name!r}) is not None or"
    (package / "kernels.py").write_text(KERNELS.replace("WIDE =", head))
    assert asked() == ([64], True)
    (tmp_path / place).touch()
    assert [asked(), asked()] == [([128, 256], True), ([128, 256], False)]


def test_the_version_that_a_file_asks_for_is_a_fact(package, source):
    head = "from importlib import metadata\nVERSION = metadata.version('pytest')\nWIDE ="
    (package / "kernels.py").write_text(KERNELS.replace("WIDE =", head))
    assert ("version pytest", pytest.__version__) in declared_in("t::k", source, "k", TARGET).facts


FACTS = [
    'os.environ.get("T_WIDE") == "1"',
    'os.environ.get("T_ASK") == "1" and os.environ.get("T_WIDE") == "1"',
    "os.path.exists(DATA)",
    "os.path.exists(FOLDER) and os.path.getsize(DATA) == 3",
    "'data' in os.listdir(FOLDER)",
]


@pytest.mark.parametrize("asks", one_in_four(FACTS, lambda text: f"fact{FACTS.index(text)}"))
def test_a_fact_that_changes_within_a_process_counts(package, tmp_path, source, monkeypatch, asks):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("T_ASK", "1")
    head = f"FOLDER = {str(folder)!r}\nDATA = FOLDER + '/data'\nWIDE = {asks}\n"
    text = head + KERNELS.replace("import torch\n", "").replace("WIDE =", "_ =")
    (package / "kernels.py").write_text("import os\n" + text)
    x = torch.zeros(200, device="meta")
    found = []
    for wide in ("0", "1", "0", "1"):
        monkeypatch.setenv("T_WIDE", wide)
        _put(folder / "data", "012" if wide == "1" else None)
        if "getsize" in asks and wide == "0":
            _put(folder / "data", "01")
        declared = declared_in("t::k", source, "k", TARGET)
        k = jitkern.triton_kernel("keptlib.ops.kernels:k")
        assert len(k.variants(x, x, 192, target=H100)) == len(declared.configs)
        found.append([dict(config.constexprs)["B"] for config in declared.configs])
    assert found == [[64], [128, 256]] * 2


@pytest.mark.parametrize("edited", ["decorated_by_hand.py", "sizes_by_hand.py"])
def test_functions_of_decorators_follow_edits_of_files(tmp_path, monkeypatch, edited):
    monkeypatch.syspath_prepend(tmp_path)
    over = '@triton.heuristics({"B": lambda args: args["n"] // 3 // sizes_by_hand.BY})\n@triton.jit'
    text = KERNELS.replace("@triton.jit", over).replace("from .sizes import sizes", "")
    text = f"import sizes_by_hand\n{text}".replace("@triton.autotune", "#")
    (tmp_path / "decorated_by_hand.py").write_text(text)
    (tmp_path / "sizes_by_hand.py").write_text("BY = 3 // 3\n")
    source = Triton("decorated_by_hand.py", folder=str(tmp_path))
    found = []
    for _ in range(2):
        found.append(functions_for(source, "k").heuristics["B"]({"n": 12}))
        path = tmp_path / edited  # of the same size, within the second
        path.write_text(path.read_text().replace("// 3", "// 1"))
    assert found == ([4, 12] if edited.startswith("d") else [4, 1])


@pytest.mark.long
@needs_triton
def test_a_helper_that_an_earlier_folder_has_is_not_that_beside(tmp_path, monkeypatch):
    """Python takes the first one, which the key does not cover."""
    for folder in ("later", "earlier"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sizes_twice.py").write_text(f"BY = {len(folder)}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    text = KERNELS.replace("from .sizes import sizes", "").replace("@triton.autotune", "#")
    (tmp_path / "later" / "kernels_twice.py").write_text(f"from sizes_twice import BY\n{text}")
    source = Triton("kernels_twice.py", folder=str(tmp_path / "later"))
    with pytest.raises(CompileError, match="opens .*earlier/sizes_twice.py, which the cache key"):
        declared_in("test::k", source, "k", Target.parse(H100))


def test_functions_of_decorators_follow_a_reload(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    over = '@triton.heuristics({"B": lambda args: 8})\n@triton.jit'
    text = KERNELS.replace("@triton.jit", over).replace("from .sizes import sizes", "")
    path = tmp_path / "reloaded_by_hand.py"
    path.write_text(text.replace("@triton.autotune", "#"))
    module = importlib.import_module(path.stem)
    source = Triton(path.name, folder=str(tmp_path))
    assert functions_for(source, "k").heuristics["B"]({}) == 8
    path.write_text(path.read_text().replace("args: 8", "args: 16"))
    functions_for(source, "k")  # between the edit and the reload
    importlib.reload(module)
    assert functions_for(source, "k").heuristics["B"]({}) == 16


def test_imports_for_decorators_in_threads_leave_no_setting(tmp_path, monkeypatch):
    """The second begins while the first runs, and ends after it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(tmp_path)
    turns = {name: threading.Event() for name in ("first_runs", "second_runs", "first_ended")}
    monkeypatch.setitem(sys.modules, "turns", SimpleNamespace(**turns))
    head = "import helper_of_both, turns\ndef k(): pass\n"
    texts = {
        "first.py": f"{head}turns.first_runs.set()\nturns.second_runs.wait({LONGEST})\n",
        "second.py": f"{head}turns.second_runs.set()\nturns.first_ended.wait({LONGEST})\n",
        "helper_of_both.py": "",
    }
    write_files(tmp_path, texts)
    finders = [*sys.meta_path]

    def first():
        imported(Triton("first.py", folder=str(tmp_path)), "k")
        turns["first_ended"].set()

    def second():
        turns["first_runs"].wait(LONGEST)
        imported(Triton("second.py", folder=str(tmp_path)), "k")

    run_threads(first, second)
    assert (sys.dont_write_bytecode, sys.meta_path) == (False, finders)
    assert not [*tmp_path.rglob("*.pyc")]
    assert "helper_of_both" not in sys.modules


@pytest.mark.long
def test_one_import_may_serve_several_targets(source):
    first, second = (Target.parse(target_of(arch)) for arch in ("sm_80", "sm_90"))
    assert declared_in("t::k", source, "k", first) == declared_in("t::k", source, "k", second)
    assert len([*(jit.open_cache().root / "v1").glob("cuda-*/*declaration*")]) == 4  # two for each


@pytest.mark.parametrize("way", ["never", "background"])
def test_without_a_record_no_call_waits_for_an_import(source, way):
    with jitkern.using(compile=way), pytest.raises(NotCached, match="not cached"):
        declared_in("t::k", source, "k", TARGET, may_import=way == "never")


def install(folder, text):
    """Write the module of a distribution; returns the folder of its metadata."""
    (folder / "othername.py").write_text(text)
    info = folder / "other_lib-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-lib\nVersion: 1.2\n")
    (info / "RECORD").write_text("othername.py,,\n")
    (info / "top_level.txt").write_text("othername\n")
    return info


@pytest.mark.long
def test_an_import_has_the_facts_that_it_would_read_alone(package, monkeypatch):
    """Whichever files came before."""
    folder = package.parents[1]
    install(folder, "import os\nos.environ.get('OTHER')\n")
    monkeypatch.syspath_prepend(folder)
    text = KERNELS.replace("sizes(WIDE)", "[64]")
    absent = f"try: import absent\nexcept ImportError: pass\n{text}"
    texts = [*[f"import othername\n{text}"] * 3, text, absent]
    found = []
    for number, text in enumerate(texts):
        (package / f"k{number}.py").write_text(text)
        source = Triton(f"k{number}.py", folder=str(package), package="keptlib.ops")
        found.append(dict(declared_in("t::k", source, "k", TARGET).facts))
    own = {"variable WIDE_BLOCKS": None}
    other = {**own, "variable OTHER": None, "version other-lib": "1.2"}
    assert found == [other, other, other, own, {**own, "module absent": False}]


@pytest.mark.long
def test_installed_code_counts_by_its_version_wherever_it_lies(package, source):
    """And no fact are the metadata of all that is installed, and the folders above it."""
    folder = package.parents[1]
    text = "import importlib.metadata\nimportlib.metadata.packages_distributions()\n"
    info = install(folder, text)
    text = KERNELS.replace("sizes(WIDE)", "[64]")
    text += "for above in __import__('pathlib').Path(torch.__file__).parents:\n    above.exists()\n"
    (package / "kernels.py").write_text(f"__import__('other' + 'name')\n{text}")
    facts = dict(declared_in("t::k", source, "k", TARGET).facts)
    assert facts == {"variable WIDE_BLOCKS": None, "version other-lib": "1.2"}
    (info / "RECORD").write_text("")
    (info / "top_level.txt").write_text("")
    (package / "sizes.py").write_text(f"{SIZES}# another text\n")
    with pytest.raises(CompileError, match=r"opens .*othername\.py, which the cache key does not"):
        declared_in("t::k", source, "k", TARGET)


@pytest.mark.long
def test_a_property_that_no_absent_gpu_tells_is_refused(package, source):
    asks = "str(torch.cuda.get_device_properties(0).uuid)"
    (package / "kernels.py").write_text(KERNELS.replace("WIDE =", f"WIDE = {asks} or"))
    with pytest.raises(CompileError, match="asks for `uuid`, which no absent GPU tells"):
        declared_in("t::k", source, "k", TARGET)


def test_an_import_that_fails_is_refused_with_its_reason(package, source):
    (package / "kernels.py").write_text("import no_such_module\n" + KERNELS)
    says = r"cannot import its kernels: .*kernels\.py.*no_such_module"
    with pytest.raises(CompileError, match=says):
        declared_in("t::k", source, "k", TARGET)
    (package / "kernels.py").write_text(KERNELS)
    assert declared_in("t::k", source, "k", TARGET).name == "k"
    with pytest.raises(LaunchError, match="has no @triton.jit function `l`; it has: k"):
        declared_in("t::k", source, "l", TARGET)


def test_an_unknown_field_of_a_configuration_is_refused(package, source):
    for field in ("pre_hook", "num_consumer_groups"):
        text = f"\nk.configs[0].{field} = 2\n"
        (package / "kernels.py").write_text(KERNELS + text)
        with pytest.raises(CompileError, match=f"`{field}` of triton.Config is not supported"):
            declared_in("t::k", source, "k", TARGET)


ODD = [
    None, [], {}, {"reads": 3}, {"reads": [3]}, {"reads": []}, {"functions": []},
    {"functions": {"k": {"name": "k"}}, "facts": []}, {"functions": {"k": 3}, "facts": []},
]  # fmt: skip


@pytest.mark.parametrize("content", one_in_four(ODD))
def test_a_record_that_says_nothing_is_made_again(source, content):
    sound = declared_in("t::k", source, "k", TARGET)
    for path in (jit.open_cache().root / "v1").glob("cuda-*/*declaration*/manifest.json"):
        manifest = Manifest.decode(path.read_bytes())
        path.write_bytes(manifest._replace(meta={"content": content}).encode())
    again = source.replace(module="as_of_another_process")
    assert declared_in("t::k", again, "k", TARGET) == sound
