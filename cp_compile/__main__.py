"""``python -m cp_compile``."""

import sys

from cp_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
