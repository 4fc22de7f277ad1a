"""What CONTRIBUTING.md says, done once as it is written there."""

import re
import sys
import types

import pytest
import torch
from helpers import REPOSITORY

from jitkern import cli, config, jit
from jitkern.cli import main
from jitkern.compilers import COMPILERS, Compiler, compiler_for, cpp
from jitkern.config import Config
from jitkern.declare import discover, kernel
from jitkern.op.all_ops import all_ops
from jitkern.op.op import OPS
from jitkern.source.kinds import SOURCES, Cpp, Generated, Variant
from jitkern.target import Target

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text()


def snippets(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def undone(monkeypatch):
    """Ops, kinds and compilers that a test adds are gone after it."""
    before = {id(table): dict(table) for table in (all_ops(), SOURCES, COMPILERS)}
    yield
    for table in (OPS, SOURCES, COMPILERS):
        table.clear()
        table.update(before[id(table)])


@pytest.mark.long
def test_an_op_is_a_folder(tmp_path, monkeypatch, undone):
    folder = tmp_path / "contributed" / "twice"
    folder.mkdir(parents=True)
    (tmp_path / "contributed" / "__init__.py").touch()
    (op,) = (text for text in snippets("python") if "twice" in text)
    (folder / "kernel.py").write_text(op.replace('"twice(', '"contributed::twice('))
    (folder / "twice.cpp").write_text(snippets("cpp")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    (twice,) = discover("contributed")
    x = torch.rand(5)
    assert torch.equal(twice(x), 2 * x)


class FormulaCompiler(Compiler):
    """The compiler of the kind in CONTRIBUTING.md: writes C++, and has it compiled."""

    def target(self, source, target):
        return target.for_host_code()

    def flags(self, source, target):
        return ("-O1", "-fPIC", "-shared", *source.flags)

    def identities(self, source, target):
        return [{"name": "formula", "version": "1"}]

    def compile(self, variant, target, closure, staging):
        expression = variant.source.paths[0].read_text().strip()
        text = (
            f'extern "C" void {variant.function}(double *out, const double *x0, long long n)'
            f"{{ for (long long i = 0; i < n; i++) {{ double x = x0[i]; out[i] = {expression}; }} }}\n"
        )
        folder = staging / "c"
        folder.mkdir()
        (folder / "k.cpp").write_text(text)
        written = variant._replace(source=Cpp("k.cpp", folder=str(folder)))
        built = cpp.cc_build.build(
            written,
            target,
            Compiler.closure(self, written.source),
            staging,
            ("-O1", "-fPIC", "-shared", "-std=c++17"),
        )
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return built._replace(compiler=self.identities(variant.source, target)[0])


@pytest.mark.long
def test_a_kind_of_source_is_a_class_and_so_is_a_compiler(tmp_path, monkeypatch, undone):
    home = types.ModuleType("formula_compiler")
    home.FormulaCompiler = FormulaCompiler
    monkeypatch.setitem(sys.modules, "formula_compiler", home)
    names = {}
    (kind,) = (text for text in snippets("python") if "class Formula" in text)
    exec(kind, names)
    (tmp_path / "k.formula").write_text("3 * x + 1\n")
    op = kernel(
        "contributed::affine(Tensor x) -> Tensor", cpu=names["Formula"](str(tmp_path / "k.formula"))
    )

    @op.launch("cpu")
    def _(k, x):
        out = torch.empty_like(x)
        k.affine(out, x, x.numel())
        return out

    x = torch.rand(7, dtype=torch.float64)
    for _ in range(3):
        assert torch.allclose(op(x), 3 * x + 1)
    assert type(compiler_for(op.sources["cpu"][0])) is FormulaCompiler
    with config.using(prefer="formula"):
        assert torch.allclose(op(x), 3 * x + 1)
    assert Config.from_env({"JITKERN_PREFER": "formula"}).prefer == "formula"
    variant = Variant(op.name, op.sources["cpu"][0], "affine")
    entry, new = jit.ensure_and_tell(variant, Target.current("cpu"))
    assert not new and entry.manifest.compiler["name"] == "formula"
    (tmp_path / "k.formula").write_text("x\n")
    assert jit.ensure_and_tell(variant, Target.current("cpu"))[1], "an edit is another key"


def test_a_command_is_a_file_and_a_line(monkeypatch, capsys):
    module = types.ModuleType("jitkern.cli.greet")
    module.__doc__ = "Say hello."

    def configure(parser, shared):
        parser.add_argument("name")
        parser.set_defaults(run=lambda args: print(f"hello {args.name}") or 0)

    module.configure = configure
    monkeypatch.setitem(sys.modules, "jitkern.cli.greet", module)
    monkeypatch.setitem(cli.COMMANDS, "greet", "say hello")
    assert main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


def test_every_kind_says_all_that_the_text_names():
    for kind in (*SOURCES.values(), Generated):
        assert kind.kind and kind.suffixes and kind.compiler and kind.runs
    assert "`runs`" in TEXT and "`devices`" in TEXT and "SOURCES" in TEXT and "COMMANDS" in TEXT
