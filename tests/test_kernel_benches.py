"""`benches.kernels` and `benches.profile`: what they report, and that a wrong result gets no time."""

import csv
import itertools
import json
import math
import shutil
import sys
import types

import pytest
import torch
from helpers import declared
from torch.nn import functional as F

import jitkern.ops
from benches import profile
from benches.kernels import __main__ as command, bench, bench_op, checks, peers
from benches.kernels.shapes import Shape, named_shapes
from benches.kernels.subject import subject_of, subjects_of
from jitkern.devtools import timing
from jitkern.devtools.roofline import Bandwidth

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
SMALL = {"small": ("f32[8, 1000]",)}
_number = itertools.count()


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 100 GB/s, whose caches hold little."""
    monkeypatch.setattr(bench, "bandwidth", lambda device: Bandwidth(100e9, 120e9))
    monkeypatch.setattr("jitkern.devtools.timing.CPU_BYTES", 1 << 16)


def measured(function, shapes=SMALL, **options):
    options = {"device": "cpu", "only": ["eager"], "seconds": 0.01, "most": 3, **options}
    return bench_op(function, shapes, tell=lambda text: None, **options)


def rows_of(result, direction="forward"):
    return {row.who: row for row in result.rows if row.direction == direction}


@pytest.fixture
def times(tmp_path):
    """Declare an op that multiplies by a factor, and whose reference multiplies by 2."""

    def declare(body, **keywords):
        name = f"times{next(_number)}"

        def launch(k, x):
            x, out = x.contiguous(), torch.empty_like(x)
            getattr(k, name)[{"T": x.dtype}](out, x, x.numel())
            return out

        return declared(
            f"benched::{name}(Tensor x) -> Tensor",
            tmp_path / f"{name}.cpp",
            f'#include <cstdint>\nextern "C" void {name}(T* out, const T* x, int64_t n) {{ {body} }}\n',
            launch, lambda x: 2 * x, **keywords,
        )  # fmt: skip

    return declare


TWICE = "for (int64_t i = 0; i < n; i++) out[i] = 2 * x[i];"
THRICE = "for (int64_t i = 0; i < n; i++) out[i] = 3 * x[i];"


@pytest.mark.long
@needs_compiler
def test_an_op_and_its_reference_are_timed_forward_and_backward():
    result = measured(jitkern.ops.softmax)
    for direction, streams in (("forward", 2), ("backward", 3)):
        rows = rows_of(result, direction)
        assert list(rows) == ["jitkern", "eager"]
        for row in rows.values():
            assert row.op == "softmax" and row.shape == "small" and not row.note
            assert row.wall_us > 0 and row.kernel_us is None and row.samples == 3
            assert row.bytes == streams * 8 * 1000 * 4
            assert row.gbs == pytest.approx(row.bytes / row.wall_us / 1e3)
            assert row.of_copy == pytest.approx(row.gbs / 100)
            assert row.of_read == pytest.approx(row.gbs / 120)
    assert not result.failed
    assert json.loads(json.dumps(result.as_json()))["ceilings"] == {"copy": 100e9, "read": 120e9}


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("body", [THRICE, ""], ids=["wrong", "writes nothing"])
def test_a_wrong_result_has_no_time_but_the_reason(times, body):
    result = measured(times(body))
    rows = rows_of(result)
    assert rows["jitkern"].note.startswith("wrong: ")
    assert rows["jitkern"].wall_us is None and rows["jitkern"].gbs is None
    assert rows["eager"].wall_us > 0 and not rows["eager"].note
    assert result.failed


@pytest.mark.long
@needs_compiler
def test_a_wrong_gradient_has_no_time(times):
    op = times(TWICE)
    op.backward(lambda grad: 3 * grad)
    result = measured(op)
    assert not rows_of(result)["jitkern"].note
    row = rows_of(result, "backward")["jitkern"]
    assert row.note.startswith("wrong: ") and row.wall_us is None
    assert rows_of(result, "backward")["eager"].wall_us > 0


@pytest.mark.long
@needs_compiler
def test_a_peer_that_fails_is_named_and_stops_no_other(times, monkeypatch):
    def broken(x):
        raise RuntimeError("no such kernel\nand more")

    contenders = {"liger": peers.Contender("liger", broken)}
    of_shape = peers.Peers.of_shape
    monkeypatch.setattr(
        peers.Peers, "of_shape", lambda self: [*of_shape(self), *contenders.values()]
    )
    rows = rows_of(measured(times(TWICE)))
    assert rows["liger"].note == "RuntimeError: no such kernel" and rows["liger"].wall_us is None
    assert rows["jitkern"].wall_us > 0 and rows["eager"].wall_us > 0


@pytest.mark.long
@needs_compiler
def test_what_an_op_changes_is_compared(tmp_path):
    def launch(k, x, flag):
        k.flag_nan(flag, x, x.numel())

    name, text = "benched::flag_nan(Tensor x, Tensor(a!) flag) -> ()", tmp_path / "flag_nan.cpp"
    body = "for (int64_t i = 0; i < n; i++) *flag += x[i] != x[i];"
    source = f'#include <cstdint>\nextern "C" void flag_nan(int* flag, const float* x, int64_t n) {{ {body} }}\n'
    op = declared(name, text, source, launch, lambda x, flag: flag.add_(x.isnan().sum()) and None)
    x, flag = torch.full((10,), math.nan), torch.zeros(1, dtype=torch.int32)
    shape = Shape("all NaN", lambda: (x, flag.clone()))
    rows = rows_of(measured(op, [shape]))
    assert rows["jitkern"].note == rows["eager"].note == "" and not flag.any()
    op.reference(lambda x, flag: flag.add_(1) and None)
    wrong = rows_of(measured(op, [shape]))["jitkern"].note
    assert wrong == "wrong: other numbers than the reference"


@pytest.mark.long
@needs_compiler
def test_a_reference_without_float64_is_compared_with_itself(times):
    op = times(TWICE)

    def reference(x):
        assert x.dtype == torch.float32
        return 2 * x

    op.reference(reference)
    assert not rows_of(measured(op))["jitkern"].note
    op.reference(lambda x: reference(x) + 1)
    assert rows_of(measured(op))["jitkern"].note.startswith("wrong: ")


# ------------------------------------------------------------------------------ the command line


@pytest.mark.long
@needs_compiler
def test_the_command_prints_json_and_writes_a_table_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra docs: pip install jitkern[docs]")
    options = ["--device", "cpu", "--quick", "--peers", "eager", "--json", "--rounds", "2"]
    shape = "f32[8, 1000]"
    code = command.main(["softmax", *options, "--shapes", shape, "--plot", str(tmp_path)])
    out, err = capsys.readouterr()
    output = json.loads(out.splitlines()[-1])
    assert code == 0 and output["schema"] == 1
    assert output["device"] and output["commit"] and "torch" in output["versions"]
    (op,) = output["ops"]
    assert op["op"] == "softmax" and op["device"] == "cpu"
    assert len(op["rows"]) == 4 and all(row["wall_us"] > 0 for row in op["rows"])
    assert [file.rpartition(".")[2] for file in output["files"]] == ["csv", "svg", "png"]
    with (tmp_path / "softmax_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["who"] for row in rows] == ["jitkern", "eager"] * 2
    for row in rows:
        assert row["device"] == output["device"] and row["commit"] == output["commit"]
        assert row["torch"] == torch.__version__ and row["copy_gbs"] == "100.0"
    drawn = (tmp_path / "softmax_cpu.svg").read_text()
    assert "softmax forward" in drawn and "copy: 100 GB/s" in drawn and output["device"] in drawn
    assert (tmp_path / "softmax_cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "liger" not in err, "only eager was asked for"


@pytest.mark.long
@needs_compiler
def test_the_exit_code_tells_of_a_wrong_kernel(times, monkeypatch, capsys):
    op = times(THRICE)
    monkeypatch.setattr(command, "subjects_of", lambda names: [subject_of(op)])
    options = ["--device", "cpu", "--quick", "--peers", "eager", "--shapes", "f32[8]"]
    assert command.main(options) == 1
    assert "wrong: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmx"], "`softmx` is not an op, a namespace or a package with kernels; did you mean softmax?"),
        (["softmax", "--shapes", "vocabulry"], "softmax has no shape `vocabulry`; did you mean vocabulary?"),
        (["softmax", "--shapes", "f32[3], 4, 5, 6"], "got 4 arguments, and jitkern::softmax(Tensor x"),
        (["softmax", "--peers", "ligr"], "there is no peer `ligr`; did you mean liger?"),
        (["math:pi"], "`math:pi` is not an op of jitkern"),
        (["no_such_module:op"], "`no_such_module:op` cannot be found: No module named"),
    ],
    ids=["op", "shape", "call", "peer", "no op", "module"],
)  # fmt: skip
def test_mistakes_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as e:
        command.main([*arguments, "--device", "cpu"])
    assert e.value.code == 2
    assert message in capsys.readouterr().err


@needs_compiler
@pytest.mark.long
def test_a_cold_first_call_is_timed_in_a_process_of_its_own():
    result = measured(jitkern.ops.vec_add, {"small": ("f32[100]", "f32[100]")}, cold=True)
    rows = rows_of(result)
    assert rows["jitkern"].first_call_s > 0 and rows["eager"].first_call_s is None
    assert not rows["jitkern"].note


# ------------------------------------------------------------------------------ shapes and peers


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    wanted = peers.known_peers()
    left_out = peers.Peers(subject_of(jitkern.ops.softmax), "cuda", wanted).left_out
    assert left_out == {
        "liger": "there is no package `liger_kernel` here",
        "quack": "there is no package `quack` here",
        "flashinfer": "there is no package `flashinfer` here",
    }


@pytest.fixture
def others(monkeypatch):
    """Liger 0.8.5, quack 0.6.5 and FlashInfer 0.7.2: their functions' parameters, over PyTorch."""

    def rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        assert casting_mode in ("llama", "gemma", "none") and not in_place
        return F.rms_norm(X, W.shape, W + offset, eps)

    def add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        return rms_norm(X + R, W, eps, offset, casting_mode, in_place), X + R

    def cross_entropy(logits, target, weight=None, size_average=None, ignore_index=-100):
        assert weight is None and size_average is None
        return F.cross_entropy(logits, target)

    functions = {
        "liger_kernel.transformers.functional": {
            "liger_softmax": lambda x: x.softmax(-1),
            "liger_rms_norm": rms_norm,
            "liger_fused_add_rms_norm": add_rms_norm,
            "liger_layer_norm": lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps),
            "liger_cross_entropy": cross_entropy,
            "liger_swiglu": lambda a, b: F.silu(a) * b,
            "liger_geglu": lambda a, b: F.gelu(a, approximate="tanh") * b,
        },
        "quack.softmax": {"softmax": lambda x: x.softmax(-1)},
        "flashinfer.sampling": {
            "softmax": lambda logits, temperature=None, enable_pdl=None: logits.softmax(-1)
        },
    }
    for module, attributes in functions.items():
        made, names = None, module.split(".")
        for count in range(len(names), 0, -1):
            inner, made = made, types.ModuleType(".".join(names[:count]))
            vars(made).update(attributes if inner is None else {names[count]: inner})
            monkeypatch.setitem(sys.modules, made.__name__, made)


@pytest.mark.parametrize(
    "name",
    ["softmax", "rms_norm", "add_rms_norm", "layer_norm", "cross_entropy", "silu_and_mul",
     "gelu_tanh_and_mul", "benches.formulas:swiglu"],
)  # fmt: skip
def test_peers_are_called_with_their_own_parameters(name, others):
    (subject,) = subjects_of([name])
    call = named_shapes(subject, "cpu", "f32")
    shape = next(
        shape for name, shape in call.items() if name in ("row-1024", "8B-hidden", "8B-mlp")
    )
    args = subject.complete(shape.make())
    expected = subject.results(subject.reference(), args)
    for adapter in peers.ADAPTERS[subject.name]:
        if adapter.package != "torch":
            torch.testing.assert_close(subject.results(adapter.make(), args), expected)


# ------------------------------------------------------------------------------ what is right


def oracle(own, precise, family="pointwise"):
    return checks.Oracle(family, [own], [precise])


def test_one_rounding_is_right_and_two_places_off_is_wrong():
    precise = torch.rand(1000, dtype=torch.float64) + 1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        right = precise.to(dtype)
        off = right * (1 + 8 * torch.finfo(dtype).eps)
        found = oracle(right, precise)
        assert found.problem([right]) == ""
        assert found.problem([off]).startswith("wrong: ")


def test_twice_the_error_of_the_reference_is_right():
    precise = torch.ones(10, dtype=torch.float64)
    own = torch.full((10,), 1.01)
    assert oracle(own, precise).problem([torch.full((10,), 0.985)]) == ""
    assert "1.25 times the error" in oracle(own, precise).problem([torch.full((10,), 1.025)])


def test_a_peer_that_rounds_is_compared_by_the_errors_norm():
    precise = torch.ones(10, dtype=torch.float64)
    own, near, far = precise.float(), torch.full((10,), 1.02), torch.full((10,), 1.04)
    assert oracle(own, precise).problem([near]).startswith("wrong: ")
    assert oracle(own, precise).problem([near], exact=False) == ""
    assert "times the error" in oracle(own, precise).problem([far], exact=False)
    far[3] = math.nan
    assert oracle(own, precise).problem([far], exact=False).startswith("wrong: ")


@pytest.mark.gpu
def test_random_numbers_work_after_a_failed_capture():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        timing.captured([lambda: x.sum().item()], x.device)
    assert torch.randn(3, device="cuda").isfinite().all()
    assert timing.captured([lambda: torch.randn(3, device="cuda")], x.device)() > 0


def test_nan_and_infinity_must_be_where_the_reference_has_them():
    precise = torch.tensor([1.0, math.nan, math.inf, 1e300], dtype=torch.float64)
    own = precise.float()
    found = oracle(own, precise)
    assert found.problem([own.clone()]) == ""
    for number in range(4):
        wrong = own.clone()
        wrong[number] = 2.0 if number else math.nan
        assert found.problem([wrong]) == "wrong: NaN or infinity in the wrong places"


def test_a_result_of_another_kind_is_wrong():
    own = torch.ones(4)
    found = oracle(own, own.double())
    assert "gave float32[2] on cpu, the reference float32[4] on cpu" in found.problem([own[:2]])
    assert "gave float64[4]" in found.problem([own.double()])
    assert found.problem([]).startswith("wrong: ")
    whole = checks.Oracle("", [torch.arange(4)], [torch.arange(4)])
    assert whole.problem([torch.arange(4)]) == "" and whole.problem([torch.zeros(4).long()])


def test_rows_are_compared_within_their_largest_number():
    precise = torch.tensor([[1.0, 1e-8]], dtype=torch.float64)
    off = torch.tensor([[1.0, 5e-6]])
    assert oracle(precise.float(), precise, "rows").problem([off]) == ""
    assert oracle(precise.float(), precise).problem([off]).startswith("wrong: ")


def test_results_are_compared_by_parts(monkeypatch):
    monkeypatch.setattr(checks, "CHUNK", 10)
    precise = torch.rand(7, 5, dtype=torch.float64)
    wrong = precise.float()
    wrong[6, 4] += 1
    found = oracle(precise.float(), precise)
    assert found.problem([precise.float()]) == "" and found.problem([wrong]).startswith("wrong: ")


# ------------------------------------------------------------------------------ the trace


@needs_compiler
@pytest.mark.long
def test_a_trace_has_a_range_for_each_pass(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    options = ["--device", "cpu", "--shape", "f32[8, 100]", "--rounds", "2", "--json"]
    assert profile.main(["softmax", *options, "--trace", str(trace)]) == 0
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert output["op"] == "softmax" and output["trace"] == str(trace)
    named = {kernel["name"]: kernel for kernel in output["kernels"]}
    assert named["jitkern::softmax_backward"]["calls"] == 2
    assert all(kernel["us"] > 0 for kernel in output["kernels"])
    events = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    for number in range(2):
        assert f"softmax forward {number}" in events and f"softmax backward {number}" in events
    assert not any(name.startswith("softmax ") for name in named)


# ------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "muladd", "vec_add"])
def test_on_a_gpu_kernels_are_timed_apart_from_their_calls(name):
    op = getattr(jitkern.ops, name)
    required = [a for a in op.signature.arguments if not a.has_default_value()]
    tensors = ("bf16[256, 1024]",) * len(required)
    result = measured(op, {"small": tensors}, device="cuda")
    for direction in ("forward", "backward") if op.gradient else ("forward",):
        for row in rows_of(result, direction).values():
            assert not row.note and row.kernel_us > 0 and row.wall_us > 0 and row.gbs > 0


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Inductor, about its own lowering
def test_on_a_gpu_compiled_peers_are_captured_in_both_directions():
    only = ["eager", "torch.compile", "torch.compile-dynamic"]
    shapes = {"one": ("bf16[64, 512]",), "other": ("bf16[32, 1024]",)}
    result = measured(jitkern.ops.softmax, shapes, device="cuda", only=only)
    assert len(result.rows) == 16
    for row in result.rows:
        assert not row.note and row.kernel_us > 0 and row.wall_us > 0
