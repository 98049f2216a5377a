"""Sphinx: pages in Markdown whose code is run at every build. `make docs` builds them."""

import os
import re
import shutil
import sys
from pathlib import Path

from sphinx import addnodes

import einshard

sys.path.insert(
    0, str(Path(__file__).parent / '_playground')
)  # for build_playground and build_search

# for the kernels that run the pages, which inherit it: they simulate their devices
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'  # no lines of XLA's log in the pages

project = 'einshard'
author = 'the einshard authors'
copyright = 'the einshard authors'
version = release = einshard.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'build_playground',
    'build_search',
]
exclude_patterns = ['_build', '_playground', 'jupyter_execute', 'conf.py']

# an example is one file: a script, which is its page and its notebook too
nb_custom_formats = {'.py': ['jupytext.reads', {'fmt': 'py:percent'}]}

nb_execution_mode = 'force'  # a page shows what this version does, never what a cache remembers
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # in an empty folder, as whoever downloads a notebook has it
nb_execution_timeout = 120
nb_merge_streams = True
nb_code_prompt_show = 'Show the setup'  # simulated devices, imports and helpers
nb_code_prompt_hide = 'Hide it'

myst_enable_extensions = ['colon_fence']
myst_heading_anchors = 3

default_role = 'code'
highlight_language = 'none'  # a page that means Python says so, or runs it
highlight_options = {'python': {'stripnl': True}}
smartquotes_action = 'D'  # dashes; '...' is notation, and no ellipsis of one character
autodoc_typehints = 'none'  # the signature shows them
autodoc_preserve_defaults = True

html_theme = 'sphinx_book_theme'
html_title = 'einshard'
html_theme_options = {
    'show_toc_level': 2,
    'navbar_persistent': [],
    'footer_content_items': ['copyright'],
}
html_static_path = ['_static']
html_css_files = ['page.css']


def plain_defaults(app, what, name, obj, options, signature, returns):
    """Defaults as they are written, where the objects themselves have other names."""
    if signature is None:
        return None
    if what == 'class' and name.startswith('einshard._'):  # of a result, which users do not make
        return '', None
    shown = {'_NO_DEFAULT': '...', 'mappingproxy({})': '{}', 'MappingProxyType({})': '{}'}
    for text, written in shown.items():
        signature = signature.replace(text, written)
    return signature, returns


def without_private_module(app, domain, objtype, content):
    """Results are classes of private modules, whose names may change."""
    for node in [*content.parent.findall(addnodes.desc_addname)]:
        if node.astext().startswith('einshard._'):
            node.parent.remove(node)


def without_private_names(app, what, name, obj, options, lines):
    """The types of attributes without private modules, and the kinds of findings as strings."""
    for i, line in enumerate(lines):
        if ':type:' in line:
            line = re.sub(r'[~.\w]*Literal\[.*\]', 'str', line)
            lines[i] = re.sub(r'\b(einshard|jax)\._[.\w]*\.', '', line)


def without_docstring_of_type(app, what, name, obj, options, lines):
    """Data has what the page says of it, and not the docstring of its type."""
    if what == 'data':
        lines.clear()


def offer_notebook(app, pagename, templatename, context, doctree):
    """Adds the notebook of a page to the theme's download button.

    The theme does so only for pages with a button that launches them elsewhere.
    """
    folder = Path(app.outdir)
    notebook = folder.parent / 'jupyter_execute' / f'{pagename}.ipynb'
    if doctree and notebook.exists():
        target = folder / '_sources' / f'{pagename}.ipynb'
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(notebook, target)
        context['ipynb_source'] = f'{pagename}.ipynb'


def write_llms(app, exception):
    """Writes llms.txt (https://llmstxt.org): the pages, as Markdown, for language models."""
    if exception is not None or app.builder.format != 'html':
        return
    index = (Path(app.srcdir) / 'index.md').read_text(encoding='utf-8')
    summary = ' '.join(index.partition('# Start\n')[2].split('\n\n')[0].split())
    lines = ['# einshard', '', f'> {summary}']
    for name in ('index', *sorted(app.env.titles.keys() - {'index'})):
        suffix = Path(app.env.doc2path(name)).suffix  # the theme adds no '.txt', as Sphinx would
        title = app.env.titles[name].astext()
        lines += [''] * (name == 'index') + [f'- [{title}](_sources/{name}{suffix})']
    skill = '../einshard/.agents/skills/einshard/SKILL.md'
    shutil.copyfile(Path(app.srcdir) / skill, Path(app.outdir) / 'skill.md')
    lines += ['', '## Optional', '', '- [Skill for coding agents](skill.md)']
    (Path(app.outdir) / 'llms.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')


# It offers the notebooks of the examples, which a second process may not have written yet.
LAST = 'notebooks'


def leave_for_last(app, env, names):
    app.has_last = LAST in names
    if app.has_last:
        names.remove(LAST)


def read_last(app, env):
    if app.has_last:
        app.builder.read_doc(LAST)
    return [LAST] * app.has_last


def setup(app):
    app.connect('env-before-read-docs', leave_for_last)
    app.connect('env-updated', read_last)
    app.connect('build-finished', write_llms)
    app.connect('html-page-context', offer_notebook, priority=400)  # before the theme's buttons
    app.connect('autodoc-process-signature', plain_defaults)
    app.connect('object-description-transform', without_private_module)
    app.connect('autodoc-process-docstring', without_docstring_of_type)
    app.connect('autodoc-process-docstring', without_private_names, priority=600)  # after napoleon
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
