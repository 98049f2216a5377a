"""The command `einshard`: show, explain, profile, why, plan, compare, check, move, and others."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered, Traced

from .._draw.show import show
from .._errors import EinshardError
from .._explain.explain import explain
from .._explain.frameworks import is_jitted
from .._explain.report import Report
from .._sharding.mesh import AnyMesh, device_mesh
from .._trees.rules import Rules
from .arguments import (
    abstract_mesh,
    call_with_mesh,
    is_plain_function,
    is_spec_function,
    load,
    mesh_of,
    read_arguments,
    replicated,
    result_shapes,
    with_options,
    zeros,
)

_SHOW_EXAMPLES = """\
examples:
  {prog} 'a b -> 2 a2* b*' --shape 4 8 --devices 16
  {prog} 'a b -> a4 b2'
  {prog} 'b d -> b@data d@tp' --shape 32 512 --mesh data=4 tp=2
  {prog} '... -> * ...' --shape --devices 8
  {prog} explain model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
other commands ('show' may be omitted):
  {prog} explain --help     compile a function and list its collectives
  {prog} profile --help     run a function, and report on it with measured times
  {prog} why --help         say why a function has its collectives
  {prog} plan --help        find the sharding of a function
  {prog} move --help        show what it costs to move arrays to other placements
  {prog} table --help       show how rules shard the arrays of a model
  {prog} eject --help       write a sharding as plain JAX
  {prog} doctor --help      say what is installed, and what that allows
  {prog} skill --help       print the path of the skill for coding agents
"""
_EXPLAIN_EXAMPLES = """\
examples:
  {prog} explain model:layer --args 'f32[8,128]' 'f32[128,512]' --devices 8
  {prog} explain model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  {prog} explain model:step --args model:init_state lr=0.1 --mesh data=4 tp=2 --json
  {prog} explain model:step --args model:init_state --topology h100:4x8 --fail-on findings
  {prog} explain model:step --args model:init_state --topology h100:4x8 --timeline --save step.svg
  {prog} explain model:step --args model:init_state --mesh data=4 tp=2 --profile trace_folder
a step that is already jitted needs arguments with shardings:
  {prog} explain model:jitted_step --args model:shapes --topology v5e:4x4 --mesh data=4 tp=4
  where model.py has:
    def shapes(mesh):  # a parameter of this name is given the mesh
        sharding = NamedSharding(mesh, P('data', 'tp'))
        return {'w': jax.ShapeDtypeStruct((1024, 4096), 'float32', sharding=sharding)}
exit status: 0, 2 for an error, 3 if --fail-on finds something
"""
_PROFILE_EXAMPLES = """\
examples:
  {prog} profile model:step --args model:init_state 'i32[16,64]'
  {prog} profile model:step --args model:init_state --runs 10 --save step.html
  {prog} profile model:step --args model:init_state --mesh data=4 tp=2
The last one simulates 8 devices on one CPU: its times show what is joined, not what it costs.
"""
_WHY_EXAMPLES = """\
examples:
  {prog} why model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  {prog} why model:step model.py:34 params/head --args model:init_state --mesh data=4 tp=2
"""
_PLAN_EXAMPLES = """\
examples:
  {prog} plan model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  {prog} plan model:step --args model:init_state 'i32[16,64]' --devices 8 --chip H100
  {prog} plan model:step --args model:init_state --topology v5e:4x4 --pin embed=@x layers=
"""
_MOVE_EXAMPLES = """\
examples:
  {prog} move model:trained model:serving --devices 8
  {prog} move model:trained model:serving --topology h100:2x8 --mesh fsdp=8 tp=2
  where model.py has:
    def trained(mesh):  # a parameter of this name is given the mesh
        sharding = NamedSharding(mesh, P('fsdp', 'tp'))
        return {'w': jax.ShapeDtypeStruct((4096, 14336), 'bfloat16', sharding=sharding)}

    def serving(mesh):
        return NamedSharding(mesh, P(None, 'tp'))
"""
_TABLE_EXAMPLES = """\
examples:
  {prog} table model:rules model:init_params --devices 8
  {prog} table model:rules model:init_params --args 'u32[2]' --mesh data=4 tp=2
"""
_EJECT_EXAMPLES = """\
examples:
  {prog} eject 'a b -> a2* b*' --devices 8
  {prog} eject 'b d -> b@data d@tp' --mesh data=4 tp=2
  {prog} eject model:rules --args model:init_params --mesh data=4 tp=2
  {prog} eject model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
"""
_COMPARE_EXAMPLES = """\
examples:
  {prog} compare model:step --args model:state 'i32[SIZE,64]' --targets v5e:4x4 --sizes 8 64
  {prog} compare model:step --args model:shapes --targets cpu:8 --mesh data=4 tensor=2
a function in --args is given the mesh of the target, if it has a parameter `mesh`
"""
_CHECK_EXAMPLES = """\
examples:
  {prog} check --update
  {prog} check train --fail-on bytes --fail-on does-not-fit
  {prog} check --base origin/main --markdown comment.md
where pyproject.toml has:
  [[tool.einshard.step]]
  name = "train"
  function = "model:step"
  args = ["model:state", "i32[16,64]"]
  targets = ["h100:4x8", "cpu:8"]
exit status: 0, 2 if a step cannot be compiled, 3 if --fail-on or fail_on finds something
"""
_DOCTOR_EXAMPLES = """\
examples:
  {prog} doctor
  {prog} doctor tpu plan --json
exit status: 0, or 1 if a feature that is asked for is missing
"""
_ARGUMENT_HELP = (
    "arguments of the call: 'f32[8,128]' for an array, a Python number, or module:name for a "
    'value, or for a function that returns one, or its shapes with shardings; name=... passes an '
    'argument by keyword'
)
_ASCII = str.maketrans('─│┌┬┐├┼┤└┴┘█░', '-|+++++++++#.')


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            text, status = _run(arguments) if arguments else (_show_parser().format_help(), 0)
        except SystemExit:  # argparse has printed help or an error
            _print('')
            raise
        _print(text.rstrip('\n') + '\n')
    except EinshardError as error:
        print(f'einshard.EinshardError: {with_options(error, arguments)}', file=sys.stderr)
        return 2
    return status


def _run(arguments: Sequence[str]) -> tuple[str, int]:
    """Returns what a command prints, and its exit status."""
    commands = {
        'show': _show,
        'explain': _explain,
        'profile': _profile,
        'why': _why,
        'plan': _plan,
        'move': _move,
        'table': _table,
        'eject': _eject,
        'compare': _compare,
        'check': _check,
        'doctor': _doctor,
        'skill': _skill,
    }
    name = arguments[0]
    # a misspelled command is also a valid expression, with one unsharded axis
    near = difflib.get_close_matches(name, commands, n=1, cutoff=0.7)
    if near and name not in commands:
        raise EinshardError(
            f"'{name}' is not a command", code='command', fix=f'{_program()} {near[0]}'
        )
    done = commands[name](arguments[1:]) if name in commands else _show(arguments)
    return done if isinstance(done, tuple) else (done, 0)


def _print(text: str) -> None:
    """Prints text, with ASCII or '?' for characters that the encoding lacks.

    Raises an EinshardError if standard output cannot be written, as on a full disk.
    """
    encoding = sys.stdout.encoding or 'utf-8'
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, 'replace').decode(encoding)
    try:
        print(text, end='', flush=True)
    except OSError as error:
        # Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # of a reader such as `head`
            raise _cannot_write('standard output', error) from None


@contextmanager
def _writing(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_write(f"'{path}'", error) from None


def _cannot_write(what: str, error: OSError) -> EinshardError:
    return EinshardError(f'cannot write {what}: {error.strerror}', code='command')


def script() -> int:
    """Runs the installed command, with the current folder on `sys.path`, as `python -m` does."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return main()


def _program() -> str:
    """Returns how the user started the command: 'einshard' or 'python -m einshard'."""
    is_script = Path(sys.argv[0]).stem == 'einshard'
    return 'einshard' if is_script else 'python -m einshard'


def _show_parser() -> argparse.ArgumentParser:
    parser = _parser(
        '',
        'Draws which devices hold which block of an array.\nThe devices do not have to exist.',
        _SHOW_EXAMPLES,
    )
    parser.add_argument('expression', help="the placement, such as 'a b -> 2 a2* b*'")
    parser.add_argument(
        '--shape',
        type=int,
        nargs='*',
        metavar='SIZE',
        help='the shape of the array; if omitted, the parts of each axis are numbered',
    )
    return parser


def _show(arguments: Sequence[str]) -> str:
    options = _show_parser().parse_args(arguments)
    devices = options.devices if options.mesh is None else abstract_mesh(options.mesh)
    return repr(show(options.expression, options.shape, devices))


def _explain(arguments: Sequence[str]) -> tuple[str, int]:
    parser = _function_parser(
        'explain',
        'Compiles a function and lists its placements, collectives and memory.',
        _EXPLAIN_EXAMPLES,
    )
    _add_save_option(parser)
    parser.add_argument(
        '--timeline',
        action='store_true',
        help='also estimate when what runs on a device, of TPUs and GPUs',
    )
    parser.add_argument(
        '--cost',
        action='append',
        default=[],
        metavar='NAME=FLOPS,BYTES',
        help='what one call of a kernel costs a device, by named scope or custom call',
    )
    parser.add_argument(
        '--profile',
        metavar='PATH',
        help='also read the times of a run: a folder of jax.profiler.trace, or an .xplane.pb file',
    )
    parser.add_argument(
        '--program',
        type=int,
        metavar='N',
        help="the number of the program in the profile, 2 for 'jit_step(2)', if several are equal",
    )
    parser.add_argument(
        '--fail-on',
        choices=['findings'],
        help='exit with status 3 if the report has findings',
    )
    parser.add_argument(
        '--tries',
        type=int,
        metavar='N',
        help='compile up to N changes in search of suggestions (default: 12); 0 for none',
    )
    parser.add_argument(
        '--patch',
        type=_output_file,
        metavar='FILE',
        help='also write the suggestions as a unified diff',
    )
    options = parser.parse_args(arguments)
    tries = {} if options.tries is None else {'tries': options.tries}
    report = explain_call(options, costs=dict(map(_kernel_cost, options.cost)), **tries)
    if options.profile is not None:
        report = report.with_profile(options.profile, options.program)
    if options.timeline:
        _ = report.timeline  # from now on, the report has it
    _save(report, options)
    if options.patch is not None:
        patch = report.patch()
        with _writing(options.patch):
            # the bytes of files in other encodings are surrogates
            Path(options.patch).write_bytes(patch.encode('utf-8', 'surrogateescape'))
    text = json.dumps(report.to_dict(), indent=2) if options.json else str(report)
    return text, 3 if options.fail_on and report.findings else 0


def _kernel_cost(text: str) -> tuple[str, tuple[float, float]]:
    name, _, pair = text.rpartition('=')
    try:
        flops, n_bytes = map(float, pair.split(','))
    except ValueError:
        raise EinshardError(
            f"--cost must be like 'flash=4e9,2e7', not {text!r}", code='command'
        ) from None
    return name, (flops, n_bytes)


def _add_save_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--save',
        type=_output_file,
        metavar='FILE',
        help="also write the report to a file: '.html' for a web page, '.svg' for the timeline",
    )


def _save(report: Report, options: argparse.Namespace) -> None:
    if options.save is not None:
        with _writing(options.save):
            report.save(options.save)


def _profile(arguments: Sequence[str]) -> str:
    parser = _function_parser(
        'profile',
        'Runs a function on the devices of this machine, and reports on it with measured times.\n'
        'Arrays of --args are zeros.',
        _PROFILE_EXAMPLES,
        has_topology=False,
    )
    _add_save_option(parser)
    parser.add_argument(
        '--runs', type=_positive_int, default=5, metavar='N', help='trace N calls (default: 5)'
    )
    parser.add_argument(
        '--tries',
        type=int,
        default=0,
        metavar='N',
        help='compile up to N changes in search of suggestions (default: 0)',
    )
    options = parser.parse_args(arguments)
    from .._explain.profile import profile  # only this command needs it

    mesh = mesh_of(options.devices, options.mesh, None)
    function, args, kwargs = _read_call(profile, load(options.function), mesh, options)
    with _mesh_for(function, mesh, options) as mesh_option:
        if mesh_option is not None:  # a plain function: as `explain` with mesh=, replicated
            args, kwargs = replicated((args, kwargs), mesh_option)
        args, kwargs = zeros((args, kwargs))
        report = profile(
            *(function, *args),
            runs=options.runs,
            chip=options.chip,
            tries=options.tries,
            **kwargs,
        )
    _save(report, options)
    return json.dumps(report.to_dict(), indent=2) if options.json else str(report)


def explain_call(options: argparse.Namespace, **explain_options: Any) -> Report:
    mesh = mesh_of(options.devices, options.mesh, options.topology)
    function, args, kwargs = _read_call(explain, load(options.function), mesh, options)
    with _mesh_for(function, mesh, options) as mesh_option:
        report = explain(
            function, *args, mesh=mesh_option, chip=options.chip, **explain_options, **kwargs
        )
    if mesh is not None and mesh_option is None and report.n_devices == 1 < mesh.size:
        raise EinshardError(
            f'{options.function} is already jitted, and neither it nor its arguments are sharded, '
            f'so it runs on 1 device and not on {mesh.size}',
            code='command',
            facts={
                'instead': '--args module:name, a function that returns ShapeDtypeStructs with '
                'shardings, as in explain --help; or a function that is not jitted'
            },
        )
    return report


def _why(arguments: Sequence[str]) -> str:
    parser = _function_parser(
        'why',
        'Says why a compiled function has its collectives, and why values are sharded as they are.',
        _WHY_EXAMPLES,
    )
    parser.add_argument(
        'places',
        nargs='*',
        metavar='place',
        help='a line, such as model.py:34, or the path of an argument or result; '
        'without one, all collectives',
    )
    options = parser.parse_args(arguments)
    report = explain_call(options, tries=0)
    found = [report.why(place) for place in options.places or report.collectives]
    if options.json:
        return json.dumps([each.to_dict() for each in found], indent=2)
    return '\n\n'.join(dict.fromkeys(map(str, found))) or 'the program has no collectives'


def _plan(arguments: Sequence[str]) -> str:
    parser = _function_parser(
        'plan',
        'Finds how to shard a function that names its axes.\n'
        '--mesh fixes the mesh shape, so that only the placement of each named axis is planned.',
        _PLAN_EXAMPLES,
    )
    parser.add_argument('--memory', metavar='SIZE', help="the limit per device, such as '14 GB'")
    parser.add_argument(
        '--objective',
        default='bound',
        metavar='NAME',
        help='what to minimize: bound (the default), bytes or memory',
    )
    parser.add_argument(
        '--pin',
        type=_pin,
        nargs='+',
        default=[],
        metavar='NAME=@AXIS',
        help='fix the placement of a named axis; NAME= keeps it unsharded',
    )
    parser.add_argument(
        '--compilations',
        type=_positive_int,
        default=40,
        metavar='N',
        help='compile at most N candidates',
    )
    parser.add_argument('--seconds', type=float, metavar='S', help='stop after S seconds')
    options = parser.parse_args(arguments)
    from .._plan.plan import plan  # only this command needs it

    mesh = mesh_of(options.devices, options.mesh, options.topology)
    function, args, kwargs = _read_call(plan, load(options.function), mesh, options)
    found = plan(
        function,
        *args,
        mesh=mesh,
        chip=options.chip,
        memory=options.memory,
        objective=options.objective,
        pin=dict(options.pin),
        compilations=options.compilations,
        seconds=options.seconds,
        **kwargs,
    )
    return json.dumps(found.to_dict(), indent=2) if options.json else str(found)


def _move(arguments: Sequence[str]) -> str:
    parser = _parser(
        'move',
        'Shows what it costs to move arrays to other placements, and by which route.',
        _MOVE_EXAMPLES,
        'simulated CPU devices',
    )
    parser.add_argument(
        'tree',
        metavar='module:tree',
        help='a pytree of arrays or shapes with shardings, or a function that returns one',
    )
    parser.add_argument(
        'spec',
        metavar='module:shardings',
        help='where they go: an expression, rules, shardings, or a function that returns them',
    )
    parser.add_argument('--topology', metavar='NAME', help='devices such as v5e:4x4 or h100:4x8')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.add_argument(
        '--save', type=_output_file, metavar='FILE', help="write a page if the name ends in '.html'"
    )
    options = parser.parse_args(arguments)
    from .._move.explain_move import explain_move  # only this command needs it

    mesh = mesh_of(options.devices, options.mesh, options.topology)
    [tree], _ = read_arguments([options.tree], mesh)
    spec = load(options.spec) if _is_name(options.spec) else options.spec
    if is_plain_function(spec) and not is_spec_function(spec):
        spec = call_with_mesh(spec, options.spec, mesh)
    report = explain_move(tree, spec, mesh)
    if options.save is not None:
        with _writing(options.save):
            report.save(options.save)
    return json.dumps(report.to_dict(), indent=2) if options.json else str(report)


def _is_name(text: str) -> bool:
    return ':' in text and '->' not in text


def _table(arguments: Sequence[str]) -> str:
    parser = _parser(
        'table',
        'Shows how rules shard the arrays of a model.',
        _TABLE_EXAMPLES,
    )
    parser.add_argument('rules', metavar='module:rules')
    parser.add_argument(
        'tree', metavar='module:init', help='a pytree of arrays, or a function that returns one'
    )
    parser.add_argument('--args', nargs='*', default=[], metavar='ARG', help=_ARGUMENT_HELP)
    options = parser.parse_args(arguments)
    rules, tree = load(options.rules), load(options.tree)
    if not isinstance(rules, Rules):
        raise EinshardError(
            f'{options.rules} is of type {type(rules).__name__}, not Rules', code='command'
        )
    args, kwargs = read_arguments(options.args)
    if is_plain_function(tree):
        tree = result_shapes(tree, args, kwargs)
    elif args or kwargs:
        kind = type(tree).__name__
        raise EinshardError(
            f'{options.tree} is of type {kind}, which takes no arguments', code='command'
        )
    return str(rules.table(tree, mesh=_abstract_mesh_of(options)))


def _eject(arguments: Sequence[str]) -> str:
    parser = _parser(
        'eject',
        'Writes an expression, rules or a sharded function as plain JAX, without einshard.',
        _EJECT_EXAMPLES,
    )
    parser.add_argument('what', help='an expression, or module:name for rules or a function')
    parser.add_argument(
        '--shape', type=int, nargs='*', metavar='SIZE', help='the shape of the array'
    )
    parser.add_argument(
        '--args',
        nargs='*',
        default=[],
        metavar='ARG',
        help=f'the pytree that rules shard, or {_ARGUMENT_HELP}',
    )
    parser.add_argument('--topology', metavar='NAME', help='devices such as v5e:4x4 or h100:4x8')
    options = parser.parse_args(arguments)
    from .._eject.to_jax import to_jax  # only this command needs it

    is_expression = ':' not in options.what
    if is_expression and options.topology is None:
        mesh = _abstract_mesh_of(options)
    else:
        mesh = mesh_of(options.devices, options.mesh, options.topology)
    what = options.what if is_expression else load(options.what)
    what, args, kwargs = _read_call(to_jax, what, mesh, options)
    with _mesh_for(what, mesh, options) as mesh_option:
        return to_jax(what, *args, mesh=mesh_option, shape=options.shape, **kwargs)


def _compare(arguments: Sequence[str]) -> tuple[str, int]:
    from .compare_targets import compare_targets  # only this command needs it

    parser = _plain_parser(
        'compare',
        'Compiles a function for several targets and sizes, and prints one table.',
        _COMPARE_EXAMPLES,
    )
    parser.add_argument('function', metavar='module:function')
    parser.add_argument(
        '--args', nargs='*', default=[], metavar='ARG', help=f'{_ARGUMENT_HELP}; SIZE is the size'
    )
    parser.add_argument(
        '--targets',
        nargs='+',
        required=True,
        metavar='NAME',
        help='such as h100:4x8, v5e:4x4, cpu:8',
    )
    parser.add_argument('--sizes', nargs='+', type=int, metavar='N', help='what SIZE stands for')
    parser.add_argument('--mesh', nargs='+', type=_mesh_axis, metavar='AXIS=SIZE')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    options = parser.parse_args(arguments)
    table = compare_targets(options)
    return (json.dumps(table.to_dict(), indent=2) if options.json else str(table)), 0


def _check(arguments: Sequence[str]) -> tuple[str, int]:
    from .._changes.command import Options, check  # only this command needs it
    from .._changes.config import KINDS, check_kinds

    parser = _plain_parser(
        'check',
        'Says what a change of the code does to the programs of [tool.einshard] in '
        'pyproject.toml.\nCompares them with stored reports, or with those of the merge base.',
        _CHECK_EXAMPLES,
    )
    parser.add_argument(
        'names', nargs='*', metavar='name', help='the steps to check (default: all)'
    )
    parser.add_argument('--target', action='append', default=[], help='only for this target')
    parser.add_argument(
        '--update', action='store_true', help='write the stored reports, and remove stale ones'
    )
    parser.add_argument('--base', metavar='REF', help='compare with the merge base of HEAD and REF')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.add_argument(
        '--markdown',
        type=_output_file,
        metavar='FILE',
        help='also write a comment for a pull request',
    )
    parser.add_argument('--save', metavar='FOLDER', help='also write a page for each report')
    parser.add_argument(
        '--fail-on',
        action='append',
        default=[],
        metavar='KIND',
        help=f'exit with status 3 for this: {", ".join(KINDS)}',
    )
    options = parser.parse_args(arguments)
    done = check(
        Options(
            options.names,
            options.target,
            options.update,
            options.base,
            options.json,
            options.markdown,
            options.save,
            check_kinds(options.fail_on, '--fail-on'),
        ),
        Path.cwd(),
    )
    return done.text, done.status


def _doctor(arguments: Sequence[str]) -> tuple[str, int]:
    from .doctor import FEATURES, as_text, check  # only this command needs it

    parser = _plain_parser(
        'doctor',
        'Says what is installed, and what that allows. Starts no backend.',
        _DOCTOR_EXAMPLES,
    )
    parser.add_argument(
        'features', nargs='*', metavar='feature', help=f'one of {", ".join(FEATURES)}'
    )
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    options = parser.parse_args(arguments)
    found = check(options.features)
    text = json.dumps(found, indent=2) if options.json else as_text(found)
    return text, 1 if found['missing'] else 0


def _skill(arguments: Sequence[str]) -> str:
    argparse.ArgumentParser(
        prog=f'{_program()} skill',
        description='Prints the path of the skill of einshard: a folder that coding agents read.\n'
        'library-skills finds it, too. Without it, copy or link the folder to .agents/skills/.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    return str(Path(__file__).parents[1] / '.agents' / 'skills' / 'einshard')


def _read_call(
    command: Any, function: Any, mesh: AnyMesh | None, options: argparse.Namespace
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Returns a function and its arguments.

    Binds keyword arguments of the function that have the names of options of the command.
    """
    args, kwargs = read_arguments(options.args, mesh, enter=_names_mesh(options))
    names = inspect.signature(command).parameters
    bound = {name: value for name, value in kwargs.items() if name in names}
    others = {name: value for name, value in kwargs.items() if name not in names}
    return functools.partial(function, **bound) if bound else function, args, others


@contextmanager
def _mesh_for(
    function: Any, mesh: AnyMesh | None, options: argparse.Namespace
) -> Generator[AnyMesh | None]:
    """Returns the `mesh=` with which a function is called. Enters the mesh for a jitted function.

    A jitted function takes no `mesh=`: its shardings, its arguments or the mesh in context say
    where it runs. --devices only simulates devices, so that the module can make a mesh of them.
    """
    if isinstance(function, functools.partial):
        function = function.func
    has_mesh = getattr(function, 'has_mesh', None)  # None if the function is not `sharded`
    is_stage = isinstance(function, Traced | Lowered | Compiled)
    option = '--topology' if options.topology is not None else '--mesh'
    if (is_stage or has_mesh) and _names_mesh(options):
        raise EinshardError(
            f'{getattr(options, "function", None) or options.what} has its own mesh, so {option} '
            'cannot be given',
            code='command',
            facts={'instead': 'omit it; --devices N simulates N devices'},
        )
    if is_stage or has_mesh:
        yield None
    elif has_mesh is None and is_jitted(function):
        with (
            jax.set_mesh(mesh) if _names_mesh(options) and isinstance(mesh, Mesh) else nullcontext()
        ):
            yield None
    else:
        yield mesh


def _names_mesh(options: argparse.Namespace) -> bool:
    """Whether the options name a mesh. --devices only simulates devices."""
    return options.topology is not None or options.mesh is not None


def _abstract_mesh_of(options: argparse.Namespace) -> AbstractMesh | None:
    if options.devices is not None:
        return device_mesh(abstract_mesh([('d0', options.devices)]))
    return None if options.mesh is None else abstract_mesh(options.mesh)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive integer')
    return int(text)


def _mesh_axis(text: str) -> tuple[str, int]:
    """Reads a mesh axis: ('data', 4) for 'data=4'."""
    name, _, size = text.partition('=')
    if not name or not size.isdecimal() or int(size) == 0:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a mesh axis with its size, such as data=4 '
            '(put the expression before --mesh)'
        )
    return name, int(size)


def _output_file(text: str) -> str:
    """Checks that the directory of a file exists, before anything is compiled."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f'{text!r} is a directory')
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f'the directory of {text!r} does not exist')
    return text


def _pin(text: str) -> tuple[str, str]:
    """Reads a pinned placement: ('embed', '@x') for 'embed=@x'."""
    name, equals, placement = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not an axis name with its placement, such as embed=@x'
        )
    return name, placement


def _function_parser(
    command: str, description: str, examples: str, has_topology: bool = True
) -> argparse.ArgumentParser:
    parser = _parser(command, description, examples, 'simulated CPU devices')
    parser.add_argument('function', metavar='module:function')
    parser.add_argument('--args', nargs='*', default=[], metavar='ARG', help=_ARGUMENT_HELP)
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    if has_topology:
        parser.add_argument(
            '--topology',
            metavar='NAME',
            help='compile for devices such as v5e:4x4 or h100:4x8; --mesh then names their axes',
        )
    else:
        parser.set_defaults(topology=None)
    parser.add_argument(
        '--chip', metavar='NAME', help='the chip that lower bounds on time are for, such as H100'
    )
    return parser


def _plain_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f'{_program()} {command}'.rstrip(),
        description=description,
        epilog=examples.replace('{prog}', _program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _parser(
    command: str,
    description: str,
    examples: str,
    noun: str = 'devices, which do not have to exist',
) -> argparse.ArgumentParser:
    """Makes a parser with the options --devices and --mesh."""
    parser = _plain_parser(command, description, examples)
    group = parser.add_mutually_exclusive_group()
    group.add_argument('--devices', type=_positive_int, metavar='N', help=f'number of {noun}')
    group.add_argument(
        '--mesh',
        type=_mesh_axis,
        nargs='+',
        metavar='AXIS=SIZE',
        help=f'a mesh of {noun}: its axes, slowest-varying first',
    )
    return parser
