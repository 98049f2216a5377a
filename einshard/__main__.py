"""`python -m einshard` is the command `einshard`."""

import sys

from ._cli.main import script

if __name__ == '__main__':
    sys.exit(script())
