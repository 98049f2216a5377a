"""What a program raises while JAX traces it, for the frame that called it and then calls again.

They are no errors, and reach no user. A call that JAX need not trace for asks nothing of this.
"""

from __future__ import annotations


class Signal(Exception):
    """A program cannot be called with these arguments as it is."""


class Stale(Signal):
    """It is traced for a mesh or for arguments other than those it was resolved for."""


class Untyped(Signal):
    """The types of arguments, on explicit mesh axes, are not those that their specs say."""
