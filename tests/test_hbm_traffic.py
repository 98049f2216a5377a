"""The HBM bound: never more than a program can do with."""

import jax
import jax.numpy as jnp
import pytest
from hlo.read import copied_in, hbm_bytes_of
from jax import lax
from placed import struct

N, ROW = 2**20, 4 * 128


TABLE, VECTOR, NUMBER = struct(8192, 128), struct(N), struct(dtype='int32')
ALL = 4 * N  # bytes of either


def sum_of_rows(x, n):
    return lax.fori_loop(0, n, lambda i, c: c * 0.5 + x[i], jnp.zeros(128))


def scan(x, **options):
    return lax.scan(lambda c, row: (c * 0.5 + row, None), jnp.zeros(128), x, **options)[0]


# the function, its arguments, and the bytes of a run that moves as little as possible
PROGRAMS = {
    'every 1024th': (lambda x: x[::1024] * 2, [VECTOR], 2 * 4 * 1024),
    'a product of which 8 are needed': (
        lambda x, y: jnp.where(y > 0, jnp.tanh(x)[:8], y),
        [VECTOR, struct(8)],
        3 * 4 * 8,
    ),
    'one row in every step': (
        lambda x, n: lax.scan(lambda c, i: (c + x[i], None), jnp.zeros(128), n)[0],
        [TABLE, struct(16, dtype='int32')],
        ROW + 4 * 16 + ROW,  # the 16 rows may be the same
    ),
    'the first rows': (lambda x: sum_of_rows(x, 64), [TABLE], 64 * ROW + ROW),
    'a number of rows': (sum_of_rows, [TABLE, NUMBER], ROW + 4 + ROW),
    'every other row': (
        lambda x: lax.fori_loop(0, 4096, lambda i, c: c * 0.5 + x[2 * i], jnp.zeros(128)),
        [TABLE],
        ALL // 2 + ROW,
    ),
    'a branch': (
        lambda p, w, x: lax.cond(p, lambda x: x + jnp.sum(w), lambda x: x * 2, x),
        [struct(dtype='bool'), VECTOR, struct(8)],
        1 + 2 * 4 * 8,
    ),
    'a branch that changes nothing': (
        lambda x, p: lax.cond(p, lambda x: x * 2, lambda x: x, x),
        [VECTOR, struct(dtype='bool')],
        1,
    ),
    'two caches': (
        lambda a, b, row, n: [lax.dynamic_update_slice(x, row, (n, 0)) for x in (a, b)],
        [TABLE, TABLE, struct(1, 128), NUMBER],
        3 * ROW + 4,
    ),
}


def decode(cache, row, n):
    cache = lax.dynamic_update_slice(cache, row, (n, 0))
    return cache, jnp.sum(cache, 0)


def decode_tokens(cache, row, n):
    def token(i, state):
        cache, row = state
        cache = lax.dynamic_update_slice(cache, row, (n + i, 0))
        return cache, jnp.sum(cache, 0, keepdims=True)

    return lax.fori_loop(0, 8, token, (cache, row))


def scatter(cache, row, n):
    cache = cache.at[n].set(row[0])
    return cache, jnp.sum(cache, 0)


@pytest.mark.parametrize(
    ('fn', 'updated'), [(decode, ROW), (decode_tokens, 8 * ROW), (scatter, ROW)]
)
def test_a_cache_that_is_updated_in_place_and_read(fn, updated):
    compiled = jax.jit(fn, donate_argnums=0).lower(TABLE, struct(1, 128), NUMBER).compile()
    needed = ALL - updated + ROW + 4 + ROW
    assert 0.99 * needed < hbm_bytes_of(compiled) <= needed


@pytest.mark.parametrize('what', PROGRAMS)
def test_no_more_than_a_run_can_do_with(what):
    fn, arguments, needed = PROGRAMS[what]
    donated = {'two caches': (0, 1), 'a branch that changes nothing': (0,)}.get(what, ())
    compiled = jax.jit(fn, donate_argnums=donated).lower(*arguments).compile()
    assert hbm_bytes_of(compiled) <= needed


@pytest.mark.parametrize(
    ('fn', 'argument', 'needed'),
    [
        (scan, TABLE, ALL + ROW),
        (lambda x: scan(x, reverse=True), TABLE, ALL + ROW),
        (lambda x: x[: N // 2] + x[N // 2 :], VECTOR, ALL + ALL // 2),
        (lambda x: jnp.sum(x[:8]), VECTOR, 4 * 8 + 4),
        (lambda x: jnp.tanh(x) * 2, VECTOR, 2 * ALL),
    ],
    ids=['scan', 'reverse scan', 'halves', 'slice', 'elementwise'],
)
def test_all_that_a_run_needs(fn, argument, needed):
    compiled = jax.jit(fn).lower(argument).compile()
    assert hbm_bytes_of(compiled) == needed


def test_a_computation_that_is_called_twice():
    row = 'f32[1,128]{1,0}'
    state = f'(s32[], f32[8,128]{{1,0}}, f32[8,128]{{1,0}}, {row})'
    text = f"""HloModule jit_f

%row (table: f32[8,128], i: s32[]) -> f32[1,128] {{
  %table = f32[8,128]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = {row} dynamic-slice(%table, %i, %zero), dynamic_slice_sizes={{1,128}}
}}

%body (state: {state}) -> {state} {{
  %state = {state} parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[8,128]{{1,0}} get-tuple-element(%state), index=1
  %y = f32[8,128]{{1,0}} get-tuple-element(%state), index=2
  %sum = {row} get-tuple-element(%state), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %row_of_x = {row} fusion(%x, %n), kind=kLoop, calls=%row
  %row_of_y = {row} fusion(%y, %one), kind=kLoop, calls=%row
  %rows = {row} add(%row_of_x, %row_of_y)
  %added = {row} add(%sum, %rows)
  ROOT %after = {state} tuple(%next, %x, %y, %added)
}}

%condition (state: {state}) -> pred[] {{
  %state = {state} parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(8)
  ROOT %less = pred[] compare(%n, %limit), direction=LT
}}

ENTRY %main (a: f32[8,128], b: f32[8,128], c: f32[1,128]) -> f32[1,128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  %b = f32[8,128]{{1,0}} parameter(1)
  %c = {row} parameter(2)
  %start = s32[] constant(0)
  %state = {state} tuple(%start, %a, %b, %c)
  %loop = {state} while(%state), condition=%condition, body=%body
  ROOT %result = {row} get-tuple-element(%loop), index=3
}}
"""
    # all rows of a, one row of b, and c; the result is written
    assert hbm_bytes_of(text) <= 8 * ROW + ROW + ROW + ROW


CACHES = """HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }

ENTRY %main (a: f32[16,64], b: f32[16,64], x: f32[1,64]) -> (f32[16,64], f32[16,64]) {
  %a = f32[16,64]{1,0} parameter(0)
  %b = f32[16,64]{1,0} parameter(1)
  %x = f32[1,64]{1,0} parameter(2)
  %n = s32[] parameter(3)
  %zero = s32[] constant(0)
  %in = f32[16,64]{1,0} dynamic-update-slice(%a, %x, %n, %zero)
COPIES
  ROOT %both = (f32[16,64]{1,0}, f32[16,64]{1,0}) tuple(%in, %new)
}
"""
FAST = 'f32[16,64]{1,0:T(8,128)S(1)}'
PAIR = f'({FAST}, f32[16,64]{{1,0}}, u32[])'
BACK = f'(f32[16,64]{{1,0}}, {FAST}, u32[])'
UPDATE = 'dynamic-update-slice'


@pytest.mark.parametrize(
    ('copies', 'n'),
    [
        ([f'%new = f32[16,64]{{1,0}} {UPDATE}(%b, %x, %n, %zero)'], 0),
        (
            [
                '%copy = f32[16,64]{0,1} copy(%b)',
                f'%new.1 = f32[16,64]{{0,1}} {UPDATE}(%copy, %x, %n, %zero)',
                '%new = f32[16,64]{1,0} copy(%new.1)',
            ],
            2,
        ),
        (
            # on TPU: updated in VMEM, and written back
            [
                f'%s = {PAIR} copy-start(%b)',
                f'%d = {FAST} copy-done(%s)',
                f'%u = {FAST} {UPDATE}(%d, %x, %n, %zero)',
                f'%t = {BACK} copy-start(%u)',
                '%new = f32[16,64]{1,0} copy-done(%t)',
            ],
            1,
        ),
        (
            # only a read of the new cache is copied
            [
                f'%new = f32[16,64]{{1,0}} {UPDATE}(%b, %x, %n, %zero)',
                f'%s = {PAIR} copy-start(%new)',
                f'%d = {FAST} copy-done(%s)',
                '%e = f32[16,64]{0,1} copy(%new)',
            ],
            0,
        ),
    ],
    ids=['in place', 'other layout', 'VMEM', 'copy of the result'],
)
def test_copies_of_donated_arguments(copies, n):
    found = copied_in(CACHES.replace('COPIES', '\n'.join(f'  {line}' for line in copies)))
    assert [(one.output, one.parameter) for one in found] == [(1, 1)] * bool(n)
    assert sum(one.bytes for one in found) == n * 4 * 16 * 64
