"""`python -m megatrain`: the command line, where the command isn't on the path."""

from __future__ import annotations

import sys

from megatrain.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
