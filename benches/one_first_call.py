"""One first call of one kind in this process, over Torch and the CUDA context: prints its seconds.

`first_call` starts it as `python -m benches.one_first_call KIND DEVICE`, with the caches and
settings of that kind in the environment. KIND `import jitkern.ops` times that alone. Nothing that
a kind may import is imported here before the clock starts, but for what Torch imports itself.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benches.kinds import KINDS, Kind, synchronize, verify_events
from benches.rivals import RIVALS

_events: list[Any] = []


def main() -> None:
    """Run the kind that the command line names."""
    name, device = sys.argv[1:]
    inputs = _inputs(device)
    kind = KINDS.get(name)
    synchronize(device)
    started = time.perf_counter()
    out = _first_call(kind, inputs) if kind else _import_ops()
    synchronize(device)
    seconds = time.perf_counter() - started
    if kind:
        _verify(kind, inputs, out)
    print(json.dumps({"seconds": seconds}))


def _inputs(device: str) -> list[torch.Tensor]:
    torch.zeros(1, device=device)  # on a GPU: creates the context
    return [torch.rand(1024, device=device) for _ in range(3)]


def _import_ops() -> Any:
    import jitkern.ops

    return jitkern.ops


def _first_call(kind: Kind, inputs: list[torch.Tensor]) -> Any:
    if not kind.op:
        return RIVALS[kind.name](*inputs[:2])
    import jitkern.ops

    jitkern.on_compile(_events.append)
    return getattr(jitkern.ops, kind.op)(*inputs[: 3 if kind.op == "muladd" else 2])


def _verify(kind: Kind, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    x, y, z = inputs
    torch.testing.assert_close(out, x * y + z if kind.op == "muladd" else x + y)
    if kind.op:
        from jitkern import config

        verify_events(_events, kind.op, kind.prefer)
        statuses = {event.status for event in _events}
        wanted = "hit" if config.current().compile == "never" else "built"
        if wanted not in statuses or (wanted == "hit" and len(statuses) > 1):
            raise AssertionError(
                f"{kind.name}: expected `{wanted}`, but jitkern reports {sorted(statuses)}"
            )


if __name__ == "__main__":
    main()
