"""An op in Torch: schema, kernels per device, fake and gradient.

There is one registration per key, made at declaration and never replaced: a trampoline, or a Python
function that gets the kernel on its first call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from jitkern import config, launch, op as op_room, trace
from jitkern._fork import after_fork
from jitkern.calls.signature import Signature, tensors_in
from jitkern.errors import DeclarationError, LaunchError, call_site, defined_at, meant
from jitkern.op.autograd import Autograd
from jitkern.op.declaration import DEVICES, Declaration, DeclaredOp, Function
from jitkern.op.dispatch import Backend, FallbackKernel
from jitkern.op.recording import plainly_on
from jitkern.runtime.programs import OpPrograms
from jitkern.runtime.trampoline import cause_of, handled, register, wants_cause
from jitkern.source.kinds import ITSELF, SOURCES, Extension, Source

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from jitkern.op.execution import Execution

    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Result = TypeVar("Result")

OPS: dict[str, Op[Any]] = {}  # all that are declared, by name
_libraries: dict[str, torch.library.Library] = {}
_settling = threading.RLock()
after_fork(_settling)
_is_compiling = torch.compiler.is_dynamo_compiling


class LazyAttribute:
    """An attribute that each op computes at its first use; the class itself has `of_class`."""

    def __init__(self, function: str, of_class: str | None = None) -> None:
        self.function, self.of_class = function, of_class

    def __get__(self, op: Op | None, kind: type[Op]) -> Any:
        return self.of_class if op is None else getattr(op_room.about, self.function)(op)


class Op(DeclaredOp, Generic[Result]):
    """An op: a PyTorch reference, and kernels that compute it faster.

    Calling it calls the registered op. The decorators `reference`, `launch`, `tune`, `fake`,
    `backward`, `samples` and `cost` complete the declaration. A type checker reads no schema. For
    it, `scale: Op[Tensor] = kernel(...)` declares what a call returns.
    """

    __doc__: Any = LazyAttribute("doc", __doc__)
    __signature__ = LazyAttribute("signature")

    def __init__(self, signature: Signature, declaration: Declaration) -> None:
        self._following: tuple[Declaration, Execution] | None = None
        self._was_traced = False  # meanwhile
        super().__init__(signature, declaration)
        self.execution: Any = None  # the code that declared the op, of a module or a cell
        _check_extensions(self.name, declaration.sources)
        self.autograd = Autograd(self)
        self.backends: dict[str, Function] = {}
        self.programs: dict[str, OpPrograms | None] = {}
        self._made: dict[str, Backend] = {}
        self.overload = self._register()
        if declaration.gradient:
            self._follow_gradient()
        self._builtin = self.overload._op
        self._direct = {} if any(self.programs.values()) else self.backends

    @property
    def declaration(self) -> Declaration:
        """The declaration that serves this thread, which uses it now."""
        if self._following is not None:
            self._settle(used=True)
        return self._declaration

    @declaration.setter
    def declaration(self, declaration: Declaration) -> None:
        self._declaration = declaration

    @property
    def newest(self) -> Declaration:
        """The declaration that the decorators of this thread complete."""
        self._settle(used=False)
        following = self._following
        if following is not None and following[1].is_of_this_thread():
            return following[0]
        return self._declaration

    def is_settled(self, declaration: Declaration) -> bool:
        return self._following is None and self._declaration is declaration

    def declare_again(self, declaration: Declaration, body: types.FrameType | None = None) -> None:
        """Declare the op anew, as a cell that runs again or a reloaded module does.

        body: of the code whose next statements complete the declaration. The earlier one serves
        until the code returns, and stays if it raises; but if the thread that runs the code uses
        the op before, the new one serves from then on. Without `body` it serves at once.

        Code that torch.compile made of the earlier one is dropped. A CUDA graph that was captured
        keeps the kernels that it holds, as it does for every op of Torch.
        """
        _check_extensions(self.name, declaration.sources)
        execution = op_room.execution.Execution.of(body) if body is not None else None
        with _settling:
            self._following = (declaration, execution) if execution is not None else None
            if execution is None:
                self._declaration, self._drawn = declaration, None
        self._follow_gradient()
        self._stop_programs()
        self._forget_compiled()

    def _settle(self, *, used: bool) -> None:
        """Let the next declaration serve, if its time has come; see `declare_again`.

        used: whether this thread uses the op now.
        """
        with _settling:
            following = self._following
            if following is None:
                return
            declaration, execution = following
            if not execution.is_over() and not (used and execution.is_of_this_thread()):
                return
            self._following = None
            if not execution.failed:
                self._declaration, self._drawn = declaration, None
        self._follow_gradient()
        self._stop_programs()
        traced, self._was_traced = self._was_traced, False
        self._forget_compiled(reset=traced)

    def _follow_gradient(self) -> None:
        """Let C++ record calls, unless only Python knows which gradient serves a thread."""
        self.autograd.follow(None if self._following else self._declaration.gradient)

    def _forget_compiled(self, *, reset: bool = True) -> None:
        """Drop all that Torch has traced of an earlier declaration.

        reset: whether there may be compiled code of it.
        """
        table = self.overload.python_key_table
        table.pop(FunctionalTensorMode, None)
        self.overload._dispatch_cache.clear()
        if self._declaration.fusible:
            self.overload.py_impl(FunctionalTensorMode)(self._decomposed)
        FakeTensorMode.cache_clear()
        op_room.compile_cache_key.forget()
        if not reset or "_dynamo" not in vars(torch):
            return
        if torch._guards.TracingContext.try_get():  # Torch resets once this compile is over
            config.background.BUILDS.later(torch.compiler.reset)
        else:
            torch.compiler.reset()

    @wants_cause
    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if _is_compiling():  # Dynamo knows the overload, and not the builtin inside
            return self.overload(*args, **kwargs)
        try:
            direct = self._direct and not kwargs and self.signature.takes(args)
            if direct and (device := plainly_on(args)) in self._direct:
                with torch._C._AutoDispatchBelowAutograd():  # Torch need not dispatch
                    return self._direct[device](*args)
            return self._builtin(*args, **kwargs)
        except BaseException as e:  # noqa: BLE001  it is raised again, or its cause
            cause = cause_of(e) if isinstance(e, RuntimeError) else e
            context = cause.__context__
            try:
                raise cause  # noqa: TRY301  its context is set below
            except BaseException:
                cause.__context__ = context  # without the RuntimeError in its place
                raise
            finally:
                del cause, context  # the traceback holds this frame, and the arguments

    def __repr__(self) -> str:
        return f"<op {self.schema}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the op as its name and the module that declares it; a copy is the op itself."""
        return declared, (self.name, self.module)

    def _declare(self, **parts: Any) -> Declaration:
        """Complete the newest declaration, and return it as it was before."""
        before = self.newest
        with _settling:
            if self._following is not None and self._following[0] is before:
                self._following = before._replace(**parts), self._following[1]
            else:
                self._declaration = before._replace(**parts)
        return before

    def reference(self, function: Function) -> Function:
        """Decorator: the op in plain Torch, its oracle and fallback. Raises DeclarationError."""
        self._check_parameters("reference", function, self.signature.names)
        if self._declare(reference=function).reference is not None:
            self._forget_compiled()
        return function

    def launch(self, *kinds: str) -> Callable[[Function], Function]:
        """Decorator: `f(k, *args)` checks, allocates and launches, for these devices or kinds."""
        self._check_kinds("launch", kinds)

        def keep(function: Function) -> Function:
            self._check_parameters("launch function", function, ["k", *self.signature.names])
            launchers = self.newest.launchers
            again = not launchers.keys().isdisjoint(kinds)  # it may be the op's fake
            kept: Function = function
            if isinstance(function, functools.partial):
                kept = trace.fast_check.from_partial(function)
            self._declare(launchers={**launchers, **dict.fromkeys(kinds, kept)})
            self._stop_programs()
            if again:
                self._forget_compiled()
            return function

        return keep

    def tune(
        self, *kinds: str, key: Function | None = None, inputs: Function | None = None,
        cold: bool = False,
    ) -> Callable[[Function], Function]:  # fmt: skip
        """Decorator: `f(*args)` lists configurations for the launch function of these kinds.

        Each configuration is a dict of constants, which the launch function reads as `k.config`.
        The first call measures them on its own arguments, of which those that the op changes are
        copied; the quickest is kept in the cache for the model of the device, the dtypes of the
        arguments and the result of `key(*args)`: numbers, bools, strings, tuples of them.
        A configuration that does not compile or run, or for which memory is short, is left out.

        inputs: `inputs(*args)` returns the arguments to measure with, as a tuple, in place of those
            of the call; nothing is copied then.
        cold: whether each measured run begins with an L2 cache that holds none of its data, as it
            does among other kernels, rather than with what the run before it left there.
        """
        self._check_kinds("tune", kinds)
        for name, function in dict[str, Any](key=key, inputs=inputs).items():
            if function is not None and not callable(function):
                where = f"{self.name}: {call_site()}"
                raise DeclarationError(
                    f"{where}tune() takes a function as {name}=, got {function!r}"
                )

        def keep(function: Function) -> Function:
            tuning = launch.tuned.Tuning(function, key, inputs, cold)
            tunings = self.newest.tunings
            self._declare(tunings={**tunings, **dict.fromkeys(kinds, tuning)})
            self._stop_programs()
            return function

        return keep

    def _stop_programs(self) -> None:
        """Stop the programs that were made from an earlier launch function."""
        for programs in filter(None, self.programs.values()):
            programs.forget()

    def _check_kinds(self, method: str, kinds: tuple[str, ...]) -> None:
        known = {*DEVICES, *[kind.kind for kind in SOURCES.values() if kind.runs != ITSELF]}
        wrong = [kind for kind in kinds if not isinstance(kind, str) or kind not in known]
        if wrong or not kinds:
            asked = [repr(kind) for kind in wrong[:1]]
            raise DeclarationError(
                f"{self.name}: {call_site()}{method}() takes {', '.join(sorted(known))}, "
                f"got {kinds}" + "".join(meant(kind, map(repr, known)) for kind in asked)
            )

    def _check_parameters(self, what: str, function: Function, names: list[str]) -> None:
        """Refuse a function that no call of the op fits. `names` are what it is called with."""
        if not isinstance(function, types.FunctionType):
            return
        code = function.__code__
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            return
        most = code.co_argcount + code.co_kwonlyargcount
        least = most - len(function.__defaults__ or ()) - len(function.__kwdefaults__ or ())
        optional = len(self.signature.optional.intersection(names))
        if least > len(names) or most < len(names) - optional:
            takes = ", ".join(code.co_varnames[:most])
            raise DeclarationError(
                f"{self.name}: {defined_at(function)}its {what} takes ({takes}), but is called "
                f"with ({', '.join(names)})"
            )

    def fake(self, function: Function) -> Function:
        """Decorator: `f(*args)` returns empty outputs, in place of the launch function."""
        self._check_parameters("fake", function, self.signature.names)
        if self._declare(fake=function).fake is not None:
            self._forget_compiled()
        return function

    def backward(self, function: Function) -> Function:
        """Decorator: the gradient. Called with an op, it makes that op the gradient.

        See `jitkern.op.gradient.Gradient` for the parameters and results of the function or op.
        """
        declared = self.newest
        if declared.gradient:
            raise DeclarationError(f"{self.name} has a backward already")
        plain = declared.nondifferentiable
        self._declare(gradient=op_room.gradient.Gradient(self.signature, plain, function))
        self._follow_gradient()
        return function

    def samples(self, function: Callable[[str], Iterator[Any]]) -> Callable[[str], Iterator[Any]]:
        """Decorator: `f(device)` yields argument tuples (or single tensors).

        These samples are for tests, benches and prewarm. Raises DeclarationError.
        """
        self._check_parameters("samples function", function, ["device"])
        self._declare(samples=function)
        self._drawn = None
        return function

    def cost(self, function: Function) -> Function:
        """Decorator: `f(*args)` returns `(bytes, flops)`, what a call must move and compute.

        The bytes are the least that any kernel moves: each input is read once, and each output is
        written once. The flops are additions, multiplications and calls of functions like `exp`.
        `jitkern.roofline` calls the function, also with meta tensors: shapes and dtypes suffice.
        """
        self._check_parameters("cost function", function, self.signature.names)
        self._declare(cost=function)
        return function

    def _register(self) -> Any:
        library, name = _library(self.name), self.__name__
        library.define(self.schema.split("::", 1)[1], tags=(torch.Tag.pt2_compliant_tag,))
        for device in DEVICES:
            self._implement(device, library)
        functions: dict[str, Function] = {
            "CompositeExplicitAutograd": handled(FallbackKernel(self)),
            "FuncTorchBatched": self.run_reference,  # its ATen ops can vmap
        }
        if {*self.signature.results} != {"T"} or "[]" in self.schema or self.signature.changed:
            functions["Batched"] = self.run_reference  # Torch's own loop refuses these
        on_cpu, on_cuda = (self.programs.get(device) for device in ("cpu", "cuda"))
        slots = on_cpu.number if on_cpu else -1, on_cuda.number if on_cuda else -1
        self.autograd.slot = register(self.signature, "Autograd", self.autograd, slots)
        if self.autograd.slot is None:
            functions["Autograd"] = handled(self.autograd)
        for key, function in functions.items():
            _register_kernel(library, self.name, key, function)
        _register_fake(self.name, self._run_fake, library)
        if not OPS:
            key_compile_caches()
        OPS[self.name] = self
        overload = getattr(getattr(torch.ops, self.name.split("::")[0]), name).default
        if "SymInt" in self.schema:  # C would turn symbolic integers into constants
            overload.py_impl(torch._C.DispatchKey.Autograd)(self.autograd)
        if self._declaration.fusible:
            overload.py_impl(FunctionalTensorMode)(self._decomposed)
        return overload

    def _decomposed(self, mode: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the reference in the graph of torch.compile, so that Inductor fuses its ATen ops."""
        with mode:
            return self._traced().run_reference(*args, **kwargs)

    def _traced(self) -> DeclaredOp:
        """Return the op by the declaration that serves this thread, for a trace that is kept."""
        declared = DeclaredOp(self.signature, self.declaration)
        self._was_traced |= self._following is not None
        return declared

    def _implement(self, device: str, library: torch.library.Library) -> None:
        """Register a trampoline for a device if it has kernels to launch, else a function."""
        raw = any(source.runs != ITSELF for source in self.sources.get(device, ()))
        run = self.backends[device] = functools.partial(self._run_on, device)
        key, number = device.upper(), None
        usable = raw and (device == "cpu" or bool(torch.version.cuda))
        if usable and self.signature.parameters is not None:
            number = register(self.signature, key, run)
            self.programs[device] = None if number is None else OpPrograms(number, self.signature)
        if number is None:
            _register_kernel(library, self.name, key, handled(run))

    def _run_on(self, device: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.backend(device)(*self.signature.complete(args, kwargs))

    def backend(self, device: str) -> Backend:
        """Return the backend of the declaration that serves this thread."""
        declaration, made = self.declaration, self._made.get(device)
        if made is None or made.op.declaration is not declaration:
            with _settling:
                made = self._made.get(device)
                if made is None or made.op.declaration is not declaration:
                    made = self._made[device] = Backend(self, declaration, device)
        return made

    def forget(self, device: str) -> None:
        """Forget all that was made from the declaration, also where it stays the same."""
        self._made.pop(device, None)
        self._stop_programs()

    def _run_fake(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.signature.complete(args, kwargs)
        place = self.signature.device_of(args, kwargs, meta_alone=True)
        result = self._traced().promised(place, args, kwargs)
        if place.type == "meta" and any(t.device != place for t in tensors_in([result])):
            raise LaunchError(
                f"{self.name}: its tensors are on the meta device, where nothing is computed, and "
                "its fake returned a tensor that is not: allocate on the device of a tensor with "
                "dimensions"
            )
        return result


def key_compile_caches() -> None:
    """Add a digest of all ops, taken when a graph is compiled, to Torch's cache keys.

    The caches of torch.compile key a graph by the names of the ops in it (pytorch#144344): after an
    edit they would serve a graph with the old backward, fake or reference of an op. So the digest
    is added to `torch.compiler.config.cache_key_tag`, which is in the keys of all graphs; a tag of
    the user's is kept.
    """
    settings = torch.compiler.config
    kind: Any = type(settings)  # a class of this one module
    if "cache_key_tag" not in getattr(settings, "_config", {}):
        return  # a Torch that has no such tag
    before = kind.__dict__.get("cache_key_tag")

    def tag(self: Any) -> str:
        value = before.fget(self) if before else self.__getattr__("cache_key_tag")
        return f"{value}:{op_room.compile_cache_key.digest(OPS)}" if OPS else str(value)

    kind.cache_key_tag = property(tag)


def declared(name: str, module: str) -> Op:
    """Return the op of this name; imports the module that declares the op, if need be.

    Raises DeclarationError.
    """
    if name not in OPS:
        try:
            importlib.import_module(module)
        except ImportError as e:
            raise DeclarationError(
                f"{name} was pickled as an op of the module `{module}`, which cannot be imported "
                f"here: {e}; install that module, or declare the op before unpickling"
            ) from e
    if name not in OPS:
        raise DeclarationError(
            f"{name} was pickled as an op of the module `{module}`, which does not declare it "
            "here; declare the op before unpickling"
        )
    return OPS[name]


def _register_kernel(library: torch.library.Library, op: str, key: str, function: Function) -> None:
    """Register a kernel as Library.impl does, without its search for earlier ones."""
    library.m.impl(op.split("::")[1], key, function, False)  # type: ignore[union-attr]


def _register_fake(op: str, function: Function, library: torch.library.Library) -> None:
    """Register a fake as torch.library does, without its search for the caller: 1 ms."""
    entry = torch._library.simple_registry.singleton.find(op)
    library._registration_handles.append(entry.fake_impl.register(function, op, lib=library))


def _library(op: str) -> torch.library.Library:
    """Return the library of a namespace, kept because dropping it would undo registrations."""
    namespace = op.split("::", maxsplit=1)[0]
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def _check_extensions(name: str, sources: dict[str, tuple[Source, ...]]) -> None:
    for source in (source for declared in sources.values() for source in declared):
        if isinstance(source, Extension) and source.function == name:
            raise DeclarationError(
                f"{name}: the Extension {source.files[0]} must register its function "
                "under another name"
            )
