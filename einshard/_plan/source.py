"""Writes the mesh of a plan, and specs with its placements, as source text to paste."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh

from .._notation.expression import write_short
from .._sharding.leaf_spec import LEAF_SPECS, REPLICATED, as_leaf_spec, with_memory_kind
from .._sharding.mesh import Device, position
from .._trees.rules import Rules
from .._trees.specs import Spec
from .candidate import Candidate


def mesh_call(devices: Mesh, candidate: Candidate) -> str:
    """Returns a call that makes the mesh of a candidate, if possible of `device_mesh`.

    >>> import jax
    >>> from einshard import device_mesh
    >>> from einshard._plan.candidate import Candidate
    >>> from einshard._plan.source import mesh_call
    >>> candidate = Candidate(mesh=(('x', 2), ('y', 4)), axes=())
    >>> mesh_call(device_mesh(jax.devices()[8:16]), candidate)
    'device_mesh(jax.devices()[8:16], x=2, y=4)'
    """
    axes = candidate.mesh_text
    names, sizes = zip(*candidate.mesh, strict=True)
    if any(not name.isidentifier() or keyword.iskeyword(name) for name in names):
        axes = f'**{dict(candidate.mesh)}'
    wanted = list(devices.devices.flat)
    call, available = find_devices_call(wanted)
    numbers = sorted(map(available.index, wanted))
    start, end = numbers[0], numbers[-1] + 1
    if len(numbers) < end - start:
        call = f'[{call}[i] for i in {numbers}]'
    elif len(numbers) < len(available):
        call = f'{call}[{start or ""}:{end}]'
    arguments = [] if call == 'jax.devices()' else [call]
    if {'devices', 'axis_types'} & {*names}:  # parameters of device_mesh
        devices_text = f'device_mesh({", ".join(arguments)}).devices.reshape{sizes}'
        return f'jax.sharding.Mesh({devices_text}, {names})'
    return f'device_mesh({", ".join([*arguments, axes])})'


def find_devices_call(devices: Sequence[Device]) -> tuple[str, list[Device]]:
    """Finds a call of `jax.devices` that returns all of `devices`, and maybe others.

    If this machine lacks the devices, as for a topology, returns 'jax.devices()' and `devices`, in
    hardware order.

    Returns:
        The source text of the call, and the devices that it returns, in order.
    """
    platform = devices[0].platform
    for call, arguments in (('jax.devices()', ()), (f'jax.devices({platform!r})', (platform,))):
        # JAX may lack the platform of a topology. With JAX_PLATFORMS=cuda and no GPU, it has no
        # devices at all, and an assertion of its own fails.
        with suppress(RuntimeError, AssertionError):
            available = jax.devices(*arguments)
            if set(devices) <= set(available):
                return call, available
    return 'jax.devices()', sorted(devices, key=position)


def spec_lines(arguments: Sequence[tuple[str, Spec]], candidate: Candidate) -> tuple[str, ...]:
    """Returns lines that assign a spec to each argument, such as "x = 'batch@x embed'".

    `Rules` take a line for each rule. Specs that are None or functions are left out, and so are
    such rules of `Rules`, and pytrees that contain functions or `Rules`. `arguments` are pairs of a
    name and a spec.
    """
    axes = dict(candidate.axes)
    # the name of an argument in *args is 'args[0]'
    named = [(re.sub(r'\W+', '_', name).strip('_'), spec) for name, spec in arguments]
    return tuple(line for name, spec in named for line in _assignment(name, spec, axes))


def _assignment(name: str, spec: Spec, axes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if isinstance(spec, Rules):
        yield f'{name} = Rules(['
        for pattern, leaf_spec in spec.rules:
            if isinstance(leaf_spec, LEAF_SPECS):
                yield f'    ({raw_string(pattern)}, {_with_mesh_axes(leaf_spec, axes)!r}),'
        default = spec.default if isinstance(spec.default, LEAF_SPECS) else None
        yield '])' if default is None else f'], default={_with_mesh_axes(default, axes)!r})'
    elif isinstance(spec, LEAF_SPECS):
        yield f'{name} = {_with_mesh_axes(spec, axes)!r}'
    elif spec is not None and not callable(spec):
        leaves, treedef = jtu.tree_flatten(spec, is_leaf=lambda one: isinstance(one, Rules))
        if all(isinstance(leaf, LEAF_SPECS) for leaf in leaves):
            texts = [_with_mesh_axes(leaf, axes) for leaf in leaves]
            yield f'{name} = {jtu.tree_unflatten(treedef, texts)}'


def suffix_rules(placements: Mapping[str, str]) -> str:
    """Writes `Rules` that match the ends of paths, so that weights share them with their states.

    Args:
        placements: of each path of an argument; '' for arrays that are replicated.

    >>> from einshard._plan.source import suffix_rules
    >>> print(suffix_rules({'0/0/up': 'a b*', '0/1/up': 'a b*', '1/mu/0/up': 'a b*', '1/n': ''}))
    Rules([
        ('(^|/)up$', 'a b*'),
    ], default='...')
    """
    rules: dict[str, str] = {}
    for path, placement in placements.items():
        if not placement or any(re.search(pattern, path) for pattern in rules):
            continue
        parts = [r'\d+' if part.isdigit() else re.escape(part) for part in path.split('/')]
        for n in range(1, len(parts) + 1):
            start = '(^|/)' if len(parts) > n else '^'
            pattern = f'{start}{"/".join(parts[-n:])}$'
            if all(
                placed == placement for p, placed in placements.items() if re.search(pattern, p)
            ):
                break
        else:
            pattern = f'^{re.escape(path)}$'
        rules[pattern] = placement
    lines = (f'    ({raw_string(pattern)}, {text!r}),\n' for pattern, text in rules.items())
    return f'Rules([\n{"".join(lines)}], default={REPLICATED!r})'


def raw_string(pattern: str) -> str:
    """Writes a pattern as source text, if possible as a raw string where it has backslashes."""
    quoted = repr(pattern)
    raw = f'r{quoted}'.replace('\\\\', '\\')
    with suppress(SyntaxError):
        if '\\' in pattern and ast.literal_eval(raw) == pattern:
            return raw
    return quoted


def _with_mesh_axes(spec: Any, axes: Mapping[str, tuple[str, ...]]) -> str:
    """Writes a spec with the mesh axes of its axis names. Does not change expressions with '->'."""
    leaf_spec = as_leaf_spec(spec)
    expression = leaf_spec.expression
    if not expression.short:
        return str(leaf_spec)
    terms = [
        term if term.spans_devices else replace(term, mesh_axes=axes.get(term.name or '', ()))
        for term in expression.right
    ]
    return with_memory_kind(write_short(terms).text, leaf_spec.memory_kind)
