"""What a run calls is written down, and prewarm builds exactly that."""

import json
import os
import re
import sys

import pytest
import torch
from helpers import last_json

import jitkern.ops
from jitkern import config, declare, testing
from jitkern.calls import record, samples
from jitkern.calls.signature import Signature, tensors_in
from jitkern.errors import DeclarationError
from jitkern.op.op import OPS
from jitkern.prewarming.op_calls import recorded_calls
from jitkern.prewarming.shards import shard_of
from jitkern.target import Target

APP = """
import torch, jitkern.ops, jitkern
x = torch.randn(8, 1000)
for _ in range(3):
    jitkern.ops.softmax(x)
jitkern.ops.softmax(x[:, ::2])
jitkern.ops.vec_add(x[0, 1:], x[0, 1:])
print(jitkern.stats()["compiles"])
"""


@pytest.fixture
def recorded(tmp_path, run_python):
    """What APP recorded on an empty cache."""
    path = tmp_path / "calls.jsonl"
    assert run_python(APP, JITKERN_RECORD=str(path)).stdout == "2\n"
    return path


@pytest.mark.long
def test_each_call_that_had_to_be_readied_is_a_line(recorded):
    calls = record.read(recorded)
    ops = ["jitkern::softmax", "jitkern::softmax", "jitkern::vec_add"]
    assert [(c.op, c.device, c.kind) for c in calls] == [(op, "cpu", "cc") for op in ops]
    shapes = [
        [(*a.shape, *a.stride(), a.storage_offset()) for a in tensors_in(call.args)]
        for call in calls
    ]
    assert shapes == [[(8, 1000, 1000, 1, 0)], [(8, 500, 1000, 2, 0)], [(999, 1, 1), (999, 1, 1)]]
    assert all(a.is_meta for call in calls for a in tensors_in(call.args))


@pytest.mark.long
def test_a_warm_process_records_the_same(recorded, tmp_path, run_python):
    again = tmp_path / "again.jsonl"
    assert run_python(APP, JITKERN_RECORD=str(again)).stdout == "0\n"
    assert again.read_bytes() == recorded.read_bytes()


@pytest.mark.long
def test_prewarm_from_a_recording_leaves_nothing_to_compile(recorded, cli, tmp_path, run_python):
    other = str(tmp_path / "other")
    code, out, err = cli("prewarm", "--from", str(recorded), "--cache-dir", other, "--json")
    report = last_json(out)
    assert (code, report["failed"], report["skipped"]) == (0, 0, 0), err
    built = {(r["op"], r["variant"].partition(".")[0]) for r in report["results"]}
    assert built == {
        ("jitkern::softmax", "f32"), ("jitkern::softmax", "call"),
        ("jitkern::vec_add", "f32"), ("jitkern::vec_add", "call"),
        ("jitkern::runtime", ""),
    }  # fmt: skip
    code = APP + "import sys; print('jitkern.trace.trace' in sys.modules)"
    done = run_python(code, JITKERN_CACHE_DIR=other, JITKERN_COMPILE="never", PATH="/nonexistent")
    assert done.stdout == "0\nFalse\n", done.stderr


@pytest.mark.long
def test_the_node_is_wanted_if_the_run_needed_gradients(tmp_path, run_python):
    path = tmp_path / "calls.jsonl"
    app = """
import torch, jitkern.ops
from jitkern.config import background
x, w = torch.randn(4, 4, requires_grad=True), torch.ones(4)
with torch.no_grad():
    jitkern.ops.softmax(x), jitkern.ops.rms_norm(x, w)
background.settle()
jitkern.ops.rms_norm(x, w), jitkern.ops.rms_norm(x, w)
"""
    assert not run_python(app, JITKERN_RECORD=str(path)).stderr
    calls = record.read(path)
    assert [(call.op, call.gradient) for call in calls] == [
        ("jitkern::softmax", False), ("jitkern::rms_norm", False),
        ("jitkern::rms_norm", True),
    ]  # fmt: skip
    wanted = recorded_calls([jitkern.ops.softmax, jitkern.ops.rms_norm], calls, path)
    assert [one.node for one in wanted] == [False, True]
    assert [one.node for one in shard_of(wanted, 1, 1)] == [False, True]


@pytest.mark.long
def test_the_record_command_passes_a_programs_status_on(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = APP + "raise SystemExit(3)"
    for _ in range(2):  # the second run stores no call again
        code, out, err = cli("record", "--json", "--", sys.executable, "-W", "ignore", "-c", script)
        assert (code, "3 calls in" in err) == (3, True), err
        assert (last_json(out)["calls"], last_json(out)["status"]) == (3, 3)
    assert len(record.read(tmp_path / "jitkern-calls.jsonl")) == 3
    assert cli("record", "--")[0] == 2
    assert cli("record", "--", "/nonexistent/program")[0] == 127


def test_a_file_that_record_cannot_write_is_told_before_the_run(cli, tmp_path):
    wanted = tmp_path / "missing" / "calls"
    code, _, err = cli("record", "-o", str(wanted), "--", "touch", str(tmp_path / "ran"))
    assert (code, f"{wanted} cannot be written: name a file in a" in err) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_a_program_without_calls_leaves_no_file(cli, tmp_path):
    wanted, folder = tmp_path / "calls", tmp_path / "folder"
    folder.mkdir()
    for program, status in (("false", 1), ("/nonexistent/program", 127)):
        code, _, err = cli("record", "-o", f"{folder}/../calls", "--", program)
        assert (code, wanted.exists(), "--from" in err) == (status, False, False), err
    assert cli("record", "-o", str(wanted), "--", "false")[2] == "no calls were recorded\n"
    wanted.write_text(recorded_line("a::b", 1))
    _, _, err = cli("record", "-o", f"{folder}/../calls", "--", "false")
    assert err == f"1 call in {wanted}: jitkern prewarm --from {wanted}\n"


def recorded_line(op, args, device="cpu", kind="cc"):
    tensor = {"tensor": "float32", "shape": [4], "stride": [1], "offset": 0}
    fields = {"op": op, "module": "", "device": device, "kind": kind, "args": [tensor] * args}
    return json.dumps({"schema": 1, **fields}) + "\n"


OF_AN_OP = '"op":"a::b","module":"","device":"cpu","kind":"cc",'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x", ""), ("[]", ""), ("{}", ""), ("[" * 100000, ""), (f'{{"schema":2,{OF_AN_OP}"args":[]}}', ""),
        ('{"schema":1,"op":1,"module":"","device":"cpu","kind":"cc","args":[]}', ""),
        (f'{{"schema":1,{OF_AN_OP}"args":[{{"tensor":"load"}}]}}', ""),
        (f'{{"schema":1,{OF_AN_OP}"args":[{{"dtype":"nn"}}]}}', ""),
        (recorded_line("a::b", 1).replace("[4]", "[-5]"), ""), ('{"a":1}', ': .*it has no "schema"'),
        (recorded_line("a::b", 1).replace("float32", "f7"), ": .*`f7` is not a"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_call_is_named(tmp_path, line, says):
    path = tmp_path / "calls"
    path.write_text(f"{line}\n")
    with pytest.raises(DeclarationError, match=f"calls, line 1 is not a recorded call{says}"):
        record.read(path)


def test_an_op_that_is_not_here_is_named(cli, tmp_path):
    path = tmp_path / "calls"
    path.write_text(of_module("nolib.kernel"))
    code, _, err = cli("prewarm", "--from", str(path), "nolib")
    assert (code, "calls of nolib::f, declared in nolib.kernel" in err) == (1, True), err
    code, _, err = cli("prewarm", "--from", str(tmp_path / "none"))
    assert (code, "there is no file" in err) == (2, True), err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise NameError('oops')", "cannot be imported: NameError('oops')"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit(3)"),
        ("import no_such_dependency", 'cannot be imported: ModuleNotFoundError("No module named'),
        ("", "no longer declares it: record again"),
    ],
)
def test_why_the_module_of_a_recorded_op_gives_none_is_told(cli, tmp_path, monkeypatch, text, says):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "declares_f.py").write_text(text)
    monkeypatch.delitem(sys.modules, "declares_f", raising=False)
    path = tmp_path / "calls"
    path.write_text(of_module("declares_f"))
    code, _, err = cli("prewarm", "--from", str(path), "declares_f")
    assert code == 1
    assert f"calls of nolib::f, declared in declares_f, which {says}" in err


def of_module(module):
    return recorded_line("nolib::f", 1).replace('"module": ""', f'"module": "{module}"')


@pytest.mark.long
@pytest.mark.parametrize("module", ["stray", "stray.kernel", "", "__main__", ".relative", "this"])
def test_a_module_that_nobody_named_is_not_imported(cli, tmp_path, monkeypatch, module):
    (tmp_path / "stray.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "calls"
    path.write_text(of_module(module))
    code, out, err = cli("prewarm", "--from", str(path))
    assert (code, f"calls of nolib::f, declared in {module}, " in err) == (1, True), err
    named = f"name it: `jitkern prewarm --from {path} {module.partition('.')[0]}`" in err
    assert named == (module in ("stray", "stray.kernel", "this"))
    assert not (tmp_path / "ran").exists()
    assert out == ""
    code, _, err = cli("prewarm", "--from", str(path), "jitkern")
    assert (code, (tmp_path / "ran").exists()) == (1, False), err
    assert "nothing was built" in err


def test_a_module_of_an_installed_package_is_imported(cli, tmp_path, monkeypatch):
    package = tmp_path / "registered"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "more.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(declare, "installed", lambda: ["registered"])
    path = tmp_path / "calls"
    path.write_text(of_module("registered.more"))
    _, _, err = cli("prewarm", "--from", str(path))
    assert "declared in registered.more, which no longer declares it" in err
    assert (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_bad_call_takes_no_good_one_away(cli, tmp_path, compiler):
    path = tmp_path / "calls"
    good, bad = recorded_line("jitkern::vec_add", 2), recorded_line("jitkern::vec_add", 1)
    path.write_text(good + bad + re.sub(r'"args": .*', '"args": [3, 4]}', good))
    arguments = ("prewarm", "--from", str(path), "--jobs", "1", "--json")
    report = json.loads(cli(*arguments)[1])
    assert [row["status"] for row in report["results"]] == ["failed"]
    code, out, _ = cli(*arguments, "--keep-going")
    failed = [row["reason"] for row in json.loads(out)["results"] if row["status"] == "failed"]
    assert [variant.label for variant in compiler.compiles] == ["f32"]
    assert (code, len(failed)) == (1, 2)
    assert f"{path}, line 2 does not fit the op" in failed[0]
    assert f"its launch function failed on {path}, line 3: " in failed[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "kind", "says"),
    [
        (
            "cuda",
            "nvrtc",
            "1 recorded call on cuda: no target is of this device: add e.g. --target cuda-",
        ),
        ("cpu", "gone", "the op has no gone source"),
        ("xpu", "cc", "the op has no cc source"),
    ],
)
def test_a_recorded_call_that_nothing_fits_is_skipped(cli, tmp_path, compiler, device, kind, says):
    path = tmp_path / "calls"
    odd = recorded_line("jitkern::vec_add", 2, device, kind)
    path.write_text(recorded_line("jitkern::vec_add", 2) + odd)
    cpu = str(Target.current("cpu"))
    arguments = ("prewarm", "--from", str(path), "--target", cpu)
    code, out, err = cli(*arguments)
    assert (code, "1 skipped" in out, says in err) == (0, True, True), err
    assert cli(*arguments, "--fail-on-miss", "--shard", "1/2")[0] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "contains no calls"),
        (
            "".join(recorded_line("jitkern::vec_add", n) for n in (2, 1)),
            "line 2 does not fit the op: ",
        ),
        (recorded_line("jitkern::vec_add", 3), "3 arguments, and jitkern::vec_add"),
    ],
)
def test_a_recording_that_is_of_no_use_is_an_error(cli, tmp_path, lines, says):
    path = tmp_path / "calls"
    path.write_text(lines)
    code, _, err = cli("prewarm", "--from", str(path))
    assert (code, f"{path}" in err, says in err) == (1, True, True), err


VALUES = (
    None, True, 3, -0.5, float("inf"), "text", [1, 2], torch.float16, torch.device("cuda"),
)  # fmt: skip


def test_every_kind_of_argument_survives(tmp_path):
    path = tmp_path / "calls"
    with config.using(record=path):
        record.note("a::b", "", "cpu", "cc", VALUES)
        record.note("a::b", "", "cpu", "cc", [torch.ones(0, 3), [torch.ones(2)]])
        record.note("a::b", "", "cpu", "cc", [object()])
    first, second = record.read(path)
    assert first.args == VALUES
    assert (second.args[0].shape, second.args[1][0].shape) == ((0, 3), (2,))


def test_calls_that_differ_in_sizes_alone_are_bounded(tmp_path, caplog):
    path = tmp_path / "calls"
    with config.using(record=path):
        for n in range(record.MOST + 50):
            record.note("a::many", "", "cpu", "cc", [torch.ones(n)])
            record.note("a::listed", "", "cpu", "cc", [[torch.ones(n), n]])
    assert len(record.read(path)) == 2 * record.MOST
    says = "a::many: recorded 64 calls that differ only in sizes and numbers"
    assert caplog.text.count(says) == 1


def test_a_call_that_needs_other_kernels_is_always_recorded(tmp_path):
    path = tmp_path / "calls"
    with config.using(record=path):
        for n in range(record.MOST + 50):
            record.note("a::one_each", "", "cpu", "cc", [n], lambda call: f"kernel {call[0] // 2}")
    assert len(record.read(path)) == record.MOST + 50


def test_kernels_of_known_calls_are_asked_for_a_few_times_only(tmp_path, caplog):
    path, asked = tmp_path / "calls", []
    known = record.MOST + record.ENOUGH

    def kernels(call):
        asked.append(call)
        return "new" if len(asked) == known else "same"

    with config.using(record=path):
        for n in range(2 * known):
            for _ in range(2):
                record.note("a::asked", "", "cpu", "cc", [n], kernels)
    assert len(asked) == known + record.ENOUGH, "a new kernel begins the count anew"
    assert len(record.read(path)) == record.MOST + 1
    says = "further calls that differ only in sizes and numbers will not be recorded"
    assert caplog.text.count(says) == 1
    with config.using(record=path):
        record.note("a::asked", "", "cpu", "cc", [0.5], kernels)
    assert len(record.read(path)) == record.MOST + 2, "another type is another outline"


TIMES = """
import torch
from jitkern.declare import Cpp, kernel
op = kernel("recorded::times(Tensor x, int v) -> Tensor", cpu=Cpp("times.cpp", folder="."))
@op.reference
def _(x, v):
    return x * v
@op.launch("cpu")
def _(k, x, v):
    out = torch.empty_like(x)
    k.times[{"T": x.dtype, "V": v}](out, x, x.numel())
    return out
for v in range(1, 101):
    assert op(torch.ones(3), v)[0] == v
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "environment",
    [
        {"JITKERN_COMPILE": "never", "JITKERN_FALLBACK": "reference"},
        {"JITKERN_COMPILE": "background", "PATH": "/nonexistent"},
        {"PATH": "/nonexistent"},
    ],
    ids=["never", "background", "no compiler"],
)
def test_what_the_reference_served_is_recorded(tmp_path, run_python, environment):
    """Every kernel of it, too."""
    (tmp_path / "times.cpp").write_text('extern "C" void times(T* y, const T* x, long n) {}\n')
    path = tmp_path / "calls"
    done = run_python(TIMES, JITKERN_RECORD=str(path), **environment)
    assert done.returncode == 0, done.stderr
    calls = record.read(path)
    assert [(call.kind, call.args[1]) for call in calls] == [("cc", v) for v in range(1, 101)]


def test_a_call_that_is_cut_off_is_left_out(tmp_path, caplog, monkeypatch):
    path = tmp_path / "calls"
    write = os.write
    with config.using(record=path):
        record.note("a::cut", "", "cpu", "cc", [1])
        for part in (5, 40, 0):
            with monkeypatch.context() as patched:
                patched.setattr(os, "write", lambda f, data, n=part: write(f, data[:n]))
                record.note("a::cut", "", "cpu", "cc", [f"lost {part}"])
            assert "cannot record" in caplog.text
        record.note("a::cut", "", "cpu", "cc", [2])
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:-1]))
        record.note("a::cut", "", "cpu", "cc", [3])
    caplog.clear()
    assert [call.args for call in record.read(path)] == [(1,), (2,), (3,)]
    told = [r.getMessage() for r in caplog.records]
    assert told == [f"{path}, line {n} was cut off; leaving it out" for n in (2, 3)]


def test_a_call_too_long_to_read_is_not_written(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(record, "MAX_LINE", 1000)
    path = tmp_path / "calls"
    with config.using(record=path):
        for n in (50, 900, 1100):
            record.note("a::long", "", "cpu", "cc", ["x" * n])
    assert "cannot record" in caplog.text
    assert [len(call.args[0]) for call in record.read(path)] == [50, 900]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    with config.using(record=tmp_path / "none" / "calls"):
        record.note("a::lost", "", "cpu", "cc", [1])
    assert "cannot record" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f16[64, 1000]", (torch.float16, (64, 1000))),
        ("i64[]", (torch.int64, ())),
        ("bool[2147483648]", (torch.bool, (2147483648,))),
    ],
)
def test_a_text_spells_a_tensor(text, expected):
    found = samples.tensor(text)
    assert (found.dtype, tuple(found.shape)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "f33[4]", "f32[4", "float32[4]", "f32[-1]", "f32[²]", "f16[a]", "text", "",
        f"f32[{10**30}]", f"f32[{10**18}, {10**18}]", f"f32[{'9' * 5000}]",
    ],
)  # fmt: skip
def test_a_text_that_spells_no_tensor_is_named(text):
    schema = "a::b(Tensor x, str s='') -> Tensor"
    _, bad = samples.samples_of(Signature(schema), ["i8[]", (text, "f32[4]")])
    says = f"call 2 of prewarm=: `{text:.80}` does not describe a tensor, as `f16"
    assert bad.problem.startswith(says)


def test_texts_are_tensors_where_the_schema_has_them_alone():
    signature = Signature("a::b(Tensor? x, str s) -> Tensor")
    (sample,) = samples.samples_of(signature, [("f32[4]", "f32[4]")])
    x, s = sample.args
    assert (tuple(x.shape), s) == ((4,), "f32[4]")


def test_lists_of_texts_are_lists_of_tensors():
    schema = "a::b(Tensor[] x, Tensor?[] y, str[] s) -> Tensor"
    call = (["f32[4]", "f16[2]"], [None, "f32[]"], ["f32[4]"])
    good, bad = samples.samples_of(Signature(schema), [call, (["f33[4]"], [], [])])
    x, y, s = good.args
    assert [t.dtype for t in x] == [torch.float32, torch.float16]
    assert (y[0], tuple(y[1].shape), s) == (None, (), ["f32[4]"])
    assert "`f33[4]` does not describe a tensor" in bad.problem


@pytest.mark.parametrize(
    ("call", "says"), [(("f32[4]", 1, 2), "3 arguments, and a::b.* takes 2"), ((), "no x for a::b")]
)
def test_a_call_of_another_length_is_refused(call, says):
    (sample,) = samples.samples_of(Signature("a::b(Tensor x, int n=1) -> Tensor"), [call])
    assert re.search(says, sample.problem)


def test_prewarm_in_the_declaration_adds_calls(cli, tmp_path, monkeypatch, compiler):
    (tmp_path / "warmed").mkdir()
    (tmp_path / "warmed" / "__init__.py").write_text("")
    (tmp_path / "warmed" / "k.cpp").write_text('extern "C" void twice(T* out, const T* x) {}\n')
    (tmp_path / "warmed" / "kernel.py").write_text(
        "import torch\nfrom jitkern.declare import Cpp, kernel\n"
        "twice = kernel('warmed::twice(Tensor x, *, int n=1) -> Tensor', cpu=Cpp('k.cpp'),\n"
        "               prewarm=[('f32[3]', 2), 'f64[5]', ('i8[2, 2]', 1)])\n"
        "@twice.reference\ndef _(x, n): return x * 2\n"
        "@twice.launch('cpu')\ndef _(k, x, *, n):\n    out = torch.empty_like(x)\n"
        "    k.twice[{'T': x.dtype, 'N': n}](out, x)\n    return out\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = cli("prewarm", "warmed", "--json", "--jobs", "1")
    report = last_json(out)
    assert code == 0, err
    assert {v.label for v in compiler.compiles} == {"f32.N2", "f64.N1", "i8.N1"}, report
    op = OPS["warmed::twice"]
    declaration = op.declaration._replace(prewarm=["f33[4]"])
    monkeypatch.setattr(op, "declaration", declaration)
    testing.forget_samples(op)
    for told, *shard in ((1,), (1, "--shard", "1/1"), (1, "--shard", "1/2"), (0, "--shard", "2/2")):
        code, _, err = cli("prewarm", "warmed", *shard)
        assert code == told
        assert ("warmed::twice: call 1 of prewarm=: `f33[4]`" in err) == bool(told)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4, 4]}, {"shape": [-4]}, {"shape": [True]}, {"shape": [1] * 65, "stride": [1] * 65}, {"offset": -1},
        {"offset": 1.5}, {"more": 0}, {"shape": [10**30]}, {"shape": [10**25]}, {"tensor": "_inductor"}, {"shape": 4},
    ],
    ids=range(11),
)  # fmt: skip
def test_a_line_from_anybody_is_read_within_bounds(change):
    fields = json.loads(recorded_line("a::b", 1))
    assert record.parsed(json.dumps(fields)).args[0].shape == (4,)
    fields["args"][0].update(change)
    before = set(sys.modules)
    with pytest.raises(ValueError):
        record.parsed(json.dumps(fields))
    assert not {name for name in set(sys.modules) - before if name.startswith("torch")}


def test_arguments_are_a_list_and_no_tensor():
    fields = json.loads(recorded_line("a::b", 1))
    fields["args"] = {"tensor": "float32", "shape": [10**12], "stride": [1], "offset": 0}
    with pytest.raises(ValueError, match="its arguments are not a list"):
        record.parsed(json.dumps(fields))
