"""Builds one site from files all over the repository, without second copies.

README.md is the first page. Markdown files outside docs/ that are linked become pages; other linked files are copied.
Links are written for the repository, so that they work on a code host, and rewritten for the site.
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
    """Add the first page and all linked files outside docs/, recursively."""
    first = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]  # the second is only in the navigation
    queue = [*first, *(Path(config["docs_dir"]) / file.src_uri for file in files.documentation_pages())]
    seen = set(queue)
    while queue:
        document = queue.pop()
        if (uri := site_uri(document)) not in files.src_uris:
            files.append(_file(document, uri, config))
        if document.suffix != ".md":
            continue
        for target in targets(document):
            if target not in seen and target.is_file():
                seen.add(target)
                queue.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site."""
    document = source(page.file.src_uri)
    fences = [match.span() for match in _FENCE.finditer(markdown)]

    def moved(match: re.Match[str]) -> str:
        path, mark, fragment = match[1].partition("#")
        if not path or re.match(r"[a-z]+:", path) or any(a <= match.start() < b for a, b in fences):
            return match[1]
        start = PurePosixPath(page.file.src_uri).parent
        return os.path.relpath(site_uri((document.parent / path).resolve()), start) + mark + fragment

    return _LINK.sub(moved, markdown)


def targets(document: Path) -> list[Path]:
    """The repository files that a document links to."""
    links = _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))
    paths = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    return [(document.parent / path).resolve() for path in paths if path]


def site_uri(path: Path) -> str:
    """The path of a repository file in the site: docs/ is the root, and the README the first page."""
    inside = path.relative_to(ROOT).as_posix()
    return "index.md" if inside == "README.md" else inside.removeprefix("docs/")


def source(uri: str) -> Path:
    """The repository file behind a page."""
    if uri == "index.md":
        return ROOT / "README.md"
    inside = ROOT / "docs" / uri
    return inside if inside.is_file() else ROOT / uri


def _file(path: Path, uri: str, config: Any) -> File:
    return File.generated(config, uri, abs_src_path=str(path))
