"""Reads the wire format of protocol buffers: fields by number, without a schema.

JAX's `ProfileData` shows neither the metadata of events, where a trace has its programs, nor what a
trace has lost. https://protobuf.dev/programming-guides/encoding describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

WireValue: TypeAlias = int | memoryview


class Truncated(ValueError):
    """The bytes end within a field, or are not of this format."""


def fields(data: memoryview) -> Iterator[tuple[int, WireValue]]:
    """Yields (number, value) of each field of a message, in order.

    A value is an integer, not decoded further, or the bytes of a string, of a message or of packed
    numbers.
    """
    i, end = 0, len(data)
    try:
        while i < end:
            key = data[i]
            i += 1
            if key > 127:
                key, i = _varint(data, i - 1)
            kind = key & 7
            if kind == 0:
                value = data[i]
                i += 1
                if value > 127:
                    value, i = _varint(data, i - 1)
                yield key >> 3, value
            elif kind == 2:
                size = data[i]
                i += 1
                if size > 127:
                    size, i = _varint(data, i - 1)
                start, i = i, i + size
                if i > end:
                    raise Truncated(f'a field of {size} bytes has {end - start}')
                yield key >> 3, data[start:i]
            elif kind in (1, 5):
                start, i = i, i + (8 if kind == 1 else 4)
                yield key >> 3, int.from_bytes(data[start:i], 'little')
            else:
                raise Truncated(f'a field has the unknown type {kind}')
    except IndexError:
        raise Truncated('the last field is cut off') from None


def messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yields the values of one field that have bytes: strings and messages."""
    for n, value in fields(data):
        if n == number and not isinstance(value, int):
            yield value


def numbers(value: WireValue) -> list[int]:
    """The integers of a repeated field, of which a packed one has all in one value."""
    if isinstance(value, int):
        return [value]
    found, i = list[int](), 0
    while i < len(value):
        number, i = _varint(value, i)
        found.append(number)
    return found


def text(value: WireValue) -> str:
    return '' if isinstance(value, int) else bytes(value).decode('utf-8', 'replace')


def _varint(data: memoryview, i: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[i]
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i
        shift += 7
