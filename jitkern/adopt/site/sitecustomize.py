"""What Python imports at its start under `jitkern run`: the user's own file, and then our hook.

The hook is read when the first module that is not of the standard library is imported, or one that
starts other programs: a process without one compiles nothing.
"""

import os
import sys


class _HookFinder:
    """A finder that finds nothing, and has the hook installed in its own place."""

    def find_spec(self, name, path=None, target=None):
        """Return what the finder of the hook does."""
        own = getattr(sys, "stdlib_module_names", ()) if name != "subprocess" else ()
        if name.partition(".")[0] in own or name in ("sitecustomize", "usercustomize"):
            return None
        sys.meta_path.remove(self)
        _install()
        return sys.meta_path[0].find_spec(name, path, target)


def _install():
    try:
        for name in ("jits", "events", "hook"):
            full = f"_jitkern_run_{name}"
            loader = type(_loader)(full, f"{os.path.dirname(_here)}{os.sep}{name}.py")
            sys.modules[full] = module = type(sys)(full)
            module.__file__ = loader.path
            loader.exec_module(module)
        module.install()
    except Exception as e:  # noqa: BLE001  the program runs as without us
        sys.stderr.write(f"jitkern run: nothing is counted or refused in this process: {e!r}\n")


_here = os.path.dirname(os.path.abspath(__file__))
_loader = __spec__.loader
if os.environ.get("JITKERN_RUN_MODE"):
    _install()
else:
    sys.meta_path.insert(0, _HookFinder())
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != _here]
_mine = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401  the user's
except ImportError as e:
    if e.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _mine
