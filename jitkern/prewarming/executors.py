"""The executor that `prewarm --executor` names: one of Dask, Ray, submitit, mpi4py and others."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

from jitkern.errors import JitkernError, SettingError, error_line, meant, then
from jitkern.prewarming.jobs import found_in


class NamedExecutor(contextlib.ExitStack):
    """The executor that the function `MODULE:FACTORY` returns, with all of its attributes.

    The function is called at the first use. What it returns is entered then, and left at exit, if
    it is a context manager.

    Raises SettingError for a text that names no function. The first use raises SettingError for a
    result that is no executor, and JitkernError if the function raises.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._executor: Any = None
        module, _, name = text.partition(":")
        if not (module and name):
            example = "MODULE:FACTORY, as in `cluster:executor` for a function in cluster.py"
            raise SettingError(f"--executor `{text}` names no function: expected {example}")
        try:
            with found_in(module.partition(".")[0], [str(Path.cwd())]):
                imported = importlib.import_module(module)
        except (Exception, SystemExit) as e:  # whatever its author's code raises
            raise SettingError(
                f"--executor `{text}`: {module} cannot be imported: {error_line(e)}; it may be a "
                "file of the current directory, or an installed package"
            ) from e
        self._factory: Any = getattr(imported, name, None)
        if not callable(self._factory):
            known = hasattr(imported, name)
            why = "is no function" if known else f"is not there{meant(name, vars(imported))}"
            where = f"define it in {getattr(imported, '__file__', module)}"
            raise SettingError(then(f"--executor `{text}`: `{name}` {why}", where))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the executor."""
        if self._executor is None:
            self._executor = self._begun()
        return getattr(self._executor, name)

    def _begun(self) -> Any:
        try:
            executor = self._factory()
            if hasattr(type(executor), "__exit__"):
                executor = self.enter_context(executor)
        except Exception as e:
            raise JitkernError(f"--executor `{self._text}` failed: {error_line(e)}") from e
        if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
            raise SettingError(
                f"--executor `{self._text}` returned {executor!r:.80}, which is no executor: "
                "return a concurrent.futures.Executor, or what has its method `submit`"
            )
        return executor
