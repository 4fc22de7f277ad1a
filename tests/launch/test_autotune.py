"""@triton.autotune and @triton.heuristics as an import gives them; the choice, kept per device model."""

import threading

import pytest
import torch
from helpers import H100, needs_triton

from jitkern import config, jit, testing
from jitkern.errors import CompileError, LaunchError
from jitkern.launch import autotune, measure
from jitkern.launch.call import Call, all_configurations, expanded, variant_of
from jitkern.launch.declared import declared_in
from jitkern.launch.runner import Runner
from jitkern.source.kinds import Triton
from jitkern.source.triton_decorators import TritonConfig
from jitkern.target import Target

TEXT = """
import triton
import triton.language as tl
SIZES = [64, 128]

def configs():
    return [triton.Config({"B": size}, num_warps=size // 32) for size in SIZES]

@triton.autotune(configs=configs(), key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["B"] == 0, "P": lambda a: triton.next_power_of_2(a["n"])})
@triton.jit
def k(out, x, n, B: tl.constexpr, EVEN: tl.constexpr, P: tl.constexpr):
    pass
"""
pytestmark = needs_triton
TARGET = Target.parse(H100)
CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path):
    (tmp_path / "k.py").write_text(TEXT)
    return Triton("k.py", folder=str(tmp_path))


def call(n, **keywords):
    return Call("k", (), (torch.empty(n), torch.empty(n), n), {"grid": 1, **keywords})


def variants(source, call):
    every = all_configurations("test::k", source, call)
    return [variant_of("test::k", source, one)[0] for one in every]


def declared(source, function="k"):
    return declared_in("test::k", source, function)


def test_decorators_are_what_triton_read(source):
    function = declared(source)
    assert function.configs == (
        TritonConfig((("B", 64),), (("num_warps", 2), ("num_stages", 3))),
        TritonConfig((("B", 128),), (("num_warps", 4), ("num_stages", 3))),
    )
    assert function.key == ("n",)
    assert (function.heuristics, function.before) == (("EVEN", "P"), 0)


def test_every_configuration_is_a_variant_to_prewarm(source):
    found = variants(source, call(192))
    assert [dict(v.template) for v in found] == [
        {"B": 64, "EVEN": True, "P": 256},
        {"B": 128, "EVEN": False, "P": 256},
    ]
    assert [dict(v.options)["num_warps"] for v in found] == [2, 4]


def test_a_grid_function_sees_arguments_and_configuration(source):
    asked = call(200, grid=lambda meta: (-(-meta["n"] // meta["B"]),))
    found = [one.keywords["grid"] for one in all_configurations("test::k", source, asked)]
    assert found == [(4,), (2,)]


def test_a_grid_function_sees_defaults_of_constexprs(source):
    path = source.paths[0]
    path.write_text(TEXT + "\n@triton.jit\ndef halves(x, SPLIT: tl.constexpr = 2): pass\n")
    asked = Call("halves", (), (torch.empty(8),), {"grid": lambda meta: (meta["SPLIT"],)})
    (one,) = all_configurations("test::k", source, asked)
    assert one.keywords["grid"] == (2,)


def test_a_constexpr_of_the_key_is_a_situation_of_its_own(source):
    source.paths[0].write_text(
        TEXT.replace('key=["n"]', 'key=["n", "D"]').replace("n, B:", "n, D: tl.constexpr, B:")
    )
    found = []

    def choose(declared, named):
        found.append(autotune.tuning_key_of(declared, named))
        return declared.configs[0]

    for size in (64, 128):
        expanded("test::k", source, call(192)._replace(template=(("D", size),)), choose)
    assert [dict(situation)["D"] for situation in found] == [64, 128]


def test_an_option_named_like_a_parameter_is_a_constexpr(source):
    path = source.paths[0]
    path.write_text(TEXT.replace("P: tl.constexpr", "P: tl.constexpr, num_warps: tl.constexpr"))
    found = variants(source, call(4))
    assert [dict(v.template)["num_warps"] for v in found] == [2, 4]
    assert [dict(v.options)["num_warps"] for v in found] == [2, 4]


def test_heuristics_may_give_options(source):
    decorator = '@triton.heuristics({"num_warps": lambda args: 8 if args["n"] > 64 else 2})'
    source.paths[0].write_text(
        f"{TEXT}\n{decorator}\n@triton.jit\ndef h(n, B: tl.constexpr): pass\n"
    )
    for n, keywords, expected in ((64, {}, 2), (65, {}, 8), (65, {"num_warps": 1}, 1)):
        asked = Call("h", (("B", 16),), (n,), {"grid": 1, **keywords})
        (one,) = all_configurations("test::h", source, asked)
        assert variant_of("test::h", source, one)[0].options == (("num_warps", expected),)


def test_what_the_call_gives_wins_over_heuristics_and_options(source):
    asked = call(192, num_warps=8)._replace(template=(("EVEN", False),))
    one = expanded("test::k", source, asked, lambda declared, _: declared.configs[0])
    assert (dict(one.template)["EVEN"], one.keywords["num_warps"]) == (False, 8)


DECORATED = """
@triton.jit
def k(out, x, n, B: tl.constexpr = 16, EVEN: tl.constexpr = False, BIG: tl.constexpr = False):
    pass
"""
EVEN = '{"EVEN": lambda args: args["n"] % 16 == 0}'
BIG = '{"BIG": lambda args: args["n"] > 100}'
ONE = '[triton.Config({"B": 64}, num_warps=2)]'


@pytest.mark.parametrize(
    ("above", "below", "expected"),
    [
        (f"@triton.heuristics({EVEN})\n@triton.heuristics({BIG})", "", {"EVEN": True, "BIG": True}),
        (f"import triton as t\nfrom triton import autotune as at, heuristics as h\n@h({EVEN})\n@at({ONE}, [])", "", {"B": 64, "EVEN": True}),
        ("from triton.runtime.autotuner import autotune, Config\n@autotune([Config({'B': 64})], key=[])", "", {"B": 64}),
        (f"tune = triton.autotune\ndef tuned(c): return tune(configs=c, key=[])\n@tuned({ONE})", "", {"B": 64}),
        (f"both = [triton.heuristics({EVEN}), triton.heuristics({BIG})]\n@both[0]\n@both[1]", "", {"EVEN": True, "BIG": True}),
        ("", f"k = triton.heuristics({EVEN})(k)\nk = triton.autotune({ONE}, key=[])(k)", {"B": 64, "EVEN": True}),
        ("", f"for d in (triton.heuristics({EVEN}), triton.heuristics({BIG})): k = d(k)", {"EVEN": True, "BIG": True}),
        ("", f"made = k\nk = triton.heuristics({EVEN})(made)", {"EVEN": True}),
        (f"def both(f): return triton.heuristics({EVEN})(triton.heuristics({BIG})(f))\n@both", "", {"EVEN": True, "BIG": True}),
        ("import functools\ndef same(f):\n    functools.update_wrapper(same, f.fn)\n    return f\n@same", "", {}),
        (f"C = {ONE}\ndef more(b): C[0] = triton.Config({{'B': b}})\nmore(32)\n@triton.autotune(C, key=[])", "", {"B": 32}),
        (f"C = []\ndef more(c): c.extend({ONE})\nmore(C)\n@triton.autotune(C, key=[])", "", {"B": 64}),
        (f"C = []\ndef inner():\n    global C\n    C = {ONE}\ndef setup(): inner()\nsetup()\n@triton.autotune(C, key=[])", "", {"B": 64}),
        (f"def keep(c): return c.kwargs['B'] * c.num_warps > 64\n@triton.autotune(list(filter(keep, {ONE})), key=[])", "", {"B": 64}),
        ("import itertools\n@triton.autotune([triton.Config({'B': a * b}) for a, b in itertools.product((2,), (8,))], [])", "", {"B": 16}),
        (f"try:\n    import triton\nexcept ImportError: pass\n@triton.heuristics({EVEN})", "", {"EVEN": True}),
    ],
)  # fmt: skip
def test_decorators_count_however_they_are_applied(source, above, below, expected):
    head = "import triton\nimport triton.language as tl\n"
    source.paths[0].write_text(f"{head}{above}{DECORATED}{below}\n")
    for one in all_configurations("test::k", source, call(192)):
        assert dict(one.template) == expected


def test_a_definition_under_a_condition_counts_as_imported(source):
    both = f"FAST = True\nif FAST:\n    @triton.heuristics({BIG})\n    @triton.jit\n    def k(n, BIG: tl.constexpr): pass\nelse:\n    def k(): pass\n"
    source.paths[0].write_text(f"import triton\nimport triton.language as tl\n{both}")
    assert declared(source).parameters == ("n", "BIG")


@pytest.mark.parametrize(
    ("decorators", "seen"),
    [
        (f"@triton.heuristics({BIG})\n@triton.autotune(C, key=['BIG'])", [("BIG", False), ("BIG", True)]),
        (f"@triton.autotune(C, key=['BIG'])\n@triton.heuristics({BIG})", []),
        ("@triton.heuristics({'BIG': lambda a: a['n'] > 9})\n@triton.heuristics({'EVEN': lambda a: not a['BIG']})\n@triton.autotune(C, key=['EVEN'])", [("EVEN", True), ("EVEN", False)]),
    ],
    ids=["above", "below", "after another"],
)  # fmt: skip
def test_the_key_may_name_what_heuristics_above_it_compute(source, decorators, seen):
    configs = "C = [triton.Config({'B': b}) for b in (32, 64)]\n"
    source.paths[0].write_text(
        f"import triton\nimport triton.language as tl\n{configs}{decorators}{DECORATED}"
    )
    found = []

    def choose(declared, named):
        found.extend(item for item in autotune.tuning_key_of(declared, named) if item[0].isupper())
        return declared.configs[1]

    last = [expanded("test::k", source, call(n), choose) for n in (8, 200)][1]
    assert (found, dict(last.template)["B"]) == (seen, 64)


def test_heuristics_see_a_configuration_only_below_it(source):
    text = "import triton\nimport triton.language as tl\n@triton.heuristics({'EVEN': lambda a: 'B' in {**a}})\n@triton.autotune([triton.Config({'B': 2})], [])\n@triton.heuristics({'BIG': lambda a: a['B'] == 2})\n"
    source.paths[0].write_text(text + DECORATED.replace("tl.constexpr = 16", "tl.constexpr"))
    (one,) = all_configurations("test::k", source, call(192))
    assert dict(one.template) == {"EVEN": False, "B": 2, "BIG": True}


@pytest.mark.parametrize(
    ("decorators", "says"),
    [
        (f"@triton.autotune({ONE}, key=[])\n@triton.autotune({ONE}, key=[])", "two `@triton.autotune`"),
        (f"@triton.autotune({ONE}, key=[], new_keyword=1)", "unexpected keyword argument 'new_keyword'"),
        ("@triton.autotune([triton.Config({}, ir_override='f')], [])", "`ir_override` of triton.Config"),
        (f"@triton.autotune({ONE}, key=[], pre_hook=print)", "`pre_hook` of @triton.autotune"),
    ],
)  # fmt: skip
def test_a_decorator_that_a_launch_cannot_follow_is_refused(source, decorators, says):
    source.paths[0].write_text(f"import triton, triton.language as tl\n{decorators}{DECORATED}")
    with pytest.raises(CompileError, match=rf"k\.py: error: .*{says}"):
        declared(source)


def test_a_list_of_unspecialized_parameters_may_have_a_name(source):
    path = source.paths[0]
    text = TEXT.replace("@triton.jit", "@triton.jit(do_not_specialize=PLAIN)")
    path.write_text(text.replace("SIZES =", 'PLAIN = ["n"]\nSIZES ='))
    assert declared(source).plain == {"n"}


class Clock:
    """Stands for the device: configuration number -> milliseconds; counts what was measured."""

    def __init__(self, monkeypatch, *milliseconds):
        self.measured = []
        times = dict(enumerate(milliseconds))

        def milliseconds(run, candidate, device, *, cold):
            self.measured.append(candidate)
            return times[len(self.measured) - 1]

        monkeypatch.setattr(measure, "milliseconds", milliseconds)
        monkeypatch.setattr(autotune, "model_of", lambda _: "Test GPU")


def choose(source, situation=(("n", 5),)):
    question = autotune.Question("k", declared(source).configs, situation)
    return autotune.choose("test::k", source, TARGET, CPU, question, None).config


def test_the_quickest_is_chosen_and_kept(source, monkeypatch):
    clock = Clock(monkeypatch, 2.0, 1.0)
    assert dict(choose(source).constexprs) == {"B": 128}
    assert dict(choose(source).constexprs) == {"B": 128}
    assert len(clock.measured) == 2


def test_another_situation_or_device_is_measured_anew(source, monkeypatch):
    clock = Clock(monkeypatch, *[1.0] * 6)
    choose(source)
    choose(source, (("n", 6),))
    monkeypatch.setattr(autotune, "model_of", lambda _: "Another GPU")
    choose(source)
    assert len(clock.measured) == 6


def test_configurations_that_do_not_run_are_left_out(source, monkeypatch):
    Clock(monkeypatch, float("inf"), 3.0)
    assert dict(choose(source).constexprs) == {"B": 128}


def test_one_configuration_is_not_measured(source, monkeypatch):
    clock = Clock(monkeypatch)
    source.paths[0].write_text(TEXT.replace("SIZES = [64, 128]", "SIZES = [64]"))
    assert dict(choose(source).constexprs) == {"B": 64}
    assert not clock.measured


@pytest.mark.parametrize(
    ("prune", "tried"),
    [
        ("{'early_config_prune': lambda configs, args, **more: [c for c in configs if c.kwargs['B'] < args['n'] == more['n']]}", [16, 32, 64]),
        ("{'early_config_prune': lambda configs, args, n: configs[:n - 98]}", [16, 32]),
        ("{'perf_model': lambda B, n, num_warps, **_: -B, 'top_k': 2}", [256, 128]),
        ("{'perf_model': lambda **args: args['B'], 'top_k': 0.25}", []),
        ("{}", [16, 32, 64, 128, 256]),
    ],
    ids=["early", "strict", "model", "one", "none"],
)  # fmt: skip
def test_configurations_are_pruned_before_they_are_measured(source, monkeypatch, prune, tried):
    listed = f'configs=configs(), prune_configs_by={prune}, key=["n"]'
    text = TEXT.replace('configs=configs(), key=["n"]', listed)
    text = text.replace("[64, 128]", "[16, 32, 64, 128, 256]")
    source.paths[0].write_text(text.replace("size // 32)", "max(1, size // 32))"))
    clock = Clock(monkeypatch, *range(5, 0, -1))
    for _ in range(2):  # measured, and then found
        found = Runner("test::pruned", source, TARGET, CPU).expanded(call(100))
        assert [dict(config.constexprs)["B"] for config in clock.measured] == tried
        assert dict(found.template)["B"] == [16, *tried][-1]


PRUNE = "{'early_config_prune': lambda configs, args, **_: [c for c in configs if c.kwargs['B'] <= args['n']]}"


def test_a_choice_is_for_what_pruning_leaves_in_this_process(source, monkeypatch):
    text = TEXT.replace('key=["n"]', f"key=[], prune_configs_by={PRUNE}")
    source.paths[0].write_text(text)
    clock = Clock(monkeypatch, 2.0, 1.0)
    blocks = []
    for n in (200, 100, 200):  # each in a process of its own; the fake clock prefers 128
        runner = Runner("test::pruned", source, TARGET, CPU)
        blocks += [dict(runner.expanded(call(size)).template)["B"] for size in (n, 200)]
    assert blocks == [128, 128, 64, 64, 128, 128]  # one choice for each value of the key
    assert len(clock.measured) == 2


@pytest.mark.long
def test_tuning_finds_what_to_reset_and_what_to_restore(source, monkeypatch):
    lists = 'key=["n"], reset_to_zero=["out"], restore_value=["x"]'
    source.paths[0].write_text(TEXT.replace('key=["n"]', lists))
    found = []

    def start(runner, call):
        out, x, _ = call.args
        found.append((out.tolist(), x.tolist()))
        out += 1
        x += 1

    testing.set_launch(monkeypatch, Runner, start)
    out, x = torch.ones(2), torch.ones(2)
    asked = Call("k", (), (out, x, 2), {"grid": 1})
    Runner("test::reset", source, TARGET, CPU).expanded(asked)
    assert len(found) == 2 * (measure.WARM_UPS + measure.REPEATS)
    assert all(values == ([0, 0], [1, 1]) for values in found)
    assert out.tolist() == x.tolist() == [1, 1]


@pytest.mark.long
def test_many_configurations_compile_at_once(source, monkeypatch):
    source.paths[0].write_text(TEXT.replace("[64, 128]", "[32 * n for n in range(1, 9)]"))
    together, compiled, started = threading.Barrier(2), [], []

    def ensure(variant, target):
        size = dict(variant.template)["B"]
        if size <= 64:  # the first two, each of which waits for the other
            together.wait(60.0)
        compiled.append(size)

    monkeypatch.setattr(jit, "ensure", ensure)
    testing.set_launch(monkeypatch, Runner, lambda *_: started.append(len(compiled)))
    with config.using(jobs=2):
        Runner("test::many", source, TARGET, CPU).expanded(call(5))
    assert sorted(compiled) == [32 * n for n in range(1, 9)]
    assert started[0] == 8


def test_what_another_process_published_meanwhile_is_taken(source, monkeypatch):
    def measure_after_the_other(run, candidate, device, *, cold):
        clock = Clock(monkeypatch, 2.0, 1.0)
        if not others:
            others.append(choose(source))
        clock.measured.clear()
        return {64: 1.0, 128: 2.0}[dict(candidate.constexprs)["B"]]

    others = []
    Clock(monkeypatch)
    monkeypatch.setattr(measure, "milliseconds", measure_after_the_other)
    chosen = choose(source)
    assert chosen == others[0] and dict(chosen.constexprs) == {"B": 128}


def test_none_that_runs_is_an_error(source, monkeypatch):
    Clock(monkeypatch, float("inf"), float("inf"))
    with pytest.raises(LaunchError, match="none of the 2 configurations of `k` runs"):
        choose(source)


def test_nothing_is_measured_where_nothing_may_be_compiled(source, monkeypatch, caplog):
    clock = Clock(monkeypatch)
    declared(source)
    with config.using(compile="never"):
        assert dict(choose(source).constexprs) == {"B": 64}
    assert not clock.measured
    assert "for {'n': 5}; using the first" in caplog.text
