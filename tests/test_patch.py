# ruff: noqa: E501, the lines are those of the modules that the tests write
"""Patches: changes written into sources of many styles, applied by two tools, and run."""

import ast
import importlib
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import main
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from modules import applied, load, spans

from einshard import explain
from einshard._explain.patch.files import read_source
from einshard._explain.patch.patch import make_patch
from einshard._explain.patch.write import Change

# private: changes by hand, before a suggestion makes them
from einshard._explain.search.trials import Trials
from einshard._program.edits.edit import Constrain, MoveThrough, RemoveConstraint, ReplaceConstraint
from einshard._program.jaxpr.spans import Span
from einshard._text import format_bytes

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'tensor'))
KINDS = {'constrain': Constrain, 'replace': ReplaceConstraint}


def arguments(mesh=MESH):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return struct((256, 64), 'data'), struct((64, 64), 'data'), struct((64, 64), None, 'data')


def patch_of(jitted, args, *changes):
    """Returns the patch of changes, given as (kind, path, spec), and the bytes that they send."""
    report = explain(jitted, *args, tries=0)
    facts = report.reading
    trials, written = Trials(facts, facts.stages.call), {}
    for kind, path, *spec in changes:
        sharding = NamedSharding(facts.mesh, P(*spec)) if kind != 'remove' else None
        edit = (
            RemoveConstraint(path)
            if kind == 'remove'
            else MoveThrough(('constraint', path), sharding)
            if kind == 'operand'
            else KINDS[kind](path, sharding)
        )
        written[edit] = Change(kind, path, sharding, f'{kind} the value')
    trial = trials.run((*written,))
    assert trial is not None, trials.error
    return make_patch(written, (*written,), trials, ()), trial.figures.network_bytes, report


def check(folder, text, changes, monkeypatch, name='model.py', expected=()):
    """Writes a module, patches it, and runs the patched one. Returns the patch."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    monkeypatch.chdir(folder)
    module = load(path, f'before_{folder.name}')
    args = getattr(module, 'arguments', arguments)()
    found = [
        (kind, (spans(path, of)[0],), *spec) if isinstance(of, str) else (kind, of(path), *spec)
        for kind, of, *spec in changes
    ]
    patch, sends, before = patch_of(module.step, args, *found)
    for each in [expected] if isinstance(expected, str) else expected:
        assert each in patch
    if '--- a/' in patch:
        after = load(applied(patch, folder, path), f'after_{folder.name}')
        report = explain(after.step, *args, tries=0)
        assert report.network_bytes == sends
        assert sends != before.network_bytes
    return patch


HEAD = """
import jax
import jax.numpy as jnp
import numpy as np
"""
MESH_TEXT = (
    "mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'tensor'))\n"
)
SHARDING = 'from jax.sharding import NamedSharding, PartitionSpec as P\n'
STEP = """
@jax.jit
def step(x, w, v):
    h = jnp.tanh(x @ w)
    return h @ v
"""
WSC = 'jax.lax.with_sharding_constraint'
# name: module, what it writes
STYLES = {
    'jax only': (HEAD + MESH_TEXT + STEP, f"{WSC}(x @ w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, 'data')))"),
    'names': (HEAD + SHARDING + MESH_TEXT + STEP, f"{WSC}(x @ w, NamedSharding(mesh, P(None, 'data')))"),
    'other names': (
        HEAD + 'from jax.sharding import NamedSharding as NS\nimport jax.sharding as js\nfrom jax import lax\n' + MESH_TEXT + STEP,
        "lax.with_sharding_constraint(x @ w, NS(mesh, js.PartitionSpec(None, 'data')))",
    ),
    'function by name': (
        HEAD + SHARDING + 'from jax.lax import with_sharding_constraint as wsc\n' + MESH_TEXT + STEP,
        "wsc(x @ w, NamedSharding(mesh, P(None, 'data')))",
    ),
    'einshard': (HEAD + 'from einshard import einshard\n' + MESH_TEXT + STEP, "einshard(x @ w, 'a b -> a b@data', mesh=mesh)"),
    'einshard module': (HEAD + 'import einshard as es\n' + MESH_TEXT + STEP, "es.einshard(x @ w, 'a b -> a b@data', mesh=mesh)"),
    'no import jax': (
        'import jax.numpy as jnp\nimport numpy as np\nfrom jax import jit, devices\nfrom jax.sharding import Mesh\n'
        "mesh = Mesh(np.array(devices()[:8]).reshape(4, 2), ('data', 'tensor'))\n" + STEP.replace('jax.jit', 'jit'),
        ('+import jax\n', "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, 'data'))"),
    ),
    'type checking': (
        HEAD + 'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jax.sharding import NamedSharding, PartitionSpec\n' + MESH_TEXT + STEP,
        'jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(',
    ),
    'explicit mesh': (
        HEAD + SHARDING + "mesh = jax.make_mesh((4, 2), ('data', 'tensor'), devices=jax.devices()[:8], axis_types=(jax.sharding.AxisType.Explicit,) * 2)\n" + STEP,
        'NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names), P(',
    ),
    'another mesh first': (
        HEAD + SHARDING + "other = jax.sharding.Mesh(np.array(jax.devices()[:8][::-1]).reshape(4, 2), ('data', 'tensor'))\n" + MESH_TEXT + STEP,
        'NamedSharding(mesh, P(',
    ),
    'sharding': (
        HEAD + SHARDING + MESH_TEXT.replace('mesh =', 'its =') + 'batch = NamedSharding(its, P())\ndel its\n' + STEP,
        'NamedSharding(batch.mesh, P(',
    ),
    'dictionary': (HEAD + SHARDING + MESH_TEXT + "setup = {'mesh': mesh}\ndel mesh\n" + STEP, "NamedSharding(setup['mesh'], P("),
    'function of the mesh': (
        HEAD + SHARDING + 'import functools\n@functools.cache\ndef get_mesh():\n    return ' + MESH_TEXT[7:]
        + 'sharding = lambda: NamedSharding(get_mesh(), P())\n' + STEP,
        'NamedSharding(get_mesh(), P(',
    ),
    'shadowed': (
        HEAD + SHARDING + MESH_TEXT + 'its = mesh\n' + STEP.replace('h =', 'mesh = 3\n    h ='),
        'NamedSharding(its, P(',
    ),
    'shadowed jax': (
        HEAD + MESH_TEXT + STEP.replace('h =', 'jax = 3\n    h ='),
        ('+from jax.sharding import NamedSharding', '+from jax.lax import with_sharding_constraint'),
    ),
    'closure': (
        HEAD + SHARDING + """
def make(mesh):
    def step(x, w, v):
        h = jnp.tanh(x @ w)
        return jax.lax.with_sharding_constraint(h @ v, NamedSharding(mesh, P('data')))
    return jax.jit(step)
step = make(""" + MESH_TEXT[7:-1] + ')\n',
        "NamedSharding(mesh, P(None, 'data'))",
    ),
    'method': (
        HEAD + SHARDING + """
class Model:
    def __init__(self, mesh):
        self.mesh = mesh
    def step(self, x, w, v):
        h = jnp.tanh(x @ w)
        return h @ v
step = jax.jit(Model(""" + MESH_TEXT[7:-1] + ').step)\n',
        'NamedSharding(self.mesh, P(',
    ),
    'property': (
        HEAD + SHARDING + """
class Model:
    def __init__(self, mesh):
        self._state = [mesh]
    @property
    def mesh(self):
        return self._state[0]
    def placed(self, x):
        return jax.device_put(x, NamedSharding(self.mesh, P()))
    def step(self, x, w, v):
        h = jnp.tanh(x @ w)
        return h @ v
step = jax.jit(Model(""" + MESH_TEXT[7:-1] + ').step)\n',
        'NamedSharding(self.mesh, P(',
    ),
    'dataclass': (
        HEAD + SHARDING + """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Config:
    mesh: object
    size: int = 3
class Model:
    def __init__(self, config):
        self.config = config
    def __call__(self, x, w, v):
        h = jnp.tanh(x @ w)
        return h @ v
step = jax.jit(Model(Config(""" + MESH_TEXT[7:-1] + ')))\n',
        'NamedSharding(self.config.mesh, P(',
    ),
    'static argument': (
        HEAD + SHARDING + MESH_TEXT.replace('mesh', 'its_') + """
import functools
@functools.partial(jax.jit, static_argnames='mesh')
def inner(x, w, v, mesh):
    h = jnp.tanh(x @ w)
    return h @ v
step = functools.partial(inner, mesh=its_)
del its_
""",
        'NamedSharding(mesh, P(',
    ),
    'lambdas on one line': (
        HEAD + SHARDING + MESH_TEXT + """
pair = [lambda x, w: x @ w, lambda x, w: x @ w + 1]
@jax.jit
def step(x, w, v):
    return jnp.tanh(pair[0](x, w)) @ v
""",
        '+pair = [lambda x, w: jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(',
    ),
    'nested under transformations': (
        HEAD + SHARDING + MESH_TEXT + """
@jax.jit
def step(x, w, v):
    def loss(w):
        @jax.checkpoint
        def layer(h, _):
            h = jnp.tanh(x @ w)
            return h @ v, None
        return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0] ** 2)
    return jax.grad(loss)(w)
""",
        'NamedSharding(mesh, P(',
    ),
    'decorated without wraps': (
        HEAD + SHARDING + MESH_TEXT + """
def logged(f):
    return lambda *args: f(*args)
@jax.jit
@logged
def step(x, w, v):
    h = jnp.tanh(x @ w)
    return h @ v
""",
        'NamedSharding(mesh, P(',
    ),
    'comprehension': (
        HEAD + SHARDING + MESH_TEXT + """
@jax.jit
def step(x, w, v):
    return [jnp.tanh(x @ w) @ each for each in (v,)][0]
""",
        'NamedSharding(mesh, P(',
    ),
    'local import': (
        HEAD + MESH_TEXT + STEP.replace('    h =', '    from jax.sharding import NamedSharding, PartitionSpec as P\n    h ='),
        'NamedSharding(mesh, P(',
    ),
    'sharded': (
        HEAD + 'from einshard import einshard, sharded\n' + MESH_TEXT + STEP.replace('@jax.jit', "@sharded('b@data d', 'd@data f', 'd f@data', mesh=mesh)"),
        "einshard(x @ w, 'a b -> a b@data')",
    ),
    'function with effects': (
        HEAD + SHARDING + MESH_TEXT + '''
def load():
    raise SystemExit
def put(x):
    with load():
        return jax.device_put(x, get_sharding(load()))
''' + STEP,
        'NamedSharding(mesh, P(',
    ),
    'unknown mesh of a closure': (
        HEAD + SHARDING + """
def make(mesh):
    placed = NamedSharding(mesh, P())
    def step(x, w, v):
        h = jnp.tanh(x @ w)
        return h @ v
    return jax.jit(step)
step = make(""" + MESH_TEXT[7:-1] + ')\n',
        ('parsed, not traced: ', "mesh is taken for the program's mesh", 'NamedSharding(mesh, P('),
    ),
    'no mesh': (
        HEAD + STEP,
        f"{WSC}(x @ w, jax.sharding.NamedSharding(jax.typeof(x).sharding.mesh, jax.sharding.PartitionSpec(None, 'data')))",
    ),
    'einshard, no mesh': (
        'from einshard import einshard\n' + HEAD + STEP,
        f"{WSC}(x @ w, jax.sharding.NamedSharding(jax.typeof(x).sharding.mesh, ",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('style', STYLES)
def test_constraint_in_many_styles(style, tmp_path, monkeypatch):
    text, expected = STYLES[style]
    patch = check(
        tmp_path / 'p', text, [('constrain', 'x @ w', None, 'data')], monkeypatch, expected=expected
    )
    if 'not traced' in str(expected):
        return
    assert re.match(r'# parsed, traced: sends [\d.]+ [KM]iB\n', patch), patch


@pytest.mark.filterwarnings('ignore:.*context manager has been deprecated')
@pytest.mark.parametrize('enter', [jax.set_mesh, lambda mesh: mesh], ids=['set_mesh', 'with mesh'])
def test_mesh_in_a_context_that_has_ended(enter, tmp_path, monkeypatch):
    path = tmp_path / 'model.py'
    path.write_text(
        HEAD + STEP.replace('h @ v', 'jax.lax.with_sharding_constraint(h @ v, jax.P())')
    )
    monkeypatch.chdir(tmp_path)
    module = load(path, 'in_context')
    with enter(MESH):
        facts = explain(module.step, *arguments(), tries=0).reading
        assert facts.stages.call is not None  # as where suggestions are tried
    found = (spans(path, 'x @ w')[0],)
    edit = Constrain(found, NamedSharding(MESH, P(None, 'data')))
    trials = Trials(facts, facts.stages.call)
    patch = make_patch({edit: Change('constrain', found, edit.sharding, '')}, [edit], trials, ())
    assert patch.startswith('# parsed, traced: sends ')
    assert "with_sharding_constraint(x @ w, jax.sharding.PartitionSpec(None, 'data'))" in patch


def test_what_a_module_imports_stays(tmp_path, monkeypatch):
    # the import in the function hides that of the module, so that the patch adds one
    local = STEP.replace('return h @ v', 'import jax\n    return jax.nn.relu(h @ v)')
    path = tmp_path / 'model.py'
    path.write_text(HEAD + MESH_TEXT + local)
    monkeypatch.chdir(tmp_path)
    module = load(path, 'imports_again')
    patch_of(module.step, arguments(), ('constrain', (spans(path, 'x @ w')[0],), None, 'data'))
    assert module.jax is jax


def test_a_mesh_with_other_types_of_axes_needs_an_import(tmp_path, monkeypatch):
    text = """
    import jax.numpy as jnp
    import numpy as np
    from einshard import einshard
    from jax import devices, jit
    from jax.sharding import AxisType, Mesh as Devices
    mesh = Devices(np.array(devices()[:8]).reshape(4, 2), ('data', 'tensor'), axis_types=(AxisType.Explicit,) * 2)
    del Devices
    @jit
    def step(x, w, v):
        h = jnp.tanh(x @ w)
        return h @ v
    """
    expected = '+import jax\n', 'mesh=jax.sharding.Mesh(mesh.devices, mesh.axis_names)'
    change = 'constrain', 'x @ w', None, 'data'
    patch = check(tmp_path / 'p', text, [change], monkeypatch, expected=expected)
    assert patch.startswith('# parsed, traced: sends '), patch


def test_mesh_of_an_array_in_a_dictionary(tmp_path, monkeypatch):
    """`h`, which the statement assigns, is also an array on the mesh, but has no value yet."""
    text = (
        HEAD
        + """
def run(arrays, *rest):
    h = jnp.tanh(arrays['x'] @ rest[0])
    return h @ rest[1]

step = jax.jit(lambda x, w, v: run({'x': x}, w, v))
"""
    )
    change = 'constrain', "arrays['x'] @ rest[0]", None, 'data'
    expected = '# parsed, traced: sends ', "jax.typeof(arrays['x']).sharding.mesh"
    check(tmp_path / 'p', text, [change], monkeypatch, expected=expected)


def test_no_name_for_the_mesh_or_an_array_of_it(tmp_path, monkeypatch):
    """The patch says that it needs the mesh in context. The code raises without one."""
    (tmp_path / 'p').mkdir()
    path = tmp_path / 'p' / 'model.py'
    path.write_text(HEAD + 'step = jax.jit(lambda *a: jnp.tanh(a[0] @ a[1]) @ a[2])\n')
    monkeypatch.chdir(tmp_path / 'p')
    change = 'constrain', (spans(path, 'a[0] @ a[1]')[0],), None, 'data'
    patch, sends, _ = patch_of(load(path, 'no_names').step, arguments(), change)
    first, second, *_ = patch.splitlines()
    assert first == f'# parsed, traced: sends {format_bytes(sends)}'
    assert second == '# needs the mesh in context, as it was tried: with jax.set_mesh(mesh)'
    assert f"{WSC}(a[0] @ a[1], jax.sharding.PartitionSpec(None, 'data'))" in patch
    after = load(applied(patch, tmp_path / 'p', path), 'no_names_after')
    with pytest.raises(RuntimeError, match='requires a non-empty mesh in context'):
        after.step.trace(*arguments())
    with jax.set_mesh(MESH):
        assert explain(after.step, *arguments(), tries=0).network_bytes == sends


NETWORK = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

SPECS = {'embed': P(None, None), 'up': P(None, 'tensor'), 'down': P(None, 'tensor')}

def loss_of(params, tokens):
    x = params['embed'][tokens]
    for layer in params['layers']:
        x = x + jax.nn.gelu(x @ layer['up']) @ layer['down']
    return -jax.nn.log_softmax(x @ params['embed'].T)[..., 0].mean()

@jax.jit
def step(params, tokens):
    loss, grads = jax.value_and_grad(loss_of)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def params(mesh):
    def one(i, name, *shape):
        sharding = NamedSharding(mesh, SPECS[name])
        return jax.device_put(jax.random.normal(jax.random.key(i), shape) / 16, sharding)
    layers = [{'up': one(0, 'up', 64, 256), 'down': one(1, 'down', 256, 64)} for _ in range(2)]
    return {'embed': one(2, 'embed', 128, 64), 'layers': layers}

def tokens(mesh):
    return jax.device_put(jnp.arange(4096).reshape(64, 64) % 128, NamedSharding(mesh, P('data', None)))
"""


@pytest.mark.slow
@pytest.mark.parametrize('way', ['command', 'python', 'mesh in context'])
def test_patch_runs_as_the_program_does(way, tmp_path, monkeypatch):
    """Also if only arguments have the mesh. The command enters it, and the program does not."""
    folder = tmp_path / 'p'
    folder.mkdir()
    path = folder / 'network_of_arguments.py'
    path.write_text(NETWORK)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = importlib.import_module(path.stem)
    args = before.params(MESH), before.tokens(MESH)
    scope = jax.set_mesh(MESH) if way == 'mesh in context' else nullcontext()
    with scope:
        if way == 'command':
            command = f'explain {path.stem}:step --args {path.stem}:params {path.stem}:tokens'
            assert main([*command.split(), '--mesh', 'data=4', 'tensor=2', '--patch', 'out']) == 0
            patch = Path('out').read_text()
            Path('out').unlink()
        else:
            patch = explain(before.step, *args).patch()
        assert patch.startswith('# parsed, traced: sends ')
        assert f'{WSC}(' in patch
        assert ('.sharding.mesh' in patch) == (way != 'mesh in context')
        after = load(applied(patch, folder, path), 'network_after')
        (params, loss), (expected, expected_loss) = after.step(*args), before.step(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), params, expected)
        np.testing.assert_allclose(loss, expected_loss, 1e-5)
        reports = [explain(each.step, *args, tries=0) for each in (before, after)]
    assert reports[1].network_bytes < 0.75 * reports[0].network_bytes
    sys.modules.pop(path.stem)


HELPER = HEAD + SHARDING + MESH_TEXT
# name: the module, the edits, what it writes
FIXED = (
    HELPER
    + """
def constrain(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data')))
@jax.jit
def step(x, w, v):
    h = constrain(x @ w)
    return constrain(h @ v)
"""
)
HELPERS = {
    'spec in the call': (
        HELPER
        + """
def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
@jax.jit
def step(x, w, v):
    h = constrain(x @ w, 'data')
    return constrain(h @ v, 'data')
""",
        ["constrain(x @ w, 'data')"],
        "constrain(x @ w, None, 'data')",
    ),
    'no spec in the call': (
        HELPER
        + """
def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
@jax.jit
def step(x, w, v):
    h = constrain(x @ w)
    return constrain(h @ v)
""",
        ['constrain(x @ w)'],
        "constrain(x @ w, None, 'data')",
    ),
    'PartitionSpec in the call': (
        HELPER
        + """
def constrain(x, spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
@jax.jit
def step(x, w, v):
    h = constrain(jnp.tanh(x @ w), spec=P('data'))
    return constrain(h @ v, P('data'))
""",
        ["constrain(jnp.tanh(x @ w), spec=P('data'))"],
        "constrain(jnp.tanh(x @ w), spec=P(None, 'data'))",
    ),
    'expression in the call': (
        HELPER
        + """
from einshard import einshard
def constrain(x, spec):
    return einshard(x, spec, mesh=mesh)
@jax.jit
def step(x, w, v):
    h = constrain(x @ w, 'b f -> b@data f')
    return constrain(h @ v, 'b f -> b@data f')
""",
        ["constrain(x @ w, 'b f -> b@data f')"],
        "constrain(x @ w, 'a b -> a b@data')",
    ),
    'fixed placement': (
        FIXED,
        ['constrain(x @ w)'],
        "h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, 'data')))",
    ),
    'rule by name': (
        HELPER
        + """
RULES = {'hidden': P('data'), 'out': P('data')}
def constrain(x, name):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, RULES[name]))
@jax.jit
def step(x, w, v):
    h = constrain(x @ w, 'hidden')
    return constrain(h @ v, 'out')
""",
        ["constrain(x @ w, 'hidden')"],
        "+RULES = {'hidden': P(None, 'data'), 'out': P('data')}",
    ),
    'rule of several calls': (
        HELPER
        + """
RULES = {'hidden': P('data')}
def constrain(x, name):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, RULES[name]))
@jax.jit
def step(x, w, v):
    h = constrain(x @ w, 'hidden')
    return constrain(h @ v, 'hidden')
""",
        ["constrain(x @ w, 'hidden')"],
        "h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, 'data')))",
    ),
    'all calls': (
        FIXED,
        ['constrain(x @ w)', 'constrain(h @ v)'],
        "+    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, 'data')))",
    ),
    'one call': (
        HELPER
        + """
class Model:
    grid = mesh
    @classmethod
    def pin(cls, h, *spec):
        return jax.lax.with_sharding_constraint(h, NamedSharding(cls.grid, P(*spec)))
    def __call__(self, x, w, v):
        return self.pin(x @ w, 'data') @ v
step = jax.jit(Model().__call__)
""",
        ["self.pin(x @ w, 'data')"],
        "self.pin(x @ w, None, 'data') @ v",
    ),
    'placement of the object': (
        HELPER
        + """
class Model:
    def __init__(self, spec):
        self.spec = spec
    def pin(self, h):
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, self.spec))
    def __call__(self, x, w, v):
        return self.pin(x @ w) @ v
step = jax.jit(Model(P('data')).__call__)
""",
        ['self.pin(x @ w)'],
        "return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(None, 'data')))",
    ),
    'calls outside the program': (
        HELPER
        + """
def constrain(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data')))
@jax.jit
def step(x, w, v):
    return constrain(x @ w) @ v
def other(x):
    return constrain(x)
""",
        ['constrain(x @ w)'],
        "jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, 'data'))) @ v",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', HELPERS)
def test_helper_is_changed_at_the_call(name, tmp_path, monkeypatch):
    text, calls, expected = HELPERS[name]
    constraint = 'einshard(x, spec, mesh=mesh)' if 'einshard(' in text else None

    def path_of(call):
        def found(path):
            text = read_source(str(path)).text
            inner = constraint or re.search('jax.lax.with_sharding_constraint.*', text)[0]
            return spans(path, inner)[0], spans(path, call)[0]

        return found

    changes = [('replace', path_of(call), None, 'data') for call in calls]
    patch = check(tmp_path / 'p', text, changes, monkeypatch, expected=expected)
    assert patch.startswith('# parsed, traced: sends ')


COMPUTES = """
def keep_rows(h):
    h = jnp.where(h > 0, h, 0.01 * h)
    return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P('data')))
@jax.jit
def step(x, w, v):
    return keep_rows(x @ w) @ v
def export(x):
    return keep_rows(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize('result', ['directly', 'by name'])
def test_helper_that_computes_is_not_changed_for_others(result, tmp_path, monkeypatch):
    text = COMPUTES
    if result == 'by name':
        text = text.replace('    return jax.lax', '    h = jax.lax').replace(
            '@jax.jit', '    return h\n@jax.jit'
        )

    def found(path):
        (constraint,) = re.findall('jax.lax.with_sharding_constraint.*', HELPER + text)
        return spans(path, constraint)[0], spans(path, 'keep_rows(x @ w)')[0]

    patch = check(tmp_path / 'p', HELPER + text, [('replace', found, None, 'data')], monkeypatch)
    assert patch.endswith('(not written: keep_rows is also called elsewhere)\n')
    assert patch.count('\n') == 1


def test_mesh_of_the_object_is_before_a_global_one(tmp_path, monkeypatch):
    text = """
    class Block:
        def __init__(self, mesh):
            self.mesh = mesh
        def step(self, x, w, v):
            return jnp.tanh(x @ w) @ v
    block = Block(mesh)
    step = jax.jit(block.step)
    """
    changes = [('constrain', 'x @ w', None, 'data')]
    patch = check(tmp_path / 'p', HELPER + textwrap.dedent(text), changes, monkeypatch)
    assert "(x @ w, NamedSharding(self.mesh, P(None, 'data')))" in patch


def test_mesh_of_the_function_around_is_before_a_global_one(tmp_path, monkeypatch):
    text = """
    def make_step(grid):
        def mlp(x, w):
            return jnp.tanh(x @ w)
        def pin(y):
            return jax.lax.with_sharding_constraint(y, NamedSharding(grid, P('data')))
        return jax.jit(lambda x, w, v: pin(mlp(x, w) @ v))
    step = make_step(mesh)
    """
    changes = [('constrain', 'x @ w', None, 'data')]
    patch = check(tmp_path / 'p', HELPER + textwrap.dedent(text), changes, monkeypatch)
    assert "(x @ w, NamedSharding(grid, P(None, 'data')))" in patch
    assert patch.startswith(
        '# parsed, not traced: make_step.<locals>.mlp does not capture grid before the change\n'
        "# grid is taken for the program's mesh\n"
    )


def test_call_of_a_decorated_function_is_in_the_program(tmp_path, monkeypatch):
    text = """
    import functools
    def logged(f):
        @functools.wraps(f)
        def wrapper(*args):
            with jax.named_scope('f'):
                return f(*args)
        return wrapper
    @logged
    def hidden(x, w):
        return jnp.tanh(x @ w)
    @jax.jit
    def step(x, w, v):
        return hidden(x, w) @ v
    """
    changes = [('constrain', 'x @ w', None, 'data')]

    def found(path):
        calls = 'x @ w', 'f(*args)', 'hidden(x, w)'
        return tuple(spans(path, each)[0] for each in calls)

    changes = [('constrain', found, None, 'data')]
    patch = check(tmp_path / 'p', HELPER + textwrap.dedent(text), changes, monkeypatch)
    assert patch.startswith('# parsed, traced: sends ')
    assert patch.splitlines()[1] == '--- a/model.py'  # nothing else changes


EXPLICIT = (
    HEAD
    + SHARDING
    + """
types = (jax.sharding.AxisType.Explicit,) * 2
mesh = jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=types)
@jax.jit
def step(x, w, v):
    h = jnp.einsum('bd,df->bf', x, w, out_sharding=NamedSharding(mesh, P(None, 'tensor')))
    h = jax.sharding.reshard(h, NamedSharding(mesh, P('data')))
    return jnp.einsum('bf,fd->bd', h, v, out_sharding=NamedSharding(mesh, P('data')))
def arguments():
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
    return struct((256, 64), 'data'), struct((64, 64), None, 'tensor'), struct((64, 64), 'tensor')
"""
)


def test_code_of_explicit_axes_is_traced_with_its_changes(tmp_path, monkeypatch):
    """No trial can change constraints there."""
    folder = tmp_path / 'p'
    folder.mkdir()
    path = folder / 'model.py'
    path.write_text(EXPLICIT)
    monkeypatch.chdir(folder)
    module = load(path, 'explicit')
    facts = explain(module.step, *module.arguments(), tries=0).reading
    product, reshard = (
        (spans(path, text)[0],) for text in re.findall(r'(?<=    h = ).*', EXPLICIT)
    )
    sharding = NamedSharding(facts.mesh, P('data', 'tensor'))
    changes = {
        ReplaceConstraint(product, sharding): Change('replace', product, sharding, ''),
        RemoveConstraint(reshard): Change('remove', reshard, None, ''),
    }
    patch = make_patch(changes, [*changes], Trials(facts, facts.stages.call), ())
    after = load(applied(patch, folder, path), 'explicit_after')
    report = explain(after.step, *after.arguments(), tries=0)
    assert "w, out_sharding=NamedSharding(mesh, P('data', 'tensor')))" in patch
    assert '-    h = jax.sharding.reshard' in patch
    assert '+    h' in patch
    assert {each.kind for each in report.collectives} == {'all-reduce'}
    assert patch.startswith(f'# parsed, traced: sends {format_bytes(report.network_bytes)}\n')


NESTED = """
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from einshard import sharded
import numpy as np
mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'tensor'))

@sharded('b@data d', 'd@data f', 'd f@data', out='b@data f', mesh=mesh)
def layer(x, w, v):
    h = x @ w
    return h @ v

@jax.jit
def step(x, w, v):
    return layer(x, w, v)
"""


def test_sharded_function_in_a_jitted_one(tmp_path, monkeypatch):
    patch = check(
        *(tmp_path / 'p', NESTED, [('constrain', 'x @ w', None, 'data')], monkeypatch),
        expected="+    h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, 'data')))",
    )
    assert patch.startswith('# parsed, traced: sends ')
    # private: calls of a function with several programs are slower, and each trace would add one
    layer = sys.modules['before_p'].layer
    assert len(layer._programs._programs) == 1
    assert not layer._programs.need_full_lookup


def test_placement_of_arguments_with_in_shardings(tmp_path, monkeypatch):
    text = """
    shardings = {'w': NamedSharding(mesh, P()), 'v': NamedSharding(mesh, P('data'))}
    step = jax.jit(lambda p, x: x @ p['w'] @ p['v'], in_shardings=(shardings, NamedSharding(mesh, P('data'))))
    def arguments():
        shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        return {'w': shape, 'v': shape}, jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    """
    (tmp_path / 'model.py').write_text(HELPER + textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    module = load(tmp_path / 'model.py', 'in_shardings')
    patch = explain(module.step, *module.arguments(), tries=4).patch()
    assert "# p = einshard(p, Rules([\n#     (r'^v$', " in patch
    assert '# and in_shardings= of jax.jit, which has to be the same\n' in patch


TWICE = """
@jax.jit
def step(x, w, v):
    h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P('data')))
    return h @ v
"""
CALL = "jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P('data')))"
CONSTRAINED = "h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(None, 'data')))"
EDITS = {
    'replace': (TWICE, [('replace', CALL, None, 'data')], "NamedSharding(mesh, P(None, 'data')))"),
    'remove': (TWICE.replace('x @ w', 'x + 1').replace("P('data')", "P(None, 'data')").replace('h @ v', 'h @ w @ v'),
        [('remove', CALL.replace('x @ w', 'x + 1').replace("P('data')", "P(None, 'data')"))], '+    h = (x + 1)\n'),
    'remove all of a statement': (
        TWICE.replace(CALL, 'x @ w').replace('return h', f'{CONSTRAINED}  # why\n    return h').replace('@ v', '@ w @ v'),
        [('remove', CONSTRAINED.removeprefix('h = '))],
        "     h = x @ w\n-    h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(None, 'data')))  # why\n     return",
    ),
    'constraint and operand': (
        TWICE,
        [('replace', CALL, None, 'data'), ('operand', CALL, ('data', 'tensor'))],
        "with_sharding_constraint(x @ w, NamedSharding(mesh, P(('data', 'tensor')))), NamedSharding(mesh, P(None, 'data')))",
    ),
    'nested': (
        STEP,
        [('constrain', 'x @ w', None, 'data'), ('constrain', 'jnp.tanh(x @ w)', 'data', 'tensor'), ('constrain', 'h @ v', 'data', 'tensor')],
        "P(None, 'data')))), NamedSharding(mesh, P('data', 'tensor')))",
    ),
    'variable': (
        'placed = NamedSharding(mesh, P("data"))' + TWICE.replace("NamedSharding(mesh, P('data'))", 'placed'),
        [('replace', CALL.replace("NamedSharding(mesh, P('data'))", 'placed'), None, 'data')],
        "with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, 'data')))",
    ),
    'keyword': (
        TWICE.replace('NamedSharding(mesh', 'shardings=NamedSharding(mesh'),
        [('replace', CALL.replace('NamedSharding(mesh', 'shardings=NamedSharding(mesh'), None, 'data')],
        "shardings=NamedSharding(mesh, P(None, 'data')))",
    ),
    'augmented assignment': (
        STEP.replace('    h = jnp.tanh(x @ w)', '    h = x @ w\n    h  *=  x if True else w').replace('x, w, v', 'x, w, v'),
        [('constrain', 'h  *=  x if True else w', None, 'data')],
        "+    h = jax.lax.with_sharding_constraint(h * (x if True else w), NamedSharding(mesh, P(None, 'data')))",
    ),
    'augmented assignment in parentheses': (
        STEP.replace('    h = jnp.tanh(x @ w)', '    h = x @ w\n    h += (  # the data\n        x @ w\n    )'),
        [('constrain', 'h += (  # the data\n        x @ w\n    )', None, 'data')],
        '+    h = jax.lax.with_sharding_constraint(h + (  # the data\n',
    ),
    'several lines': (
        STEP.replace('    h = jnp.tanh(x @ w)', '    h = (\n        x  # the data\n        @ w\n    )'),
        [('constrain', 'x  # the data\n        @ w', None, 'data')],
        "        @ w, NamedSharding(mesh, P(None, 'data')))",
    ),
    'method on its own line': (
        STEP.replace('jnp.tanh(x @ w)', '(\n        (x @ w)\n        .dot(w)\n    )'),
        [('constrain', lambda path: tuple(method_span(path)), None, 'data')],
        '+        jax.lax.with_sharding_constraint((x @ w)',
    ),
}  # fmt: skip


def method_span(path):
    (call,) = spans(path, '(x @ w)\n        .dot(w)')
    yield call._replace(line=call.end_line, column=9)  # as Python's compiler says


@pytest.mark.parametrize('name', EDITS)
def test_edits(name, tmp_path, monkeypatch):
    text, changes, expected = EDITS[name]
    patch = check(tmp_path / 'p', HELPER + text, changes, monkeypatch, expected=expected)
    assert patch.startswith('# parsed, traced: sends ')


PLAIN = HELPER + STEP


@pytest.mark.slow
def test_what_is_not_written_is_a_comment(tmp_path, monkeypatch):
    """Of two changes, one is in a function that is also called elsewhere."""
    calls = 'times(h, v), times(h + 1, v)'
    text = HEAD + SHARDING + MESH_TEXT + STEP.replace('h @ v', calls)
    (tmp_path / 'other.py').write_text(
        'def times(h, v):\n    t = h @ v\n    return t[:128], t[128:]\n'
    )
    monkeypatch.chdir(tmp_path)
    load(tmp_path / 'other.py', 'other_file')
    (tmp_path / 'model.py').write_text('from other_file import times\n' + text)
    module = load(tmp_path / 'model.py', 'model_file')
    changes = [
        ('constrain', (spans(tmp_path / 'model.py', 'x @ w')[0],), None, 'data'),
        (
            'constrain',
            (
                spans(tmp_path / 'other.py', 'h @ v')[0],
                spans(tmp_path / 'model.py', 'times(h, v)')[0],
            ),
            'data',
            'tensor',
        ),
    ]
    patch, _, _ = patch_of(module.step, arguments(), *changes)
    _, alone, _ = patch_of(module.step, arguments(), changes[0])
    first, second, *_ = patch.splitlines()
    assert first == f'# parsed, traced: sends {alone / 1024:.1f} KiB'
    assert second.startswith(f'# {tmp_path}/other.py:2: constrain the value (not written: ')
    assert patch.count('--- a/') == 1


FILES = {
    'windows': PLAIN.replace('\n', '\r\n').encode(),
    'tabs': PLAIN.replace('    ', '\t').encode(),
    'form feed': PLAIN.replace('@jax.jit', '\f\n@jax.jit').encode(),
    'form feed in a line': PLAIN.replace('    h =', "    t = '\f'; h =").encode(),
    'line separator': PLAIN.replace('    h =', "    t = '\u2028é'; h =").encode(),
    'no newline': PLAIN.replace(
        'h = jnp.tanh(x @ w)\n    return h @ v\n', 'return x @ w @ v'
    ).encode(),
    'byte order mark': b'\xef\xbb\xbf' + PLAIN.encode(),
    'latin-1': b'# coding: latin-1\n'
    + PLAIN.replace('    h =', "    t = 'é'; h =").encode('latin-1'),
    'umlauts': PLAIN.replace('jnp.tanh(x @ w)', "dict(ä=jnp.tanh(x @ w))['ä']").encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', FILES)
def test_files(name, tmp_path, monkeypatch):
    changes = [('constrain', 'x @ w', None, 'data')]
    patch = check(tmp_path / 'p', FILES[name], changes, monkeypatch)
    assert patch.startswith('# parsed, traced: sends ')
    before, after = FILES[name], (tmp_path / 'p_patch' / 'model.py').read_bytes()
    start = before.index(b'x @ w')
    assert after.startswith(before[:start])  # nothing else changes
    assert after.endswith(before[start + 5 :])


@pytest.mark.parametrize('name', ['my model.py', 'a "model".py', 'modèle.py'])
def test_names_of_files(name, tmp_path, monkeypatch):
    changes = [('constrain', 'x @ w', None, 'data')]
    patch = check(tmp_path / 'p', PLAIN, changes, monkeypatch, name=name)
    assert patch.startswith('# parsed, traced: sends ')


@pytest.mark.slow
def test_threads(tmp_path, monkeypatch):
    """Patches that threads make at once, of functions that share a helper."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'model.py').write_text(HELPERS['spec in the call'][0])
    module = load(tmp_path / 'model.py', 'threads')
    calls = spans(tmp_path / 'model.py', 'x @ w')
    specs = [('data',), (None, 'tensor'), ('tensor', 'data'), (None, 'data')] * 2

    def make(spec):
        return patch_of(module.step, arguments(), ('constrain', (calls[0],), *spec))[0]

    serial = [make(spec) for spec in specs[:4]]
    assert all('traced: sends' in patch for patch in serial), serial
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(make, specs)] == serial * 2


def test_link(tmp_path, monkeypatch):
    folder = tmp_path / 'p'
    (folder / 'src').mkdir(parents=True)
    (folder / 'src' / 'real.py').write_text(PLAIN)
    (folder / 'model.py').symlink_to('src/real.py')
    monkeypatch.chdir(folder)
    module = load(folder / 'model.py', 'linked')
    found = ('constrain', (spans(folder / 'model.py', 'x @ w')[0],), None, 'data')
    patch, _, _ = patch_of(module.step, arguments(), found)
    assert patch.startswith('# parsed, traced: sends ')
    assert '--- a/src/real.py' in patch
    assert 'NamedSharding(mesh, P(' in applied(patch, folder, folder / 'model.py').read_text()


def test_other_folder(tmp_path, monkeypatch):
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    (tmp_path / 'model.py').write_text(PLAIN)
    module = load(tmp_path / 'model.py', 'elsewhere')
    found = ('constrain', (spans(tmp_path / 'model.py', 'x @ w')[0],), None, 'data')
    patch, _, _ = patch_of(module.step, arguments(), found)
    assert f'# apply in {tmp_path}\n' in patch
    assert '--- a/model.py' in patch


def test_code_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(PLAIN, '<cell>', 'exec'), names)
    tree = next(n for n in ast.walk(ast.parse(PLAIN)) if ast.unparse(n) == 'x @ w')
    span = Span('<cell>', tree.lineno, tree.col_offset, tree.end_lineno, tree.end_col_offset)
    patch, _, _ = patch_of(names['step'], arguments(), ('constrain', (span,), None, 'data'))
    assert patch == (
        f'# <cell>:{span.line}: constrain the value (not written: the source of <cell>:{span.line} '
        'cannot be read)\n'
    )


DECODE = """
from jax import lax
cache = NamedSharding(mesh, P(None, None, 'tensor'))
def step(w, k, v, x, at):
    ks, vs = [], []
    for i in range(2):
        q, new, value = (jnp.einsum('bd,dhk->bhk', x, w[n][i]) for n in 'qkv')
        ks.append(lax.dynamic_update_index_in_dim(k[i], new, at, 2))
        vs.append(lax.dynamic_update_index_in_dim(v[i], value, at, 2))
        s = jax.nn.softmax(jnp.einsum('bhk,bhtk->bht', q, ks[-1]), -1)
        x = x + jnp.einsum('bht,bhtk,hkd->bd', s, vs[-1], w['o'][i])
    return x, jnp.stack(ks), jnp.stack(vs)
step = jax.jit(step, out_shardings=(NamedSharding(mesh, P('data')), cache, cache), donate_argnums=(1, 2))
def arguments(cache=cache.spec):
    def struct(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    w = {n: struct((2, 256, 4, 64), P(None, None, 'tensor')) for n in 'qkv'}
    w['o'] = struct((2, 4, 64, 256), P(None, 'tensor'))
    k = struct((2, 16, 4, 512, 64), cache)
    return w, k, k, struct((16, 256), P('data')), struct((), P(), jnp.int32)
"""


def test_results_that_were_tried_with_arguments(tmp_path, monkeypatch):
    folder = tmp_path / 'p'
    folder.mkdir()
    (folder / 'model.py').write_text(HELPER + DECODE)
    monkeypatch.chdir(folder)
    module = load(folder / 'model.py', 'decode')
    report = explain(module.step, *module.arguments(), tries=4)
    (finding,) = report.findings
    patch = report.patch()
    placement = "'a b c d e -> a b@data c@tensor d e'"
    assert f'result/1-2 with {placement}' in finding.suggestion
    assert f'# k = einshard(k, {placement}, mesh=mesh)\n' in patch
    assert f"#     (r'^1$', {placement}),\n" in patch
    after = load(applied(patch, folder, folder / 'model.py'), 'decode_after')
    moved = explain(after.step, *after.arguments(P(None, 'data', 'tensor')), tries=0)
    assert moved.network_bytes == finding.tried.network_bytes < 0.1 * report.network_bytes


def test_a_file_that_is_too_deep_for_python_is_not_read(tmp_path):
    file = tmp_path / 'deep.py'
    file.write_text(f'x = {" + ".join(["1"] * 100_000)}\n')
    assert read_source(str(file)) is None
