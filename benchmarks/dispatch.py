"""Call sharded functions, against jax.jit with hand-written shardings.

Both functions are compiled beforehand and get the same arrays, already placed. The calls of one
device are timed as a loop of which only the last result is awaited; on several devices each is
awaited, so that neither side pays for work that the other has left in the queue. The rows of
jax.jit against itself show the noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from einshard import device_mesh, sharded

from ._counting import count_calls
from ._measure import Bench, Call

SPLIT, REPLICATED = 'a b -> a* b', 'a b -> * a b'
BY_HAND = 'jax.jit with hand-written shardings'


def run(bench: Bench) -> None:
    n_leaves = 4 if bench.tiny else 200
    for n_devices in sorted({1, jax.device_count()}):
        calls(bench, Setting(n_devices), n_leaves)
    keywords(bench, Setting(1))
    method(bench, Setting(1))
    modules(bench, Setting(1), 10 if bench.tiny else 2000)
    count(bench, Setting(jax.device_count()))


class Setting:
    """Some of the devices, their canonical mesh, and hand-written shardings on it."""

    def __init__(self, n_devices: int):
        self.n_devices = n_devices
        self.devices = jax.devices()[:n_devices]
        self.mesh: Mesh = device_mesh(self.devices)
        # einshard's PartitionSpecs name no mesh axis of size 1
        axes = PartitionSpec(self.mesh.axis_names) if n_devices > 1 else PartitionSpec()
        self.split = NamedSharding(self.mesh, axes)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.n_calls = 20 if n_devices == 1 else 1  # per loop

    def array(self, sharding: NamedSharding, width: int = 8) -> jax.Array:
        return jax.device_put(np.ones((self.n_devices, width), np.float32), sharding)

    def tree(self, n_leaves: int, width: int = 8) -> dict[str, dict[str, jax.Array]]:
        """A dict of layers, each with a split leaf 'w' and a replicated leaf 'b'."""
        w, b = self.array(self.split, width), self.array(self.replicated, width)
        return {f'layer{i}': {'w': w + 0, 'b': b + 0} for i in range(n_leaves // 2)}

    def compare(self, bench: Bench, name: str, ours: Call, against: str, theirs: Call) -> None:
        """A row for two calls, each in a loop."""

        def loop(call: Call) -> None:
            for _ in range(self.n_calls - 1):
                call()
            jax.block_until_ready(call())

        name = f'{name}, {self.n_devices} device{"s" * (self.n_devices > 1)}'
        bench.compare(name, partial(loop, ours), against, partial(loop, theirs), self.n_calls)


def plus_one(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, x)


def by_path(path: str, leaf: Any) -> str:
    return SPLIT if path.endswith('w') else REPLICATED


def jit_by_hand(function: Callable[[Any], Any], shardings: Any) -> Any:
    return jax.jit(function, in_shardings=(shardings,), out_shardings=shardings)


def calls(bench: Bench, setting: Setting, n_leaves: int) -> None:
    """Several kinds of specs; one argument also with limited collectives, and in a mesh context."""
    x, tree = setting.array(setting.split), setting.tree(n_leaves)
    split_tree = jax.device_put(tree, setting.split)
    by_leaf = jax.tree.map(lambda leaf: leaf.sharding, tree)
    by_layer = {layer: {'w': SPLIT, 'b': REPLICATED} for layer in tree}
    cases: dict[str, tuple[Any, Any, Any]] = {
        'one argument': (x, SPLIT, setting.split),
        f'{n_leaves} leaves, one expression': (split_tree, SPLIT, setting.split),
        f'{n_leaves} leaves, a tree of expressions': (tree, by_layer, by_leaf),
        f'{n_leaves} leaves, a function of the path': (tree, by_path, by_leaf),
    }
    again = jit_by_hand(lambda x: plus_one(x), setting.split)
    compare(bench, setting, 'jax.jit against itself', again, x, setting.split)
    for name, (value, spec, shardings) in cases.items():
        given = sharded(spec, out=spec, mesh=setting.devices)(plus_one)
        check_shardings(given, value, shardings)
        compare(bench, setting, name, given, value, shardings)
    limited = sharded(SPLIT, out=SPLIT, mesh=setting.devices, collectives=())(plus_one)
    compare(bench, setting, 'one argument, collectives=()', limited, x, setting.split)
    with jax.set_mesh(setting.mesh):
        ambient = sharded(SPLIT, out=SPLIT)(plus_one)
        check_shardings(ambient, x, setting.split)
        compare(bench, setting, 'one argument, jax.set_mesh', ambient, x, setting.split)


def compare(
    bench: Bench, setting: Setting, name: str, ours: Any, value: Any, shardings: Any
) -> None:
    by_hand = jit_by_hand(plus_one, shardings)
    # lambdas, not partials: called from C, the Python frame of `sharded` costs half as much again
    setting.compare(bench, name, lambda: ours(value), BY_HAND, lambda: by_hand(value))


def check_shardings(ours: Any, value: Any, shardings: Any) -> None:
    """Raise unless `ours` has the shardings that are written by hand."""
    found = ours.in_shardings(value), ours.out_shardings(value)
    if found != ({'x': shardings}, shardings):
        raise RuntimeError(f'{found} is compared with {shardings}')


def keywords(bench: Bench, setting: Setting) -> None:
    """A keyword call, which jit rejects with `in_shardings`, against a positional call of jit."""
    x, split = setting.array(setting.split), setting.split
    ours = sharded(SPLIT, out=SPLIT, mesh=setting.devices)(plus_one)
    by_hand = jit_by_hand(plus_one, split)
    name, against = 'one argument by keyword', f'{BY_HAND}, by position'
    setting.compare(bench, name, lambda: ours(x=x), against, lambda: by_hand(x))


def method(bench: Bench, setting: Setting) -> None:
    """A method of a dataclass of arrays; the instance has no spec."""
    x, split = setting.array(setting.split), setting.split
    ours = model(sharded(SPLIT, out=SPLIT, mesh=setting.devices))(x)
    by_hand = model(lambda f: jax.jit(f, in_shardings=(None, split), out_shardings=split))(x)
    setting.compare(bench, 'a method', lambda: ours.scaled(x), BY_HAND, lambda: by_hand.scaled(x))


def modules(bench: Bench, setting: Setting, n_leaves: int) -> None:
    """A module of Equinox, against filter_jit, and the state of an NNX module, against jax.jit."""
    try:
        import equinox
        from flax import nnx
    except ImportError as error:
        bench.leave_out('modules of Equinox and NNX', f'{error.name} is not installed')
        return

    class Layer(equinox.Module):
        w: jax.Array
        b: jax.Array
        activation: Any = jax.nn.relu
        size: int = 8

    class Model(nnx.Module):
        def __init__(self, tree: dict[str, dict[str, jax.Array]]):
            variables = {k: nnx.List([nnx.Param(x) for x in v.values()]) for k, v in tree.items()}
            self.layers = nnx.Dict(variables)

    def update(module: Any) -> Any:
        return jax.tree.map(lambda x: x + 1 if equinox.is_array(x) else x, module)

    tree = setting.tree(n_leaves)
    layers = [Layer(**layer) for layer in tree.values()]
    by_filter_jit = equinox.filter_jit(update)
    ours = sharded('...', out='...', mesh=setting.devices)(update)
    name = f'{n_leaves} leaves of an Equinox module'
    setting.compare(
        bench, name, lambda: ours(layers), 'eqx.filter_jit', lambda: by_filter_jit(layers)
    )
    state = nnx.state(Model(tree))
    by_hand = jit_by_hand(plus_one, setting.split)
    of_state = sharded('...', out='...', mesh=setting.devices)(plus_one)
    name = f'{n_leaves} leaves of an NNX state'
    setting.compare(bench, name, lambda: of_state(state), BY_HAND, lambda: by_hand(state))


def model(decorate: Callable[[Any], Any]) -> type:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        weight: jax.Array

        @decorate
        def scaled(self, x: jax.Array) -> jax.Array:
            return x * self.weight

    return Model


def count(bench: Bench, setting: Setting) -> None:
    """Traces and compilations over a few calls with arguments of several kinds."""
    narrow, wide = setting.tree(4), setting.tree(4, width=16)
    by_leaf = jax.tree.map(lambda leaf: leaf.sharding, narrow)
    trees = [narrow, narrow, wide, narrow, jax.tree.map(np.asarray, narrow), wide]
    split = setting.split
    x, other = setting.array(split), setting.array(split, width=16)
    # the same sharding, with another PartitionSpec
    spelled = jax.device_put(x, NamedSharding(setting.mesh, PartitionSpec(*split.spec, None)))
    for kind, spec, shardings, values in (
        ('one argument', SPLIT, split, [x, x, spelled, other, x, np.asarray(x)]),
        ('a function of the path', by_path, by_leaf, trees),
    ):
        ours = sharded(spec, out=spec, mesh=setting.devices)
        theirs = partial(jit_by_hand, shardings=shardings)
        record_counts(bench, f': {kind}', plus_one, ours, BY_HAND, theirs, values)


def record_counts(
    bench: Bench,
    kind: str,
    function: Callable[[Any], Any],
    ours: Callable[[Any], Any],
    against: str,
    theirs: Callable[[Any], Any],
    values: Sequence[Any],
) -> None:
    """Rows for the traces and compilations of a function in a call with each value."""
    bench.progress(f'counting{kind}')
    both = count_calls(function, ours, values), count_calls(function, theirs, values)
    for what, mine, other in zip(('traces', 'compilations'), *both, strict=True):
        bench.record(f'{what} of {len(values)} calls{kind}', what, [mine], against, [other])
