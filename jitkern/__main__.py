"""`python -m jitkern` is the `jitkern` command."""

import atexit
import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current directory, which Python put there, and the command never does

import jitkern
import jitkern._command as command
import jitkern.adopt.start as start  # noqa: PLR0402  `from` would import more

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start
if TYPE_CHECKING:
    import jitkern.cli.run  # noqa: TC004  met on first use


def main() -> int:
    """Run the command line, and return its exit code."""
    if sys.argv[1:2] != ["run"]:
        return jitkern.cli.main()
    ended: list[int] = []
    # Of all functions at exit the first one is called last. Python would tear its modules down, in
    # 20 ms, and another thread may import some right now.
    atexit.register(lambda: ended and os._exit(ended[0]))
    try:
        code = start.begin(sys.argv[2:], lambda: jitkern.cli.run)
        ended.append(jitkern.cli.main() if code is None else command.end_as(code))
    finally:
        start.finish()
    return ended[0]


if __name__ == "__main__":
    sys.exit(main())
