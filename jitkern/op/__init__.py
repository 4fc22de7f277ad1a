"""An op in Torch: declaration, registration, dispatch to a source, and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.op import (
        about as about,
        all_ops as all_ops,
        autograd as autograd,
        autograd_functions as autograd_functions,
        compile_cache_key as compile_cache_key,
        declaration as declaration,
        dispatch as dispatch,
        execution as execution,
        gradient as gradient,
        needed_kernels as needed_kernels,
        op as op,
        recorder as recorder,
        recording as recording,
    )
else:
    __getattr__ = on_first_use(__name__)
