"""The C compiler, for what jitkern writes itself: stubs, and the launch runtime they run under."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config
from jitkern.closure import Closure
from jitkern.errors import TargetError
from jitkern.kernel import Generated, Source, Variant
from jitkern.target import Target, this_platform

if TYPE_CHECKING:
    from jitkern.compilers.result import Built


class StubCompiler:
    """Plain C, linked to nothing: 40 ms."""

    def target(self, source: Source, target: Target) -> Target:
        return target.for_host_code()

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return (
            "-O2",
            "-fPIC",
            "-shared",
            "-nostdlib",
            "-std=c17",
            "-fwrapv",
            "-fexceptions",
            "-ffp-contract=off",
            "-fno-math-errno",
        )

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        from jitkern.compilers.cc_build import identity

        return [identity(config.current().cc)]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        import shlex

        from jitkern.compilers.cc_build import identity
        from jitkern.compilers.result import Built, compile_error, run, write_log

        source = variant.source
        assert isinstance(source, Generated)
        if target.platform != this_platform():
            raise TargetError(
                f"{variant.op} for {target}: host code is built on its own platform, "
                f"here {this_platform()}"
            )
        tool = config.current().cc
        compiler = identity(tool)
        build = staging / "build"
        build.mkdir()
        unit = build / source.files[0]
        unit.write_text(source.text, encoding="utf-8")
        flags = self.flags(source, target)
        command = [*shlex.split(tool), *flags, "-o", "out.so", unit.name]
        done = run(command, source=source, folder=build)
        write_log(staging, command, done.stdout)
        if done.returncode:
            raise compile_error(variant, target, command, done.stdout)
        binary = (build / "out.so").read_bytes()
        artifact = f"{unit.stem}.{hashlib.sha256(binary).hexdigest()[:8]}.so"
        (staging / artifact).write_bytes(binary)
        return Built(compiler, {"artifact": artifact})
