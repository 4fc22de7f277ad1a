"""`.tune`: configurations of any kind of kernel, measured once per device model, kept in the cache."""

import itertools
import json

import pytest
import torch
from conftest import H100, FakeCompiler, served, slot_of

from jitkern import cache_tools, config, jit
from jitkern.compilers import COMPILERS
from jitkern.compilers.cuda import toolkit
from jitkern.declare import Cpp, Cuda, Triton, kernel
from jitkern.errors import DeclarationError, LaunchError
from jitkern.launch import autotune
from jitkern.launch.kernels import Kernels, Runner
from jitkern.launch.tuned import parts_of
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.ahead import keep_plans, stubs_of
from jitkern.runtime import binding, linker, plans
from jitkern.source.kinds import Variant
from jitkern.target import Target
from jitkern.trace.world import world_of

needs_runtime = pytest.mark.skipif(
    not binding.runtime(), reason="no launch runtime on this platform"
)
needs_nvrtc = pytest.mark.skipif(
    not toolkit.nvrtc_libraries(), reason="needs NVRTC: pip install jitkern[cuda]"
)
SOURCE = """
#if WAY == 13
#error a configuration that does not compile
#endif
extern "C" void scale(T* y, const T* x, double a, long n) {
  for (long i = 0; i < n; i++) y[i] = a * x[i];
}
extern "C" void add(T* x, double a, long n) {
  for (long i = 0; i < n; i++) x[i] += a;
}
"""
_number = itertools.count()
HERE = Target.current("cpu")


@pytest.fixture
def declare(tmp_path):
    """An op with a launch function for the CPU, and configurations for it."""
    (tmp_path / "k.cpp").write_text(SOURCE)

    def declare(launch, configurations, key=None, schema="(Tensor x) -> Tensor"):
        op = kernel(f"jitkern_tune::f{next(_number)}{schema}", cpu=Cpp(str(tmp_path / "k.cpp")))
        op.launch("cpu")(launch)
        if configurations:
            op.tune("cpu", key=key)(configurations)
        return op

    return declare


class Clock:
    """Stands for time: what a configuration costs. Each is run once, and noted."""

    def __init__(self, monkeypatch, cost):
        self.measured = []

        def measure(run, candidate, device):
            run(candidate)()
            self.measured.append(candidate)
            return cost(candidate)

        monkeypatch.setattr(autotune, "_milliseconds", measure)


@pytest.fixture
def clock(monkeypatch):
    """The higher `WAY`, the quicker."""
    return Clock(monkeypatch, lambda config: 1.0 / config["WAY"])


def ways(x):
    return [{"WAY": 1}, {"WAY": 3}, {"WAY": 2}]


def double(k, x):
    x = x.contiguous()
    y = torch.empty_like(x)
    k.scale[{"T": x.dtype, "WAY": k.config["WAY"]}](y, x, 2.0, x.numel())
    return y


def length(x):
    return x.shape[-1]


def choices(op):
    source = op.sources["cpu"][0]
    return [choice for _, choice in autotune.choices_of(op.name, source, HERE)]


def ways_built(op):
    return {
        dict(entry.manifest.inputs["variant"]["template"]).get("WAY")
        for _, entry in jit.open_cache().entries()
        if entry.op == op.name and entry.manifest.inputs["source"]["kind"] == "cc"
    } - {None}


# ------------------------------------------------------------------ choosing


@needs_runtime
def test_the_quickest_is_chosen_once_and_served_by_a_stub(declare, clock):
    op = declare(double, ways)
    for _ in range(2):
        assert torch.equal(served(op, torch.ones(4)), torch.full((4,), 2.0))
    assert clock.measured == [{"WAY": 1}, {"WAY": 3}, {"WAY": 2}]
    (choice,) = choices(op)
    assert choice["configs"][choice["choice"]] == "{'WAY': 3}"
    assert choice["situation"] == {"dtypes": "('f32',)"}


def test_really_measured(declare):
    def busy(k, x):
        y = torch.empty_like(x)
        for _ in range(k.config["times"]):
            k.scale[{"T": x.dtype}](y, x, 2.0, x.numel())
        return y

    op = declare(busy, lambda x: [{"times": 200}, {"times": 1}])
    op(torch.ones(1000))
    (choice,) = choices(op)
    slow, quick = choice["milliseconds"]
    assert choice["choice"] == 1 and quick < slow


def test_dtypes_and_what_key_returns_choose_anew(declare, clock):
    op = declare(double, ways, key=length)
    for x in (torch.ones(4), torch.ones(3, 4), torch.ones(5), torch.ones(5, dtype=torch.float64)):
        for _ in range(2):
            assert torch.equal(op(x), 2 * x)
            linker.settle()
    assert len(clock.measured) == 3 * 3
    assert {(c["situation"]["dtypes"], c["situation"]["key"]) for c in choices(op)} == {
        ("('f32',)", "4"), ("('f32',)", "5"), ("('f64',)", "5")
    }  # fmt: skip


@needs_runtime
def test_what_key_and_list_ask_is_guarded(declare, monkeypatch):
    Clock(monkeypatch, lambda config: 1.0 / config["factor"])

    def launch(k, x):  # tells which configuration it ran in
        x = x.contiguous()
        y = torch.empty_like(x)
        k.scale[{"T": x.dtype}](y, x, float(k.config["factor"]), x.numel())
        return y

    op = declare(
        launch,
        lambda x: [{"factor": f} for f in ((2, 3) if x.shape[0] < 10 else (4, 5, x.stride()[0]))],
        key=lambda x: ("long", x.shape[0] > 100, x.dim()),
    )
    for n in (4, 200, 5, 50, 9, 10, 101, 100, 150):
        wanted = 3 if n < 10 else 5
        assert served(op, torch.ones(n)).tolist() == [wanted] * n
    assert served(op, torch.ones(70)[::7]).tolist() == [7] * 10  # its list has 7, of the stride
    assert served(op, torch.ones(20)).tolist() == [5] * 20


@needs_runtime
def test_whether_two_inputs_are_one_is_guarded_in_a_key_too(declare, monkeypatch):
    Clock(monkeypatch, lambda config: 1.0)

    def launch(k, x, y):
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype}](out, x, k.config["a"], x.numel())
        return out

    op = declare(
        launch,
        lambda x, y: [{"a": 2.0 if x is y else 3.0}, {"a": 2.0 if x is y else 3.0}],
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    x, y = torch.ones(3), torch.ones(3)
    assert served(op, x, x).tolist() == [2, 2, 2]
    assert served(op, x, y).tolist() == [3, 3, 3]
    assert served(op, y, y).tolist() == [2, 2, 2]


def test_an_in_place_op_changes_its_argument_once(declare, clock):
    def launch(k, x):
        k.add[{"T": x.dtype, "WAY": k.config["WAY"]}](x, 1.0, x.numel())

    op = declare(launch, ways, schema="(Tensor(a!) x) -> ()")
    x = torch.zeros(4)
    for count in range(1, 5):
        op(x)
        linker.settle()
        assert x.tolist() == [count] * 4
    assert len(clock.measured) == 3


def test_copies_have_layout_alignment_and_identity():
    base = torch.arange(40.0)
    for x in (
        base[1:], base[3:].view(37)[::3], base.view(5, 8).t(), base[:1].expand(7), base[:0],
        base.view(5, 8)[:, 2:4], torch.tensor(3.0),
    ):  # fmt: skip
        (copy, again), = autotune.copied([[x, x]], {})  # fmt: skip
        assert copy is again and copy is not x
        assert torch.equal(copy, x) and copy.stride() == x.stride()
        assert x.numel() == 0 or copy.data_ptr() != x.data_ptr()
        assert x.numel() == 0 or copy.data_ptr() % 64 == x.data_ptr() % 64


def test_any_constant_may_be_in_a_configuration(declare, clock):
    seen = []

    def launch(k, x):
        seen.append(dict(k.config))
        with pytest.raises(TypeError):
            k.config["WAY"] = 4
        return double(k, x.to(k.config["dtype"]))

    listed = {"WAY": 1, "f": 0.5, "b": True, "s": "text", "dtype": torch.float64}
    op = declare(launch, lambda x: [listed])
    assert op(torch.ones(2)).dtype == torch.float64
    assert seen[0] == listed


@needs_runtime
def test_one_configuration_needs_no_choice(declare, clock):
    op = declare(double, lambda x: [{"WAY": 2}])
    assert served(op, torch.ones(2)).tolist() == [2, 2]
    assert not clock.measured and not choices(op)


# ------------------------------------------------------------------ what goes wrong


def test_a_configuration_that_does_not_compile_is_left_out(declare, clock):
    op = declare(double, lambda x: [{"WAY": 13}, {"WAY": 1}])
    assert op(torch.ones(2)).tolist() == [2, 2]
    (choice,) = choices(op)
    assert (choice["choice"], choice["milliseconds"][0]) == (1, None)


def test_a_configuration_that_its_launch_function_refuses_is_left_out(declare, clock):
    def launch(k, x):
        torch._check(k.config["WAY"] < 3, lambda: "too many ways")
        return double(k, x)

    op = declare(launch, ways)
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert clock.measured == [{"WAY": 1}, {"WAY": 2}]
    never = declare(launch, lambda x: [{"WAY": 4}, {"WAY": 5}])
    with pytest.raises(RuntimeError, match="^too many ways$"):
        never(torch.ones(2))


def test_none_that_compiles_is_an_error_with_the_reason(declare, clock):
    op = declare(double, lambda x: [{"WAY": 13}, {"WAY": 13, "B": 1}])
    with pytest.raises(
        LaunchError, match="none of the 2 configurations of its launch function"
    ) as e:
        op(torch.ones(2))
    assert "a configuration that does not compile" in str(e.value)


def test_without_a_compiler_the_reference_runs(declare, clock):
    op = declare(double, ways)
    op.reference(lambda x: x * 2)
    with config.using(cxx="no-such-compiler"):
        assert op(torch.ones(2)).tolist() == [2, 2]
    assert not clock.measured


def test_config_without_configurations_says_what_to_add(declare):
    op = declare(double, None)
    with pytest.raises(
        DeclarationError, match=r"jitkern_tune::f\d+ for cpu.*reads `k.config`.*add `.tune`"
    ):
        op(torch.ones(2))


@pytest.mark.parametrize(
    ("configurations", "key", "says"),
    [
        (lambda x: [], None, "gave none"),
        (lambda x: None, None, "gave none"),
        (lambda x: {"WAY": 1}, None, "gave `'WAY'`"),
        (lambda x: [{"WAY": [1]}], None, r"gave `\[1\]`"),
        (lambda x: [{"WAY": 1}, {"WAY": 2}], lambda x: x, "returned a Tensor"),
        (lambda x: [{"WAY": 1}, {"WAY": 2}], lambda x: ({},), "returned a dict"),
    ],
    ids=["empty", "nothing", "no list", "list", "tensor", "dict"],
)
def test_what_a_tune_function_may_not_give_is_named(declare, configurations, key, says):
    op = declare(double, configurations, key)
    with pytest.raises(DeclarationError, match=rf"test_tune\.py:\d+ .*{says}"):
        op(torch.ones(2))


def test_an_attribute_error_of_a_key_is_its_own(declare):
    op = declare(double, ways, key=lambda x: x.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        op.launcher(op.sources["cpu"][0], "cpu")(
            kernels_of(op), torch.ones(2)
        )  # fmt: skip


def kernels_of(op):
    return Kernels(Runner(op.name, op.sources["cpu"][0], HERE, torch.device("cpu")))


def test_tune_takes_devices_and_kinds(declare):
    op = declare(double, None)
    with pytest.raises(DeclarationError, match=r"tune\(\) takes cc, cpu, cuda"):
        op.tune("gpu")
    with pytest.raises(DeclarationError, match=r"tune\(\) takes "):
        op.tune()
    op.tune("cpu", "cuda")(lambda x: [{"WAY": 1}])
    op.tune("cc")(lambda x: [{"WAY": 2}])
    op(torch.ones(1))
    assert ways_built(op) == {2}


def test_where_nothing_may_be_compiled_the_first_serves_with_one_warning(
    declare, clock, caplog, monkeypatch
):
    op = declare(double, ways)
    jit.ensure(Variant(op.name, op.sources["cpu"][0], "scale", (("T", "f32"), ("WAY", 1))), HERE)
    with config.using(compile="never"):
        for _ in range(3):
            assert op(torch.ones(2)).tolist() == [2, 2]
            linker.settle()
    assert not clock.measured and ways_built(op) == {1}
    assert [r.message for r in caplog.records if "no tuned" in r.message] == [
        f"{op.name}: no tuned configuration of its launch function for {{'dtypes': ('f32',)}}; using the first. Call the op once with compiling allowed to tune it"
    ]
    monkeypatch.setattr(jit, "capturing", lambda: True)
    op(torch.ones(2))
    monkeypatch.setattr(jit, "capturing", lambda: False)
    op(torch.ones(2))
    assert len(clock.measured) == 3


@needs_runtime
def test_what_was_not_chosen_is_not_kept_as_a_plan(declare, clock):
    op = declare(double, ways)
    with config.using(compile="background"):
        jit.ensure(
            Variant(op.name, op.sources["cpu"][0], "scale", (("T", "f32"), ("WAY", 1))), HERE
        )
        served(op, torch.ones(2))
    assert not [p for p in jit.open_cache().paths() if ".plan" in p.name]


# ------------------------------------------------------------------ Torch


def test_opcheck_compile_and_gradients(declare, clock):
    op = declare(double, ways, key=length)
    op.reference(lambda x: x * 2)
    op.backward(lambda grad: op(grad) * 1)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,))
    torch.library.opcheck(op.overload, (x,))
    torch.library.opcheck(op.overload, (torch.randn(6, 4).t(),))
    compiled = torch.compile(lambda x: op(x + 1), fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 5, 6):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 4.0))
    assert op(torch.empty(3, device="meta")).shape == (3,)


def test_fakes_may_have_sizes_in_their_configurations(declare, clock):
    op = declare(double, lambda x: [{"WAY": min(x.shape[0], n)} for n in (2, 3)], key=length)
    compiled = torch.compile(lambda x: op(x) * 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 3, 7):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 2.0))


# ------------------------------------------------------------------ another process

MODULE = """
import torch
from jitkern.declare import Cpp, kernel
op = kernel("jitkern_tuned::scaled(Tensor x, *, float a=2.0) -> Tensor", cpu=Cpp("k.cpp"))
@op.reference
def _(x, a): return x * a
@op.tune("cpu", key=lambda x, a: {key})
def _(x, a): return [{{"WAY": way}} for way in {ways}]
@op.launch("cpu")
def _(k, x, *, a):
    out = torch.empty_like(x)
    k.scale[{{"T": x.dtype, "WAY": k.config["WAY"]}}](out, x, a * k.config["WAY"], x.numel())
    return out
@op.samples
def _(device): yield torch.ones(3, device=device), 2.0
"""
RUN = """
import sys, torch
if {warm}:
    class Refuse:
        def find_spec(self, name, *_):
            if name in ("jitkern.trace.trace", "jitkern.launch.kernels", "jitkern.launch.autotune"):
                raise AssertionError(f"a warm process imported {{name}}")
    sys.meta_path.insert(0, Refuse())
else:
    from jitkern.launch import autotune
    measured = []
    def measure(run, candidate, device):
        run(candidate)()
        measured.append(candidate["WAY"])
        return float(candidate["WAY"])
    autotune._milliseconds = measure
import jitkern, tuned
from jitkern.runtime import slot
x = torch.ones(3)
results = {{str(tuned.op(x, a=2.0).tolist()) for _ in range(2)}}
from jitkern import jit
if {warm}:
    print(*results, jitkern.stats()["compiles"])
else:
    from jitkern.runtime import linker
    linker.settle()
    print(*results, measured)
"""


@pytest.fixture
def process(tmp_path, run_python):
    """Run RUN in a process, over MODULE with these configurations; returns what it prints."""
    (tmp_path / "k.cpp").write_text(SOURCE)

    def run(ways="(5, 3)", key="x.shape[0]", *, warm=False, **environment):
        (tmp_path / "tuned.py").write_text(MODULE.format(ways=ways, key=key))
        done = run_python(RUN.format(warm=warm), PYTHONPATH=str(tmp_path), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run_python("from jitkern import jit; from jitkern.runtime import binding\n"
               "from jitkern.target import Target\n"
               "jit.ensure(binding.variant(), Target.current('cpu'))")  # fmt: skip
    return run


@needs_runtime
def test_a_second_process_neither_measures_nor_traces_nor_compiles(process):
    assert process() == "[6.0, 6.0, 6.0] [5, 3]"
    assert process(warm=True, JITKERN_COMPILE="never", PATH="/nonexistent") == "[6.0, 6.0, 6.0] 0"


@needs_runtime
@pytest.mark.parametrize(
    ("edit", "gives"),
    [
        ({"ways": "(5, 2)"}, "[4.0, 4.0, 4.0] [5, 2]"),
        ({"key": "x.dim()"}, "[6.0, 6.0, 6.0] [5, 3]"),
    ],
    ids=["configurations", "key"],
)
def test_an_edit_is_tuned_anew(process, edit, gives):
    before = process()
    assert process(**edit) == gives
    assert process() == before.replace("[5, 3]", "[]")


def test_prewarm_builds_every_configuration_and_says_that_none_is_chosen(
    process, run_python, tmp_path
):
    process(ways="(1,)")
    code = "import tuned\nfrom jitkern.cli import main; main(['prewarm', 'jitkern_tuned::scaled'])"
    (tmp_path / "tuned.py").write_text(MODULE.format(ways="(5, 3, 4)", key="None"))
    done = run_python(code, JITKERN_CACHE_DIR=str(tmp_path / "other"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = {line.split()[2] for line in done.stdout.splitlines() if "jitkern_tuned" in line}
    assert {"scale.f32.WAY3", "scale.f32.WAY4", "scale.f32.WAY5"} == names
    assert (
        "keeps to its Python launcher" in done.stderr
        and "the device chooses among its 3 configurations" in done.stderr
    )


@needs_runtime
@pytest.mark.parametrize("ways", ["(5, 3)", "(3,)"], ids=["chosen", "only one"])
def test_prewarm_with_a_choice_or_none_to_make_leaves_nothing_to_do(
    process, run_python, tmp_path, ways
):
    process(ways)
    for plan in (tmp_path / "cache").rglob("*.plan.*"):
        plan.rename(tmp_path / plan.name)
    code = "import tuned\nfrom jitkern.cli import main; main(['prewarm', 'jitkern_tuned::scaled'])"
    done = run_python(code, PYTHONPATH=str(tmp_path))
    assert "plan" in done.stdout, done.stderr
    assert process(ways, warm=True, JITKERN_COMPILE="never") == "[6.0, 6.0, 6.0] 0"


def test_a_recorded_call_is_made_ready_in_every_configuration(process, run_python, tmp_path):
    calls = str(tmp_path / "calls")
    process(JITKERN_RECORD=calls)
    code = f"from jitkern.cli import main; main(['prewarm', '--from', {calls!r}, 'tuned'])"
    done = run_python(code, JITKERN_CACHE_DIR=str(tmp_path / "other"), PYTHONPATH=str(tmp_path))
    assert {"scale.f32.WAY3", "scale.f32.WAY5"} <= set(done.stdout.split()), done.stderr


# ------------------------------------------------------------------ other devices

CUDA = """
template <typename T, int WAY> __global__ void scale(T* y, const T* x, double a, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = T(a) * x[i];
}
"""
GPU = Target.parse(H100)


def blocks(x):
    return [{"block": 128, "WAY": 1}, {"block": 256, "WAY": 2}, {"block": 2048, "WAY": 1}]


def cuda_double(k, x):
    y = torch.empty_like(x)
    n, block = x.numel(), k.config["block"]
    k.scale[{"T": x.dtype, "WAY": k.config["WAY"]}](
        y, x, 2.0, n, grid=(n + block - 1) // block, block=block
    )
    return y


@pytest.fixture
def on_cuda(tmp_path):
    (tmp_path / "k.cu").write_text(CUDA)
    op = kernel(
        f"jitkern_tune::f{next(_number)}(Tensor x) -> Tensor", cuda=Cuda(str(tmp_path / "k.cu"))
    )
    op.launch("cuda")(cuda_double)
    op.tune("cuda", key=length)(blocks)
    op.reference(lambda x: x * 2)
    op.samples(lambda device: iter([torch.ones(1000, device=device)]))
    return op


@needs_nvrtc
def test_a_builder_without_a_gpu_uses_the_choices_of_each_model(on_cuda, monkeypatch):
    op, source = on_cuda, on_cuda.sources["cuda"][0]
    variants, calls, _ = needs_of(op, source, "cuda")
    assert [v.label for v in variants] == ["scale.f32.WAY1", "scale.f32.WAY2"]
    for variant in variants:
        jit.ensure(variant, GPU)
    stubs, reasons = stubs_of(op, source, GPU, calls)
    assert not stubs and "chooses among its 3 configurations" in reasons[0]
    for number, model in enumerate(("One GPU", "Another GPU")):
        monkeypatch.setattr(autotune, "model_of", lambda _, model=model: model)
        Clock(monkeypatch, lambda c, wanted=128 * 2**number: abs(c["block"] - wanted))
        autotune.choose(
            op.name, source, "", GPU, torch.device("cuda"), blocks(None),
            (("dtypes", ("f32",)), ("key", 1000)), lambda config: lambda: None,
        )  # fmt: skip
    stubs, reasons = stubs_of(op, source, GPU, calls)
    assert not reasons
    assert {s.traced.model: dict(s.traced.kernels[0].variant.template)["WAY"] for s in stubs} == {
        "One GPU": 1, "Another GPU": 2
    }  # fmt: skip
    keep_plans(op, source, GPU, stubs)
    known = plans_of(op, source, GPU)
    monkeypatch.setattr(plans, "model_of", lambda _: "A third GPU")
    assert not list(known.find(("f32[1]",), "", torch.device("cuda")))


def test_a_triton_kernel_takes_constexprs_and_options_of_a_configuration(tmp_path):
    (tmp_path / "t.py").write_text(ROWS.format(plain=""))
    op = kernel(
        f"jitkern_tune::f{next(_number)}(Tensor x) -> Tensor", cuda=Triton(str(tmp_path / "t.py"))
    )

    @op.launch("triton")
    def _(k, x):
        y = torch.empty_like(x)
        k.rows[{"B": k.config["B"]}](y, x, 3, 5, grid=1, num_warps=k.config["num_warps"])
        return y

    @op.tune("triton")
    def _(x):
        return [{"B": b, "num_warps": w} for b in (16, 32) for w in (4, 8)]

    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    variants = needs_of(op, op.sources["cuda"][0], "cuda").variants
    assert [(dict(v.template)["B"], dict(v.options)["num_warps"]) for v in variants] == [
        (16, 4), (16, 8), (32, 4), (32, 8)
    ]  # fmt: skip
    assert op(torch.empty(4, device="meta")).shape == (4,)


def plans_of(op, source, target):
    function = op.written(source, target.device)
    world = world_of(parts_of(function))
    return plans.Plans(op.name, op.schema, function, world, source, target)


def test_a_choice_is_for_one_model_and_its_plan_too(declare, clock, monkeypatch):
    op = declare(double, ways)
    source = op.sources["cpu"][0]
    served(op, torch.ones(2))
    known = plans_of(op, source, HERE)
    cpu = torch.device("cpu")
    assert len(list(known.find(("f32[1]",), "", cpu))) == 1
    assert not list(known.find(("f32[1]",)))
    monkeypatch.setattr(plans, "model_of", lambda _: "another CPU")
    assert not list(known.find(("f32[1]",), "", cpu))


@pytest.mark.gpu
def test_cuda_kernels_are_tuned_and_served_by_stub(on_cuda):
    x = torch.randn(1000, device="cuda")
    on_cuda(x)
    linker.settle()
    slot = slot_of(on_cuda, "cuda")
    before = slot.misses
    assert torch.equal(on_cuda(x), 2 * x)
    assert not binding.runtime() or slot.misses == before, slot.refused
    ((_, choice),) = autotune.choices_of(
        on_cuda.name, on_cuda.sources["cuda"][0], Target.current("cuda")
    )
    assert choice["milliseconds"][2] is None  # no block has 2048 threads
    assert choice["choice"] in (0, 1) and choice["model"] == torch.cuda.get_device_name()
    assert all(0 < time < 0.5 for time in choice["milliseconds"][:2])
    torch.library.opcheck(on_cuda.overload, (x,))


@pytest.mark.gpu
def test_nothing_is_measured_in_a_capture(on_cuda, caplog):
    x = torch.randn(1000, device="cuda")
    source, here = on_cuda.sources["cuda"][0], Target.current("cuda")
    on_cuda(x[:500])  # another key: its kernels are loaded then
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = on_cuda(x)
    graph.replay()
    assert torch.equal(y, 2 * x)
    assert "no tuned configuration of" in caplog.text
    assert len(list(autotune.choices_of(on_cuda.name, source, here))) == 1
    assert torch.equal(on_cuda(x), 2 * x)
    assert len(list(autotune.choices_of(on_cuda.name, source, here))) == 2


# ------------------------------------------------------------------ explain


def explained(cli, op, *arguments):
    code, out, err = cli("explain", op.name, *arguments)
    assert code == 0, err
    code, data, _ = cli("explain", op.name, *arguments, "--json")
    (found,) = json.loads(data.splitlines()[-1])["ops"]
    return out, found


def test_explain_lists_what_was_chosen(declare, clock, cli):
    op = declare(double, ways, key=length)
    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    assert "the device chooses among its 3 configurations" in explained(cli, op)[0]
    op(torch.ones(4))
    linker.settle()
    out, found = explained(cli, op)
    (row,) = [row for row in found["variants"] if row["kind"] == "choice"]
    (listed,) = cache_tools.rows(jit.open_cache(), cache_tools.Wanted(kind="choice"))
    assert listed.path == row["path"]
    assert row["note"] in out
    assert row["note"].endswith(
        ", dtypes=('f32',), key=4: {'WAY': 3} 0.3333 ms; not {'WAY': 1} 1 ms; not {'WAY': 2} 0.5 ms"
    )


def test_explain_notes_a_newer_compiler(declare, compiler, cli):
    def launch(k, x):
        k.scale[{"T": x.dtype}](x)

    op = declare(launch, None, schema="(Tensor(a!) x) -> ()")
    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    for version, noted in (("1.9", False), ("1.10", True), ("1.8", False)):
        compiler.version = "1.9" if not compiler.compiles else version
        jit.ensure(needs_of(op, op.sources["cpu"][0], "cpu").variants[0], HERE)
        compiler.version = version
        out, found = explained(cli, op)
        assert (
            "made by fake 1.9, and 1.10 is installed: jitkern prewarm --refresh" in out
        ) == noted
        assert bool(found["variants"][0]["note"]) == noted


ROWS = """
import triton
import triton.language as tl

@triton.jit{plain}
def rows(out, x, n, m, B: tl.constexpr):
    pass
"""


@pytest.mark.parametrize(
    ("sizes", "plain", "hinted"),
    [
        ([(1, 5), (5, 5), (16, 5), (2**40, 5)], "", '4 variants that differ in `n` alone (1, i32, i32:16, i64:16): @triton.jit(do_not_specialize=["n"]) makes 2 of them'),
        ([(1, 5), (5, 16), (16, 1)], "", None),
        ([(1, 5), (5, 5)], "", None),
        ([(1, 5), (5, 5), (16, 5), (2**40, 5)], '(do_not_specialize=["n"])', None),
    ],
    ids=["one", "two together", "few", "done"],
)  # fmt: skip
def test_explain_suggests_do_not_specialize(tmp_path, cli, monkeypatch, sizes, plain, hinted):
    monkeypatch.setitem(COMPILERS, "triton", FakeCompiler())
    (tmp_path / "t.py").write_text(ROWS.format(plain=plain))
    op = kernel(
        f"jitkern_tune::f{next(_number)}(Tensor x) -> Tensor", cuda=Triton(str(tmp_path / "t.py"))
    )

    @op.launch("cuda")
    def _(k, x):
        y = torch.empty_like(x)
        for n, m in sizes:
            k.rows[{"B": 16}](y, x, n, m, grid=1)
        return y

    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    assert not explained(cli, op, "--target", H100)[1]["hints"]
    for variant in needs_of(op, op.sources["cuda"][0], "cuda").variants:
        jit.ensure(variant, GPU)
    out, found = explained(cli, op, "--target", H100)
    assert found["hints"] == ([f"`rows` has {hinted}"] if hinted else [])
    assert (f"hint: `rows` has {hinted}" in out) == bool(hinted)
