"""What mkdocs does for this site beyond its settings in mkdocs.yml.

README.md becomes the first page. What the pages link to outside of docs/ becomes a page too: code
with its lines, a folder as a list. Formulas become MathML, so no script has to draw them.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
CODE = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".txt": "text"}
# A page of code: not searched, and as wide as it gets.
UNLISTED = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"


def place(path: str) -> str:
    """Where the file or folder at this path of the repository is in the site's sources."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if (REPOSITORY / path).is_dir():
        return f"source/{path}/files.md"
    return f"source/{path}.md" if Path(path).suffix in CODE else f"source/{path}"


def relinked(markdown: str, path: str, found: set[str]) -> str:
    """The page at `path` of the repository with links for the site; adds to `found` what it needs.

    A line (#L12) is a query until after_markdown: mkdocs knows the anchors of headings alone.
    """

    def write(match: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not (REPOSITORY / target).exists() or target == ".":
            return match[0]  # mkdocs warns
        if (REPOSITORY / target / "README.md").is_file():
            target += "/README.md"
        found.add(target)
        anchor = re.sub(r"^#L(\d+)$", r"?line=\1", match[2] or "")
        return posixpath.relpath(place(target), posixpath.dirname(place(path)) or ".") + anchor

    return LINK.sub(write, markdown)


def page_of_code(path: str) -> str:
    """The page of a file: its text, with numbered lines."""
    text = (REPOSITORY / path).read_text(encoding="utf-8").rstrip("\n")
    fence = f'````{CODE[Path(path).suffix]} linenums="1"'
    return f"{UNLISTED}# {path}\n\n{fence}\n{text}\n````\n"


def page_of_folder(path: str, found: set[str]) -> str:
    """The page of a folder: its files, linked where they are pages, and what each says it is."""
    lines = []
    for file in sorted((REPOSITORY / path).iterdir()):
        name = f"{path}/{file.name}"
        if file.suffix == ".py" and file.stat().st_size > 0:
            said = (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]
            link = f"[{file.name}]({posixpath.basename(place(name))})"
            lines.append(f"- {link if name in found else f'`{file.name}`'}: {said}")
    return f"{UNLISTED}# {path}/\n\n" + "\n".join(lines) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and whatever pages link to, and what those link to."""
    found = {"README.md"} | {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    pages, known = {}, set()
    while new := found - known:
        known |= new
        for path in (p for p in new if p.endswith(".md")):
            pages[path] = relinked((REPOSITORY / path).read_text(encoding="utf-8"), path, found)
    for path in sorted(known):
        if (REPOSITORY / path).is_dir():
            pages.setdefault(path, page_of_folder(path, known))
        elif Path(path).suffix in CODE:
            pages[path] = page_of_code(path)
        elif path not in pages and not path.startswith("docs/"):
            source = str(REPOSITORY / path)
            files.append(File.generated(config, place(path), abs_src_path=source))
    for path, content in pages.items():
        if place(path) in files.src_uris:
            files.remove(files.src_uris[place(path)])
        files.append(File.generated(config, place(path), content=content))
    return files


def on_page_content(text: str, **_: object) -> str:
    """Turn formulas into MathML, and queries for a line into anchors of lines; mark short code."""

    def formula(match: re.Match) -> str:
        alone = match[1] == "div"
        drawn = convert(html.unescape(match[2]), display="block" if alone else "inline")
        return f'<div class="formula">{drawn}</div>' if alone else drawn

    text = re.sub(r"<code>([\w./-][\w./ -]{0,31})</code>", r'<code class="name">\1</code>', text)
    text = re.sub(r'\?line=(\d+)"', r'#__codelineno-0-\1"', text)
    return FORMULA.sub(formula, text)
