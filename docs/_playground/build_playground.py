"""Sphinx extension: adds the playground to the site, or leaves it out and says why.

The page needs Pyodide, which npm fetches. The modules of einshard that it runs are zipped here,
from the source.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import playground

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / 'einshard'
PYODIDE = 'pyodide@314.0.7'
SHA256 = '66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0'
RUNTIME = (
    'pyodide.mjs',
    'pyodide.asm.mjs',
    'pyodide.asm.wasm',
    'pyodide-lock.json',
    'python_stdlib.zip',
)
FIRST = {'expression': 'batch d -> batch* d2', 'shape': '32 64', 'devices': '8'}
# the modules without numpy and JAX
MODULES = ('_cache.py', '_errors.py', '_text.py', '_working_fixes.py', '_notation/*', '_draw/*')


class Missing(Exception):
    """The playground cannot be built; says why."""


def write_bundle(path):
    """Zips the Python code of the page, with an empty `einshard/__init__.py`."""
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr('einshard/__init__.py', '')
        for pattern in MODULES:
            for module in sorted(PACKAGE.glob(pattern)):
                # `show` reads JAX's shardings
                if module.suffix == '.py' and module.name != 'show.py':
                    bundle.write(module, f'einshard/{module.relative_to(PACKAGE).as_posix()}')
        bundle.write(HERE / 'playground.py', 'playground.py')


def fetch(folder):
    """Returns the archive of Pyodide, which it downloads to `folder` once."""
    archive = folder / f'{PYODIDE.replace("@", "-")}.tgz'
    if not archive.exists():
        npm = shutil.which('npm')
        if npm is None:
            raise Missing('npm is not installed')
        folder.mkdir(parents=True, exist_ok=True)
        options = ('--loglevel=error', '--fetch-retries=1', '--fetch-timeout=60000')
        try:
            subprocess.run(
                [npm, 'pack', PYODIDE, *options],
                cwd=folder,
                check=True,
                capture_output=True,
                timeout=180,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, 'stderr', None) or b'').decode().partition('\n')[0]
            raise Missing(f'npm cannot fetch {PYODIDE} ({said or type(error).__name__})') from error
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        archive.unlink()
        raise Missing(f'{archive.name} has another checksum')
    return archive


def assemble(folder, archive):
    """Writes what the page loads to `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(archive) as files:
        for name in RUNTIME:
            with files.extractfile(f'package/{name}') as file:
                (folder / name).write_bytes(file.read())
    for name in ('page.js', 'page.css', 'worker.js'):
        shutil.copy(HERE / name, folder)
    write_bundle(folder / 'einshard.zip')
    # what the page shows until Python has started
    first = json.dumps({**FIRST, 'result': json.loads(playground.answer(**FIRST))})
    (folder / 'first.js').write_text(f'export default {first}\n', encoding='utf-8')


def add(app):
    """Adds the files of the page to an HTML site; leaves out the page if they are missing."""
    if app.builder.format != 'html':
        return
    cache = HERE.parent / '_build' / 'playground'
    try:
        assemble(cache / 'site' / 'playground', fetch(cache))
        app.config.html_extra_path.append(str(cache / 'site'))
    except Missing as reason:
        print(f'the site has no playground: {reason}')
        app.config.exclude_patterns.append('playground.md')


def drop_links(app, docname, source):
    """Removes the lines that link to a page that is left out."""
    if 'playground.md' in app.config.exclude_patterns:
        lines = source[0].splitlines(keepends=True)
        source[0] = ''.join(
            line for line in lines if '(playground.md)' not in line and line != 'playground\n'
        )


def linking(app, env, added, changed, removed):
    """Lists the page with those lines, to be read again when the playground comes or goes."""
    return ['index'] if 'playground' in added | removed else []


def setup(app):
    app.connect('builder-inited', add)
    app.connect('source-read', drop_links)
    app.connect('env-get-outdated', linking)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
