"""Adds the get-tuple-element instructions that JAX 0.12 omits from HLO text."""

from __future__ import annotations

import re
from collections import defaultdict

_ELEMENT = re.compile(r'%([^\s,()#]+)#(\d+)')
_DEFINITION = re.compile(r'\n  (?:ROOT )?%([^\s=]+) = \((.*?)\) [a-z][^\n]*')
_TYPE = re.compile(r'(?:/\*index=\d+\*/)?([^\s,{}]+(?:\{[^}]*\})?)')


def add_tuple_elements(text: str) -> str:
    """Adds a get-tuple-element instruction for each tuple element written like `%pair#0`.

    >>> from einshard._hlo.elements import add_tuple_elements
    >>> text = '''
    ...   %pair = (f32[8]{0}, s32[]) parameter(0)
    ...   ROOT %x = f32[8]{0} negate(%pair#0)
    ... '''
    >>> print(add_tuple_elements(text).strip())
    %pair = (f32[8]{0}, s32[]) parameter(0)
      %pair#0 = f32[8]{0} get-tuple-element(%pair), index=0
      ROOT %x = f32[8]{0} negate(%pair#0)
    """
    elements: dict[str, set[int]] = defaultdict(set)
    for name, number in _ELEMENT.findall(text):
        elements[name].add(int(number))
    if not elements:
        return text

    def with_elements(match: re.Match[str]) -> str:
        name, types = match[1], _TYPE.findall(match[2])
        return match[0] + ''.join(
            f'\n  %{name}#{i} = {types[i]} get-tuple-element(%{name}), index={i}'
            for i in sorted(elements.get(name, ()))
            if i < len(types)
        )

    return _DEFINITION.sub(with_elements, text)
