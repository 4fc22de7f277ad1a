"""`python -m jitkern` is the `jitkern` command."""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current directory, which Python put there, and the command never does

import jitkern
import jitkern._command as command
import jitkern.adopt.start as start  # noqa: PLR0402  `from` would import more

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start
if TYPE_CHECKING:
    import jitkern.cli  # noqa: TC004  met on first use


def main() -> int:
    """Run the command line, and return its exit code."""
    code = start.begin(sys.argv[2:]) if sys.argv[1:2] == ["run"] else None
    if code is not None:
        return command.end_as(code)
    try:
        return jitkern.cli.main()
    finally:
        start.finish()


if __name__ == "__main__":
    sys.exit(main())
