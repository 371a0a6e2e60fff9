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


UNNEEDED = """subprocess socket ctypes gc inspect multiprocessing requests urllib http pickle
marshal signal pty importlib checks grade problems child remote sandbox wire""".split()
LIBRARIES = {"torch", "random", "numpy", "np", "math"}  # nothing of theirs has to be replaced
TEXT = re.compile(
    r"sys\._getframe|sys\.settrace|sys\.setprofile|gc\.get_objects|gc\.get_referrers|__import__"
    r"|__reduce__|__torch_function__|as_subclass|__main__\.|sys\.modules|os\._exit|os\.fork"
    r"|os\.system|os\.kill|/proc/|\beval\(|\bexec\(|\bopen\("
)


def signs_in(texts: dict[str, str]) -> list[str]:
    """What a submission's code says that no answer needs and the repository's files don't: a line
    each, for the teacher.
    """
    found = []
    for file, text in texts.items():
        ours = (REPOSITORY / file).read_text("utf-8") if (REPOSITORY / file).exists() else ""
        known = {line.strip() for line in ours.split("\n")}
        lines = text.split("\n")
        signs = {(n, f"has {x}") for n, line in enumerate(lines, 1) for x in TEXT.findall(line)}
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            found.append(f"{file} doesn't parse: its imports have not been looked at")
        else:
            names = {problem.function for problem in PROBLEMS if problem.file == file} - {"main"}
            signs |= {(n, f"has import of {x}") for n, x in _imports(tree, Path(file).stem)}
            signs |= {(n, f"replaces {x}") for n, x in _replaced(tree)}
            signs |= {(n, f"uses {x} before it is written") for n, x in _too_early(tree, names)}
        found += [f"{file}:{n} {x}" for n, x in sorted(signs) if lines[n - 1].strip() not in known]
    return found[:50]


def _imports(tree: ast.Module, itself: str) -> Iterator[tuple[int, str]]:
    """(line, module) of imports that no answer needs."""
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [x.name for x in node.names] if isinstance(node, ast.Import) else []
        for module in (name.split(".")[0] for name in modules):
            if module in UNNEEDED or module == itself:
                yield node.lineno, "itself" if module == itself else module


def _replaced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) where an attribute of a library is set, or setattr is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            whole = ast.unparse(node)
            if whole.split(".")[0] in LIBRARIES:
                yield node.lineno, whole
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield node.lineno, ast.unparse(node)[:60]


def _too_early(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each use of a name, when the file is imported, before the function of that
    name is defined. The grader puts one function of a student into a file of ours: there the name
    could mean our function.
    """
    written = set()
    for node in _run_at_import(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            written.add(node.name)
        elif isinstance(node, ast.Name) and node.id in names - written:
            yield node.lineno, node.id


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated when a file is imported, in order: no body of a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            defaults = [x for x in (*child.args.defaults, *child.args.kw_defaults) if x]
            for part in (*defaults, *getattr(child, "decorator_list", [])):
                yield from (part, *_run_at_import(part))
        else:
            yield from _run_at_import(child)
        yield child


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
