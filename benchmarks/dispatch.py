"""calls of a sharded function, against jax.jit with the same shardings written by hand

Both sides are compiled before and are given the same arrays, placed as asked. A call stands in a
loop, as in a user's program: by way of a `functools.partial` it would be a call from C, and the one
more Python frame that `sharded` is would cost half as much again. On one device the last of a loop
is waited for, on several each: else a side would be charged for what the other left in the queue.

The rows of jit beside itself show what noise there is. Those that count come last.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from einshard import device_mesh, sharded

from ._counting import count_calls
from ._harness import Bench, Call, figure_at_most, ratio_at_most
from ._models import device_counts

SPLIT, WHOLE = 'a b -> a* b', 'a b -> * a b'
BY_HAND = 'jax.jit, shardings by hand'
POSITIONAL = f'{BY_HAND}, by position'
ONE_DEVICE, SEVERAL, TREE = ratio_at_most(1.1), ratio_at_most(1.03), ratio_at_most(1.05)
KEYWORDS = figure_at_most(20e-6)
PROMISE = ratio_at_most(1.1)
WITHOUT = 'sharded, without the promise'


def run(bench: Bench) -> None:
    n_leaves = 4 if bench.tiny else 200
    for n_devices in sorted({1, jax.device_count()}):
        setting = Setting(n_devices)
        one_argument(bench, setting)
        parameter_tree(bench, setting, n_leaves)
        promise(bench, setting, n_leaves)
    for n_devices in device_counts(jax.device_count())[: 2 if bench.tiny else None]:
        leaves(bench, Setting(n_devices), 2 if bench.tiny else 20)
    one_device = Setting(1)
    for n in () if bench.tiny else (2, 500):
        leaves(bench, one_device, n)
    keywords(bench, one_device, n_leaves)
    method(bench, one_device)
    count(bench, Setting(jax.device_count()), 4)


class Setting:
    """Some of the devices, the one mesh of them, and shardings on it written by hand."""

    def __init__(self, n_devices: int):
        self.n_devices = n_devices
        self.devices = jax.devices()[:n_devices]
        self.mesh: Mesh = device_mesh(self.devices)
        # an axis of size 1 is named by no PartitionSpec that einshard writes
        axes = PartitionSpec(self.mesh.axis_names) if n_devices > 1 else PartitionSpec()
        self.split = NamedSharding(self.mesh, axes)
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self.on = f'{n_devices} device{"s" * (n_devices > 1)}'
        self.calls_in_a_loop = 20 if n_devices == 1 else 1

    def array(self, sharding: NamedSharding, width: int = 8) -> jax.Array:
        return jax.device_put(np.ones((self.n_devices, width), np.float32), sharding)

    def tree(self, n_leaves: int, width: int = 8) -> dict[str, dict[str, jax.Array]]:
        """A dict of layers, of a split leaf 'w' and a replicated leaf 'b' each."""
        w, b = self.array(self.split, width), self.array(self.whole, width)
        return {f'layer{i}': {'w': w + 0, 'b': b + 0} for i in range(n_leaves // 2)}

    def calls(self, function: Callable[..., Any], x: Any) -> Call:
        """`calls_in_a_loop` calls of `function(x)`, the last of them waited for."""

        def loop() -> None:
            for _ in range(self.calls_in_a_loop - 1):
                function(x)
            jax.block_until_ready(function(x))

        return loop

    def keyword_calls(self, function: Callable[..., Any], x: Any) -> Call:
        """`calls_in_a_loop` calls of `function(x=x)`, the last of them waited for."""

        def loop() -> None:
            for _ in range(self.calls_in_a_loop - 1):
                function(x=x)
            jax.block_until_ready(function(x=x))

        return loop

    def compare(
        self,
        bench: Bench,
        name: str,
        ours: Any,
        beside: str,
        theirs: Any,
        x: Any,
        limit: Any,
        **size: int,
    ) -> None:
        """Calls of two functions with the same argument."""
        bench.compare(
            f'{name}, {self.on}',
            self.calls(ours, x),
            beside,
            self.calls(theirs, x),
            limit,
            self.calls_in_a_loop,
            devices=self.n_devices,
            **size,
        )


def plus_one(x: Any) -> Any:
    return x + 1


def each_plus_one(x: Any) -> Any:
    return jax.tree.map(plus_one, x)


def by_the_path(path: str, leaf: Any) -> str:
    return SPLIT if path.endswith('w') else WHOLE


def one_argument(bench: Bench, setting: Setting) -> None:
    x, split = setting.array(setting.split), setting.split
    limit = ONE_DEVICE if setting.n_devices == 1 else SEVERAL
    by_hand = jax.jit(plus_one, in_shardings=split, out_shardings=split)
    again = jax.jit(lambda x: x + 1, in_shardings=split, out_shardings=split)

    def compare(name: str, ours: Any, limit: Any) -> None:
        setting.compare(bench, name, ours, BY_HAND, by_hand, x, limit)

    compare('jax.jit beside itself', again, None)
    ours = sharded(SPLIT, out=SPLIT, mesh=setting.devices)(plus_one)
    check_shardings(ours, x, {'x': split}, split)
    compare('one argument', ours, limit)
    with jax.set_mesh(setting.mesh):
        ours = sharded(SPLIT, out=SPLIT)(plus_one)
        check_shardings(ours, x, {'x': split}, split)
        compare('one argument, jax.set_mesh', ours, limit)


def parameter_tree(bench: Bench, setting: Setting, n_leaves: int) -> None:
    mixed = setting.tree(n_leaves)
    in_parts = jax.tree.map(lambda x: jax.device_put(x, setting.split), mixed)
    by_leaf = jax.tree.map(lambda x: x.sharding, mixed)
    expressions = {layer: {'w': SPLIT, 'b': WHOLE} for layer in mixed}

    def compare(name: str, ours: Any, by_hand: Any, tree: Any, limit: Any) -> None:
        name = f'{name}, {n_leaves} leaves'
        setting.compare(bench, name, ours, BY_HAND, by_hand, tree, limit, leaves=n_leaves)

    kinds = {
        'one expression': (SPLIT, setting.split, in_parts),
        'a tree of expressions': (expressions, by_leaf, mixed),
        'a function of the path': (by_the_path, by_leaf, mixed),
    }
    by_hand: Any = None
    for kind, (spec, shardings, tree) in kinds.items():
        by_hand = jax.jit(each_plus_one, in_shardings=(shardings,), out_shardings=shardings)
        if kind == 'one expression':
            again = jax.jit(
                lambda x: jax.tree.map(plus_one, x),
                in_shardings=(shardings,),
                out_shardings=shardings,
            )
            compare('jax.jit beside itself', again, by_hand, tree, None)
        ours = sharded(spec, out=spec, mesh=setting.devices)(each_plus_one)
        check_shardings(ours, tree, {'x': shardings}, shardings)
        compare(kind, ours, by_hand, tree, TREE)
        with jax.set_mesh(setting.mesh):
            ours = sharded(spec, out=spec)(each_plus_one)
            compare(f'{kind}, jax.set_mesh', ours, by_hand, tree, TREE)
    # the last kind looks at the leaves: here it has met leaves of another shape as well
    ours = sharded(by_the_path, out=by_the_path, mesh=setting.devices)(each_plus_one)
    other = setting.tree(n_leaves, width=16)
    for called in (ours, by_hand):
        called(mixed)
        called(other)
    compare('a function of the path, after other shapes', ours, by_hand, mixed, TREE)


def leaves(bench: Bench, setting: Setting, n_leaves: int) -> None:
    """Trees of several sizes on several numbers of devices, under the spec that looks at most."""
    tree = setting.tree(n_leaves)
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    by_hand = jax.jit(each_plus_one, in_shardings=(shardings,), out_shardings=shardings)
    ours = sharded(by_the_path, out=by_the_path, mesh=setting.devices)(each_plus_one)
    name = f'a tree of {n_leaves} leaves'
    setting.compare(bench, name, ours, BY_HAND, by_hand, tree, TREE, leaves=n_leaves)


def keywords(bench: Bench, setting: Setting, n_leaves: int) -> None:
    """Keyword calls, which jit with `in_shardings` refuses, beside positional calls of jit."""
    shardings = jax.tree.map(lambda x: x.sharding, setting.tree(n_leaves))
    cases = {
        f'one argument by keyword, {setting.on}': (
            plus_one,
            setting.array(setting.split),
            SPLIT,
            setting.split,
        ),
        f'{n_leaves} leaves by keyword, {setting.on}': (
            each_plus_one,
            setting.tree(n_leaves),
            by_the_path,
            shardings,
        ),
    }
    for name, (function, x, spec, sharding) in cases.items():
        ours = sharded(spec, out=spec, mesh=setting.devices)(function)
        by_hand = jax.jit(function, in_shardings=(sharding,), out_shardings=sharding)
        bench.difference(
            name,
            setting.keyword_calls(ours, x),
            POSITIONAL,
            setting.calls(by_hand, x),
            KEYWORDS,
            setting.calls_in_a_loop,
            devices=setting.n_devices,
        )


def method(bench: Bench, setting: Setting) -> None:
    """A method of a dataclass of arrays; the instance takes no spec."""
    x, split = setting.array(setting.split), setting.split
    ours = model(sharded(SPLIT, out=SPLIT, mesh=setting.devices))(x)
    by_hand = model(lambda f: jax.jit(f, in_shardings=(None, split), out_shardings=split))(x)

    def calls(instance: Any) -> Call:
        def loop() -> None:
            for _ in range(setting.calls_in_a_loop - 1):
                instance.scaled(x)
            jax.block_until_ready(instance.scaled(x))

        return loop

    name = f'a method, {setting.on}'
    n_calls = setting.calls_in_a_loop
    size = {'devices': setting.n_devices}
    bench.compare(name, calls(ours), BY_HAND, calls(by_hand), ONE_DEVICE, n_calls, **size)


def promise(bench: Bench, setting: Setting, n_leaves: int) -> None:
    """Calls under a promise, beside calls without; the programs have no collectives."""
    x, tree = setting.array(setting.split), setting.tree(n_leaves)
    cases = {
        'one argument': (SPLIT, x),
        f'{n_leaves} leaves, a function of the path': (by_the_path, tree),
        # where arrays without a spec are is looked at in every call
        f'{n_leaves} leaves without a spec': ((SPLIT, None), (x, tree)),
    }
    for name, (spec, value) in cases.items():
        plain = sharded(spec, out=spec, mesh=setting.devices)(each_plus_one)
        ours = sharded(spec, out=spec, mesh=setting.devices, collectives=())(each_plus_one)
        setting.compare(bench, f'a promise, {name}', ours, WITHOUT, plain, value, PROMISE)


def model(decorate: Callable[[Any], Any]) -> type:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        weight: jax.Array

        @decorate
        def scaled(self, x: jax.Array) -> jax.Array:
            return x * self.weight

    return Model


def check_shardings(ours: Any, x: Any, in_shardings: Any, out_shardings: Any) -> None:
    """Raises unless the shardings are those that are written by hand."""
    for found, expected in (
        (ours.in_shardings(x), in_shardings),
        (ours.out_shardings(x), out_shardings),
    ):
        if found != expected:
            raise RuntimeError(f'{expected} is compared with {found}, which is something else')


def count(bench: Bench, setting: Setting, n_leaves: int) -> None:
    """Traces and compilations over a few calls of each kind."""
    narrow, wide = setting.tree(n_leaves), setting.tree(n_leaves, width=16)
    by_leaf = jax.tree.map(lambda x: x.sharding, narrow)
    on_host = jax.tree.map(np.asarray, narrow)
    leaf, other = setting.array(setting.split), setting.array(setting.split, width=16)
    # equal to the split sharding, spelled otherwise
    spelled = jax.device_put(
        leaf, NamedSharding(setting.mesh, PartitionSpec(*setting.split.spec, None))
    )
    one = [leaf, leaf, spelled, other, leaf, np.asarray(leaf)]
    trees = [narrow, narrow, wide, narrow, on_host, wide]
    whole = setting.array(setting.whole)
    behind = '... b -> * ... b'
    simple = sharded(SPLIT, out=SPLIT, mesh=setting.devices)
    path = sharded(by_the_path, out=by_the_path, mesh=setting.devices)
    ellipsis = sharded(WHOLE, out=behind, mesh=setting.devices)
    kinds = {
        'one argument': (simple, setting.split, one),
        'every other time by keyword': (lambda f: in_turn(simple(f)), setting.split, one),
        'a function of the path': (path, by_leaf, trees),
        f"out='{behind}'": (ellipsis, setting.whole, [whole] * 3),
    }
    for kind, (decorate, shardings, values) in kinds.items():
        bench.progress(f'counting: {kind}')
        by_hand = partial(jax.jit, in_shardings=(shardings,), out_shardings=shardings)
        ours = count_calls(each_plus_one, decorate, values)
        theirs = count_calls(each_plus_one, by_hand, values)
        for what, mine, other in zip(('traces', 'programs'), ours, theirs, strict=True):
            bench.record(
                f'{what} of {len(values)} calls: {kind}',
                what,
                [mine],
                BY_HAND,
                [other],
                ratio_at_most(1.0),
                devices=setting.n_devices,
            )


def in_turn(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Calls the function by position, then by keyword, and so on."""
    turns = itertools.cycle((lambda x: function(x), lambda x: function(x=x)))
    return lambda x: next(turns)(x)
