"""The names that users rely on."""

import pytest

import jitkern
import jitkern.declare

OF_OPS = (
    "AsyncScalar", "BlockSparseMask", "KVCacheFull", "LossMeter", "PagedCache", "cross_entropy_in_place",
    "flash_attention", "quantize_linears",
)  # fmt: skip
NAMES = {
    "Cache", "CacheError", "CompileError", "CompilerNotFound", "Config", "DeclarationError", "JitkernError", "LaunchError", "LoadError",
    "NotCached", "SettingError", "Target", "TargetError", "UntrustedCache", "cache_tools", "compose", "cpp_kernel", "cuda_kernel", "declare", "load", "load_inline", "on_compile", "ops", "patch_extensions", "patch_triton", "pointwise", "prewarm", "roofline", "stats", "triton_kernel", "using",
}  # fmt: skip


def test_all_is_what_was_promised():
    assert set(jitkern.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_resolves(name):
    assert getattr(jitkern, name) is not None
    assert name in dir(jitkern)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute `nothing`"):
        jitkern.nothing
    with pytest.raises(AttributeError, match="it is `jitkern.declare.Cuda`"):
        jitkern.Cuda


@pytest.mark.parametrize("name", OF_OPS)
def test_a_name_that_moved_to_the_ops_still_works_with_a_warning(name):
    with pytest.warns(FutureWarning, match=rf"use `jitkern\.ops\.{name}`"):
        found = getattr(jitkern, name)
    assert found is getattr(jitkern.ops, name)
    assert name in dir(jitkern.ops) and name not in dir(jitkern)


def test_names_do_not_collide_with_submodules():
    import pkgutil

    assert {m.name for m in pkgutil.iter_modules(jitkern.__path__)} & NAMES <= {
        "declare",
        "ops",
        "cache_tools",
    }


def test_declare_has_all_that_a_kernel_author_needs():
    assert set(jitkern.declare.__all__) == {
        "Cpp", "CuTile", "Cuda", "Cute", "Extension", "Include", "Op", "Triton", "Unit",
        "attach", "discover", "installed", "kernel",
    }  # fmt: skip


def test_the_shipped_ops_are_functions_of_jitkern_ops():
    import torch

    for name in ("vec_add", "muladd", "softmax", "softmax_backward"):
        op = getattr(jitkern.ops, name)
        assert op.overload is getattr(torch.ops.jitkern, name).default


def test_every_public_thing_has_a_docstring():
    import importlib
    import inspect
    import pkgutil

    for info in pkgutil.walk_packages(jitkern.__path__, "jitkern."):
        if info.name.endswith("__main__") or "kernels_src." in info.name:
            continue
        module = importlib.import_module(info.name)
        assert module.__doc__, info.name
        for name, thing in vars(module).items():
            own = getattr(thing, "__module__", "") == info.name and (
                inspect.isclass(thing) or inspect.isfunction(thing)
            )
            command = name in ("configure", "run", "main") or name.startswith(("run_", "_"))
            assert not own or command or inspect.getdoc(thing), f"{info.name}.{name}"
