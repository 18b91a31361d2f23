"""Settings of the site: `make docs`."""

import hashlib
import importlib.metadata
import importlib.resources
import inspect
import os
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from PIL import Image
from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from pictures import save_card  # noqa: E402

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
exclude_patterns = ["_build", "conf.py", "pictures.py"]

# Tutorials are percent scripts, executed as notebooks; SMOKE=1 in the environment runs them at a size of seconds.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
# What was executed is kept until a tutorial, or any source of the package, changes.
sources = hashlib.sha256()
for path in sorted(path for top in ("pyro_nngp", "models", "inference") for path in (ROOT / top).rglob("*.[pch]*")):
    if path.suffix in {".py", ".cpp", ".h"}:
        sources.update(path.read_bytes())
size = "smoke" if "SMOKE" in os.environ else "full"
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "docs/_build" / f"executed-{size}-{sources.hexdigest()[:12]}")
os.environ.pop("MPLBACKEND", None)  # a notebook shows its figures
nb_output_stderr = "remove"  # progress bars
nb_execution_timeout = 3600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_code_prompt_show = "Show imports and settings"
nb_code_prompt_hide = "Hide imports and settings"
nb_execution_in_temp = True

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type", "myst-nb.lexer"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
foreign = (  # bases whose members other projects document
    "PyroModule",
    "Module",
    "TorchDistribution",
    "TorchDistributionMixin",
    "Distribution",
    "TraceMeanField_ELBO",
    "MCMCKernel",
    "MCMC",
    "Optimizer",
    "NamedTuple",
    "tuple",
)
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "inherited-members": ",".join(foreign),
    "show-inheritance": True,
}
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
mathjax_path = "mathjax.js"  # of the site itself, which needs no network; see copy_mathjax
# Links to other projects' pages, whose inventories are fetched: INTERSPHINX=1 make docs, with a network.
inventories = {
    "python": ("https://docs.python.org/3/", None),
    "numpy": ("https://numpy.org/doc/stable/", None),
    "torch": ("https://docs.pytorch.org/docs/stable/", None),
    "pyro": ("https://docs.pyro.ai/en/stable/", None),
    "arviz": ("https://python.arviz.org/en/stable/", None),
}
intersphinx_mapping = inventories if "INTERSPHINX" in os.environ else {}

html_theme = "pydata_sphinx_theme"
html_title = "pyro_nngp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "secondary_sidebar_items": {"[!t]**": ["page-toc"], "index": []},  # code of tutorials needs the width
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_context = {"default_mode": "light"}


def escape_signs(app, what, name, obj, options, lines):
    """Shapes such as (*L, N) in docstrings are no emphasis, attributes such as gp_ no links.

    Attributes that share a line are one name: Sphinx takes the words before its first space for a type, and links them.
    """
    inside = False
    for i, line in enumerate(lines):
        inside = line == "Attributes:" or (inside and line.startswith(" "))
        if inside and re.match(r" {4}\w+(, \w+)+: ", line):
            names, text = line.split(": ", 1)
            lines[i] = f"{names.replace(', ', ',' + chr(0x200B))}: {text}"
    lines[:] = [re.sub(r"(?<![\\*`])\*(?=[A-Za-z]+[,) ])", r"\\*", line) for line in lines]
    if name.startswith("pyro_nngp.adapters.sklearn."):
        lines[:] = [re.sub(r"(?<=[a-z])_(?=[,:])", r"\\_", line) for line in lines]


def arguments_of(obj):
    """Entries of the section "Args" of a docstring, {names: lines}."""
    section = re.search(r"\nArgs:\n(.*?)(?=\n\S|\Z)", inspect.getdoc(obj) or "", re.DOTALL)
    entries, lines = {}, []
    for line in section[1].splitlines() if section else ():
        if re.match(r" {4}[*\w]", line):
            lines = entries.setdefault(line.partition(":")[0].strip(), [])
        lines.append(line)
    return entries


def inherit_arguments(app, what, name, obj, options, lines):
    """Arguments of a constructor that a base class describes are described here too."""
    if what != "class" or not inspect.isfunction(obj.__init__):
        return
    taken, own = list(inspect.signature(obj.__init__).parameters)[1:], vars(obj).get("__doc__")
    known = {each for names in arguments_of(obj) for each in names.split(", ")} if own else set()
    added = []
    for base in obj.__mro__[1:]:
        if not base.__module__.startswith("pyro_nngp") or not vars(base).get("__doc__"):
            continue
        for line, entry in arguments_of(base).items():
            names = set(line.split(", "))
            if names <= set(taken) and not names <= known:
                known |= names
                added += entry
    if added and "Args:" in lines:
        end = next((i for i in range(lines.index("Args:") + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
        lines[end:end] = added
    elif added:
        lines += ["", "Args:", *added]


def shorten_signature(app, what, name, obj, options, signature, returns):
    """The signature of ``__init__`` for a class that has ``__new__``; NumPy's and this package's aliases by name."""
    if what == "class" and signature and signature.startswith("(*args"):
        own = inspect.signature(obj.__init__)
        own = own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)
        signature = stringify_signature(own, unqualified_typehints=True)
    pattern = r"(?:~?[\w.]*Tensor \| float \| int|float \| [~\w.]*Tensor) \| [~\w.]*PyroParam \| [~\w.]*PyroSample"
    signature = re.sub(pattern, "Hyperparameter", signature or "") or None
    found = re.sub(r"[~\w.]*_?Buffer \| .*?_NestedSequence\[complex \| bytes \| str\]", "ArrayLike", signature or "")
    return found or signature, returns


def link_pages(app, name, source):
    """Links to tutorials and results, which are links in the file system: MyST looks for what those point at."""
    within = name.startswith(("tutorials/", "results/"))
    folders, root = ("", "") if within else ("(?:tutorials|results)/", "/")
    pattern = rf"\[([^\]`]+)\]\((?:\.\./)?({folders}\w+)\.(?:py|md)\)"
    source[0] = re.sub(pattern, rf"{{doc}}`\1 <{root}\2>`", source[0])


def open_with_result(app, name, source):
    """Files of results begin with their command; pages begin with a title, a sentence and the first table.

    Title and sentence are those of the page on benchmarks. What stands above the first table comes after it.
    """
    if not name.startswith("results/"):
        return
    contents = Path(app.srcdir, "benchmarks.md").read_text(encoding="utf-8")
    titles = {page: title for title, page in re.findall(r"^(.+) <(results/\w+)>$", contents, re.MULTILINE)}
    page = re.escape(name)
    sentence = re.search(rf"^\| \[[^]]*\]\({page}\.md\) \| (.*) \|$", contents, re.MULTILINE)[1]
    text = re.sub(r"\A# .*\n+", "", source[0]) + "\n"
    first = re.match(r"(.*?\n)(\|.*?\|\n)(?!\|)", text, re.DOTALL)
    above, table, rest = first[1], first[2], text[first.end() :]
    source[0] = f"# {titles[name]}\n\n{sentence}\n\n{table}\n## How it was measured\n\n{above}\n{rest}"


def copy_thumbnails(app, exception):
    """The last figure of each tutorial (the first of the demonstration, a map) is kept, and a panel of it for its card
    in the gallery; without execution the committed ones stay."""
    folder, cards = Path(app.outdir, "_static/thumbnails"), Path(app.outdir, "_static/cards")
    for each in (folder, cards):
        each.mkdir(parents=True, exist_ok=True)
    for name in sorted(name for name in app.env.found_docs if name.startswith("tutorials/")) if not exception else ():
        images = [node["uri"] for node in app.env.get_doctree(name).findall(nodes.image)]
        if images:
            chosen = images[0] if name == "tutorials/demo" else images[-1]
            picture = Image.open(Path(app.srcdir, chosen)).convert("RGB")
            save_card(picture, Path(name).name, cards)
            picture.thumbnail((960, 640))
            picture.quantize(64).save(folder / f"{Path(name).name}.png", optimize=True)


def describe_figures(app, doctree):
    """Figures that a page draws have the title of their section for a screen reader."""
    for image in doctree.findall(nodes.image):
        alt, section = image.get("alt", ""), image.parent
        while section is not None and not isinstance(section, nodes.section):
            section = section.parent
        if section is not None and (not alt or alt.endswith(".png")):
            image["alt"] = f"Figure: {section.next_node(nodes.title).astext()}"


def copy_mathjax(app):
    """One file, with its fonts as outlines; pages without formulas do not load it."""
    folder = Path(app.outdir, "_static")
    folder.mkdir(parents=True, exist_ok=True)
    source = importlib.resources.files("mathjax").joinpath("static/mathjax/es5/tex-svg.js")
    with importlib.resources.as_file(source) as path:
        shutil.copyfile(path, folder / mathjax_path)


def setup(app):
    """Connect the hooks of this file."""
    app.connect("autodoc-process-docstring", escape_signs, priority=400)  # before napoleon, which comes at 500
    app.connect("autodoc-process-docstring", inherit_arguments, priority=300)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("source-read", open_with_result)
    app.connect("source-read", link_pages)
    app.connect("builder-inited", copy_mathjax)
    app.connect("doctree-read", describe_figures)
    app.connect("build-finished", copy_thumbnails)
