"""The import of a kernel's file as Python does it, on the machine of the target, as far as it asks.

What the import may depend on is the files of the closure, installed distributions by their
versions, variables, and what it asks of the device, which is answered from the target. All but the
closure is noted. An audit hook refuses to open or start anything else. Packages above the file are
stubs, which run their `__init__` when a name is missing in them.

It changes the process, so that each import has one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from jitkern.source import import_facts
from jitkern.source.gpus import capability_of
from jitkern.source.kinds import Source
from jitkern.source.triton_globals import TextLoader
from jitkern.target import Target

_REMEDY = (
    "put the kernel into a file that only defines kernels, guard what runs by "
    '`if __name__ == "__main__":`, or leave it to Triton (`jitkern.patch_triton` does)'
)
_TOOLS = ("numpy", "torch", "triton")  # count by versions that the key has, or change no kernel
_STARTING = (  # audit events
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn",
    "socket.connect", "subprocess.Popen",
)  # fmt: skip
_SMI = "nvidia-smi"
_PATHS = sysconfig.get_paths()
_STDLIB = tuple(f"{os.path.realpath(_PATHS[name])}{os.sep}" for name in ("stdlib", "platstdlib"))
_UNTOLD = (  # properties of a device in Torch that no absent GPU tells
    "clock_rate", "gcnArchName", "is_integrated", "is_multi_gpu_board", "max_threads_per_block",
    "memory_bus_width", "memory_clock_rate", "pci_bus_id", "pci_device_id", "pci_domain_id", "uuid",
)  # fmt: skip


class ImportRefused(BaseException):
    """The import reads what no key covers; no `except Exception` of the file is to catch this."""


def gpu_of(target: Target) -> Any:
    """Return what Triton compiles for."""
    from triton.backends.compiler import GPUTarget

    major, minor = capability_of(target)
    return GPUTarget("cuda", 10 * major + minor, 32)


class Import:
    """The import of a file: the process as the file sees it, what it has read, and its module.

    request: covered, the files that it may open; device and variables, what is told to it; stubs,
    whether packages above the file are stubs. facts: what it has read besides files.
    """

    module: Any = None

    def __init__(self, source: Source, request: dict[str, Any], *, has_torch: bool) -> None:
        self.source, self.target = source, Target.parse(request["target"])
        self.covered = frozenset(request["covered"])
        self.device: dict[str, Any] = request["device"]
        self.variables: dict[str, str] = request["variables"]
        self.stubs: bool = request.get("stubs", True)
        self._has_torch = has_torch
        self.facts: dict[str, Any] = {}
        self._is_importing = False
        folders = {_PATHS[name] for name in ("purelib", "platlib")}
        folders |= {site.getusersitepackages(), *site.getsitepackages()}
        folders |= {path for path in sys.path if any(Path(path or ".").glob("*.dist-info"))}
        installed = (f"{os.path.realpath(path)}{os.sep}" for path in folders)
        self._installed = tuple(sorted(installed, key=len, reverse=True))  # one may be in another
        base = os.path.realpath(sys.base_prefix)
        system = ("/dev/null", "/lib", "/usr/", f"{base}{os.sep}")
        self._jitkern = f"{os.path.realpath(Path(__file__).parents[2])}{os.sep}"
        self._known = (*self._installed, *_STDLIB, *system, self._jitkern)
        self._tools = (self._jitkern, *(f"{p}{t}{os.sep}" for p in self._installed for t in _TOOLS))
        self._real = functools.cache(self._resolved)
        self._finder = _Finder(self)
        sys.meta_path.insert(0, self._finder)
        os.environ = _Environment(self)  # type: ignore[assignment]  # noqa: B003
        subprocess.Popen = functools.partial(_popen, self, subprocess.Popen)  # type: ignore[assignment, misc]
        accessor = getattr(pathlib, "_NormalAccessor", None)  # of Python 3.10: `os.stat` as it was
        for place in filter(None, (os, accessor)):
            for name in vars(place).keys() & {"access", "lstat", "readlink", "stat"}:
                asked = functools.partial(_asked_of_files, self, getattr(place, name))
                setattr(place, name, asked)
        of = importlib.metadata.Distribution
        asked = functools.partial(_distribution, self, of.from_name)
        of.from_name = staticmethod(asked)  # type: ignore[method-assign]
        sys.addaudithook(self._audit)

    # -------------------------------------------------------------- the import

    def run(self) -> None:
        """Import the file. Raises what its statements do, and ImportRefused."""
        source = self.source
        self._answer_triton()
        if self._has_torch:
            self.answer_torch()
        path = source.paths[0].absolute()
        package = source.package or ("" if source.text else _package_of(path))
        top, *parts = package.split(".")
        root = str(path.parents[len(parts) + 1]) if package else source.folder
        if root not in sys.path:
            sys.path.insert(0, root)
        self._finder.top = top
        with self.watched():
            self.module = self._imported(path, package)

    def note(self, fact: str, value: Any) -> None:
        """Note a fact, which after the import is to be known."""
        if self.module and fact not in self.facts:
            raise ImportRefused(self._told(f"reads the {fact} as it is compiled"))
        self.facts[fact] = value

    def note_module(self, name: str, spec: Any) -> None:
        """Note a module that a file's code asks for: whether it is found, or its version."""
        if self._is_importing and not self._is_of_tools(sys._getframe(2), at_import=True):
            file = spec and spec.origin and self._real(spec.origin)
            known = file is None or file in self.covered or self.counts_by_version(file)
            if spec is None or not known:
                self.note(f"module {name}", spec is not None)

    def _imported(self, path: Path, package: str) -> ModuleType:
        name = path.stem
        if package:
            name = package if name == "__init__" else f"{package}.{name}"
            with contextlib.suppress(ModuleNotFoundError):
                spec = importlib.util.find_spec(name)
                if spec and os.path.realpath(spec.origin or "") == os.path.realpath(path):
                    module = importlib.import_module(name)
                    _run(module)
                    return module
        elif sys.modules.get(name) or name in sys.stdlib_module_names:
            name = f"jitkern_of_{name}"
        loader = TextLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loader.exec_module(module)
        return module

    # -------------------------------------------------------------- what it may open and start

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_importing:
            with self.watched(on=False):
                self._check(event, args)

    @contextlib.contextmanager
    def watched(self, *, on: bool = True) -> Iterator[None]:
        """Do what is part of the import; with `on=False` what is not, though it opens files."""
        was, self._is_importing = self._is_importing, on
        try:
            yield
        finally:
            self._is_importing = was

    def _resolved(self, path: str) -> str:
        with self.watched(on=False):
            return os.path.realpath(path)

    def _check(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "import"):
            path = args[0] if event == "open" else args[1]
            if isinstance(path, (str, bytes, os.PathLike)):
                self.opened(os.fspath(path), sys._getframe(2))  # below `_audit`
        elif event in ("os.listdir", "os.scandir"):
            caller = sys._getframe(2)
            if not caller.f_code.co_filename.startswith("<frozen importlib"):
                self.note_path("names", "." if args[0] is None else args[0], caller)
        elif event in _STARTING:
            what = args[0] if args else event
            if not self._is_of_tools(sys._getframe(2), at_import=True):
                raise ImportRefused(self._told(f"starts `{what}` ({event})"))

    def opened(self, path: str | bytes, frame: FrameType | None) -> None:
        """Refuse a file that no key covers; frame: of who opens it, or None for the kernel."""
        file = os.path.realpath(os.fsdecode(path))
        if file.endswith(".pyc"):
            with contextlib.suppress(ValueError):
                file = importlib.util.source_from_cache(file)
        if file in self.covered:
            return
        by_version = self.counts_by_version(file)
        if by_version or (by_version is None and file.startswith(self._known)):
            return
        if frame is None or not self._is_of_tools(frame, at_import=True):
            raise ImportRefused(self._told(f"opens {file}, which the cache key does not cover"))

    def note_path(self, kind: str, path: Any, frame: FrameType | None) -> None:
        """Note that a file's code asks what a path is, or for the names in a folder."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  a link is asked as such
        above = f"{os.path.realpath(place).rstrip(os.sep)}{os.sep}"
        there = (*self.covered, *self._installed)  # and so are the folders above
        if os.path.islink(place):  # noqa: PTH114  to a covered file, or above this one
            there = (str(self.source.paths[0].absolute()),)
            above = f"{place}{os.sep}"
        is_there = any(f"{path}{os.sep}".startswith(above) for path in there)
        if above.startswith(self._known) or (kind == "path" and is_there):
            return
        if not self._is_of_tools(frame, at_import=True):
            self.note(f"{kind} {place}", import_facts.now(f"{kind} {place}", self.target))

    def counts_by_version(self, file: str) -> bool | None:
        """Return whether a file is of a distribution, and note the version; None where none is."""
        inside = next((file[len(f) :] for f in self._installed if file.startswith(f)), None)
        if inside is None:
            return None
        entry = inside.partition(os.sep)[0]
        top = entry.partition(".")[0]
        if top in _TOOLS or top.partition("-")[0] in _TOOLS or f"version {top}" in self.facts:
            return True
        if entry.endswith(("-info", ".pth")) or top in ("jitkern", "__pycache__", "__editable__"):
            return True
        with self.watched(on=False):
            found = _distribution_of(top)
        if found:
            self.note(f"version {found[0]}", found[1])
        return bool(found)

    def _told(self, what: str) -> str:
        return f"the import of {self.source.paths[0]} {what}: {_REMEDY}"

    def _is_of_tools(self, frame: FrameType | None, *, at_import: bool = False) -> bool:
        """Whether code of Triton, Torch or Python itself asks, and not code that they are asked by.

        at_import: or the import of an installed distribution, which counts by its version.
        """
        while frame is not None:
            file, code = frame.f_code.co_filename, frame.f_code
            real = self._real(file)
            frame = frame.f_back
            if real in self.covered:
                return False
            of_python = real.startswith(_STDLIB) and not real.startswith(self._installed)
            if real == __file__ or file.startswith("<frozen") or of_python:
                continue
            if not at_import:
                return real.startswith(self._tools)
            if not real.startswith((*self._installed, self._jitkern)):
                return False
            if code.co_name == "<module>":
                return True
        return True

    # -------------------------------------------------------------- variables

    def variable(self, name: str) -> str | None:
        """Return a variable of the process that asks, and note it."""
        value = self.variables.get(name)
        self.note(f"variable {name}", value)
        return value

    def all_variables(self, frame: FrameType | None) -> dict[str, str] | None:
        """Return the variables of the process that asks; None for Triton and Torch."""
        if self._is_of_tools(frame):
            return None
        if not self._is_of_tools(frame, at_import=True):
            raise ImportRefused(self._told("reads the whole environment"))
        return self.variables

    # -------------------------------------------------------------- the device

    def ask(self, name: str) -> Any:
        """Return what the device tells by a name, and note it. Raises ImportRefused."""
        if name not in self.device:
            raise ImportRefused(self._told(f"asks for `{name}`, which no absent GPU tells"))
        if name not in ("major", "minor", "warp_size"):  # which the target has
            self.note(f"device {name}", self.device[name])
        return self.device[name]

    def _refuse(self, what: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ImportRefused(self._told(f"calls {what}, which needs a GPU"))

        return refuse

    def _answer_triton(self) -> None:
        from triton.runtime import driver

        driver.set_active(_Driver(self, gpu_of(self.target)))

    def answer_torch(self) -> None:
        import torch

        cuda = torch.cuda
        version = f"{self.target.cuda[:-1]}.{self.target.cuda[-1]}"
        torch.version.cuda = version
        torch.version.hip = None
        made = type(torch.__version__)
        torch.__version__ = made(f"{self.target.torch}+cu{self.target.cuda}")
        torch.version.__version__ = str(torch.__version__)
        answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "is_bf16_supported": lambda *_, **__: capability_of(self.target) >= (8, 0),
            "device_count": lambda: self.ask("count"),
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: capability_of(self.target),
            "get_device_name": lambda *_: self.ask("name"),
            "get_device_properties": lambda *_: _Properties(self),
            "get_arch_list": lambda: [self.target.arch],
            "_lazy_init": self._refuse("CUDA"),
            "init": self._refuse("`torch.cuda.init`"),
        }
        for name, answer in answers.items():
            setattr(cuda, name, answer)


class _Properties:
    """The properties that `torch.cuda.get_device_properties` returns."""

    def __init__(self, world: Import) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        import torch

        known = getattr(torch._C, "_CudaDeviceProperties", None)  # None in a Torch without CUDA
        if name in self._world.device or name in _UNTOLD or hasattr(known, name):
            return self._world.ask(name)
        raise AttributeError(f"'_CudaDeviceProperties' object has no attribute '{name}'")


class _Driver:
    """The driver that `triton.runtime.driver.active` is."""

    _NAMES = {  # of Triton's properties, by those of Torch
        "max_shared_mem": "shared_memory_per_block_optin", "warpSize": "warp_size",
        "multiprocessor_count": "multi_processor_count", "max_num_regs": "regs_per_multiprocessor",
    }  # fmt: skip

    def __init__(self, world: Import, gpu: Any) -> None:
        self._world, self._gpu = world, gpu
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def get_current_target(self) -> Any:
        return self._gpu

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return capability_of(self._world.target)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def _properties(self, *_: Any) -> dict[str, Any]:
        return {name: self._world.ask(torchs) for name, torchs in self._NAMES.items()}

    def __getattr__(self, name: str) -> Any:
        raise ImportRefused(self._world._told(f"asks Triton's driver for `{name}`"))


def _asked_of_files(world: Import, real: Any, path: Any, *more: Any, **options: Any) -> Any:
    """Do what a function of `os` does that a path is asked by, and note the question."""
    if world._is_importing:
        with world.watched(on=False):
            world.note_path("path", path, sys._getframe(1))
    return real(path, *more, **options)


def _distribution(world: Import, real: Any, name: str) -> Any:
    """Return an installed distribution, and note its version where a file's code asks for it."""
    if world._is_importing and not world._is_of_tools(sys._getframe(1), at_import=True):
        with world.watched(on=False):
            world.note(f"version {name}", import_facts.now(f"version {name}", world.target))
    return real(name)


def _popen(world: Import, real: Any, args: Any, *more: Any, **options: Any) -> Any:
    """Start a process, or for a query of the vendor's tool one that prints the device's name."""
    first = args if isinstance(args, str) else os.fsdecode(next(iter(args)))
    if world._is_importing and Path(first.split()[0]).name == _SMI:
        options = {**options, "shell": False, "executable": None}
        with world.watched(on=False):
            return real(["/bin/echo", world.ask("name")], *more, **options)
    return real(args, *more, **options)


class _Environment(MutableMapping[str, str]):
    """`os.environ` of the process that asks, for all but Triton and Torch, which have ours."""

    def __init__(self, world: Import) -> None:
        self._world = world
        self._real = os.environ
        self._set: dict[str, str | None] = {}

    def __getitem__(self, name: str) -> str:
        if name in self._set:
            value = self._set[name]
        elif self._world._is_of_tools(sys._getframe(1)):
            value = self._real.get(name)
        else:
            value = self._world.variable(name)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        self._set[name] = value
        os.putenv(name, value)

    def __delitem__(self, name: str) -> None:
        self._set[name] = None
        os.unsetenv(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __len__(self) -> int:
        return len(self.copy())

    def items(self) -> Any:
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()

    def copy(self) -> dict[str, str]:
        """Return all variables: for processes that Triton starts, and for packages as they load."""
        told = self._world.all_variables(sys._getframe(1))
        changed = {**(self._real if told is None else told), **self._set}
        return {name: value for name, value in changed.items() if value is not None}


# ------------------------------------------------------------------ finding and loading


class _PackageLoader(TextLoader):
    """Makes a stub of a package."""

    world: Import

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Stub


class _Stub(ModuleType):
    """A package that runs its `__init__` when a name is missing."""

    def __getattr__(self, name: str) -> Any:
        _run(self)
        return getattr(self, name)


def _run(module: ModuleType) -> None:
    """Run the `__init__` of a stub, which a key covers."""
    if isinstance(module, _Stub):
        loader: Any = module.__loader__
        with loader.world.watched(on=False):
            loader.world.opened(loader.path, None)
        module.__class__ = ModuleType  # type: ignore[assignment]
        exec(loader.get_code(module.__name__), vars(module))  # noqa: S102  the kernel author's own code


class _TorchLoader(importlib.machinery.SourceFileLoader):
    """Imports Torch, and has its questions answered."""

    def __init__(self, name: str, path: str, answer: Callable[[], None]) -> None:
        super().__init__(name, path)
        self._answer = answer

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._answer()


class _Finder:
    """Finds the own modules of a kernel, packages of its own among them as stubs."""

    def __init__(self, world: Import) -> None:
        self._world = world
        self.top = ""  # the package of which packages are stubs

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or (top in _TOOLS and name != "torch"):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (f.find_spec(name, path, target) for f in others if hasattr(f, "find_spec"))
        spec = next(filter(None, specs), None)
        if name != "torch":
            self._world.note_module(name, spec)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        path = str(spec.origin)
        if name == "torch":
            spec.loader = _TorchLoader(name, path, self._world.answer_torch)
            return spec
        real = os.path.realpath(path)
        covered = real in self._world.covered
        is_stub = spec.submodule_search_locations is not None and top == self.top
        if is_stub and (self._world.stubs or not (covered or self._world.counts_by_version(real))):
            spec.loader = _PackageLoader(name, path)
            spec.loader.world = self._world
        elif covered:
            spec.loader = TextLoader(name, path)
        return spec


def _package_of(path: Path) -> str:
    """Return the package of a file by the folders that have an `__init__`."""
    parts: list[str] = []
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            break
        parts.insert(0, folder.name)
    return ".".join(parts)


_distributions = functools.cache(importlib.metadata.packages_distributions)


@functools.cache
def _distribution_of(top: str) -> tuple[str, str] | None:
    """Return the name and the version of the distribution that has a module or package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return top, importlib.metadata.version(top)
    name = min(_distributions().get(top, ()), default=None)
    return (name, importlib.metadata.version(name)) if name else None
