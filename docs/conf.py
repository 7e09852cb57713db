"""The documentation as a site: `make docs`. Its sources are the Markdown files, at the places they have on GitHub."""

import re

import msgspec

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
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_js_files = ["copy.js"]

myst_heading_anchors = 4
default_role = "code"  # in docstrings
maximum_signature_line_length = 100
autodoc_typehints_format = "short"


def _without_fields(app, what, name, obj, options, signature, returns):
    """Fields of a struct stand below it, one a line."""
    return ("", None) if _fields_of(obj) else None


def _with_fields(app, what, name, obj, options, lines):
    """Magnitudes such as |q_d k_d| are no substitutions of reStructuredText."""
    lines[:] = [line.replace("|", "\\|") for line in lines]
    told = [base for base in getattr(obj, "__mro__", ())[1:] if not base.__name__.startswith("_")]
    inherited = {field.name for base in told for field in _fields_of(base)}
    for field in _fields_of(obj):
        if field.name not in inherited:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            said = "" if default is msgspec.NODEFAULT else f" = ``{default!r}``"
            kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            plain = re.sub(r"(?:\w+\.)+(?=\w)", "", kind)
            lines.append(f"* ``{field.name}``{said}: ``{plain}``")
    lines.append("")


def _with_stars(app, context, lines):
    """Globs such as paged_* are neither links nor emphasis."""
    lines[:] = [line.replace("_*", "\\_*").replace("*", "\\*") for line in lines]


def _fields_of(obj):
    is_struct = isinstance(obj, type) and issubclass(obj, msgspec.Struct) and obj is not msgspec.Struct
    return msgspec.structs.fields(obj) if is_struct else ()


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _without_fields)
    app.connect("autodoc-process-docstring", _with_fields)
    for part in ("description", "options", "arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _with_stars)
