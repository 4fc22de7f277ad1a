"""Fixtures of NVIDIA's languages."""

from __future__ import annotations

import itertools

import pytest
from fake_gpu import FakeGpu
from nvidia_languages import TARGET, VECTOR

from jitkern import jit
from jitkern.declare import kernel
from jitkern.source.kinds import Variant

_number = itertools.count()


@pytest.fixture
def language(request):
    """The language of this module's tests. Tests of both languages have a parameter instead."""
    return request.module.LANGUAGE


@pytest.fixture
def build(tmp_path, language):
    """Compile a kernel of a text; by default the language's `scale`."""
    run_folder = tmp_path / "kernels"
    run_folder.mkdir()

    def run(
        text=language.scale, template=(("B", 64),), signature=(VECTOR, VECTOR, "float"),
        target=TARGET, folder=run_folder, file="k.py", function="k", **source
    ):  # fmt: skip
        (folder / file).write_text(text)
        kind = language.kind(file, folder=str(folder), **source)
        return jit.ensure(Variant("test::k", kind, function, template, signature), target)

    run.folder = run_folder
    return run


@pytest.fixture
def declare(tmp_path, language):
    """Declare an op of a text; by default the language's `scale`."""

    def run(launch, schema="(Tensor x, float by) -> Tensor", text=language.scale, **source):
        (tmp_path / "k.py").write_text(text)
        op = kernel(
            f"jitkern_{language.name}::f{next(_number)}{schema}",
            cuda=language.kind(str(tmp_path / "k.py"), **source),
        )
        op.launch("cuda")(launch)
        return op

    return run


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    return FakeGpu(tmp_path, monkeypatch)
