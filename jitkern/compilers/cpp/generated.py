"""The C compiler for code that jitkern writes itself: the launch runtime."""

from __future__ import annotations

from pathlib import Path

from jitkern import compilers, config
from jitkern.compilers import Compiler, cpp
from jitkern.source.closure import Closure
from jitkern.source.kinds import Generated, Source, Variant
from jitkern.target import Target

LIMIT = 60.0  # seconds


class GeneratedCompiler(Compiler):
    """The compiler of plain C that is linked to nothing but libgcc.

    libgcc holds what the compiler calls for single operations, e.g. for atomic ones on aarch64.
    """

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
        return [cpp.cc_build.identity(config.current().cc)]

    def compile(
        self, variant: Variant, target: Target, closure: Closure, staging: Path
    ) -> compilers.result.Built:
        import shlex

        source = variant.source
        assert isinstance(source, Generated)
        compilers.result.check_platform(variant.op, target)
        tool = config.current().cc
        compiler = cpp.cc_build.identity(tool)
        build = staging / "build"
        build.mkdir()
        unit = build / source.files[0]
        unit.write_text(source.text, encoding="utf-8")
        flags = self.flags(source, target)
        command = [*shlex.split(tool), *flags, "-o", "out.so", unit.name, "-lgcc"]
        process = compilers.result.run(command, source=source, folder=build, limit=LIMIT)
        compilers.result.write_log(staging, command, process.stdout)
        if process.returncode:
            raise compilers.result.compile_error(variant, target, command, process.stdout)
        binary = compilers.result.binary_at(build / "out.so", variant, target, command)
        artifact = compilers.result.keep_binary(staging, unit.stem, binary)
        return compilers.result.Built(compiler, {"artifact": artifact})
