"""Makes all processes take the same routes: process 0 chooses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .._arrays.process_agreement import all_gather_bytes, check_same_plan
from .._errors import EinshardError
from .placed import Placed
from .route import Found, Move, Route, find_route, remember_route

_SAME_MOVES = {'expected': 'the same arrays and placements in every process'}


def check_same_moves(texts: Sequence[tuple[str, str]], mesh: Mesh) -> None:
    """Raises in every process if the processes are about to move different arrays."""
    check_same_plan(texts, mesh, _SAME_MOVES)


def agree_on_routes(moves: Sequence[Move], mesh: Mesh) -> list[Found]:
    """Returns the routes that the first process of `mesh` finds."""
    first = min(device.process_index for device in mesh.devices.flat)
    return [_agree(move, mesh, first) for move in moves]


def _agree(move: Move, mesh: Mesh, first: int) -> Found:
    message = b''
    if jax.process_index() == first:
        try:
            message = json.dumps(_as_data(find_route(move))).encode()
        except EinshardError as error:  # without this, the other processes would wait
            message = json.dumps({'error': str(error)}).encode()
    lengths = all_gather_bytes(len(message).to_bytes(8, 'big'), mesh)
    length = int.from_bytes(lengths[first], 'big')
    data = json.loads(all_gather_bytes(message.ljust(length, b' '), mesh)[first])
    if 'error' in data:
        raise EinshardError(data['error'], code='processes')
    found = _from_data(data)
    remember_route(move, found)
    return found


def least_of_all(value: int, mesh: Mesh) -> int:
    """Returns the smallest value of all processes."""
    values = all_gather_bytes(value.to_bytes(8, 'big'), mesh).values()
    return min(int.from_bytes(each, 'big') for each in values)


def _as_data(found: Found) -> dict[str, Any]:
    routes = {'best': found.best, 'direct': found.direct}
    data = {
        name: route and [[list(placed) for placed in route.through], route.sent, route.temporaries]
        for name, route in routes.items()
    }
    return {**data, 'compilations': found.compilations}


def _from_data(data: dict[str, Any]) -> Found:
    def route(given: Any) -> Route | None:
        if given is None:
            return None
        through, sent, temporaries = given
        placed = (Placed(tuple(sizes), tuple(map(tuple, entries))) for sizes, entries in through)
        return Route(tuple(placed), sent, temporaries)

    return Found(route(data['best']), route(data['direct']), data['compilations'])
