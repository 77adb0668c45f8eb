"""The site that `make docs` builds from the pages of this folder.

The pages are plain Markdown, which also reads well where the repository is looked at. So the navigation is in none of
them: each heading of `index.md` is a part of it, with the pages that are linked below.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click import Option
from docutils import nodes
from sphinx.addnodes import index

from zb_hdf5.option_groups import GroupedCommand
from zb_hdf5.version import __version__

sys.path.insert(0, str(Path(__file__).parent))
import for_agents
from fitted_code import fitted
from for_agents import BLOB, navigation

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "zb_hdf5"
author = "The zb_hdf5 maintainers"
copyright = author
release = __version__
version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_click",
]
exclude_patterns = ["_build", "agents"]
html_extra_path = ["agents"]  # llms.txt at the root of the site, where agents look for it
templates_path = ["_templates"]
highlight_language = "bash"  # of blocks that name no language: lines to type, and what they print

myst_enable_extensions = ["attrs_inline"]  # classes of pictures
myst_heading_anchors = 4
smartquotes = False  # they make one dash of the two of an option

python_maximum_signature_line_length = 88  # of a longer one each argument has a line
toc_object_entries_show_parents = "hide"
autodoc_typehints = "none"  # numpydoc has the types
numpydoc_show_class_members = False
default_role = "code"  # docstrings set code as Markdown does

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy_code.js"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_title = f"zb_hdf5 {release}"
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"**": ["pages.html"]}
html_theme_options = {
    "pygments_dark_style": "github-dark-colorblind",  # its comments are quieter than the code
    "logo": {"text": "zb_hdf5"},
    "github_url": "https://github.com/zb-hdf5/zb_hdf5",
    "navbar_center": [],  # the navigation is at the side: it has more pages than a line has room for
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 3,
    "footer_start": ["copyright"],
    "footer_end": [],
}

#: A comment below a heading: words that people search for, and that this part of the page answers.
SEARCHED = re.compile(r"<!-- search: (.+) -->")
#: A picture, beside which its twin for dark pages lies.
PHOTOGRAPH = re.compile(r"^!\[(.+)\]\((.+)\.png\)$", re.MULTILINE)
BOTH = r"![\1](\2.png){.only-light} ![\1](\2-dark.png){.only-dark}"
HIDDEN = "\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fit code and pictures to the page, add the navigation to the index, and lead links to files of the project."""
    root = "../" * (docname.count("/") + 1)  # of the project, from the folder of the page
    text = re.sub(rf"\]\({re.escape(root)}([^)]+)\)", rf"]({BLOB}\1)", source[0])
    if docname == "index":
        parts = navigation(text)
        text += "".join(HIDDEN.format(caption=name, pages="\n".join(pages)) for name, pages in parts.items())
    source[0] = fitted(PHOTOGRAPH.sub(BOTH, text))


def lead_searches(app: Sphinx, doctree: nodes.document) -> None:
    """Put the words of a comment into the index of the search, which leads to the part of the page that has it."""
    for comment in list(doctree.findall(nodes.raw)):
        if found := SEARCHED.match(comment.astext()):
            section = comment.parent
            anchor = "" if isinstance(section.parent, nodes.document) else section["ids"][0]  # of the page: its top
            entries = [("single", words, anchor, "main", None) for words in found[1].split(", ")]
            comment.replace_self(index(entries=entries))


def show_options(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Put the options of a command below the headings of its help, and keep the bars of `<|endoftext|>`.

    reStructuredText would substitute what is between two bars.
    """
    text = "\n".join(line.replace("|", r"\|") for line in lines)
    blocks = re.split(r"^(?=\.\. option::)", text, flags=re.MULTILINE)[1:]
    command = context.command
    options = [each for each in command.params if isinstance(each, Option) and not each.hidden]
    if not isinstance(command, GroupedCommand) or len(blocks) != len(options):
        lines[:] = text.split("\n")
        return
    groups: dict[str, str] = dict.fromkeys(command.headings, "")
    for option, block in zip(options, blocks, strict=True):
        heading = getattr(option, "group", command.last)
        groups[heading] = groups.get(heading, "") + block
    groups[command.last] = groups.pop(command.last, "")
    shown = [f".. rubric:: {heading}\n\n{found}\n" for heading, found in groups.items() if found]
    lines[:] = "\n".join(shown).split("\n")


def setup(app: Sphinx) -> None:
    for_agents.main()
    app.connect("source-read", prepare)
    app.connect("doctree-read", lead_searches)
    app.connect("sphinx-click-process-options", show_options)
