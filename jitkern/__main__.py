"""`python -m jitkern` is the `jitkern` command."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current directory, which Python put there, and the command never does

from jitkern.cli import main

sys.exit(main())
