"""Where the files of a submission lie: in its folder, one folder deeper, or in a zip file."""

from __future__ import annotations

import ast
import contextlib
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from problems import PROBLEMS, REPOSITORY

FILES = sorted({problem.file for problem in PROBLEMS})
SOURCE_SIZE = 2**20  # bytes of a file of code; the longest of ours has 50,000
UNPACKED_SIZE = 200 * 2**20  # bytes of all that a zip file holds
ENTRIES = 10_000


class Refused(Exception):
    """A submission that can't be graded, or not safely: one line that says why."""


def folder_of(submission: Path) -> Path:
    """The folder that has the files of the problems: `submission`, or the one in it that has any.
    Raises Refused where several have.
    """
    if _has_files(submission):
        return submission
    inner = [f for f in sorted(submission.iterdir()) if f.is_dir() and _has_files(f)]
    inner = [f for f in inner if not f.name.startswith((".", "__"))]  # __MACOSX, __pycache__
    if len(inner) > 1:
        names = ", ".join(f.name for f in inner)
        raise Refused(f"{submission.name} has the files in several folders ({names}): keep one")
    return inner[0] if inner else submission


def _has_files(folder: Path) -> bool:
    return any((folder / file).exists() for file in FILES)


def sources_of(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """{file: its text} of the files of the problems, and {file: why it can't be read}."""
    texts, faults = {}, {}
    for file in FILES:
        try:
            texts[file] = source_of(folder / file)
        except OSError as e:
            faults[file] = f"{file} can't be read ({e.strerror})"
        except Refused as e:
            faults[file] = f"{file} {e}"
    return texts, faults


def source_of(path: Path) -> str:
    """The text of a file of code, whatever editor wrote it. Raises OSError, Refused."""
    size = path.stat().st_size
    if not path.is_file():
        raise Refused("is no file")  # a pipe would be read for ever
    if size > SOURCE_SIZE:
        raise Refused("is larger than 1 MB")
    data = path.read_bytes()
    # What PowerShell's > writes is UTF-16.
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = data.decode(encoding, "replace").replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\0", "")


MODULES = 100  # of the student's own, at most


def modules_of(folder: Path) -> dict[str, str]:
    """{file: its text} of the modules at the top that the repository hasn't got: none of them
    takes the place of a library's, because they are found last.
    """
    found = {}
    for path in sorted(folder.glob("*.py"))[:MODULES]:
        given = REPOSITORY / path.name, REPOSITORY / "course" / path.name
        if not any(other.exists() for other in given):
            with contextlib.suppress(OSError, Refused):
                found[path.name] = source_of(path)
    return found


SIGNS = {
    name: re.compile(pattern)
    for name, pattern in {
        "import of {}": r"^\s*(?:import\s+(?:\w+\s*,\s*)*|from\s+)(subprocess|socket|ctypes|gc"
        r"|inspect|multiprocessing|requests|urllib|http|pickle|marshal|signal|pty|importlib"
        r"|checks|grade|problems|child|remote|sandbox|wire)\b",
        "{}": r"(sys\._getframe|sys\.settrace|sys\.setprofile|gc\.get_objects|gc\.get_referrers"
        r"|__import__|__reduce__|__torch_function__|as_subclass|__main__\.|sys\.modules|os\._exit"
        r"|os\.fork|os\.system|os\.kill|/proc/|\beval\(|\bexec\(|\bopen\("
        r"|\b(?:torch|random|numpy|np|math)(?:\.\w+)+\s*=(?!=))",
    }.items()
}


def signs_in(texts: dict[str, str]) -> list[str]:
    """What a submission's code says that no answer needs and the repository's files don't: a line
    each, for the teacher.
    """
    found = []
    for file, text in texts.items():
        ours = (REPOSITORY / file).read_text("utf-8") if (REPOSITORY / file).exists() else ""
        known = {line.strip() for line in ours.split("\n")}
        itself = re.compile(rf"^\s*(?:import|from)\s+{re.escape(Path(file).stem)}\b")
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() in known:
                continue
            for name, pattern in SIGNS.items():
                for match in pattern.finditer(line):
                    found.append(f"{file}:{number} has {name.format(match[1])}")
            if itself.search(line):
                found.append(f"{file}:{number} has import of itself")
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            names = {problem.function for problem in PROBLEMS if problem.file == file} - {"main"}
            found += [
                f"{file}:{number} uses {name} before it is written"
                for number, name in _too_early(ast.parse(text), names)
            ]
    return found[:50]


def _too_early(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) where a name is used at the top level before the function that it will be: where
    files are put together, something else may stand behind it there.
    """
    written = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            written.add(node.name)
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in names - written:
                yield part.lineno, part.id


def unpack(path: Path, folder: Path) -> None:
    """A zip file into a folder. Raises Refused for one that is broken, too large, or leads out."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                _refuse_entry(info)
            if len(archive.infolist()) > ENTRIES:
                raise Refused(f"{path.name} has more than {ENTRIES:,} entries")
            # No more than this is written: zipfile reads no entry past the size that it states.
            if sum(info.file_size for info in archive.infolist()) > UNPACKED_SIZE:
                raise Refused(f"{path.name} unpacks to more than {UNPACKED_SIZE // 2**20} MB")
            archive.extractall(folder)
    # An encrypted one is a RuntimeError.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as e:
        raise Refused(f"{path.name} can't be unpacked ({e})") from e


def _refuse_entry(info: zipfile.ZipInfo) -> None:
    name = PurePosixPath(info.filename.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or ":" in "".join(name.parts[:1]):
        raise Refused(f"the entry {info.filename} leads out of its folder")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise Refused(f"the entry {info.filename} is a link")
    # Of the others a few bytes may become gigabytes in a single read.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refused(f"the entry {info.filename} isn't compressed by deflate")
