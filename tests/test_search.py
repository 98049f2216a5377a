"""The search of the built site finds pages and sections by the words of symptoms."""

import functools
import http.server
import os
import re
import shutil
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest
from browser import Browser

FOLDER = Path(__file__).parents[1] / 'docs' / '_playground'
if not FOLDER.exists():
    pytest.skip('no checkout', allow_module_level=True)
sys.path.insert(0, str(FOLDER))
import build_search  # noqa: E402

# what somebody types, and a part of the address of the answer
QUESTIONS = [
    ('compiles again at the second call', 'faq.html#why-does-my-function-compile-again'),
    ('out of memory before the first step', 'faq.html#out-of-memory-before-the-first-step'),
    ('all-gather in every layer', 'faq.html#why-is-there-an-all-gather-in-every-layer'),
    ('nnx.jit', 'faq.html#use-with-nnx-jit-and-eqx-filter-jit'),
    ('two meshes', 'faq.html#device-order'),
    ('profile', 'profiling.html'),
    ('pipeline', 'recipes/pipeline.html'),
    ('offload the optimizer', 'recipes/states_on_host.html'),
    ('device order', 'faq.html#device-order'),
    ('GSPMDSharding', 'faq.html#what-is-a-gspmdsharding'),
    ('no GPU', 'gpus.html'),
]


@pytest.fixture(scope='module')
def search(tmp_path_factory):
    site = os.environ.get('SITE') or pytest.skip('SITE= names no built site')
    names = ['chromium', 'chromium-browser', 'google-chrome', 'chrome']
    binary = next(filter(None, map(shutil.which, names)), None)
    if not binary:
        (pytest.fail if os.environ.get('CI') else pytest.skip)('Chromium is not installed')

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(binary, tmp_path_factory.mktemp('profile'))
        yield functools.partial(results, browser, f'http://127.0.0.1:{server.server_port}')
        browser.close()
        server.shutdown()


FOUND = """new Promise((resolve) => {
  const look = () => {
    // Sphinx says how many pages it found when it has listed all of them
    if (!document.querySelector('.search-summary')?.textContent) return setTimeout(look, 20)
    resolve([...document.querySelectorAll('ul.search > li > a')].map((link) => link.href))
  }
  look()
})"""


def results(browser, url, query):
    browser.call('Page.navigate', url='about:blank')
    browser.call('Page.navigate', url=f'{url}/search.html?q={urllib.parse.quote(query)}')
    links = browser.run(FOUND)
    return [re.sub(r'\?[^#]*', '', link.removeprefix(f'{url}/')) for link in links]


@pytest.mark.parametrize(('query', 'answer'), QUESTIONS)
def test_the_answer_is_among_the_first_three(search, query, answer):
    first = search(query)[:3]
    assert any(link.startswith(answer) for link in first), first


def test_pages_with_some_of_the_words_are_found(search):
    assert 'faq.html' in str(search('zzz involuntary yyy rematerialization'))
    assert not search('zzzyyy')


def test_a_version_of_sphinx_with_another_search_fails_the_build():
    with pytest.raises(ValueError, match='needs another patch'):
        build_search.patched('const Search = {}')


def test_llms_txt_lists_all_pages_as_markdown():
    site = Path(os.environ.get('SITE') or pytest.skip('SITE= names no built site'))
    listed = re.findall(r'^- \[.+\]\((.+)\)$', (site / 'llms.txt').read_text('utf-8'), re.MULTILINE)
    assert all((site / name).exists() for name in listed)
    pages = (path for path in site.glob('_sources/**/*') if path.suffix in ('.md', '.py'))
    sources = {page.relative_to(site).as_posix() for page in pages}
    assert sources == set(listed) - {'skill.md'}
