"""Makes one site of files that lie all over the repository, without a second copy of any.

README.md is the first page; documents outside docs/ that others link to become pages, other files are copied. Links are
written for the repository, so that they work on a code host, and changed to where things are in the site.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/: the first page, and whatever is linked, from page to page."""
    first = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]  # the second is in the navigation alone
    waiting = [*first, *(Path(config["docs_dir"]) / file.src_uri for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        document = waiting.pop()
        if (uri := site_uri(document)) not in files.src_uris:
            files.append(_file(document, uri, config))
        if document.suffix != ".md":
            continue
        for target in targets(document):
            if target not in seen and target.is_file():
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where things are in the site."""
    document = source(page.file.src_uri)
    fences = [found.span() for found in _FENCE.finditer(markdown)]

    def moved(found: re.Match[str]) -> str:
        path, mark, fragment = found[1].partition("#")
        if not path or re.match(r"[a-z]+:", path) or any(a <= found.start() < b for a, b in fences):
            return found[1]
        start = PurePosixPath(page.file.src_uri).parent
        return os.path.relpath(site_uri((document.parent / path).resolve()), start) + mark + fragment

    return _LINK.sub(moved, markdown)


def targets(document: Path) -> list[Path]:
    """Files of the repository that a document links to."""
    links = _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))
    paths = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    return [(document.parent / path).resolve() for path in paths if path]


def site_uri(path: Path) -> str:
    """Where a file of the repository is in the site: docs/ is its root, and the README its first page."""
    inside = path.relative_to(ROOT).as_posix()
    return "index.md" if inside == "README.md" else inside.removeprefix("docs/")


def source(uri: str) -> Path:
    """The file of the repository that a page is made of."""
    if uri == "index.md":
        return ROOT / "README.md"
    inside = ROOT / "docs" / uri
    return inside if inside.is_file() else ROOT / uri


def _file(path: Path, uri: str, config: Any) -> File:
    return File.generated(config, uri, abs_src_path=str(path))
