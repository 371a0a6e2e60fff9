"""A page that shows every token's credit, step by step, in one run or in several side by side.

  python tools/look.py runs/ppo-tiny-add-s0
  python tools/look.py runs/ppo-tiny-add-s0 runs/grpo-tiny-add-s0 --out both.html --open

The page is one file that needs no network: look.html in the folder of the first run, or --out. It
shows the completions of tokens.jsonl, warnings and, where matplotlib is installed, curves.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import math
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.errors import InputError, first_line, run_tool
from plumbing.metrics import warnings_about
from tools import plot
from tools.plot import read_lines

NEEDED = "step prompt score finished num_tokens tokens".split()  # keys of a completion


def warnings_of(metrics: list[dict[str, Any]], bf16: bool) -> list[dict[str, Any]]:
    """The warnings that a run has printed, computed once more: each name where it first came."""
    history, found = [], {}
    for line in metrics:
        if "grad_norm" in line:  # not the last evaluation
            # Unknown is a NaN of its own: no comparison with it holds, and no two are equal.
            history.append({name: math.nan if x is None else x for name, x in line.items()})
            for name, text in warnings_about(history, bf16):
                found.setdefault(name, {"step": line["step"], "text": text})
    return list(found.values())


def read_run(folder: Path) -> dict[str, Any]:
    """What the page shows of a run. Raises InputError."""
    metrics = read_lines(folder / "metrics.jsonl", "step")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        script = config["script"]
        warnings = [] if script == "reward_model" else warnings_of(metrics, config.get("bf16"))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{folder}: is no run of this version ({first_line(e)})") from e
    if script == "reward_model":
        fault = "a reward model judges whole texts, there are no tokens to show"
        raise InputError(f"{folder}: {fault}; tools/plot.py draws its curves")
    lines = read_lines(folder / "tokens.jsonl", *NEEDED)
    if not lines:
        raise InputError(f"{folder / 'tokens.jsonl'}: holds no completions yet")
    return {"name": str(folder), "warnings": warnings, "lines": lines}


def curves_of(folders: list[Path]) -> str | None:
    """The curves of the runs as the address of a picture; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    with tempfile.TemporaryDirectory() as place:
        picture = Path(place) / "curves.png"
        plot.draw(folders, picture)
        return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def page(folders: list[Path]) -> str:
    """The page, complete in itself. Raises InputError."""
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
    parser.add_argument("--out", type=Path, help="(look.html in the folder of the first run)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args(args)
    out, text = options.out or options.runs[0] / "look.html", page(options.runs)
    try:
        out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as e:  # of a name like "."
        raise InputError(f"--out {out}: can't be written ({first_line(e)})") from e
    print(out)
    if options.open:
        webbrowser.open(out.resolve().as_uri())


if __name__ == "__main__":
    run_tool(main)
