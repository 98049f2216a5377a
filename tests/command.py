"""The command `python -m einshard` in this process, because another one would start JAX again."""

import runpy
import sys
from unittest import mock


def main(arguments):
    """Runs the command, and returns its exit status."""
    with mock.patch.object(sys, 'argv', ['einshard', *arguments]):
        try:
            runpy.run_module('einshard', run_name='__main__', alter_sys=True)
        except SystemExit as done:
            return done.code
    raise AssertionError('the command did not exit')
