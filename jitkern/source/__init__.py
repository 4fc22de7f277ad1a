"""The sources of kernels: kinds of source, the files and names in them, and their key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.source import (
        argument_classes as argument_classes,
        closure as closure,
        constants as constants,
        cpp_text as cpp_text,
        declarations as declarations,
        defining_file as defining_file,
        dtypes as dtypes,
        flags as flags,
        global_names as global_names,
        gpus as gpus,
        import_facts as import_facts,
        includes as includes,
        key as key,
        kinds as kinds,
        module_spec as module_spec,
        texts as texts,
        triton_decorators as triton_decorators,
        triton_function as triton_function,
        triton_globals as triton_globals,
    )
else:
    __getattr__ = on_first_use(__name__)
