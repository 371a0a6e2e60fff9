"""Packs what is handed in: python pack.py writes hand_in.zip, and says what is missing."""

import ast
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
    for pattern in ("notebooks/*.ipynb", "figures/*.png", "runs/*/*.json", "runs/*/*.jsonl"):
        paths |= {*ROOT.glob(pattern)}
    return sorted(path for path in paths if not path.name.startswith("tokens"))


def main() -> None:
    for name in FILES:
        try:
            functions = unwritten((ROOT / name).read_text(encoding="utf-8"))
        except SyntaxError as e:
            raise SystemExit(f"error: {name} is no Python: {e}") from None
        if functions:
            print(f"note: {name}: not written yet: {', '.join(functions)}")
    answers = (ROOT / "answers.md").read_text(encoding="utf-8").count("(your answer)")
    print(f"note: answers.md: {answers} answers are empty" if answers else "")
    with zipfile.ZipFile(ROOT / "hand_in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in chosen():
            archive.write(path, path.relative_to(ROOT).as_posix())
    print(f"hand_in.zip has {len(chosen())} files.")


if __name__ == "__main__":
    main()
