"""expect_collectives: checks the collectives of every program that a block compiles."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax

from .._errors import EinshardError, public
from .._sharding.axis_rules import check_option
from .._sharding.tracing import is_tracing, user_stacklevel
from .compile_events import is_listening, loaded_text, unwatch, watch
from .promise import Promise, allowed_text, find_unexpected, read_promise

# The limits of the current block. They are in JAX's cache keys, so that a block does not reuse
# programs that were compiled without its limits. Created at import, because creating a user context
# makes JAX retrace everything.
_limits_context: Any = jax.make_user_context(default_value=None)


class _Thread(threading.local):
    def __init__(self) -> None:
        # the blocks that this thread is in, outermost first, each with its `_limits_context(...)`
        self.entered: list[tuple[expect_collectives, Any]] = []


_thread = _Thread()


class expect_collectives:
    """Checks the collectives of every program that JAX compiles in a `with` block.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import einshard, expect_collectives
        >>> x = einshard(np.ones((jax.device_count(), 64), np.float32), 'b d -> b* d')
        >>> with expect_collectives('all-reduce'):  # any number of all-reduces, and nothing else
        ...     y = jax.jit(lambda x: x.sum())(x)

    This includes the programs of `sharded` functions, of `jax.jit`, and of operations outside of
    jit. A program is checked after it is compiled and before it runs. Functions that were called
    before the block are compiled again in it. Later blocks with the same `allowed` and
    `on_unexpected` reuse these programs. A collective in a loop counts once. If blocks are nested,
    only the innermost one checks.

    Programs that other threads compile, or that were compiled ahead of time before the block, are
    not checked. A program for devices that you don't have is not checked either, and gives a
    warning. Do not `await` or `yield` inside the block.

    Args:
        allowed: the collectives that each program may have: `()` for none, one kind such as
            'all-reduce', several kinds, or the limit of each kind, such as `{'all-reduce': 2}`.
        on_unexpected: for a program with unexpected collectives, 'error' raises before it runs, and
            'warn' gives a warning and runs it.

    Raises:
        UnexpectedCollectives: in the block, at the call that compiles the program.
        EinshardError: a kind is unknown; the block is in a traced function; nested blocks are not
            exited innermost first; or the block was not checked, because it called
            `jax.monitoring.clear_event_listeners`.
    """

    @public
    def __init__(self, allowed: Promise, *, on_unexpected: Literal['error', 'warn'] = 'error'):
        self._allowed = read_promise(allowed, 'allowed=')
        check_option('on_unexpected', on_unexpected, ('error', 'warn'))
        self._warns = on_unexpected == 'warn'

    def __repr__(self) -> str:
        return f'<expect_collectives: {allowed_text(self._allowed)}>'

    @public
    def __enter__(self) -> expect_collectives:
        if is_tracing():
            raise EinshardError(
                'expect_collectives cannot be entered in a traced function',
                facts={'instead': 'enter it around the call of the jitted function'},
            )
        watch(self._check)
        limits_context = _limits_context((tuple(sorted(self._allowed.items())), self._warns))
        limits_context.__enter__()
        _thread.entered.append((self, limits_context))
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        blocks = [block for block, _ in _thread.entered]
        in_order = blocks[-1:] == [self]
        if self in blocks:
            unwatch(self._check)
            i = len(blocks) - 1 - blocks[::-1].index(self)
            limits_context = _thread.entered.pop(i)[1]
            if in_order:
                limits_context.__exit__(None, None, None)
            else:
                # the next inner block is still open; on exit, it restores the limits from before
                # this block
                _thread.entered[i] = _thread.entered[i][0], limits_context
        if raised is not None:
            return
        if not in_order:
            raise EinshardError(
                'expect_collectives blocks must be exited innermost first, by the task and thread '
                'that entered them',
                facts={'instead': "'with expect_collectives(...):', without await or yield inside"},
            )
        if not is_listening():
            raise EinshardError(
                'the collectives of this block were not checked: '
                'jax.monitoring.clear_event_listeners was called in it'
            )

    def _check(self, name: str, programs: Sequence[Any]) -> None:
        if not programs:
            self._warn(
                f'the collectives of {name} were not checked: its program is not on the devices '
                'of this process'
            )
        for program in programs:
            error = find_unexpected(name, loaded_text(program), self._allowed)
            if error is not None and not self._warns:
                raise error
            if error is not None:
                self._warn(str(error))

    def _warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=user_stacklevel())
