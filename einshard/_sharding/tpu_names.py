"""Checks and converts the names of TPU slices. Does not import JAX."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

from .._chips.table import TPUS
from .._errors import EinshardError, plural
from .gpu_names import gpu_forms

_NAME = re.compile(
    r'(?P<generation>[\w ]+?)[:=](?P<sizes>\d{1,9}(?:x\d{1,9})*)(?P<twist>_(?:un)?twisted)?',
    re.ASCII,
)

# Cloud accelerator types, such as 'v5p-128'. The number counts TensorCores.
_CLOUD = {name: tpu for tpu in TPUS.values() for name in tpu.cloud}
_CLOUD_NAME = re.compile(rf'(?P<generation>{"|".join(_CLOUD)})-(?P<count>[0-9]{{1,6}})')


def topology_name(name: str) -> str:
    """Converts a name to one that libtpu knows: 'v5p-128' to 'v5p:4x4x4'. Raises for invalid names.

    An accelerator type gets its default shape, the one closest to a square or a cube
    (https://cloud.google.com/tpu/docs/types-topologies).
    """
    try:
        return _convert(name)
    except EinshardError as error:
        raise error.with_fix(_corrected_name(name)) from None


def split_slices(name: str) -> tuple[int, str]:
    """Splits '2*v5e:4x4' into the number of slices and the name of one; 'v5e:4x4' is one slice."""
    many, star, one = name.partition('*')
    return (int(many), one) if star and re.fullmatch('[1-9][0-9]{0,5}', many) else (1, name)


def not_offered(name: str) -> str | None:
    """Returns a warning about a shape that libtpu knows, but that Google Cloud does not offer.

    2D slices have one shape for each number of chips. The sizes of 3D slices with 64 chips or more
    are multiples of 4. See https://docs.cloud.google.com/tpu/docs/v5p, and the pages of the others.
    The order of the sizes does not matter. Returns None for generations without accelerator types.
    """
    match = _NAME.fullmatch(name)
    tpu = TPUS.get(match['generation']) if match else None
    if match is None or tpu is None or not tpu.slices:
        return None
    ndim = tpu.ndim
    sizes = sorted(map(int, match['sizes'].split('x')))
    sizes = [1] * (ndim - len(sizes)) + sizes[-ndim:]  # 'v5e:2x2x1' has the shape of 'v5e:2x2'
    chips = math.prod(sizes)
    default = _default_shape(chips, ndim) if chips in tpu.slices else None
    is_cubes = ndim == 3 and all(size % 4 == 0 for size in sizes)
    if default and (sizes == sorted(default) or is_cubes):
        return None
    other = f"; with {chips} chips, it offers '{_shape_name(tpu.name, default)}'" if default else ''
    page = f'https://docs.cloud.google.com/tpu/docs/{tpu.name}'
    return f"Google Cloud does not offer slices '{name}'{other} ({page})"


def _corrected_name(name: str) -> str | None:
    """Corrects case, spaces and separators. Returns None if the name is still invalid."""
    compact = re.sub(r'\s*([-:/x])\s*', r'\1', name.strip().lower())
    text = re.sub(r'[-/](?=\d+x)', ':', compact)
    text = re.sub(r':(?=\d+$)', '-', text)
    text = re.sub(r'^v7x?(?=[:=])', 'tpu7x', text)
    try:
        _convert(text)
    except EinshardError:
        return None
    return f"'{text}'"


def _convert(name: str) -> str:
    match = _CLOUD_NAME.fullmatch(name)
    if match is None:
        _check_name(name)
        return name
    tpu, count = _CLOUD[match['generation']], int(match['count'])
    chips, rest = divmod(count, tpu.cores)
    if rest or chips not in tpu.slices:
        counts = [str(chips * tpu.cores) for chips in tpu.slices]
        shown = ', '.join(counts if len(counts) < 12 else [*counts[:7], '...', counts[-1]])
        unit = 'TensorCores' if tpu.cores == 2 else 'chips'
        shape = '4x4' if tpu.ndim == 2 else '2x2x2'
        raise EinshardError(
            f"'{name}' is not a Cloud accelerator type",
            code='topology',
            facts={f'valid numbers of {unit}': shown, 'or by shape': f"'{tpu.name}:{shape}'"},
        )
    return _shape_name(tpu.name, _default_shape(chips, tpu.ndim))


def _shape_name(generation: str, shape: Iterable[int]) -> str:
    return f'{generation}:{"x".join(map(str, shape))}'


def _default_shape(chips: int, ndim: int) -> tuple[int, ...]:
    """Returns the 2D shape closest to a square, or the 3D shape closest to a cube.

    From 64 chips on, a 3D shape consists of 4x4x4 blocks.
    """
    if ndim == 3 and chips < 64:
        return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}[chips]
    unit = 4 if ndim == 3 else 1
    n = chips // unit**ndim
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    shapes = itertools.combinations_with_replacement(divisors, ndim)
    best = min((shape for shape in shapes if math.prod(shape) == n), key=sum)
    return tuple(unit * size for size in best)


def _check_name(name: str) -> None:
    """Raises for invalid names. libtpu's own errors would show names that users do not know."""
    match = _NAME.fullmatch(name)
    generation = match['generation'] if match else ''
    if match is None or generation not in TPUS:
        sentence = (
            f"'{generation}' is not a TPU generation"
            if match
            else f"'{name}' is not a valid topology name"
        )
        raise EinshardError(sentence, code='topology', facts={**known_names(), **gpu_forms()})
    sizes = match['sizes'].split('x')
    if any(int(size) == 0 for size in sizes):  # libtpu would divide by zero
        raise EinshardError(f"'{name}' has no chips", code='topology', facts=known_names())
    ndim, n_sizes = TPUS[generation].ndim, len(sizes)
    if n_sizes == 1 or any(int(size) > 1 for size in sizes[ndim:]):
        raise EinshardError(
            f"'{name}' has {plural(n_sizes, 'dimension')}, but {generation} slices have {ndim}",
            code='topology',
            facts=known_names(),
        )


_MAX_CHIPS = 2**16  # of all slices; libtpu takes the memory of the machine for 10^9


def check_size(name: str, converted: str, n_slices: int) -> None:
    """Raises for more chips than libtpu describes in reasonable time and memory."""
    chips = math.prod(map(int, re.findall(r'\d+', converted.partition(':')[2])))
    if chips * n_slices > _MAX_CHIPS:
        slices = f'{n_slices:,} slices ' * (n_slices > 1)
        raise EinshardError(
            f"{slices}'{name}' {'have' if slices else 'has'} more than {_MAX_CHIPS:,} chips",
            code='topology',
            facts={'chips': f'{chips * n_slices:,}'},
        )


def known_names() -> dict[str, str]:
    by_ndim = [', '.join(name for name, tpu in TPUS.items() if tpu.ndim == n) for n in (2, 3)]
    cloud = [*_CLOUD]
    return {
        '2D slices': f"{by_ndim[0]}; for example 'v5e:4x4', or '2*v5e:4x4' for two",
        '3D slices': f"{by_ndim[1]}; for example 'v5p:2x2x2'",
        'Cloud accelerator types': f"{cloud[0]} to {cloud[-1]}; for example 'v5p-128', "
        "'v5litepod-16'",
    }
