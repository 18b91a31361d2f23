"""Settings of the site: `make docs`."""

import importlib.metadata
import re

project = "pyro_nngp"
author = "The pyro_nngp developers"
release = importlib.metadata.version("pyro-nngp")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "tutorials/README*"]
nitpicky = False

# Tutorials are percent scripts, executed as notebooks; SMOKE=1 in the environment runs them at a size of seconds.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_timeout = 3600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_execution_in_temp = True
exclude_patterns += ["conf.py"]

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type", "myst.xref_missing"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True, "undoc-members": False}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
intersphinx_mapping: dict[str, tuple[str, None]] = {}  # links to other projects' pages need the network

html_theme = "pydata_sphinx_theme"
html_title = "pyro_nngp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_context = {"default_mode": "light"}


def escape_shapes(app, what, name, obj, options, lines):
    """Shapes such as (*L, N) in docstrings are no emphasis."""
    lines[:] = [re.sub(r"(?<![\\*`])\*(?=[A-Za-z]+[,) ])", r"\\*", line) for line in lines]


def setup(app):
    """Connect the hooks of this file."""
    app.connect("autodoc-process-docstring", escape_shapes, priority=400)  # before napoleon, which comes at 500
