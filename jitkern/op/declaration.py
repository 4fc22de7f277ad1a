"""The declaration of an op, and what follows from it; nothing is registered here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from jitkern import calls, config, launch, trace
from jitkern.calls.signature import Signature, tensors_in
from jitkern.errors import DeclarationError, defined_at, error_site
from jitkern.named_tuple import NamedTuple
from jitkern.source.kinds import ITSELF, SOURCES, Source

if TYPE_CHECKING:
    from jitkern.calls.samples import Sample
    from jitkern.op.gradient import Gradient
    from jitkern.runtime.programs import OpPrograms

DEVICES = ("cuda", "cpu")
_YIELD = "yield all of its arguments, as a tuple"

Function = Callable[..., Any]


class Declaration(NamedTuple):
    """All that was declared of an op. It does not change: a decorator of `Op` makes another one.

    sources: by device type, in order of preference. nondifferentiable: outputs and
    inputs without a gradient.
    launchers, tunings: by device type or kind.
    place: the line of the declaration, `kernel.py:8: `.
    """

    sources: dict[str, tuple[Source, ...]]
    fusible: bool = False
    nondifferentiable: tuple[str, ...] = ()
    module: str = ""
    place: str = ""
    prewarm: Sequence[Any] = ()
    launchers: Mapping[str, Function] = MappingProxyType({})
    tunings: Mapping[str, launch.tuned.Tuning] = MappingProxyType({})
    reference: Function | None = None
    fake: Function | None = None
    gradient: Gradient | None = None
    samples: Callable[[str], Iterator[Any]] | None = None
    cost: Function | None = None


class DeclaredOp:
    """An op by one declaration of it, for the functions that Torch calls.

    overload: the registered op. backends: its functions for "cuda" and "cpu". programs: those that
    the launch runtime has for a device whose kernels C could launch; None if it cannot here.
    """

    overload: Any
    backends: Mapping[str, Function]
    programs: Mapping[str, OpPrograms | None]

    def __init__(self, signature: Signature, declaration: Declaration) -> None:
        self.signature = signature
        self.name, self.schema = signature.name, signature.schema
        self.__name__ = self.__qualname__ = self.name.split("::")[1]
        self.__module__ = declaration.module
        self.declaration = declaration
        self._drawn: list[Sample] | None = None

    @property
    def sources(self) -> dict[str, tuple[Source, ...]]:
        """The sources for "cuda" and "cpu", in order of preference."""
        return self.declaration.sources

    @property
    def gradient(self) -> Gradient | None:
        """The gradient that `Op.backward` declared, or None."""
        return self.declaration.gradient

    @property
    def module(self) -> str:
        """The name of the module that declares the op."""
        return self.declaration.module

    @property
    def place(self) -> str:
        """The line that declares the op, as `kernel.py:8: `; "" if unknown."""
        return self.declaration.place

    def is_settled(self, declaration: Declaration) -> bool:
        """Return whether this declaration serves all threads."""
        return self.declaration is declaration

    def sources_on(self, device: str) -> Sequence[Source]:
        """Return the sources for a device type, the preferred kind first. Raises SettingError."""
        declared = self.declaration.sources.get(device, ())
        preferred = config.preferred()
        return sorted(declared, key=lambda source: source.kind != preferred)

    def sample_inputs(self, device: str) -> list[tuple[Any, ...]]:
        """Return the samples as argument tuples, with the same random numbers each time."""
        with calls.samples.same_random_numbers(device):
            return list(self.each_sample(device))

    def each_sample(self, device: str) -> Iterator[tuple[Any, ...]]:
        """Yield the samples as argument tuples."""
        samples = self.declaration.samples
        for sample in samples(device) if samples else ():
            yield sample if isinstance(sample, tuple) else (sample,)

    def problem_of(self, number: int, sample: tuple[Any, ...]) -> str:
        """Return why a sample does not fit the op, or ""."""
        why, place = self.signature.misfit(sample), defined_at(self.declaration.samples)
        return why and f"{place}sample {number} does not fit the op: {why}; {_YIELD}"

    def prewarm_samples(self) -> list[Sample]:
        """Return the calls to prewarm: the samples and `prewarm=`."""
        if self._drawn is None:
            prewarm = self.declaration.prewarm
            self._drawn = [*self._draw(), *calls.samples.samples_of(self.signature, prewarm)]
        return self._drawn

    def _draw(self) -> list[calls.samples.Sample]:
        """Return the samples, up to the first error."""
        drawn: list[calls.samples.Sample] = []
        function: Any = self.declaration.samples
        try:
            with calls.samples.same_random_numbers("meta"), calls.samples.ShapesAlone():
                for number, args in enumerate(self.each_sample("meta"), 1):
                    problem = self.problem_of(number, args)
                    drawn.append(calls.samples.Sample(f"sample {number}", args, problem))
        except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
            place, what = error_site(e, function), f"{type(e).__name__}: {e}"
            problem = f"{place}its samples failed after {len(drawn)}: {what}"
            drawn.append(calls.samples.Sample("", problem=problem))
        return drawn

    def run_reference(self, *args: Any, **kwargs: Any) -> Any:
        """Run the reference on these arguments, without autocast, as kernels run.

        Raises DeclarationError if the op has none, and LaunchError for a meta tensor beside others,
        which not all of ATen refuses.
        """
        declaration = self.declaration
        if declaration.reference is None:
            odd = [
                t for t in tensors_in((*args, *kwargs.values()))
                if t.layout != torch.strided or t.is_quantized
            ]  # fmt: skip
            told = "".join(
                f", and no kernel takes {t.layout} tensors of {t.dtype}" for t in odd[:1]
            )
            raise DeclarationError(f"{self.name} has no reference{told}")
        args, kwargs = self.signature.complete(args, kwargs)
        self.signature.device_of(args, kwargs, meta_alone=True)
        with calls.autocast.off((*args, *kwargs.values())):
            result = declaration.reference(*args, **kwargs)
        plain = declaration.nondifferentiable
        if not plain:
            return result
        named = zip(self.signature.outputs, result if isinstance(result, tuple) else (result,))
        kept = tuple(value.detach() if name in plain else value for name, value in named)
        return kept if isinstance(result, tuple) else kept[0]

    def launch_function(self, source: Source, device: str) -> Function:
        """Return the launch function for this source as its author wrote it, or a `Tuned` one.

        Raises DeclarationError.
        """
        launchers = self.declaration.launchers
        function = launchers.get(source.kind) or launchers.get(device)
        if not function:
            raise DeclarationError(
                f"{self.name}: {self.place}it has no launch function for its "
                f"{type(source).__name__}: decorate one with the op's `.launch({device!r})`"
                + (f"; it has one for {', '.join(launchers)}" if launchers else "")
            )
        return self._tuned(function, source.kind, device)

    def _tuned(self, function: Function, *kinds: str) -> Function:
        """Return the function with the configurations of the first of these kinds that has some."""
        tunings = self.declaration.tunings
        tuning = next((tunings[kind] for kind in kinds if kind in tunings), None)
        return launch.tuned.Tuned(function, tuning, self.signature) if tuning else function

    def promised(self, place: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the fake returns for tensors on a device, for the layout of the results."""
        with _WithoutAddresses():
            return self._faked(place, *args, **kwargs)

    def _faked(self, place: torch.device, *args: Any, **kwargs: Any) -> Any:
        declaration = self.declaration
        launchers = declaration.launchers
        if declaration.fake:  # its author's code decides about tensors beside those on a GPU
            result = trace.fast_check.with_fast_check(declaration.fake)(*args, **kwargs)
            kinds = self.signature.results
            launch.kernels.check_result(self.name, declaration.fake, kinds, result, "fake")
            return result
        of_place = (s.kind for s in self.sources.get(place.type, ()))
        for kind in (*of_place, place.type, *launchers):
            if kind in launchers:
                self.signature.device_of(args, kwargs)
                device = next(device for device in DEVICES if kind in launched_on(device))
                launcher = self._tuned(launchers[kind], kind, *launched_on(device))
                kernels = launch.kernels.Kernels(
                    launch.kernels.ignore, None, launch.resources.device_view.faked(device, place)
                )
                return trace.fast_check.with_fast_check(launcher)(kernels, *args, **kwargs)
        return self.run_reference(*args, **kwargs)


class _WithoutAddresses(TorchFunctionMode):
    """A mode in which tensors have the address 0: fake tensors have none, and Torch raises.

    A launch function asks for the alignment of an address, on which no shape of a result depends.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return 0 if func is torch.Tensor.data_ptr else func(*args, **(kwargs or {}))


def launched_on(device: str) -> list[str]:
    """Return what a launch function may be declared for: a device, and kinds of source for it."""
    kinds = [k for k in SOURCES.values() if device in k.devices and k.runs != ITSELF]
    return [device, *(kind.kind for kind in kinds)]
