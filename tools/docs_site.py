"""Prepares the pages of the documentation site: ``python tools/docs_site.py``. ``make docs`` has Zensical build them.

Copies what is below ``docs/``, and some pages of the repository's root, to ``build/docs``. Links between pages follow
those that have moved, and show a page's title in the navigation in place of its file name. A link to a file that is no
page, such as an example, becomes the file's path, because the project has no public address yet. Each row of a table
of options becomes a section, so that it has an anchor and the search finds it by its name. An image that does not exist
ends the build.

``python tools/docs_site.py --search site/search.json`` takes the attributes of classes out of the index of the search:
the entries of their classes name them, and their titles would come before the pages about the options of that name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASE.md": "release.md",
    "SECURITY.md": "security.md",
}
"""Pages of the repository's root, and their names on the site."""

_FENCED = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_IN_LIST = re.compile(r"(?<=\n\n)(?: {2,3}\S.*\n(?:(?: {2,}.*)?\n)*)+")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_OPTIONS = re.compile(r"^\| option \| meaning \| default \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", re.MULTILINE)
_OPTION = re.compile(r"\| (`\w+`) \| (.*) \| (.*) \|\n")
_ATTRIBUTE = "attribute</code></small>"


def site_files(root: Path) -> dict[Path, Path]:
    """Returns the path on the site of every file of the repository ``root`` that belongs to it."""
    below = {path: path.relative_to(root / "docs") for path in sorted((root / "docs").rglob("*")) if path.is_file()}
    return below | {root / name: Path(target) for name, target in FROM_ROOT.items()}


def titles(nav: Any, title: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path on the site and the title of every page of the navigation ``nav``, as in ``zensical.toml``."""
    if isinstance(nav, str):
        yield nav, title
    elif isinstance(nav, dict):
        for name, below in nav.items():
            yield from titles(below, name)
    else:
        for entry in nav:
            yield from titles(entry, title)


def with_links(text: str, page: Path, files: Mapping[Path, Path], names: Mapping[str, str], root: Path) -> str:
    """Returns the text of ``page`` with links that hold on the site.

    ``files`` is the result of ``site_files``, ``names`` the titles of pages by their paths on the site. Raises
    SystemExit if an image is missing.
    """

    def link(found: re.Match[str]) -> str:
        is_image, label, (path, hash_sign, anchor) = found[1], found[2], found[3].partition("#")
        target = Path(os.path.normpath(page.parent / path))
        file = os.path.relpath(target, root)
        if is_image:
            if target not in files:
                raise SystemExit(f"{os.path.relpath(page, root)}: there is no image {file} below docs/")
            return f"![{label}]({os.path.relpath(files[target], files[page].parent)})"
        if target not in files:
            return f"`{file}`" if label.strip("`") in file else f"{label} (`{file}`)"
        if file.endswith(label) and label.endswith(".md"):
            label = names.get(str(files[target]), label)
        return f"[{label}]({os.path.relpath(files[target], files[page].parent)}{hash_sign}{anchor})"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def with_blocks_in_lists(text: str) -> str:
    """Returns ``text`` with blocks in lists indented by four spaces, which Python-Markdown needs and others do not."""

    def indented(found: re.Match[str]) -> str:
        block = found[0].rstrip()
        more = " " * (4 - len(block) + len(block.lstrip()))
        return re.sub(r"^(?=.)", more, block, flags=re.MULTILINE) + "\n\n"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _IN_LIST.sub(indented, part) for part in parts)


def with_sections_of_options(text: str) -> str:
    """Returns ``text`` with a section per option in place of each table of options."""

    def sections(table: re.Match[str]) -> str:
        rows = _OPTION.findall(table[1])
        assert len(rows) == table[1].count("\n"), "a row of a table of options has no name, meaning and default"
        return "\n".join(f"#### {name}\n\n{meaning}. Default: {default}.\n" for name, meaning, default in rows)

    return _OPTIONS.sub(sections, text)


def without_attributes(index: str) -> str:
    """Returns the index of the search without entries for the attributes of classes."""
    content = json.loads(index)
    content["items"] = [
        item for item in content["items"] if not (item["location"].startswith("api/") and _ATTRIBUTE in item["title"])
    ]
    return json.dumps(content)


def prepare(root: Path, target: Path) -> None:
    """Writes the pages of the repository ``root`` to the folder ``target``, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    files = site_files(root)
    names = dict(titles(tomllib.loads((root / "zensical.toml").read_text())["project"]["nav"]))
    for path, name in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = with_links(path.read_text(), path, files, names, root)
            (target / name).write_text(with_blocks_in_lists(with_sections_of_options(text)))
        else:
            shutil.copy(path, target / name)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--search"]:
        index = Path(sys.argv[2])
        index.write_text(without_attributes(index.read_text()))
        sys.exit()
    prepare(ROOT, ROOT / "build" / "docs")
