"""Every call in messages.md raises an EinshardError with the message under it."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from einshard import EinshardError

FILE = Path(__file__).with_name('messages.md')
SETUP = re.compile(r'^```python\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CASE = re.compile(r'^((?:(?:>>>|\.\.\.)(?: .*)?\n)+)((?:(?!```).+\n)*)', re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A call with its prompts, its line (from 0), the message under it and the span of that."""

    heading: str
    call: str
    line: int
    message: str
    span: tuple[int, int]

    @property
    def code(self):
        return re.sub('^.{3} ?', '', self.call, flags=re.MULTILINE)

    @property
    def name(self):
        code = re.sub('^#.*\n', '', self.code)
        return f'{self.heading}: {" ".join(code.split())[:80]}'


def read(text):
    """The cases of the file."""
    return [
        Case(
            heading=re.findall('^## (.*)$', text[: found.start()], re.MULTILINE)[-1],
            call=found[1],
            line=text.count('\n', 0, found.start()),
            message=found[2],
            span=found.span(2),
        )
        for found in CASE.finditer(text)
    ]


def rewritten(text, messages):
    """The file with new messages at the given spans."""
    for (start, end), message in sorted(messages.items(), reverse=True):
        text = text[:start] + message + text[end:]
    return text


def execute(code, line, namespace):
    """Runs code from the file, so that tracebacks show its lines."""
    exec(compile(ast.increment_lineno(ast.parse(code), line), FILE, 'exec'), namespace)


TEXT = FILE.read_text('utf-8')
CASES = read(TEXT)


@pytest.fixture(scope='module')
def setup():
    found = SETUP.search(TEXT)
    namespace = {'__name__': 'messages'}
    execute(found[1], TEXT.count('\n', 0, found.start(1)), namespace)
    return namespace


@pytest.fixture(scope='module')
def update(request):
    """The new messages by span, written after the last case; None without --update-messages."""
    if not request.config.getoption('--update-messages'):
        yield None
        return
    messages = {}
    yield messages
    FILE.write_text(rewritten(TEXT, messages), 'utf-8')


@pytest.mark.parametrize('case', CASES, ids=[case.name for case in CASES])
def test_message(case, setup, update):
    with pytest.raises(EinshardError) as caught:
        execute(case.code, case.line, dict(setup))
    message = f'{caught.value}\n'
    if update is not None:
        update[case.span] = message
    else:
        assert message == case.message


def test_each_call_is_written_once():
    assert len({case.call for case in CASES}) == len(CASES)


def test_only_messages_are_rewritten():
    text = '## A\n\n```pycon\n>>> f(\n...     1\n... )\nold\n  fact: 1\n\n>>> g()\n```\n'
    first, second = read(text)
    assert (first.code, first.message) == ('f(\n    1\n)\n', 'old\n  fact: 1\n')
    assert (second.code, second.message) == ('g()\n', '')
    assert rewritten(text, {first.span: first.message, second.span: 'new\n'}) == text.replace(
        'g()\n', 'g()\nnew\n'
    )
    assert rewritten(text, {first.span: 'x\n'}) == text.replace('old\n  fact: 1', 'x')
