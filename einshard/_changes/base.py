"""The merge base of a change: its files, and what the change does to lines."""

from __future__ import annotations

import bisect
import re
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .._errors import EinshardError

_HUNK = re.compile(r'^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@', re.MULTILINE)


@dataclass(frozen=True)
class Base:
    """The merge base, checked out.

    Attributes:
        commit: its hash.
        root: the folder of the repository, of the change.
        tree: the folder of the base's files.
        hunks: (old start, old length, new start, new length) of each hunk of a file, by its name.
    """

    commit: str
    root: Path
    tree: Path
    hunks: Mapping[str, Sequence[tuple[int, int, int, int]]]

    def new_line(self, source: str) -> str:
        """Returns where a line of the base, such as 'model.py:12', is in the change."""
        file, _, line = source.rpartition(':')
        if not line.isdecimal() or file not in self.hunks:
            return source
        n, hunks = int(line), self.hunks[file]
        i = bisect.bisect_right([hunk[0] for hunk in hunks], n) - 1
        if i < 0:
            return source
        start, length, new_start, new_length = hunks[i]
        if n < start + length:  # in the hunk: its lines are replaced in order
            return f'{file}:{new_start + min(n - start, max(new_length - 1, 0))}'
        return f'{file}:{n + new_start + new_length - start - length}'


def repository(folder: Path) -> Path | None:
    """Returns the root of the repository that a folder is in, or None."""
    done = _run(folder, 'rev-parse', '--show-toplevel')
    return None if done.returncode else Path(done.stdout.strip()).resolve()


@contextmanager
def merge_base(folder: Path, ref: str) -> Generator[Base]:
    """Checks out the merge base of HEAD and `ref` in a temporary folder, which is removed.

    Raises:
        EinshardError: there is no repository, no such ref, or no merge base.
    """
    root = repository(folder)
    if root is None:
        raise EinshardError(f'{folder} is not in a git repository', code='check')
    done = _run(root, 'merge-base', ref, 'HEAD')
    if done.returncode:
        raise _no_base(root, ref, done.stderr)
    commit = done.stdout.strip()
    with tempfile.TemporaryDirectory(prefix='einshard-') as temporary:
        tree = Path(temporary).resolve() / 'base'
        _git(root, 'worktree', 'add', '--detach', '--quiet', str(tree), commit)
        try:
            yield Base(commit, root, tree, _hunks(root, commit))
        finally:
            _git(root, 'worktree', 'remove', '--force', str(tree))


def tracked_files(root: Path) -> Sequence[str]:
    return _git(root, 'ls-files', '-z', '*.py').split('\0')[:-1]


def _hunks(root: Path, commit: str) -> dict[str, list[tuple[int, int, int, int]]]:
    # the user's configuration may have other prefixes, or none
    prefixes = '--src-prefix=a/', '--dst-prefix=b/'
    plain = '--no-color', '--no-ext-diff', '--no-renames'
    text = _git(root, 'diff', '--unified=0', *plain, *prefixes, commit)
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for part in re.split(r'^diff --git ', text, flags=re.MULTILINE)[1:]:
        name = re.search(r'^\+\+\+ b/(.*?)\t?$', part, re.MULTILINE)
        if name is not None:
            hunks = ([int(n) if n else 1 for n in hunk] for hunk in _HUNK.findall(part))
            # of no lines, git names the line before
            found[name[1]] = [(a + (n == 0), n, b + (m == 0), m) for a, n, b, m in hunks]
    return found


def _no_base(root: Path, ref: str, says: str) -> EinshardError:
    facts = {'git says': says.strip() or 'nothing in common'}
    if _run(root, 'rev-parse', '--is-shallow-repository').stdout.strip() == 'true':
        facts['instead'] = (
            'the clone is shallow: fetch-depth: 0 of actions/checkout, or git fetch --unshallow'
        )
    return EinshardError(f"there is no merge base of '{ref}' and HEAD", code='check', facts=facts)


def _git(root: Path, *arguments: str) -> str:
    done = _run(root, *arguments)
    if done.returncode:
        facts = {'git says': done.stderr.strip()}
        raise EinshardError(f'git {arguments[0]} failed', code='check', facts=facts)
    return done.stdout


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ['git', '-c', 'core.quotePath=false', *arguments]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors='surrogateescape',  # of names and lines that are not UTF-8
            check=False,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, '', 'git is not installed')
