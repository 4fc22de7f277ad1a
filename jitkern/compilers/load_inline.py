"""The child process that runs `torch.utils.cpp_extension.load_inline` on the request on stdin."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from torch.utils import cpp_extension

    cpp_extension.load_inline(functions=None, **json.load(sys.stdin))


if __name__ == "__main__":
    main()
