"""Runs `einshard check` in a pull request, and writes the one comment that has the mark.

Without the right to write comments, as for a pull request of a fork, the summary of the job has the
text. The exit status is that of `einshard check`.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

MARK = '<!-- einshard check -->'
API = os.environ.get('GITHUB_API_URL', 'https://api.github.com')
_PER_PAGE = 100


def call(method, path, data=None):
    request = urllib.request.Request(
        f'{API}{path}',
        method=method,
        data=None if data is None else json.dumps(data).encode(),
        headers={
            'Accept': 'application/vnd.github+json',
            'Authorization': f'Bearer {os.environ.get("GITHUB_TOKEN", "")}',
            'Content-Type': 'application/json',
        },
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def find_comment(repository, number):
    page = 1
    while True:
        path = f'/repos/{repository}/issues/{number}/comments?per_page={_PER_PAGE}&page={page}'
        comments = call('GET', path)
        for comment in comments:
            if comment['body'].startswith(MARK):
                return comment['id']
        if len(comments) < _PER_PAGE:
            return None
        page += 1


def write_comment(text):
    """Writes the comment, or changes the one that is there. Returns whether that was allowed."""
    event = json.loads(Path(os.environ['GITHUB_EVENT_PATH']).read_text(encoding='utf-8'))
    repository, number = os.environ['GITHUB_REPOSITORY'], event['pull_request']['number']
    try:
        old = find_comment(repository, number)
        if old is not None:
            call('PATCH', f'/repos/{repository}/issues/comments/{old}', {'body': text})
        elif ': 0 of ' not in text.splitlines()[1]:  # nothing changed, and nothing was said
            call('POST', f'/repos/{repository}/issues/{number}/comments', {'body': text})
    except urllib.error.HTTPError as error:
        error.close()
        if error.code not in (401, 403, 404):
            raise
        print(f'no comment was written: {error}')
        return False
    return True


def main():
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / 'comment.md'
        kinds = os.environ.get('FAIL_ON', '').split()
        options = [option for kind in kinds for option in ('--fail-on', kind)]
        command = [sys.executable, '-m', 'einshard', 'check', '--base', os.environ['BASE']]
        status = subprocess.call([*command, '--markdown', str(file), *options])
        text = file.read_text(encoding='utf-8') if file.is_file() else ''
    is_written = bool(text) and os.environ.get('COMMENT') == 'true' and write_comment(text)
    summary = os.environ.get('GITHUB_STEP_SUMMARY')
    if text and summary and not is_written:
        with open(summary, 'a', encoding='utf-8') as out:
            out.write(text)
    return status


if __name__ == '__main__':
    sys.exit(main())
