"""Packs what is handed in: python pack.py writes hand_in.zip, and says what is missing."""

import ast
import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FILES = "FILES".split()  # those that have functions to write
GIVEN = {"labs.py", "lab_parts.py", "experiments.py", "pack.py", "tasks.py"}


def unwritten(source: str) -> list[str]:
    """The functions that still raise NotImplementedError."""
    functions = [x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)]
    return [x.name for x in functions if "raise NotImplementedError" in ast.unparse(x)]


def chosen() -> list[Path]:
    """What is packed: code, answers, notebooks, pictures, and the figures of runs."""
    own = [path for path in ROOT.glob("*.py") if path.name not in GIVEN]  # helpers as well
    paths = {*own, *(ROOT / name for name in [*FILES, "answers.md"])}
    patterns = "version.txt notebooks/*.ipynb figures/**/* runs/*/*.json runs/*/*.jsonl"
    for pattern in patterns.split():
        paths |= {path for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in paths if not path.name.startswith("tokens"))


def text_of(name: str) -> str:
    """The text of a file that is handed in; without it, or in another encoding, an error."""
    try:
        return (ROOT / name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise SystemExit(f"error: {name} must be there, as UTF-8: {e}") from None


def main() -> None:
    for name in FILES:
        try:
            functions = unwritten(text_of(name))
        except SyntaxError as e:
            raise SystemExit(f"error: {name} is no Python: {e}") from None
        if functions:
            print(f"note: {name}: not written yet: {', '.join(functions)}")
    answers, files = text_of("answers.md"), chosen()
    if empty := answers.count("(your answer)"):
        print(f"note: answers.md: {empty} answers are empty")
    for name in re.findall(r"!\[.*?\]\((.+?)\)", answers):
        if ROOT / name not in files:
            print(f"note: answers.md: {name} isn't packed: put it into figures/")
    with zipfile.ZipFile(ROOT / "hand_in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            archive.write(path, path.relative_to(ROOT).as_posix())
    print(f"hand_in.zip has {len(files)} files.")


if __name__ == "__main__":
    main()
