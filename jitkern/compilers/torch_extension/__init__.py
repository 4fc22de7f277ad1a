"""C++ and CUDA with Torch's headers, as `torch.utils.cpp_extension` builds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.compilers.torch_extension import (
        commands as commands,
        compile_and_link as compile_and_link,
        extension as extension,
        hints as hints,
        inline as inline,
        ninja as ninja,
        objects as objects,
    )
else:
    __getattr__ = on_first_use(__name__)
