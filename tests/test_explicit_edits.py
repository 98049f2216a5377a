# ruff: noqa: E501, the lines are those of the modules that the tests write
"""Changes of what code says on Explicit axes: `reshard`, `out_sharding=` and `einshard`.

They are written into the code, which is traced again. Each is compared with the same program written
by hand in plain JAX: the collectives in its compiled HLO, and its values.
"""

import re
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from modules import applied, load, spans

from einshard import explain

# private: changes by hand, before a suggestion makes them
from einshard._explain.search.trials import Trials
from einshard._explain.search.with_edits import fixed_function, patch_of
from einshard._program.edits.edit import PlaceArguments, RemoveConstraint, ReplaceConstraint

MESH = jax.make_mesh(
    (2, 4), ('data', 'tensor'), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:8]
)
B, D, F = 256, 128, 512
HEAD = """
import functools
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P, reshard
from einshard import einshard
"""


def placed(shape, *spec, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.1
    return jax.device_put(values, NamedSharding(MESH, P(*spec)))


def mlp(up=(None, 'tensor'), down=('tensor', None), n=()):
    none = (None,) * len(n)
    w = {'up': placed((*n, D, F), *none, *up), 'down': placed((*n, F, D), *none, *down, seed=1)}
    return w, placed((B, D), 'data', None, seed=2)


def collectives(function, args):
    """The kinds and shapes of the collectives in the compiled HLO."""
    text = function.lower(*args).compile().as_text()
    kinds = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute'
    found = re.findall(rf'= \(?(\w+\[[\d,]*\]).*? ({kinds})(?:-start)?\(', text)
    return sorted(found)


def write(folder, text, monkeypatch):
    """Returns a module of this text, and its file."""
    folder.mkdir(exist_ok=True)
    (folder / 'model.py').write_text(HEAD + textwrap.dedent(text))
    monkeypatch.chdir(folder)
    return load(folder / 'model.py', f'module_{folder.name}_{len(text)}'), folder / 'model.py'


def check(fixed, patch, right, module, path, args, expected=None):
    """A changed function and a patched module, against the same module written by hand."""
    after = load(applied(patch, path.parent, path), f'after_{path.parent.name}')
    assert patch.startswith('# parsed, traced: sends ')
    expected = module.step(*args) if expected is None else expected
    for function in (fixed, after.step):
        assert collectives(function, args) == collectives(right.step, args)
        found = explain(function, *args, tries=0)
        by_hand = explain(right.step, *args, tries=0)
        assert (found.flops, found.network_bytes) == (by_hand.flops, by_hand.network_bytes)
        values = zip(*map(jax.tree.leaves, (function(*args), expected)), strict=True)
        for got, value in values:
            np.testing.assert_allclose(got, value, rtol=2e-4, atol=1e-5)


GATHERED = """
@jax.jit
def step(w, x):
    h = jnp.einsum('bd,df->bf', x, w['up'])
    h = jax.nn.relu(jax.sharding.reshard(h, P('data', None)))
    return jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None))
"""
RESHARD = "jax.sharding.reshard(h, P('data', None))"
LOOP = """
def layer(x, w):
    h = jnp.einsum('bd,df->bf', x, w['up'])
    h = jax.nn.relu(jax.sharding.reshard(h, P('data', None)))
    return x + jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None)), None

@jax.jit
def step(w, x):
    def loss(w):
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)
    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value
"""
# --- found by the search --------------------------------------------------------------------------

# name: the program, with the mistake and without it, its arguments, what the suggestion says
MISTAKES = {
    'a needless reshard': (GATHERED, (RESHARD, 'h'), mlp(), 'remove the reshard in model.py:11'),
    'a needless constraint of einshard': (
        GATHERED.replace(RESHARD, "einshard(h, 'b f -> b@data f')"),
        ("einshard(h, 'b f -> b@data f')", 'h'),
        mlp(),
        'remove the constraint in model.py:11',
    ),
    'a wrong out_sharding': (
        GATHERED.replace("x, w['up'])", "x, w['up'], out_sharding=P('data', None))").replace(
            RESHARD, 'h'
        ),
        (", w['up'], out_sharding=P('data', None)", ", w['up']"),
        mlp(),
        'remove out_sharding= in model.py:10',
    ),
    'in a loop and its derivative': (
        LOOP,
        (RESHARD, 'h'),
        mlp(n=(3,)),
        'remove the reshard in model.py:10, called at model.py:16',
    ),
    'in one of two calls of a helper': (
        """
def rows(x):
    return reshard(x, P('data', None))

@jax.jit
def step(w, x):
    h = jax.nn.relu(rows(jnp.einsum('bd,df->bf', x, w['up'])))
    return jnp.tanh(rows(jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None)) * 2))
""",
        ("rows(jnp.einsum('bd,df->bf', x, w['up']))", "jnp.einsum('bd,df->bf', x, w['up'])"),
        mlp(),
        'remove the reshard in model.py:9, called at model.py:13',
    ),
}


IN_A_LOOP = pytest.param('in a loop and its derivative', marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', [*(name for name in MISTAKES if name not in IN_A_LOOP.values), IN_A_LOOP]
)
def test_mistakes_are_found(name, tmp_path, monkeypatch):
    text, (wrong, right), args, said = MISTAKES[name]
    assert text.count(wrong) == 1
    with jax.set_mesh(MESH):
        module, path = write(tmp_path / 'a', text, monkeypatch)
        by_hand, _ = write(tmp_path / 'b', text.replace(wrong, right), monkeypatch)
        report = explain(module.step, *args, chip='TPU v5e')
        (finding,) = report.findings
        assert said in finding.suggestion
        assert finding.tried.network_bytes < report.network_bytes
        fixed, patch = report.fixed_function(), report.patch()
        check(fixed, patch, by_hand, module, path, args)
        # and nothing is said about the right program
        assert not explain(by_hand.step, *args, chip='TPU v5e').findings


# --- given by hand --------------------------------------------------------------------------------

SQUARE = {'square': placed((D, D), None, 'tensor', seed=4)}
TOKENS = jax.device_put(np.arange(B, dtype=np.int32), NamedSharding(MESH, P('data')))
# name: the program, the expressions from the inside, kind and spec of the change, the same written by
# hand, the arguments
CHANGES = {
    'a reshard': (
        """
@jax.jit
def step(w, x):
    x = reshard(x @ w['square'], P(None, None))
    h = jax.nn.relu(x @ w['up'])
    return jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None))
""",
        ["reshard(x @ w['square'], P(None, None))"],
        ('data', None),
        ('P(None, None)', "P('data', None)"),
        (mlp()[0] | SQUARE, mlp()[1]),
    ),
    'a product that ends with a transposition': (
        """
@jax.jit
def step(w, x):
    h = jnp.einsum('bd,dhk->hbk', x, w['up'], out_sharding=P(None, None, None))
    return jnp.einsum('hbk,hkd->bd', jnp.tanh(h), w['down'], out_sharding=P('data', None))
""",
        ["jnp.einsum('bd,dhk->hbk', x, w['up'], out_sharding=P(None, None, None))"],
        (None, 'data', None),
        ('P(None, None, None)', "P(None, 'data', None)"),
        (
            {'up': placed((D, 8, 64), 'tensor'), 'down': placed((8, 64, D), seed=1)},
            placed((B, D), 'data', 'tensor', seed=2),
        ),
    ),
    'a lookup': (
        """
@jax.jit
def step(w, tokens):
    x = w['table'].at[tokens].get(out_sharding=P(None, None))
    h = jax.nn.relu(jnp.einsum('bd,df->bf', x, w['up']))
    return jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None))
""",
        ["w['table'].at[tokens].get(out_sharding=P(None, None))"],
        ('data', None),
        ('get(out_sharding=P(None, None))', "get(out_sharding=P('data', None))"),
        (mlp()[0] | {'table': placed((1000, D), None, 'tensor', seed=3)}, TOKENS),
    ),
    'a loop and its derivative': (
        LOOP,
        [RESHARD],
        ('data', 'tensor'),
        (RESHARD, RESHARD.replace('None', "'tensor'")),
        mlp(n=(3,)),
    ),
    'an expression': (
        GATHERED.replace(RESHARD, "einshard(h, 'b f -> b@data f')"),
        ["einshard(h, 'b f -> b@data f')"],
        ('data', 'tensor'),
        ("'b f -> b@data f'", "'b f -> b@data f@tensor'"),
        mlp(),
    ),
    'the arguments of a helper': (
        """
def to(x, *axes):
    return reshard(x, P(*axes))

@jax.jit
def step(w, x):
    x = to(x @ w['square'], None, None)
    h = jax.nn.relu(x @ w['up'])
    return to(jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None)), 'data', None)
""",
        ['reshard(x, P(*axes))', "to(x @ w['square'], None, None)"],
        ('data', None),
        ('None, None)', "'data', None)"),
        (mlp()[0] | SQUARE, mlp()[1]),
    ),
    'one call of a helper': (
        """
def rows(x):
    return reshard(x, P('data', None))

@jax.jit
def step(w, x):
    h = jax.nn.relu(rows(jnp.einsum('bd,df->bf', x, w['up'])))
    return rows(jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None)) * 2)
""",
        ["reshard(x, P('data', None))", "rows(jnp.einsum('bd,df->bf', x, w['up']))"],
        ('data', 'tensor'),
        (
            "rows(jnp.einsum('bd,df->bf', x, w['up']))",
            "reshard(jnp.einsum('bd,df->bf', x, w['up']), P('data', 'tensor'))",
        ),
        mlp(),
    ),
    'a method, with the mesh in the object': (
        """
class Model:
    def __init__(self, mesh):
        self.mesh = mesh

    def on(self, *axes):
        return NamedSharding(self.mesh, P(*axes))

    def __call__(self, w, x):
        x = reshard(x @ w['square'], self.on(None, None))
        h = jax.nn.relu(x @ w['up'])
        return jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=self.on('data', None))

step = jax.jit(Model(jax.sharding.get_mesh()).__call__)
""",
        ["reshard(x @ w['square'], self.on(None, None))"],
        ('data', None),
        ('self.on(None, None)', "self.on('data', None)"),
        (mlp()[0] | SQUARE, mlp()[1]),
    ),
    'a closure that loses a variable': (
        """
def make(mesh):
    sharding = NamedSharding(mesh, P('data', None))
    rows = sharding

    def step(w, x):
        h = jax.nn.relu(reshard(jnp.einsum('bd,df->bf', x, w['up']), sharding))
        return jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=rows)

    return jax.jit(step)

step = make(jax.sharding.get_mesh())
""",
        ["reshard(jnp.einsum('bd,df->bf', x, w['up']), sharding)"],
        None,
        (
            "reshard(jnp.einsum('bd,df->bf', x, w['up']), sharding)",
            "jnp.einsum('bd,df->bf', x, w['up'])",
        ),
        mlp(),
    ),
    'under vmap': (
        """
@jax.jit
def step(w, x):
    def one(x):
        h = reshard(x @ w['up'], P(None))
        return jnp.einsum('f,fd->d', jax.nn.relu(h), w['down'], out_sharding=P(None))
    return jax.vmap(one)(x)
""",
        ["reshard(x @ w['up'], P(None))"],
        ('tensor',),
        ("w['up'], P(None))", "w['up'], P('tensor'))"),
        mlp(),
    ),
}


def given(path, texts, spec):
    frames = tuple(spans(path, text)[0] for text in texts)
    return (
        RemoveConstraint(frames)
        if spec is None
        else ReplaceConstraint(frames, NamedSharding(MESH, P(*spec)))
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', CHANGES)
def test_changes_given_by_hand(name, tmp_path, monkeypatch):
    text, frames, spec, (wrong, right), args = CHANGES[name]
    assert text.count(wrong) == 1
    with jax.set_mesh(MESH):
        module, path = write(tmp_path / 'a', text, monkeypatch)
        by_hand, _ = write(tmp_path / 'b', text.replace(wrong, right), monkeypatch)
        before = explain(module.step, *args, tries=0)
        assert before.network_bytes > explain(by_hand.step, *args, tries=0).network_bytes
        edit = given(path, frames, spec)
        fixed = fixed_function(before.reading, [edit])
        check(fixed, patch_of(before.reading, [edit]), by_hand, module, path, args)


def test_types_may_need_an_argument_and_the_code(tmp_path, monkeypatch):
    """JAX does not multiply arrays whose rows are over different mesh axes."""
    text = """
@jax.jit
def step(w, x, mask):
    h = reshard(x @ w['up'], P('data', None)) * mask
    return jnp.einsum('bf,fd->bd', h, w['down'], out_sharding=P('data', None))
"""
    (w, x), rows = mlp(), placed((B, F), 'data', None, seed=4)
    edit_of_code = "reshard(x @ w['up'], P('data', None))"
    with jax.set_mesh(MESH):
        module, path = write(tmp_path / 'a', text, monkeypatch)
        right = text.replace("P('data', None)) * mask", "P('tensor', None)) * mask")
        by_hand, _ = write(tmp_path / 'b', right, monkeypatch)
        facts = explain(module.step, w, x, rows, tries=0).reading
        edit = given(path, [edit_of_code], ('tensor', None))
        both = [PlaceArguments({3: NamedSharding(MESH, P('tensor', None))}, {}), edit]
        trials = Trials(facts, facts.stages.call)
        assert [trials.run([each]) for each in both] == [None, None]
        fixed, patch = fixed_function(facts, both), patch_of(facts, both)
        assert "mask = einshard(mask, 'a b -> a@tensor b', mesh=mesh)" in patch
        columns = jax.device_put(rows, NamedSharding(MESH, P('tensor', None)))
        check(fixed, patch, by_hand, module, path, (w, x, columns), module.step(w, x, rows))


# --- what cannot be changed -----------------------------------------------------------------------


def test_types_may_refuse_a_change(tmp_path, monkeypatch):
    """Without `out_sharding=`, the product is ambiguous: it is not removed, and nothing else is lost."""
    text = """
@jax.jit
def step(w, x):
    h = jnp.einsum('bd,df->bf', x, w['up'], out_sharding=P(None, None))
    return jax.nn.relu(h) * 2
"""
    args = mlp(up=('tensor', None))[0], placed((B, D), 'data', 'tensor', seed=2)
    with jax.set_mesh(MESH):
        module, path = write(tmp_path, text, monkeypatch)
        report = explain(module.step, *args, tries=0)
        trials = Trials(report.reading, report.reading.stages.call)
        edit = given(
            path, ["jnp.einsum('bd,df->bf', x, w['up'], out_sharding=P(None, None))"], None
        )
        assert trials.run([edit]) is None
        # what JAX says of the program that is written by hand
        removed, _ = write(tmp_path, text.replace(', out_sharding=P(None, None)', ''), monkeypatch)
        with pytest.raises(Exception, match='ambiguous') as raised:
            removed.step.trace(*args)
        assert trials.error == str(raised.value).partition('\n')[0]
        assert not trials.is_traced


def test_code_without_a_file_is_not_changed(tmp_path, monkeypatch):
    names = {}
    exec(HEAD + GATHERED, names)
    with jax.set_mesh(MESH):
        report = explain(names['step'], *mlp(), chip='TPU v5e')
    assert not any('reshard' in finding.suggestion for finding in report.findings)
    assert 'more not possible' in report.total[-1]


def test_after_the_mesh_has_left_the_context(tmp_path, monkeypatch):
    """The code names mesh axes only. It is traced again for the function, for arrays of other shapes, and for
    more changes."""
    w, x = mlp()
    module, _ = write(tmp_path / 'a', GATHERED, monkeypatch)
    by_hand, _ = write(tmp_path / 'b', GATHERED.replace(RESHARD, 'h'), monkeypatch)
    with jax.set_mesh(MESH):
        report = explain(module.step, w, x, chip='TPU v5e', tries=1)
        expected = collectives(by_hand.step, (w, x))
    (finding,) = report.findings
    fixed = report.fixed_function()
    assert collectives(fixed, (w, x)) == expected
    more = report.try_more(1)
    assert [each.suggestion for each in more.findings] == [finding.suggestion]
    longer = placed((2 * B, D), 'data', None, seed=5)
    with jax.set_mesh(MESH):
        assert collectives(fixed, (w, longer)) == collectives(by_hand.step, (w, longer))
        np.testing.assert_allclose(fixed(w, longer), module.step(w, longer), rtol=2e-4, atol=1e-5)
