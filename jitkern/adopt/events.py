"""What happens in the processes of a run: lines of JSON in one file.

Programs read this file by itself, also in environments without jitkern.
"""

from __future__ import annotations

import os

FOLDER = "JITKERN_RUN"  # the variable with the folder of the run
MODE = "JITKERN_RUN_MODE"  # "", "warn" or "frozen"
COMMAND = "JITKERN_RUN_COMMAND"  # what prepares the cache
CACHES = "JITKERN_RUN_CACHES"  # the folder with those of the JITs
FILE = "events.jsonl"


def note(**event: object) -> None:
    """Append an event to the file of the run; lines of several processes do not mix."""
    import json  # when something happens, and not at the start of each process

    folder = os.environ.get(FOLDER)
    if folder:
        line = json.dumps(event).encode() + b"\n"
        try:
            descriptor = os.open(f"{folder}/{FILE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError:
            pass  # the run is over, and this process is not


def refusal(tool: str, what: str, where: str) -> str:
    """Return why a compile is refused, and what prepares it."""
    mode, command = os.environ.get(MODE, ""), os.environ.get(COMMAND, "")
    return (
        f"jitkern run --{mode}: {tool} compiles {what}, asked for at {where}, and the cache has "
        f"nothing for it. Prepare it where compilers may run, with `{command}`, and carry it here "
        "with --push, `jitkern cache pack` or `jitkern remote push`"
    )
