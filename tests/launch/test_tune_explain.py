"""What `jitkern explain` says of choices."""

import json

import pytest
import torch
from helpers import H100, FakeCompiler, needs_triton
from tuning import GPU, HERE, ROWS, double, length, op_of, ways

from jitkern import cache_tools, jit
from jitkern.compilers import COMPILERS
from jitkern.declare import Triton
from jitkern.op.needed_kernels import needs_of
from jitkern.runtime import specializer


def explained(cli, op, *arguments):
    code, out, err = cli("explain", op.name, *arguments)
    assert code == 0, err
    code, data, _ = cli("explain", op.name, *arguments, "--json")
    (found,) = json.loads(data.splitlines()[-1])["ops"]
    return out, found


@pytest.mark.long
def test_explain_lists_what_was_chosen(declare, clock, cli):
    op = declare(double, ways, key=length)
    op.samples(lambda device: iter([torch.ones(4, device=device)]))
    assert "the device chooses among its 3 configurations" in explained(cli, op)[0]
    op(torch.ones(4))
    specializer.settle()
    out, found = explained(cli, op)
    (row,) = [row for row in found["variants"] if row["kind"] == "choice"]
    (listed,) = cache_tools.rows(jit.open_cache(), cache_tools.EntryFilter(kind="choice"))
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
        says = "made by fake 1.9, and 1.10 is installed: jitkern prewarm --refresh"
        assert (says in out) == noted
        assert bool(found["variants"][0]["note"]) == noted


@needs_triton
def test_a_trace_asks_prune_configs_by(tmp_path, cli, monkeypatch):
    monkeypatch.setitem(COMPILERS, "triton", FakeCompiler())
    configs = "[triton.Config({'B': b}) for b in (16, 32, 64)]"
    prune = "{'early_config_prune': lambda configs, args, **_: [c for c in configs if c.kwargs['B'] <= args['n']]}"
    decorator = f"\n@triton.autotune({configs}, key=[], prune_configs_by={prune})\n@triton.jit\n"
    (tmp_path / "t.py").write_text(ROWS.replace("\n@triton.jit{plain}\n", decorator))

    def launch(k, x):
        y = torch.empty_like(x)
        k.rows(y, x, x.numel(), 5, grid=1)
        return y

    sample = lambda device: torch.ones(40, device=device)
    op = op_of(Triton(str(tmp_path / "t.py")), launch, sample=sample)
    for variant in needs_of(op, op.sources["cuda"][0], "cuda").variants:
        jit.ensure(variant, GPU)
    says = "`rows` is tuned: the device chooses among its 2 configurations"
    assert says in explained(cli, op, "--target", H100)[0]
