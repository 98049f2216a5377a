"""Ports and import paths for processes that tests start."""

import contextlib
import os
import random
import socket


def free_port():
    """A free port that the system gives to no other process in the meantime."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)  # Linux gives out 32,768 and up
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            return port


def python_path(*folders):
    """A PYTHONPATH of these folders and those of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get('PYTHONPATH')]))
