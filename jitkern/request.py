"""What is looked up and compiled: a variant for a target, and all that its key covers."""

from __future__ import annotations

from jitkern.closure import Closure, closure_of
from jitkern.compilers import Compiler, compiler_for
from jitkern.kernel import Variant
from jitkern.key import Key, make_key
from jitkern.named_tuple import NamedTuple
from jitkern.target import Target


class Request(NamedTuple):
    """One variant for one target, as its files are at one moment.

    exact: the target with what the artifact depends on, such as platform and ABI.
    """

    variant: Variant
    target: Target
    exact: Target
    compiler: Compiler
    closure: Closure
    key: Key

    @classmethod
    def of(cls, variant: Variant, target: Target) -> Request:
        """The request as the files are now. It needs no compiler on this machine.

        Raises DeclarationError for a file that is not there.
        """
        source = variant.source
        compiler = compiler_for(source)
        exact = compiler.target(source, target)
        closure = closure_of(source)
        key = make_key(variant, exact, compiler.flags(source, exact), closure)
        return cls(variant, target, exact, compiler, closure, key)

    def again(self) -> Request:
        """The same request, with the files as they are now."""
        return Request.of(self.variant, self.target)
