"""A page that shows every token's credit, step by step, in one run or in several side by side.

  python tools/look.py runs/ppo-tiny-add-s0
  python tools/look.py runs/ppo-tiny-add-s0 runs/grpo-tiny-add-s0 --output both.html
  python tools/look.py runs/*-tiny-add-s? --output curves.svg    # seeds of a job have one colour

The page is one file that needs no network: look.html in the folder of the first run, or --output.
It shows the completions of tokens.jsonl, warnings and, where matplotlib is installed, curves. With
the name of a picture as --output it is the curves.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.curves import draw_curves, read_lines
from plumbing.errors import InputError, blame


def read_run(folder: Path) -> dict[str, Any]:
    """Read what the page shows of a run. Raises InputError."""
    lines = read_lines(folder / "tokens.jsonl")
    if not lines:
        fault = "holds no completions, or none yet (a reward model's run never does)"
        raise InputError(f"{folder / 'tokens.jsonl'}: {fault}")
    with blame(str(folder / "config.json")):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # Which completions are a group, and Dr. GRPO's divisor.
        sizes = {key: config[key] for key in ("num_generations", "max_new_tokens")}
    warnings = read_lines(folder / "warnings.jsonl")
    return {"name": str(folder), "warnings": warnings, "lines": lines} | sizes


def curves_of(folders: list[Path]) -> str | None:
    """Draw the curves of the runs as the address of a picture; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    draw_curves(folders, picture := io.BytesIO())
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()


def page(folders: list[Path]) -> str:
    """Make the page, complete in itself. Raises InputError."""
    # In ASCII: half a surrogate pair has no bytes in UTF-8.
    shown = {"runs": [read_run(folder) for folder in folders], "curves": curves_of(folders)}
    data = json.dumps(shown, separators=(",", ":"))
    html = Path(__file__).with_name("look.html").read_text(encoding="utf-8")
    # Without `<` nothing that a model wrote can end the script element that holds it.
    return html.replace("/*DATA*/", data.replace("<", "\\u003c"), 1)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, help="(look.html in the folder of the first run)")
    options = parser.parse_args(args)
    output = options.output or options.runs[0] / "look.html"
    with blame(f"--output {output}"):  # no matplotlib, or no kind of picture that it knows
        new = output.with_name(f"new-{output.name}")  # not through a link that stands there
        if output.suffix == ".html":
            new.write_text(page(options.runs), encoding="utf-8")
        else:
            draw_curves(options.runs, new)
        new.replace(output)
    print(f"{output}: open this in a browser" if output.suffix == ".html" else output)


if __name__ == "__main__":
    try:  # plumbing/run.py, which would tell it, takes many seconds to load torch
        main()
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from e
