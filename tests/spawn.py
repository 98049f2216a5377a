"""Ports and import paths for processes that tests start."""

import os
import socket


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def python_path(*folders):
    """A PYTHONPATH of these folders and those of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get('PYTHONPATH')]))
