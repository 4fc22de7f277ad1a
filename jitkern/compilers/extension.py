"""`torch.utils.cpp_extension.load_inline`, for sources against Torch's headers.

The sources register themselves. It builds in a child process inside our private staging, so that
its lock file, its mtimes and its cache, which is keyed by name alone, cannot hurt; the result is
loaded from our entry like any other artifact.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jitkern import closure as closures
from jitkern import config
from jitkern.closure import Closure
from jitkern.compilers import child, toolkit
from jitkern.compilers.result import Built, compile_error, write_log
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.kernel import Extension, Source, Variant
from jitkern.target import Target, this_abi

_TOOLS = {
    "ninja": "pip install ninja",
    "c++": "apt-get install g++ (or set CXX)",
    "nvcc": "install the CUDA toolkit (apt-get install cuda-nvcc-13-0) and set CUDA_HOME",
}


class LoadInline:
    """One library for the whole Extension."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Extension)
        return target.for_host_code(abi=target.abi or this_abi(python=source.pybind))

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return ("-O2", *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        import torch

        return [{"name": "load_inline", "version": torch.__version__}]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        source = variant.source
        assert isinstance(source, Extension)
        cuda = any(file.endswith(".cu") for file in source.files)
        _check_target(variant, self.target(source, target))
        environment = _environment(source, target, cuda=cuda)
        build = staging / "build"
        build.mkdir()
        digest = hashlib.sha256(
            json.dumps([variant.op, str(target), closure.files], sort_keys=True).encode()
        ).hexdigest()
        name = f"{variant.op.replace('::', '_')}_{digest[:8]}"
        units = {path: f'#line 1 "{path}"\n{path.read_text()}' for path in source.paths}
        flags = [*self.flags(source, target), f"-ffile-prefix-map={source.folder}=."]
        request = {
            "name": name,
            "cpp_sources": [text for path, text in units.items() if path.suffix != ".cu"],
            "cuda_sources": [text for path, text in units.items() if path.suffix == ".cu"],
            "extra_cflags": flags,
            "extra_cuda_cflags": [flag for flag in flags if not flag.startswith("-ffile")],
            "extra_include_paths": [root.path for root in source.roots],
            "build_directory": str(build),
            "is_python_module": source.pybind,
            "with_cuda": cuda,
            "no_implicit_headers": True,
            "verbose": True,
        }
        command = [sys.executable, "-m", "jitkern.compilers.load_inline"]
        status, output = child.run(command, text=json.dumps(request), cwd=build, env=environment)
        write_log(staging, command, output)
        library = build / f"{name}.so"
        if status or not library.is_file():
            raise compile_error(variant, target, command, output)
        _check_opened(variant, closure, build)
        binary = library.read_bytes()
        artifact = f"{name}.{hashlib.sha256(binary).hexdigest()[:8]}.so"
        (staging / artifact).write_bytes(binary)
        return Built(
            self.identities(source, target)[0],
            {
                "artifact": artifact,
                "module": name if source.pybind else "",
                "function": source.function,
            },
        )


def _check_target(variant: Variant, target: Target) -> None:
    """An Extension is built against the Torch it runs on, so only for this machine's own target."""
    import torch

    assert isinstance(variant.source, Extension)
    here = Target.current("cpu")
    cuda = (torch.version.cuda or "").replace(".", "")
    same = target.torch == here.torch and target.cuda in ("", cuda)
    if (
        same
        and target.abi == this_abi(python=variant.source.pybind)
        and target == target.for_host_code()
    ):
        return
    raise TargetError(
        f"{variant.op}: an Extension is built with the Torch it runs on: "
        f"this is Torch {torch.__version__}, which cannot build for {target}"
    )


def _environment(source: Extension, target: Target, *, cuda: bool) -> dict[str, str]:
    settings = config.current()
    environment = settings.build_environment(tuple(source.environment))
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment["CXX"] = settings.cxx
    environment["TORCH_EXTENSIONS_DIR"] = (
        os.devnull
    )  # never the shared one: build_directory is given
    missing = [
        tool for tool in ("ninja", settings.cxx) if not shutil.which(tool, path=environment["PATH"])
    ]
    if cuda:
        environment["TORCH_CUDA_ARCH_LIST"] = _arch_number(target.arch)
        nvcc = toolkit.nvcc()
        missing += [] if nvcc else ["nvcc"]
        homes = toolkit.cuda_homes()
        if homes:
            environment["CUDA_HOME"] = str(homes[0])
    if missing:
        remedy = _TOOLS.get(missing[0], _TOOLS["c++"])
        raise CompilerNotFound(
            f"an Extension needs `{missing[0]}`, which is not on PATH: {remedy}", remedy=remedy
        )
    return environment


def _arch_number(arch: str) -> str:
    """`9.0` for sm_90, `9.0a` for sm_90a."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{arch.removeprefix('sm_')[len(digits) :]}"


def _check_opened(variant: Variant, closure: Closure, build: Path) -> None:
    import torch

    done = subprocess.run(
        [shutil.which("ninja", path=str(Path(sys.executable).parent)) or "ninja", "-t", "deps"],
        cwd=build, capture_output=True, text=True, check=False,
    )  # fmt: skip
    opened = [build / line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
    known: list[str | Path] = [
        build,
        Path(torch.__file__).parent,
        sys.base_prefix,
        "/usr",
        *toolkit.cuda_homes(),
        *toolkit.include_directories(),
    ]
    closures.check(variant.source, closure, opened, known, variant.op)
