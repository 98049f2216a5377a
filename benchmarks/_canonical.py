"""Optimized HLO in a canonical form: equal programs are equal line by line.

Metadata is removed, instructions and computations are numbered in order, and replica groups are
written out. XLA writes some groups in mesh axes, `mesh['d0'=2,'d1'=2,'d2'=2]
{'d0','d1'}` or `mesh['data'=4,'model'=2] {'data'}`, others as `[2,4]<=[4,2]T(1,0)`: all three are
{0,2,4,6},{1,3,5,7}. Nothing else differs between equal programs.
"""

import itertools
import re
from collections import Counter

import numpy as np

_STRING = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf', metadata=\{{(?:[^{{}}"]|{_STRING}|\{{[^{{}}]*\}})*\}}')
_STACK_FRAMES = re.compile(
    r'^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)+\n*', re.MULTILINE
)
_NAME = re.compile(r'%[\w.-]+')
_HEADER = re.compile(r'^(?:ENTRY )?%\d+ \(.*\{$', re.MULTILINE)  # of a computation
_PARAMETER = re.compile(r'(?<=[( ])[\w.-]+(?=: )')
_GROUPS = re.compile(
    r'replica_groups=(\{\}|\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?'
    r'|mesh\[[^\]]*\](?:, device_ids=\(\[[\d,]+\](?:T\([\d,]+\))?\))? \{[^}]*\})(?=[,\n])'
)
_COLLECTIVE = re.compile(
    r' = (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\('
)


def canonical(text):
    """The lines of an optimized program, without what may differ between equal ones."""
    text = _STACK_FRAMES.sub('', _METADATA.sub('', text))
    text = re.sub(r'^HloModule [\w.-]+', 'HloModule', text)
    numbers = {}
    text = _NAME.sub(lambda found: numbers.setdefault(found[0], f'%{len(numbers)}'), text)
    text = _HEADER.sub(lambda found: _PARAMETER.sub('_', found[0]), text)
    n_groups = text.count('replica_groups=')
    if len(_GROUPS.findall(text)) != n_groups:
        raise ValueError('replica groups in an unknown form')
    text = _GROUPS.sub(lambda found: f'replica_groups={groups(found[1])}', text)
    return text.splitlines()


def groups(text):
    """The replica groups as plain numbers, from any of their forms."""
    if text.startswith('{'):
        listed = [[int(n) for n in g.split(',')] for g in re.findall(r'\{([\d, ]+)\}', text)]
    elif text.startswith('['):
        shape, dims, order = re.fullmatch(r'\[(.*)\]<=\[(.*?)\](?:T\((.*)\))?', text).groups()
        listed = _iota(_numbers(dims), _numbers(order or '')).reshape(_numbers(shape)).tolist()
    else:
        listed = _groups_of_mesh(text)
    return str_of(listed)


def str_of(listed):
    rows = sorted([int(number) for number in group] for group in listed)
    return '{' + ','.join('{' + ','.join(map(str, row)) + '}' for row in rows) + '}'


def _groups_of_mesh(text):
    """mesh['a'=2,'b'=4] {'b'}; {'b':(1)2} is the slower half of b, {'b':(2)2} the faster one.

    Device ids, if any, say which devices form the mesh: device_ids=([4,2]T(1,0)).
    """
    mesh, shape, order, axes = re.fullmatch(
        r'mesh\[(.*?)\](?:, device_ids=\(\[(.*?)\](?:T\((.*?)\))?\))? \{(.*)\}', text
    ).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    dims, at = [], {}  # mesh axes, split where a part begins or ends; the position of each part
    for name, size in sizes.items():
        edges = {1, size}
        for other, before, part in parts:
            edges |= {before, before * part} if other == name else set()
        for before, end in itertools.pairwise(sorted(edges)):
            at[name, before] = len(dims)
            dims.append(end // before)
    last = [at[name, before] for name, before, size in parts if size > 1]
    first = [i for i in range(len(dims)) if i not in last]
    n_groups = int(np.prod([dims[i] for i in first], dtype=int))
    ids = _iota(_numbers(shape) if shape else dims, _numbers(order or '')).reshape(dims)
    return ids.transpose(first + last).reshape(n_groups, -1).tolist()


def _iota(dims, order):
    numbers = np.arange(np.prod(dims, dtype=int)).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _numbers(text):
    return [int(number) for number in text.split(',') if number]


def collectives(lines):
    """Counts the collectives by kind, shape of the result and replica groups."""
    found = Counter()
    for line in lines:
        if match := _COLLECTIVE.search(line):
            among = re.search(r'(?:replica_groups|source_target_pairs)=(\{\}|\{\{.*?\}\})', line)
            found[match[2], match[1], among and among[1]] += 1
    return found
