"""python -m benchmarks NAME [options]; without a name, the list of the benchmarks."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._schema import Report

# in the order in which `all` runs them: processes of their own come before this one has taken
# an accelerator
MODULES = {
    'memory': 'benchmarks.memory',
    'placement': 'benchmarks.placement',
    'dispatch': 'benchmarks.dispatch',
    'per_device': 'benchmarks.per_device',
    'expressions': 'benchmarks.expressions',
    'rules': 'benchmarks.rules',
    'programs': 'benchmarks.programs',
    'layouts': 'benchmarks.layouts',
    'collectives': 'benchmarks.collectives',
    'scaling': 'benchmarks.scaling',
    'tpu': 'benchmarks.tpu',
    'import': 'benchmarks.importing',
}
# what is the same on all of several processes; the others are about one
DISTRIBUTED = ('programs', 'layouts', 'collectives', 'tpu')
COUNT_FLAG = '--xla_force_host_platform_device_count'


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks',
        description='What einshard costs, as ratios of interleaved runs.',
        add_help=False,
    )
    parser.add_argument(
        'name',
        nargs='?',
        choices=[*MODULES, 'all', 'page'],
        help='all: each of them; page: docs/performance.md, from benchmarks/results/*.json',
    )
    parser.add_argument('--json', metavar='FILE', type=pathlib.Path, help='write the figures there')
    parser.add_argument('--tiny', action='store_true', help='only see that everything runs')
    parser.add_argument(
        '--seconds', type=float, help='for a figure; 2 where left out, with all 0.5'
    )
    parser.add_argument(
        '--devices', type=int, default=8, help='simulated ones, where there is no accelerator'
    )
    parser.add_argument(
        '--distributed', action='store_true', help='one of several processes, as JAX finds out'
    )
    parser.add_argument(
        '--coordinator', metavar='HOST:PORT', help='one of several processes, where JAX does not'
    )
    parser.add_argument('--processes', type=int, help='how many, with --coordinator')
    parser.add_argument('--process', type=int, help='which of them, with --coordinator')
    known, _ = parser.parse_known_args(arguments)
    names = names_of(known.name, known.distributed or known.coordinator is not None)
    simulate_devices(known.devices)
    if known.tiny:
        compile_fast()
    # only now: importing them imports jax
    modules = {name: importlib.import_module(MODULES[name]) for name in names}
    parser.add_argument('-h', '--help', action='help', help='show this message')
    # of those that follow one of them too
    several = [module for one in modules.values() for module in (one, *getattr(one, 'ALSO', ()))]
    for module in dict.fromkeys(several):
        if hasattr(module, 'add_options'):
            module.add_options(parser.add_argument_group(module.__name__.rpartition('.')[2]))
    options = parser.parse_args(arguments)
    if options.name == 'page':
        from ._page import write_page

        write_page()
    elif not names:
        list_benchmarks()
    else:
        options.distributed = join_processes(options)
        run(modules, options)


def names_of(name: str | None, distributed: bool) -> list[str]:
    if name is None or name == 'page':
        return []
    names = [*MODULES] if name == 'all' else [name]
    if not distributed:
        return names
    if name not in (*DISTRIBUTED, 'all'):
        raise SystemExit(f'{name} is about one process; about several: {", ".join(DISTRIBUTED)}')
    return [name for name in names if name in DISTRIBUTED]


def join_processes(options: argparse.Namespace) -> bool:
    """Whether this is one of several processes; if so, the others are waited for."""
    if options.coordinator is None and not options.distributed:
        return False
    import jax

    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    return True


def run(modules: dict[str, object], options: argparse.Namespace) -> None:
    from ._harness import Bench, agree, environment, progress_line, report
    from ._table import print_environment, print_result

    seconds = options.seconds or (0.5 if options.name == 'all' else 2.0)
    results = []
    for name, module in modules.items():
        show = progress_line(name)
        bench = Bench(name, seconds, options.tiny, options, progress=show)
        if options.distributed:
            bench.agree = agree
        module.run(bench)
        show('')
        results.append(bench.result(first_line(module.__doc__)))
        if speaks(options):
            print_result(results[-1])
    if speaks(options):
        print_environment(environment())
        if options.json:
            options.json.write_text(json_text(report(results)), encoding='utf-8')


def speaks(options: argparse.Namespace) -> bool:
    """Of several processes the first speaks for all."""
    import jax

    return not options.distributed or jax.process_index() == 0


def json_text(document: Report) -> str:
    """A line for each row, so that a change of a figure is a change of a line."""
    rows: list[str] = []
    results = []
    for result in document['benchmarks']:
        places = [f'row {len(rows) + i}' for i in range(len(result['rows']))]
        rows += map(json.dumps, result['rows'])
        results.append({**result, 'rows': places})
    text = json.dumps({**document, 'benchmarks': results}, indent=1)
    return re.sub(r'"row (\d+)"(?=,?\n)', lambda found: rows[int(found[1])], text) + '\n'


def list_benchmarks() -> None:
    print('python -m benchmarks NAME, or all; --help after a name shows its options\n')
    for name, module in MODULES.items():
        path = pathlib.Path(__file__).with_name(module.rpartition('.')[2] + '.py')
        about = first_line(ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))))
        print(f'{name:13}{about}')


def first_line(text: str | None) -> str:
    return (text or '').strip().partition('\n')[0]


def simulate_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices, unless the user has said how many.

    The flag means nothing to an accelerator, which is used where there is one.
    """
    flags = os.environ.get('XLA_FLAGS', '')
    if COUNT_FLAG in flags or 'JAX_NUM_CPU_DEVICES' in os.environ:
        return
    os.environ['XLA_FLAGS'] = f'{flags} {COUNT_FLAG}={count}'.strip()


def compile_fast() -> None:
    """Leaves out what LLVM does to a program for the CPU: a third of the time to try them all."""
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --xla_backend_optimization_level=0'.strip()


if __name__ == '__main__':
    sys.exit(main())
