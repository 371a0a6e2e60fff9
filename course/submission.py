"""What a student has handed in: the files that count, and the function that is graded in ours.

Nothing else of a submission reaches the grader: files of the assignment that have functions to
write, and modules beside them that these may import.
"""

import ast
import codecs
import importlib.util
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from problems import FILES, PROBLEMS, PROGRAM, REPOSITORY, SHARED, NotFound, Problem, commit

# Python and pytest would read these by themselves.
SPECIAL = {"conftest", "small", "sitecustomize", "usercustomize"}
# An honest submission hardly needs these words.
TELLING = re.compile(
    r"\b(?:(?:judge|conftest|importlib|runpy|allclose|_?pytest|rmtree|sys\.modules)\b|(?:exec|open)\()"
)
MOST_BYTES, MOST_NAMES = 1_000_000, 500  # of a file, or a zip file in another; in a zip file


def read_submission(path: Path) -> dict[str, str]:
    """{file: text} of a folder or a zip file; they may lie up to three folders deeper, or in a zip
    file there, as Moodle packs them. Raises NotFound.
    """
    try:
        if not path.is_dir() and path.suffix.lower() != ".zip":
            raise NotFound("no folder, and no zip file" if path.exists() else "isn't there")
        tops = [*tops_of(path)]
        if not tops:
            raise NotFound(f"no file of the assignment is in it, as {SHARED[0]}")
        if len(tops) > 1:
            raise NotFound(f"{len(tops)} of its folders have files of the assignment: keep one")
        names = {x.name for x in tops[0].iterdir() if is_helper(x.name)} | {*FILES, "version.txt"}
        files = {name: tops[0] / name for name in sorted(names) if (tops[0] / name).is_file()}
        return {name: text_of(bytes_of(x)) for name, x in files.items()}
    except Exception as e:  # broken archives raise many kinds
        raise NotFound(f"{path.name}: {e}") from None


def tops_of(place: Path | zipfile.Path, depth: int = 3) -> Iterator[Path | zipfile.Path]:
    """The folders, this one or some below it, that have files of the assignment. Links lead to no
    folder of a hand-in.
    """
    if isinstance(place, Path) and place.is_symlink():
        return
    if place.name.lower().endswith(".zip") and place.is_file():
        archive = zipfile.ZipFile(place if isinstance(place, Path) else io.BytesIO(bytes_of(place)))
        if len(archive.namelist()) > MOST_NAMES:
            raise NotFound(f"{place.name} has more than {MOST_NAMES} files: pack with pack.py")
        place = zipfile.Path(archive)
    if any((place / file).is_file() for file in FILES):
        yield place
    elif depth > 0 and place.is_dir():
        for inner in place.iterdir():
            if inner.name != "__MACOSX" and not inner.name.startswith("."):
                yield from tops_of(inner, depth - 1)


def bytes_of(place: Path | zipfile.Path) -> bytes:
    """Read a file that is handed in. Raises NotFound for a link, which may lead to another's file,
    and above MOST_BYTES, which a zip file of a few kilobytes may unpack to.
    """
    if isinstance(place, Path) and place.is_symlink():
        raise NotFound(f"{place.name} is a link: hand in the file itself")
    with place.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise NotFound(f"{place.name} has more than {MOST_BYTES:,} bytes: pack with pack.py")
    return data


def is_helper(name: str) -> bool:
    """Whether a file is a module of the student's own. It has no name that Python, pytest or a
    library goes by: it would take their place.
    """
    stem = name.removesuffix(".py")
    if stem == name or not stem.isidentifier() or stem in SPECIAL:
        return False
    return importlib.util.find_spec(stem) is None


def text_of(data: bytes) -> str:
    """The text of a file, as Windows' editors save it too."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def remarks_on(texts: dict[str, str]) -> list[str]:
    """What the teacher should know of a submission besides its points."""
    found, theirs = [], texts.get("version.txt", "").strip()
    if theirs and commit() and theirs != commit():
        found.append(f"made from commit {theirs}, graded at {commit()}: check that one out")
    for file, text in texts.items():
        if words := {*TELLING.findall(text)}:
            found.append(f"{file} says {', '.join(sorted(words))}: read it")
    return found


def transplanted(texts: dict[str, str], problem: Problem) -> dict[str, str] | str:
    """{file: text} of what the submission changes in the repository, or why it can't be graded.

    Of the problem's file all comes along but the functions of other problems, which are ours; so
    do files that we don't have. A script runs with all that was handed in.
    """
    for file in [problem.file] if problem.function else [problem.file, *SHARED]:
        if file not in texts:
            return f"{file} isn't in the submission"
    found = {file: text for file, text in texts.items() if file not in PROGRAM}
    if not problem.function:
        return found | {file: text for file, text in texts.items() if file in FILES}
    others = {other.function for other in PROBLEMS} - {problem.function}
    ours = ast.parse((REPOSITORY / problem.file).read_text(encoding="utf-8")).body
    try:
        theirs = ast.parse(texts[problem.file], problem.file).body
        if problem.function not in map(name_of, theirs):
            return f"{problem.function} is not in {problem.file}"
        # Ours first, for what they lack. The call of main and __future__ may stand there only once.
        ours = [x for x in ours if name_of(x) != problem.function and not isinstance(x, ast.If)]
        theirs = [x for x in theirs if name_of(x) not in {*others, "__future__"}]
        return found | {problem.file: "\n".join(map(ast.unparse, [*ours, *theirs]))}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:  # a sum of 3,000 terms
        return f"{problem.file} doesn't parse: {str(e) or type(e).__name__}"


def name_of(node: ast.stmt) -> str:
    """The name of a function, of a class, or of the module that names are imported from."""
    return getattr(node, "name", "") or getattr(node, "module", "")
