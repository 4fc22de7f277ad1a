"""What Python imports at its start under `jitkern run`: our hook, then the user's own file."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_name = f"{os.path.dirname(_here)}{os.sep}hook.py"
try:
    _hook = type(sys)("_jitkern_run_hook")
    _hook.__file__ = _name
    _hook.__loader__ = type(__spec__.loader)("_jitkern_run_hook", _name)
    sys.modules["_jitkern_run_hook"] = _hook
    _hook.__loader__.exec_module(_hook)
    _hook.install()
except Exception as e:  # noqa: BLE001  the program runs as without us
    sys.stderr.write(f"jitkern run: nothing is counted or refused in this process: {e!r}\n")
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != _here]
_mine = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401  the user's
except ImportError as e:
    if e.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _mine
