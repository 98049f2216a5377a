"""The command `einshard explain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._errors import EinshardError
from .._explain.explain import explain
from .._explain.kinds import FINDINGS
from .._explain.report import Report
from .arguments import load, mesh_of
from .options import Parser, mesh_for, output_file, read_call, save_report, text_of, writing

_EXAMPLES = """\
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


def run(arguments: Sequence[str]) -> tuple[str, int]:
    parser = Parser(
        'explain',
        'Compiles a function and lists its placements, collectives and memory.',
        _EXAMPLES,
    )
    parser.add_function()
    parser.add_save()
    parser.flag('--timeline', 'also estimate when what runs on a device, of TPUs and GPUs')
    text = 'what one call of a kernel costs a device, by named scope or custom call'
    parser.option('--cost', 'NAME=FLOPS,BYTES', text, action='append', default=[])
    text = 'also read the times of a run: a folder of jax.profiler.trace, or an .xplane.pb file'
    parser.option('--profile', 'PATH', text)
    text = "the number of the program in the profile, 2 for 'jit_step(2)', if several are equal"
    parser.option('--program', 'N', text, type=int)
    text = 'exit with status 3 if the report has findings'
    parser.add_argument('--fail-on', choices=['findings'], help=text)
    text = 'a kind of findings for which --fail-on does not fail'
    parser.option('--ignore', 'KIND', text, action='append', default=[], choices=FINDINGS)
    text = 'compile up to N changes in search of suggestions (default: 12); 0 for none'
    parser.option('--tries', 'N', text, type=int)
    text = 'also write the suggestions as a unified diff'
    parser.option('--patch', 'FILE', text, type=output_file)
    options = parser.parse_args(arguments)
    tries = {} if options.tries is None else {'tries': options.tries}
    report = explain_call(options, costs=dict(map(_kernel_cost, options.cost)), **tries)
    if options.profile is not None:
        report = report.with_profile(options.profile, options.program)
    if options.timeline:
        _ = report.timeline  # from now on, the report has it
    save_report(report, options)
    if options.patch is not None:
        patch = report.patch()
        with writing(options.patch):
            # the bytes of files in other encodings are surrogates
            Path(options.patch).write_bytes(patch.encode('utf-8', 'surrogateescape'))
        if not patch:
            print(f'{options.patch} is empty: no suggestion is left to write', file=sys.stderr)
    text = text_of(report, options)
    counted = [each for each in report.findings if each.kind not in options.ignore]
    return text, 3 if options.fail_on and counted else 0


def _kernel_cost(text: str) -> tuple[str, tuple[float, float]]:
    name, _, pair = text.rpartition('=')
    try:
        flops, n_bytes = map(float, pair.split(','))
    except ValueError:
        raise EinshardError(
            f"--cost must be like 'flash=4e9,2e7', not {text!r}", code='command'
        ) from None
    return name, (flops, n_bytes)


def explain_call(options: argparse.Namespace, **explain_options: Any) -> Report:
    mesh = mesh_of(options.devices, options.mesh, options.topology)
    function, args, kwargs = read_call(explain, load(options.function), mesh, options)
    with mesh_for(function, mesh, options) as mesh_option:
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
