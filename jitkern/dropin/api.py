"""`load_inline` and `load` of `torch.utils.cpp_extension`, over jitkern's cache.

This module imports only what a warm start needs: see `dropin.memo`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jitkern import config, dropin
from jitkern.dropin import memo
from jitkern.source.flags import ENVIRONMENT, NotSupported

Paths = Sequence["str | os.PathLike[str]"]


def load_inline(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: str | Sequence[str] | None = None,
    functions: str | list[str] | dict[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,  # noqa: ARG001
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Paths | None = None,
    build_directory: str | os.PathLike[str] | None = None,
    verbose: bool = False,  # noqa: FBT001, FBT002
    with_cuda: bool | None = None,  # noqa: FBT001
    with_sycl: bool | None = None,  # noqa: FBT001
    is_python_module: bool = True,  # noqa: FBT001, FBT002
    with_pytorch_error_handling: bool = True,  # noqa: FBT001, FBT002
    keep_intermediates: bool = True,  # noqa: ARG001, FBT001, FBT002
    use_pch: bool = False,  # noqa: ARG001, FBT001, FBT002
    no_implicit_headers: bool = False,  # noqa: FBT001, FBT002
    gil_not_used: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Return a module compiled from texts; for a library without a Python module, its path.

    The arguments are those of `torch.utils.cpp_extension.load_inline`; `build_directory` gets
    copies of the library, the units and their objects, and a `build.ninja`; `keep_intermediates`
    and `use_pch` change nothing. Raises ValueError for `functions` of another type and for a name
    that no module can have, DeclarationError for a function that no source declares, TypeError for
    flags that are a string or a set, TargetError if no arch is known, CompileError,
    CompilerNotFound, NotCached, LoadError, CacheError.

    Torch's own function builds, with a warning and without the cache, what the key cannot cover:
    SYCL, sources for ROCm, and flags and directives that read files which are not in the key.
    """
    _refuse_sycl(sycl_sources, with_sycl)
    cpp, cuda = _texts(cpp_sources), _texts(cuda_sources)
    if not no_implicit_headers:
        cpp.insert(0, "#include <torch/extension.h>")
    if functions is not None:
        cpp += dropin.pybind.bindings(
            functions, safe=with_pytorch_error_handling, gil_not_used=gil_not_used,
            cpp="\n".join(cpp), cuda="\n".join(cuda),
        )  # fmt: skip
    units = {"main.cpp": "\n".join(cpp)}
    if cuda:
        headers = ("torch/types.h", "cuda.h", "cuda_runtime.h") if not no_implicit_headers else ()
        units["cuda.cu"] = "\n".join([*(f"#include <{header}>" for header in headers), *cuda])
    call = call_of(
        name, with_cuda, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths,
        files=list(units), texts=list(units.values()), places=[],
        output="module" if is_python_module else "library",
        python=is_python_module or not no_implicit_headers,
    )  # fmt: skip
    return _answer(call, build_directory, verbose=verbose)


def load(
    name: str,
    sources: str | os.PathLike[str] | Paths,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,  # noqa: ARG001
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Paths | None = None,
    build_directory: str | os.PathLike[str] | None = None,
    verbose: bool = False,  # noqa: FBT001, FBT002
    with_cuda: bool | None = None,  # noqa: FBT001
    with_sycl: bool | None = None,  # noqa: FBT001
    is_python_module: bool = True,  # noqa: FBT001, FBT002
    is_standalone: bool = False,  # noqa: FBT001, FBT002
    keep_intermediates: bool = True,  # noqa: ARG001, FBT001, FBT002
) -> Any:
    """Return a module compiled from files; for a library or program, its path.

    The arguments are those of `torch.utils.cpp_extension.load`. The key covers the content of the
    sources, and of the headers that they include from beside them and from `extra_include_paths`.
    Raises ValueError if both a module and a program are requested, FileNotFoundError for a
    source that does not exist, and the errors of `load_inline`.
    """
    if is_python_module and is_standalone:
        raise ValueError("`is_python_module` and `is_standalone` are mutually exclusive.")
    listed = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    places = [os.path.abspath(os.fspath(source)) for source in listed]  # noqa: PTH100
    _refuse_sycl([place for place in places if place.endswith(".sycl")], with_sycl)
    for place in places:
        if not os.path.isfile(place):  # noqa: PTH113
            raise FileNotFoundError(f"the source {place} of `{name}` does not exist")
    call = call_of(
        name, with_cuda, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths,
        files=[], texts=[], places=places,
        output="module" if is_python_module else "program" if is_standalone else "library",
        python=not is_standalone,
    )  # fmt: skip
    return _answer(call, build_directory, verbose=verbose)


def _texts(sources: str | Sequence[str] | None) -> list[str]:
    return [sources] if isinstance(sources, str) and sources else list(sources or ())


def _refuse_sycl(sources: object, with_sycl: bool | None) -> None:  # noqa: FBT001
    if sources or with_sycl:
        raise NotSupported("SYCL is compiled by torch.utils.cpp_extension alone")


def call_of(
    name: str,
    with_cuda: bool | None,  # noqa: FBT001
    cflags: Sequence[str] | None,
    cuda_cflags: Sequence[str] | None,
    ldflags: Sequence[str] | None,
    include: Paths | None,
    **rest: Any,
) -> dict[str, Any]:
    """The arguments as plain data for JSON.

    Raises ValueError for a name no module can have, and TypeError for flags that are no list.
    """
    last = name.rpartition(".")[2]
    if rest["output"] == "module" and not f"_{last}".isidentifier():  # a digit may come first
        raise ValueError(
            f"`{name}` cannot name a Python module: C++ has no function PyInit_{last}: write a "
            "name of letters, digits and `_`, or pass is_python_module=False"
        )
    for flags in (cflags, cuda_cflags, ldflags, include):
        if isinstance(flags, (str, set, frozenset)):
            kind = "string" if isinstance(flags, str) else "set, which has no order"
            raise TypeError(f"`{name}`: `{flags}` is a {kind}: give a list of flags or folders")
    return {
        "name": name,
        "with_cuda": with_cuda,
        "cflags": list(cflags or ()),
        "cuda_cflags": list(cuda_cflags or ()),
        "ldflags": list(ldflags or ()),
        "include": [os.path.abspath(os.fspath(path).strip()) for path in include or ()],  # noqa: PTH100
        **rest,
    }


def _answer(
    call: dict[str, Any], build_directory: str | os.PathLike[str] | None, *, verbose: bool
) -> Any:
    config.renew(ENVIRONMENT)
    key = None if build_directory else memo.shortcut_key(call)
    if key and not verbose:
        answer = memo.recall(key)
        if answer is not None:
            return answer
    with config.using(verbose=verbose or config.current().verbose):
        return dropin.extension.answer(call, key, os.fspath(build_directory or ""), verbose=verbose)
