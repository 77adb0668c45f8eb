"""The files for coding agents: `llms.txt`, a list of all pages, and a skill, the shortest way to use the package.

Both are made of the pages, whenever the site is built or this file is run, and lie at the root of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent
AGENTS: Final = DOCS / "agents"
#: The place of the project's files that are not pages.
BLOB: Final = "https://github.com/zb-hdf5/zb_hdf5/blob/main/"
#: The sections of the README that a skill has.
SECTIONS: Final = ("Ten lines", "Quick start: convert", "Quick start: train and resume", "Quick start: from text")
#: Page -> the first cells of its table that a skill has.
TABLES: Final = {"commands": "| command | does |", "exit_codes": "| exit code | meaning |"}
WHEN: Final = (
    "Use it for code or commands that convert, check, load or resume token data for training, by zb or zb_hdf5."
)


def navigation(text: str) -> dict[str, list[str]]:
    """Return the pages that each heading of the index page has below it, in their order, each page once."""
    parts: dict[str, list[str]] = {}
    met: set[str] = set()
    for heading, below in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        pages = [page for page in re.findall(r"\]\(([\w/]+)\.md\)", below) if page not in met]
        met.update(pages)
        if pages:
            parts[heading] = list(dict.fromkeys(pages))
    return parts


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def readme() -> str:
    """Return the README with the targets of its links in their places."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    targets = dict(re.findall(r"^\[(.+)\]: (\S+)$", text, re.MULTILINE))
    return re.sub(r"\[([^\]\n]+)\](?![(:])", lambda link: with_target(link, targets), text)


def with_target(link: re.Match[str], targets: dict[str, str]) -> str:
    target = targets.get(link[1])
    return f"{link[0]}({target})" if target else link[0]


def purpose(text: str) -> str:
    """Return the first sentence of a page, without its links."""
    sentence = re.split(r"(?<=\.)\s", text.split("\n\n", 2)[1])[0]
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(sentence.split()))


def facts() -> str:
    """Return the first paragraph of the README."""
    return readme().split("\n\n")[1]


def row(name: str) -> str:
    text = page(name)
    return f"- [{text.splitlines()[0].removeprefix('# ')}]({BLOB}docs/{name}.md): {purpose(text)}"


def llms() -> str:
    """Return a list of all pages, in the form of llmstxt.org."""
    parts = ["# zb_hdf5", "> " + facts().replace("\n", "\n> ")]
    for heading, names in navigation(page("index")).items():
        parts += [f"## {heading}", "\n".join(map(row, names))]
    return "\n\n".join(parts) + "\n"


def section(heading: str) -> str:
    [found] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## )", readme(), re.DOTALL | re.MULTILINE)
    return f"## {heading}\n{found}".rstrip()


def table(name: str, head: str) -> str:
    [found] = re.findall(rf"^{re.escape(head)}.*?(?=\n\n)", page(name), re.DOTALL | re.MULTILINE)
    return f"## {page(name).splitlines()[0].removeprefix('# ')}\n\n{found}"


def questions() -> str:
    """Return the questions that people ask, with links to their answers."""
    headings = re.findall(r"^### (.*)", page("questions"), re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    links = [f"- [{each}]({BLOB}docs/questions.md#{at})" for each, at in zip(headings, anchors, strict=True)]
    return "\n".join(["## Questions", "", *links])


def skill() -> str:
    """Return the skill: the first lines to type, all commands and exit codes, and the way to the pages."""
    [first] = re.findall(r"^.*?\.(?=\s)", facts(), re.MULTILINE)[:1]
    install = readme().split("\n\n")[2]
    parts = [
        f"---\nname: zb-hdf5\ndescription: {first} {WHEN}\n---",
        f"# zb_hdf5\n\n{facts()}\n\n{install}",
        *map(section, SECTIONS),
        *(table(name, head) for name, head in TABLES.items()),
        questions(),
        "## Pages\n\n" + "\n".join(row(name) for names in navigation(page("index")).values() for name in names),
    ]
    return "\n\n".join(parts) + "\n"


def texts() -> dict[str, str]:
    """Return the text of each file, by its name below `agents/`."""
    return {"llms.txt": llms(), "skills/zb-hdf5/SKILL.md": skill()}


def main() -> None:
    for name, text in texts().items():
        path = AGENTS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
