"""`python -m jitkern` is the `jitkern` command."""

import sys

from jitkern.cli import main

sys.exit(main())
