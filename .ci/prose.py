"""Counts the words of prose in README.md and docs: python .ci/prose.py [REF]

With a REF of git, such as main, prints the difference too, and fails if there are more words: a
page that explains more takes them from one that explains too much. Code, figures that benchmarks
write, HTML and link targets do not count.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# written by `python -m benchmarks page`
_GENERATED = ('docs/performance.md',)
_NOT_PROSE = re.compile(
    r'^(`{3,}|~{3,}).*?^\1\s*$'  # fenced code, also of directives
    r'|<!--.*?-->|<[^>\n]+>'
    r'|(?<=\])\([^)\s]*\)'  # the target of a link
    r'|`[^`\n]+`'
    r'|^---\n.*?^---$',
    re.MULTILINE | re.DOTALL,
)


def git(*arguments: str) -> str:
    return subprocess.run(['git', *arguments], check=True, capture_output=True, text=True).stdout


def count(ref: str | None) -> dict[str, int]:
    """Returns the number of words of each page, in the working tree or at a ref."""
    pages = ('README.md', 'docs/*.md', 'docs/**/*.md')
    if ref is None:
        names = git('ls-files', *pages).split()
        texts = [Path(name).read_text(encoding='utf-8') for name in names]
    else:
        names = [n for n in git('ls-tree', '-r', '--name-only', ref).split() if n.endswith('.md')]
        names = [n for n in names if n == 'README.md' or n.startswith('docs/')]
        texts = [git('show', f'{ref}:{name}') for name in names]
    return {
        name: len(re.findall(r"[^\W\d_][\w'-]*", _NOT_PROSE.sub(' ', text)))
        for name, text in zip(names, texts, strict=True)
        if name not in _GENERATED
    }


def main(ref: str | None = None) -> int:
    now = count(None)
    before = count(ref) if ref else {}
    for name in sorted({*now, *before}):
        change = now.get(name, 0) - before.get(name, 0)
        print(f'{now.get(name, 0):7,} {f"{change:+6,}" if ref and change else "":6} {name}')
    total, old = sum(now.values()), sum(before.values())
    print(f'{total:7,} {f"{total - old:+6,}" if ref else "":6} in all')
    return ref is not None and total > old


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
