"""The C text of a stub: a few lines below `shim.h`, without anything to link to."""

from __future__ import annotations

from jitkern.launch.symbols import Statement
from jitkern.trace import shim
from jitkern.trace.trace import Traced


def lines_of(schema: str, traced: Traced) -> list[Statement]:
    """Return the lines of the stub, each with the line of the launch function that caused it."""
    head = [
        f"/* {schema} */",
        "i32 stub(Call *call) {",
        "  const Api *api = call->api;",
        *(f"  const Tensor *{name} = &call->tensors[{i}];" for i, name in traced.tensors),
        "  i32 odd = 0;",
    ]
    middle = ["  if (odd) return MISS;", f"  Handle owned[{traced.owned or 1}] = {{0}};"]
    release = f"  return api->release(call, owned, {traced.owned}, %s);"
    return [
        *(Statement(text, 0) for text in head),
        *(Statement(f"  {text}", line) for text, line in traced.facts),
        *(Statement(text, 0) for text in middle),
        *(Statement(f"  {text}", line) for text, line in traced.actions),
        Statement(release % "DONE", 0),
        *(Statement(t, 0) for t in ("failed:", release % "FAILED") if _may_fail(traced)),
        Statement("}", 0),
    ]


def text_of_stub(schema: str, traced: Traced) -> str:
    """Return the whole C text that is compiled."""
    return shim() + "\n" + "".join(f"{text}\n" for text, _ in lines_of(schema, traced))


def _may_fail(traced: Traced) -> bool:
    return any("goto failed" in text for text, _ in traced.actions)
