"""Sphinx extension: a search that finds pages with any of the words, and ranks titles first.

Sphinx finds only pages with every word, and a title only if it contains the query as it is typed,
so somebody who asks in a sentence finds nothing.
"""

from pathlib import Path

# what Sphinx's searchtools.js has, and what replaces it
PATCHES = (
    (
        """      if (
        wordList.length !== searchTerms.size
        && wordList.length !== filteredTermCount
      )
        continue;
""",
        '',
    ),
    (
        """      const score = Math.max(...wordList.map((w) => scoreMap.get(file).get(w)));
""",
        """      // 100 for each word: pages with more of the words come first
      const scores = wordList.map((w) => scoreMap.get(file).get(w));
      const score = scores.reduce((sum, one) => sum + one, 100 * scores.length);
""",
    ),
    (
        """      if (
        title.toLowerCase().trim().includes(queryLower)
        && queryLower.length >= title.length / 2
      ) {
        for (const [file, id] of foundTitles) {
          const score = Math.round(
            (Scorer.title * queryLower.length) / title.length,
          );
""",
        """      const stemmer = new Stemmer();
      const words = splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word));
      const shared = [...searchTerms].filter((term) =>
        words.some((word) => word === term || (term.length > 2 && word.startsWith(term))),
      ).length;
      if (shared) {
        for (const [file, id] of foundTitles) {
          // before pages that have the same words in their text
          const score = Math.round(shared * 120 + (100 * shared) / words.length);
""",
    ),
)


def patched(text):
    for before, after in PATCHES:
        if text.count(before) != 1:
            raise ValueError(
                'searchtools.js of this version of Sphinx does not have this text once, so the '
                f'search of the site needs another patch:\n{before}'
            )
        text = text.replace(before, after)
    return text


def patch(app, exception):
    path = Path(app.outdir, '_static', 'searchtools.js')
    if exception is None and app.builder.format == 'html':
        import sphinx

        source = Path(sphinx.__file__).parent / 'themes' / 'basic' / 'static' / 'searchtools.js'
        path.write_text(patched(source.read_text(encoding='utf-8')), encoding='utf-8')


def setup(app):
    app.connect('build-finished', patch)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
