"""A function -> whether its compiled program communicates more than it may."""

from __future__ import annotations

from typing import Any

from .._mesh import MeshLike
from .._promises import Promise, check_promise, read_promise
from .lowered import lower


def assert_collectives(
    fn: Any, *args: Any, allowed: Promise, mesh: MeshLike | None = None, **kwargs: Any
) -> None:
    """Raises if the program of a call has other collectives than those allowed. It does not run.

        >>> @sharded('x y -> x y*', 'y z -> y* z', mesh=jax.devices()[:8])
        ... def product(x, w):
        ...     return x @ w
        >>> x, w = np.ones((8, 64)), np.ones((64, 8))
        >>> assert_collectives(product, x, w, allowed={'all-reduce': 1})
        >>> assert_collectives(product, x, w, allowed=())
        Traceback (most recent call last):
        ...
        einshard.UnexpectedCollectives: product communicates more than it may: 1 all-reduce
        ...

    Each collective of the optimised program counts once, also where a loop repeats it, and whether
    the compiler shows it plain, as a pair of start and done, or in a fusion.

    Args:
        fn: as for `explain`: a `sharded` or jitted function, or any other, which is jitted.
        args, kwargs: what it is called with; arrays, or a `ShapeDtypeStruct` for one.
        allowed: `()` for none, 'all-reduce' or a collection of kinds, or the most there may be of
            each kind, as in `{'all-reduce': 2}`; of others there may be none.
        mesh: as for `explain`: the mesh to compile for, also one that is not here, as
            `topology('v5e:4x4')`, of a `sharded` function without a mesh of its own.

    Raises:
        UnexpectedCollectives: the program has other collectives, or more of them.
        EinshardError: an unknown kind; the arguments do not fit the function, or it does not
            compile.
    """
    promise = read_promise(allowed, 'allowed=')
    stages = lower(fn, args, kwargs, mesh)
    check_promise(stages.name or 'the program', stages.compile(), promise)
