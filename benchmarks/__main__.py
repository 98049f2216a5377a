"""python -m benchmarks NAME [options]; without a name, the list of the benchmarks."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

# in the order in which `all` runs them: processes of their own come before this one has taken
# an accelerator
MODULES = {
    'placement': 'benchmarks.placement',
    'dispatch': 'benchmarks.dispatch',
    'expressions': 'benchmarks.expressions',
    'import': 'benchmarks.importing',
}
COUNT_FLAG = '--xla_force_host_platform_device_count'


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks',
        description='What einshard costs, as ratios of interleaved runs.',
        add_help=False,
    )
    parser.add_argument('name', nargs='?', choices=[*MODULES, 'all'], help='all: each of them')
    parser.add_argument('--json', metavar='FILE', type=pathlib.Path, help='write the figures there')
    parser.add_argument('--tiny', action='store_true', help='only see that everything runs')
    parser.add_argument(
        '--seconds', type=float, help='for a figure; 2 where left out, with all 0.5'
    )
    parser.add_argument(
        '--devices', type=int, default=8, help='simulated ones, where there is no accelerator'
    )
    known, _ = parser.parse_known_args(arguments)
    simulate_devices(known.devices)
    # only now: importing them imports jax
    names = [] if known.name is None else [*MODULES] if known.name == 'all' else [known.name]
    modules = {name: importlib.import_module(MODULES[name]) for name in names}
    parser.add_argument('-h', '--help', action='help', help='show this message')
    for name, module in modules.items():
        if hasattr(module, 'add_options'):
            module.add_options(parser.add_argument_group(name))
    options = parser.parse_args(arguments)
    if not names:
        list_benchmarks()
        return
    run(modules, options)


def run(modules: dict[str, object], options: argparse.Namespace) -> None:
    from ._harness import Bench, environment, progress_line, report
    from ._table import print_environment, print_result

    seconds = options.seconds or (0.5 if options.name == 'all' else 2.0)
    results = []
    for name, module in modules.items():
        show = progress_line(name)
        bench = Bench(name, seconds, options.tiny, options, progress=show)
        module.run(bench)
        show('')
        results.append(bench.result(first_line(module.__doc__)))
        print_result(results[-1])
    print_environment(environment())
    if options.json:
        text = json.dumps(report(results), indent=1)
        options.json.write_text(text + '\n', encoding='utf-8')


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


if __name__ == '__main__':
    sys.exit(main())
