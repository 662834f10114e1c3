"""Hooks of the documentation site: pages made from the code, and links out of `docs/` that also work on GitHub.

Pages under `reference/` are made at build time from the command line and the settings' schema. A link from a page to a
file outside `docs/`, such as `../examples/trainer.py`, leads to a page that shows the file. Neither needs torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from docs_reference import PAGES

ROOT = Path(__file__).parent.parent
ROOT_NAMES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
ROOT_PAGES = {name: f"project/{name.lower()}" for name in ROOT_NAMES}
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#|/)([^)#\s]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jsonl": "json", ".toml": "toml"}
LONGEST = 40_000
"""Characters of a file that its page shows."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, the pages of the root folder and one page for each linked file outside `docs/`."""
    from mkdocs.structure.files import File

    sources = {page.src_uri: f"docs/{page.src_uri}" for page in files.documentation_pages()}
    texts = {uri: Path(config["docs_dir"], uri).read_text(encoding="utf-8") for uri in sources}
    for name, uri in ROOT_PAGES.items():
        sources[uri], texts[uri] = name, (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=rewritten(texts[uri], name, uri)))
    for uri, page in PAGES.items():
        files.append(File.generated(config, uri, content=page()))
    linked = {found for uri, text in texts.items() for found in outside(text, sources[uri])}
    for path in sorted(linked):
        files.append(File.generated(config, file_page(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links out of `docs/` to the pages that show the files."""
    uri = page.file.src_uri
    return markdown if page.file.generated_by else rewritten(markdown, f"docs/{uri}", uri)


def targets(text: str, source: str) -> Iterator[str]:
    """The relative links of a page, as paths from the root folder."""
    for part in FENCE.split(text)[::2]:
        for match in LINK.finditer(part):
            yield normpath(str(PurePosixPath(source).parent / match[2]))


def outside(text: str, source: str) -> set[str]:
    """The files and folders outside `docs/` that a page links to, except the root folder's own pages."""
    found = {path for path in targets(text, source) if not path.startswith("docs/") and path not in ROOT_PAGES}
    return {path for path in found if (ROOT / path).exists()}


def file_page(path: str) -> str:
    """The page that shows a file or lists a folder."""
    return f"files/{path}.md"


def place(path: str) -> str | None:
    """The page for a path from the root folder; None for what does not exist, which mkdocs then reports."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    return file_page(path) if (ROOT / path).exists() else None


def rewritten(text: str, source: str, uri: str) -> str:
    """The page's text with every relative link as the site needs it; code blocks stay as they are."""

    def link(match: re.Match[str]) -> str:
        to = place(normpath(str(PurePosixPath(source).parent / match[2])))
        if to is None:
            return match[0]
        return f"{match[1]}{relpath(to, str(PurePosixPath(uri).parent))}{match[3] or ''}{match[4]}"

    return "".join(part if part.lstrip().startswith("```") else LINK.sub(link, part) for part in FENCE.split(text))


def shown(path: str) -> str:
    """A page with the file's text, or with the names in a folder."""
    here = ROOT / path
    if here.is_dir():
        names = sorted(found.name for found in here.iterdir() if not found.name.startswith((".", "__")))
        return f"# `{path}/`\n\n" + "".join(f"- `{name}`\n" for name in names[:100])
    text = here.read_text(encoding="utf-8")
    if here.suffix == ".ipynb":
        return rewritten(notebook(path, text), path, file_page(path))
    cut = "" if len(text) <= LONGEST else f"The first {LONGEST:,} of {len(text):,} characters.\n\n"
    return f"# `{path}`\n\n{cut}````{LANGUAGES.get(here.suffix, 'text')}\n{text[:LONGEST].rstrip()}\n````\n"


def notebook(path: str, text: str) -> str:
    """A notebook's cells as Markdown, without outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    shown = [source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells]
    return "\n\n".join([shown[0], f"The notebook is `{path}`.", *shown[1:]]) + "\n"
