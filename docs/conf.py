"""The documentation as a site: `make docs`. Its sources are the Markdown files, at the places they have on GitHub."""

import attnfuzz

project = "attnfuzz"
author = "The attnfuzz authors"
version = release = attnfuzz.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "regressions/README.md"]
exclude_patterns = [".*", "build", "tests"]
html_theme = "furo"
html_title = f"attnfuzz {version}"
html_show_copyright = False
html_extra_path = ["site"]  # the first page, which leads to docs/index.html

myst_heading_anchors = 4
default_role = "code"  # in docstrings
maximum_signature_line_length = 100


def _without_substitutions(app, what, name, obj, options, lines):  # type: ignore[no-untyped-def]
    """Magnitudes such as |q_d k_d| are no substitutions of reStructuredText."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app):  # type: ignore[no-untyped-def]
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _without_substitutions)
