"""assert_collectives: checks the collectives of a compiled function."""

from __future__ import annotations

import functools
from typing import Any

from .._errors import public
from .._functions.promise import Promise, check_promise, read_promise
from .._sharding.mesh import MeshLike
from .trace_call import trace_to_compile


@public
def assert_collectives(
    fn: Any, *args: Any, allowed: Promise, mesh: MeshLike | None = None, **kwargs: Any
) -> None:
    """Compiles a call without running it, and raises if it uses collectives beyond `allowed`.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import assert_collectives, sharded
        >>> @sharded('x* y', 'y z -> * y z')
        ... def product(x, w):
        ...     return x @ w
        >>> x, w = np.ones((jax.device_count(), 64)), np.ones((64, 8))
        >>> assert_collectives(product, x, w, allowed=())  # no collectives
        >>> assert_collectives(product, x, w, allowed={'all-reduce': 1})  # at most one

    Each collective of the optimized program counts once, even in a loop.

    Args:
        fn: a `sharded` or jitted function. Any other function is jitted first.
        args, kwargs: arguments of the call. A `jax.ShapeDtypeStruct` can replace an array.
        allowed: `()` for none, a kind such as 'all-reduce', a collection of kinds, or a mapping
            from kinds to limits, such as `{'all-reduce': 2}`.
        mesh: the mesh to compile for, as for `explain`.

    Raises:
        UnexpectedCollectives: the program has more collectives of some kind than `allowed` permits.
        EinshardError: `allowed` has an unknown kind, the arguments do not match the function, or
            the function does not compile.
    """
    promise = read_promise(allowed, 'allowed=')
    stages = trace_to_compile(fn, args, kwargs, mesh)
    sharded_by = stages.program and functools.partial(stages.program.sharded_by, stages.values)
    check_promise(stages.name or 'the program', stages.compile(), promise, sharded_by)
