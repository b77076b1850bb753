# SPDX-License-Identifier: Apache-2.0
"""mkdocs hooks: pages that live outside of docs/ join the site, and links to them lead to those pages.

In the repository every page links to files as they lie there, which is what a reader on a code host needs. Here these links
are turned: to a page of the site where there is one, else to plain text, as the site has no copy of the sources.
"""
from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import tables  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "model_zoo/llama/README.md": "llama.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    here = next((source for source, name in OUTSIDE.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")
    base = posixpath.dirname(page.file.src_uri)

    def turned(found):
        picture, text, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        name = OUTSIDE.get(path) or path.removeprefix("docs/")
        if path not in OUTSIDE and (not path.startswith("docs/") or (ROOT / path).is_dir()):
            if not (ROOT / path).exists():
                return found[0]  # mkdocs warns of it
            return f"`{path}`" if text.strip("`") != path else text
        return f"{picture}[{text}]({posixpath.relpath(name, base or '.')}{anchor or ''})"

    if name := tables.PAGES.get(page.file.src_uri):
        note = tables.NOTE.format(name=name)
        assert note.strip() in markdown, f"{page.file.src_uri} has no place for its tables"
        markdown = markdown.replace(note.strip(), tables.rendered(name))
    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(turned, part) for i, part in enumerate(parts))


def on_post_page(output, page, config):
    """A wide table scrolls in a box of its own; Material does that by script, this also without one."""
    return re.sub(r"<table>(.*?)</table>", r'<div class="wide"><table>\1</table></div>', output, flags=re.DOTALL)
