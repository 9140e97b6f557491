"""Links that leave docs/ work in the site as they do in the repository: what they name becomes a page of the site.

A page may link to any file of the repository. Where MkDocs would find nothing, these hooks of `mkdocs.yml` add a page:
Markdown as it is, code as a listing, a folder as the list of its files. README.md becomes the first page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")  # of pictures too, and of links around them
CODE = re.compile(r"^(`{3,}).*?^\1$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".cff": "yaml"}


def page_of(path: str) -> str:
    """The page of the site for a file or folder, by its path in the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return page_of(f"{path}/README.md") if (ROOT / path / "README.md").exists() else f"repository/{path}/index.md"
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def path_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    if page == "index.md":
        return "README.md"
    return page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"


def targets(text: str, path: str) -> list[str]:
    """The files and folders of the repository to which the text of a file links."""
    prose = CODE.sub("", text)
    found = (posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2])) for match in LINK.finditer(prose))
    return [target for target in found if (ROOT / target).exists()]


def relinked(text: str, path: str) -> str:
    """The text of a file with its links to files of the repository as links between pages of the site."""
    here = posixpath.dirname(page_of(path)) or "."

    def change(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not (ROOT / target).exists():
            return match[0]
        return f"{match[1]}{posixpath.relpath(page_of(target), here)}{match[3] or ''})"

    pieces, end = [], 0
    for code in CODE.finditer(text):
        pieces += [LINK.sub(change, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(change, text[end:])])


def content_of(path: str) -> str:
    """The Markdown of a page for a file or folder that isn't in docs/."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.suffix in (".py", ".md"))
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    if file.suffix == ".md":
        return file.read_text()
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of files outside of docs/, and of the files that these link to."""
    waiting = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
    for page in files.documentation_pages():
        waiting += targets(Path(page.abs_src_path).read_text(), path_of(page.src_uri))
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        page = page_of(path)
        if page in seen or path.startswith("docs/"):
            continue
        seen.add(page)
        content = content_of(path_of(page) if page.endswith("README.md") else path)
        files.append(File.generated(config, page, content=content))
        waiting += targets(content, path_of(page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links of a page that leave docs/, or lead from a file outside into it."""
    return relinked(markdown, path_of(page.file.src_uri))
