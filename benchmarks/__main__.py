"""python -m benchmarks NAME [options]; without a name, the list of benchmarks."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence

from ._list import MODULES, about

# the benchmarks that several processes can run together; the others measure one process
DISTRIBUTED = ('programs', 'layouts', 'collectives', 'tpu')
DEVICE_COUNT_FLAG = '--xla_force_host_platform_device_count'


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.name is None:
        list_benchmarks()
    elif options.name == 'page':
        from ._page import write_page

        write_page()
    else:
        run(names_of(options.name, options.distributed), options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks',
        description='What einshard costs, as ratios of interleaved runs.',
    )
    add = parser.add_argument
    pages = 'all: every benchmark; page: write docs/performance.md from benchmarks/results'
    add('name', nargs='?', choices=[*MODULES, 'all', 'page'], help=pages)
    add('--json', metavar='FILE', type=pathlib.Path, help='write the figures to FILE')
    add('--tiny', action='store_true', help='check that everything runs, at a tiny size')
    add('--seconds', type=float, help='time per figure; default 2, or 0.5 with all')
    add('--devices', type=int, default=8, help='simulated devices, without an accelerator')
    add('--large', action='store_true', help='placement: also trees of 10,000 leaves')
    slices = "tpu: the slice to compile for, 'v5e:16x16' or '2*v5e:4x4'; may be repeated"
    add('--topology', metavar='NAME', action='append', help=slices)
    add('--distributed', action='store_true', help='this is one of several processes')
    add('--coordinator', metavar='HOST:PORT', help='of those processes, if JAX cannot tell')
    add('--processes', type=int, help='their number, with --coordinator')
    add('--process', type=int, help='the number of this one, with --coordinator')
    options = parser.parse_args(arguments)
    options.distributed |= options.coordinator is not None
    return options


def names_of(name: str, distributed: bool) -> list[str]:
    names = [*MODULES] if name == 'all' else [name]
    if not distributed:
        return names
    if name not in (*DISTRIBUTED, 'all'):
        expected = ', '.join(DISTRIBUTED)
        raise SystemExit(f'{name} measures one process; several processes can run: {expected}')
    return [name for name in names if name in DISTRIBUTED]


def run(names: Sequence[str], options: argparse.Namespace) -> None:
    simulate_devices(options.devices)
    if options.tiny:
        compile_fast()
    # only now: this imports JAX
    import jax

    from ._measure import Bench, agree, progress_line
    from ._report import Report, environment
    from ._table import print_benchmark

    if options.distributed:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    seconds = options.seconds or (0.5 if options.name == 'all' else 2.0)
    report = Report({}, options.tiny)
    for name in names:
        show = progress_line(name)
        bench = Bench(name, seconds, options.tiny, options, progress=show)
        if options.distributed:
            bench.agree = agree
        importlib.import_module(f'benchmarks.{MODULES[name]}').run(bench)
        show('')
        report.rows += bench.rows
        report.left_out += bench.left_out
        if is_first(options):
            note = ' (tiny: the figures mean nothing)' if options.tiny else ''
            print_benchmark(f'{name}: {about(name)}{note}', bench.rows, bench.left_out)
    if is_first(options):
        report.environment |= environment()
        print(' '.join(f'{key}={value}' for key, value in report.environment.items()))
        if options.json:
            options.json.write_text(report.to_json(), encoding='utf-8')


def is_first(options: argparse.Namespace) -> bool:
    """Whether this process prints and writes: of several, only the first does."""
    import jax

    return not options.distributed or jax.process_index() == 0


def list_benchmarks() -> None:
    print('python -m benchmarks NAME, or all; --help shows the options\n')
    for name in MODULES:
        print(f'{name:13}{about(name)}')


def simulate_devices(count: int) -> None:
    """Simulate `count` devices on the CPU, unless the user has set their number.

    With an accelerator the flag does nothing.
    """
    flags = os.environ.get('XLA_FLAGS', '')
    if DEVICE_COUNT_FLAG not in flags and 'JAX_NUM_CPU_DEVICES' not in os.environ:
        os.environ['XLA_FLAGS'] = f'{flags} {DEVICE_COUNT_FLAG}={count}'.strip()


def compile_fast() -> None:
    """Skip LLVM's optimizations on the CPU, a third of the time that --tiny takes."""
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --xla_backend_optimization_level=0'.strip()


if __name__ == '__main__':
    sys.exit(main())
