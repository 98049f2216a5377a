"""Checks the arguments of a call before it is traced, and words for a call in errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._errors import PUBLIC, EinshardError
from .._sharding.mesh import AnyMesh, mesh_fact
from .._text import array_text, name_of


def jit_of_call(
    fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Returns a fact that says to jit a function that calls `fn`, if JAX can trace that."""
    try:
        jax.jit(lambda *args, **kwargs: fn(*args, **kwargs)).trace(*args, **kwargs)
    except Exception:  # the function may raise anything
        return {}
    return {'instead': f'jax.jit(lambda *args: {name}(*args))'}


def check_no_refs(name: str, mesh: AnyMesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Rejects Refs, because JAX does not accept a ShapeDtypeStruct in place of one."""
    if any(isinstance(leaf, jax.Ref) for leaf in jtu.tree_leaves((tuple(args), dict(kwargs)))):
        raise EinshardError(
            f'{name} takes a jax.Ref, so mesh= cannot be given',
            code='array',
            facts={
                'arguments': format_call(args, kwargs),
                'mesh=': mesh_fact(mesh),
                'instead': 'pass an array, and call jax.new_ref inside the function',
            },
        )


def check_devices(name: str, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    example_of: dict[AnyMesh, Any] = {}
    for leaf in jtu.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, NamedSharding):
            example_of[leaf.sharding.mesh] = leaf
    for other, leaf in example_of.items():
        if isinstance(other, Mesh) and {*other.devices.flat} != {*mesh.devices.flat}:
            raise EinshardError(
                f'an argument of {name} is not on the devices of mesh=',
                code='mesh',
                facts={
                    'array': array_text(leaf),
                    'mesh of the argument': mesh_fact(other),
                    'mesh=': mesh_fact(mesh),
                    'instead': 'omit mesh=, or the sharding of the argument',
                },
            )


def concrete(mesh: AnyMesh, use: str) -> Mesh:
    if isinstance(mesh, AbstractMesh):
        raise EinshardError(
            f'an abstract mesh has no devices to {use}',
            code='mesh',
            facts={
                'mesh': mesh_fact(mesh),
                'instead': "pass a Mesh with devices; for those you don't have, "
                "topology('v5e:4x4') or topology('h100:8')",
            },
        )
    return mesh


def check_arguments(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins: leave the check to JAX
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        # newer Pythons say 'keyword-only argument'
        missing = re.fullmatch(r"missing a required .*argument: '(\w+)'", str(error))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        shown = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise EinshardError(
            f'the arguments do not match the parameters of {name}: {error}',
            facts={
                'parameters': str(shown)[1:-1] or 'none',
                'arguments': format_call(args, kwargs),
                **(_partial_fact(name, missing[1]) if missing and _is_option(missing[1]) else {}),
                **_unpacked_fact(signature, args, kwargs),
            },
        ) from None


def _is_option(name: str) -> bool:
    """Whether a function that passes `kwargs` on, such as explain, takes this keyword itself."""
    found = (inspect.signature(function).parameters for function in PUBLIC)
    return any({name, 'kwargs'} <= parameters.keys() for parameters in found)


def _unpacked_fact(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Says to unpack a tuple, if its values match the parameters."""
    for i, arg in enumerate(args):
        if isinstance(arg, tuple | list):
            with suppress(TypeError):
                signature.bind(*args[:i], *arg, *args[i + 1 :], **kwargs)
                return {'instead': f'write * before argument {i + 1}, which has {len(arg)} values'}
    return {}


def _partial_fact(name: str, option: str) -> dict[str, str]:
    return {f'parameter {option}': f'functools.partial({name}, {option}=...) in place of {name}'}


@contextmanager
def suggest_partial(fn: Any, option: str) -> Generator[None]:
    """Adds to errors about an option that a parameter of the function has its name."""
    try:
        yield
    except EinshardError as error:
        names: Collection[str] = ()
        with suppress(TypeError, ValueError):  # some builtins have no signature
            names = inspect.signature(fn).parameters
        if option not in names:
            raise
        raise error.about(**_partial_fact(name_of(fn), option)) from None


def without_devices(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        aval: Any = jax.typeof(leaf)  # float32 for a float64 array of NumPy
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return leaf


def format_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Formats 'float32[8,4], dict, lr=float 0.1'."""
    by_keyword = [f'{name}={array_text(value)}' for name, value in kwargs.items()]
    return ', '.join([*map(array_text, args), *by_keyword]) or 'none'
