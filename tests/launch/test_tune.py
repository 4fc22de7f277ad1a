"""`.tune`: configurations of any kind of kernel, measured once per device model, kept in the cache."""

import pytest
import torch
from helpers import by_python, needs_runtime, served
from tuning import HERE, Clock, choices, double, length, ways, ways_built

from jitkern import config, jit
from jitkern.errors import DeclarationError, LaunchError
from jitkern.launch import measure
from jitkern.runtime import specializer
from jitkern.source.kinds import Variant

# ------------------------------------------------------------------ choosing


@pytest.mark.long
@needs_runtime
def test_the_quickest_is_chosen_once_and_served_by_a_stub(declare, clock):
    op = declare(double, ways)
    for _ in range(2):
        assert torch.equal(served(op, torch.ones(4)), torch.full((4,), 2.0))
    assert clock.measured == [{"WAY": 1}, {"WAY": 3}, {"WAY": 2}]
    (choice,) = choices(op)
    assert choice["configs"][choice["choice"]] == "{'WAY': 3}"
    assert choice["situation"] == {"dtypes": "('f32',)"}


@pytest.mark.long
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


@pytest.mark.long
def test_dtypes_and_what_key_returns_choose_anew(declare, clock):
    op = declare(double, ways, key=length)
    for x in (torch.ones(4), torch.ones(3, 4), torch.ones(5), torch.ones(5, dtype=torch.float64)):
        for _ in range(2):
            assert torch.equal(op(x), 2 * x)
            specializer.settle()
    assert len(clock.measured) == 3 * 3
    assert {(c["situation"]["dtypes"], c["situation"]["key"]) for c in choices(op)} == {
        ("('f32',)", "4"), ("('f32',)", "5"), ("('f64',)", "5")
    }  # fmt: skip


@pytest.mark.long
@needs_runtime
def test_dtypes_of_a_list_choose_anew_and_its_length_does_not(declare, clock):
    def launch(k, xs):
        return double(k, xs[0])

    op = declare(launch, ways, schema="(Tensor[] xs) -> Tensor")
    for dtype in (torch.float32, torch.float64):
        for count in (1, 2):
            x = torch.ones(4, dtype=dtype)
            assert torch.equal(served(op, [x] * count), 2 * x)
    assert len(clock.measured) == 2 * 3
    assert {c["situation"]["dtypes"] for c in choices(op)} == {"('f32',)", "('f64',)"}


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_an_in_place_op_changes_its_argument_once(declare, clock):
    def launch(k, x):
        k.add[{"T": x.dtype, "WAY": k.config["WAY"]}](x, 1.0, x.numel())

    op = declare(launch, ways, schema="(Tensor(a!) x) -> ()")
    x = torch.zeros(4)
    for count in range(1, 5):
        op(x)
        specializer.settle()
        assert x.tolist() == [count] * 4
    assert len(clock.measured) == 3


def test_copies_have_layout_alignment_and_identity():
    base = torch.arange(40.0)
    for x in (
        base[1:], base[3:].view(37)[::3], base.view(5, 8).t(), base[:1].expand(7), base[:0],
        base.view(5, 8)[:, 2:4], torch.tensor(3.0),
    ):  # fmt: skip
        (copy, again), = measure.copied([[x, x]], {})  # fmt: skip
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


@pytest.mark.long
def test_a_configuration_that_is_refused_is_left_out(declare, clock):
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
    says = "(?s)none of the 2 configurations of its launch.*a configuration that does not compile"
    with pytest.raises(LaunchError, match=says):
        op(torch.ones(2))


def test_without_a_compiler_the_reference_runs(declare, clock):
    op = declare(double, ways)
    op.reference(lambda x: x * 2)
    with config.using(cxx="no-such-compiler"):
        assert op(torch.ones(2)).tolist() == [2, 2]
    assert not clock.measured


def test_config_without_configurations_says_what_to_add(declare):
    op = declare(double, None)
    says = r"jitkern_tune::f\d+ for cpu.*reads `k.config`.*add `.tune`"
    with pytest.raises(DeclarationError, match=says):
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
    with pytest.raises(DeclarationError, match=rf"test_tune\.py:\d+: .*{says}"):
        op(torch.ones(2))


def test_an_attribute_error_of_a_key_is_its_own(declare):
    op = declare(double, ways, key=lambda x: x.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        by_python(op, op.sources["cpu"][0], "cpu", torch.ones(2))


@pytest.mark.long
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


@pytest.mark.long
def test_where_nothing_may_be_compiled_the_first_serves(declare, clock, caplog, monkeypatch):
    op = declare(double, ways)
    jit.ensure(Variant(op.name, op.sources["cpu"][0], "scale", (("T", "f32"), ("WAY", 1))), HERE)
    with config.using(compile="never"):
        for _ in range(3):
            assert op(torch.ones(2)).tolist() == [2, 2]
            specializer.settle()
    assert not clock.measured and ways_built(op) == {1}
    assert [r.message for r in caplog.records if "no tuned" in r.message] == [
        f"{op.name}: no tuned configuration of its launch function for {{'dtypes': ('f32',)}}; using the first. Call the op once with compiling allowed to tune it"
    ]
    monkeypatch.setattr(jit, "capturing", lambda: True)
    op(torch.ones(2))
    monkeypatch.setattr(jit, "capturing", lambda: False)
    op(torch.ones(2))
    assert len(clock.measured) == 3


@pytest.mark.long
@needs_runtime
def test_what_was_not_chosen_is_not_kept_as_a_plan(declare, clock):
    op = declare(double, ways)
    with config.using(compile="background"):
        variant = Variant(op.name, op.sources["cpu"][0], "scale", (("T", "f32"), ("WAY", 1)))
        jit.ensure(variant, HERE)
        served(op, torch.ones(2))
    assert not [p for p in jit.open_cache().paths() if ".call" in p.name]


# ------------------------------------------------------------------ Torch


@pytest.mark.long
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


@pytest.mark.long
def test_fakes_may_have_sizes_in_their_configurations(declare, clock):
    op = declare(double, lambda x: [{"WAY": min(x.shape[0], n)} for n in (2, 3)], key=length)
    compiled = torch.compile(lambda x: op(x) * 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 3, 7):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 2.0))
