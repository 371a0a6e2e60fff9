"""A page that shows every token's credit, step by step, in one run or several side by side.

  python tools/look.py runs/ppo-tiny-add-s0
  python tools/look.py runs/ppo-tiny-add-s0 runs/grpo-tiny-add-s0 --out both.html
  python tools/look.py runs/ppo-tiny-add-s0 --serve      # follows a run that is still going

The page is one file, RUN/look.html of the first run unless --out says otherwise. It needs no
network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.curves import OF_REWARD_MODELS, PANELS
from plumbing.errors import InputError, first_line
from plumbing.judging import pair_warnings
from plumbing.metrics import warnings_about
from plumbing.runs import write_text

HERE = Path(__file__).resolve().parent
METRICS_MD = HERE.parent / "docs" / "metrics.md"
FILES = ("config.json", "metrics.jsonl", "tokens.jsonl")
# In which panel, counted from 0, a warning is marked; others in the first.
PANEL_OF = {"negative KL": 1, "large KL": 1, "truncated": 3, "ratio": 4}
PANEL_OF |= {"overfitting": 0, "worse than chance": 1, "far scores": 3, "length": 4}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file. Raises InputError.

    A last line that is not complete is left out: the run may be writing it.
    """
    records = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        for number, line in enumerate(lines, 1):
            # What isn't a number in JSON (NaN, Infinity) is unknown, as null is.
            record = json.loads(line, parse_constant=lambda name: None)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError(f"line {number} is no record of a step")
            records.append(record)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: can't be read ({first_line(e)})") from e
    return records


def warnings_of(metrics: list[dict[str, Any]], judge: bool, bf16: bool) -> list[dict[str, Any]]:
    """The warnings that a run has printed, {"step", "name", "text"}: each name where it came first.

    They are computed from the metrics once more. What is null there was not finite or not known.
    """
    history, found = [], {}
    for line in metrics:
        if not judge and "grad_norm" not in line:  # the last evaluation
            continue
        # A NaN for each: it compares as unknown numbers should, and differs from every other.
        history.append({k: float("nan") if v is None else v for k, v in line.items()})
        new = pair_warnings(history) if judge else warnings_about(history, bf16)
        for name, text in new:
            warning = {"step": line["step"], "name": name, "text": text}
            found.setdefault(name, warning | {"panel": PANEL_OF.get(name, 0)})
    return list(found.values())


def curve(metrics: list[dict[str, Any]], name: str) -> list[list] | None:
    """Steps and values of a metric, None where no line knows it."""
    lines = [line for line in metrics if name in line]
    if all(line[name] is None for line in lines):
        return None
    return [[line["step"] for line in lines], [line[name] for line in lines]]


def read_run(folder: Path) -> dict[str, Any]:
    """What the page shows of a run. Raises InputError."""
    if not (folder / "metrics.jsonl").is_file():
        raise InputError(f"{folder}: is not the folder of a run (it has no metrics.jsonl)")
    metrics = read_lines(folder / "metrics.jsonl")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        script, bf16 = config["script"], bool(config.get("bf16"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{folder / 'config.json'}: can't be read ({first_line(e)})") from e
    judge = script == "reward_model"
    path, lines, note = folder / "tokens.jsonl", [], ""
    if path.is_file():
        lines = read_lines(path)
        note = "" if lines else "No tokens are recorded yet."
    elif judge:
        note = "A reward model judges whole texts, so there are no tokens to show."
    else:
        note = "This run has no tokens.jsonl: it was made with --record_tokens false, or is older."
    for number, line in enumerate(lines, 1):
        if line.get("split") not in ("heldout", "train") or not isinstance(line.get("tokens"), list):
            raise InputError(f"{path}: line {number} is no completion")
    curves = []
    for title, names in (OF_REWARD_MODELS if judge else PANELS).items():
        found = [curve(metrics, name) for name in names]
        if not any(found):  # a task without right and wrong answers
            found = [curve(metrics, name.replace("accuracy", "reward")) for name in names]
        curves.append({"title": title, "lines": found})
    try:
        warnings = warnings_of(metrics, judge, bf16)
    except (KeyError, TypeError, ValueError) as e:
        at = folder / "metrics.jsonl"
        raise InputError(f"{at}: is not of this version (no {first_line(e)})") from e
    name = folder.resolve().name
    return {
        "name": name,
        "script": script,
        "note": note,
        "steps": sorted({line["step"] for line in metrics}),
        "curves": curves,
        "warnings": warnings,
        "lines": lines,
    }


def version_of(folders: list[Path]) -> str:
    """What changes whenever a file of the runs does."""
    paths = [folder / name for folder in folders for name in FILES]
    marks = [(p.stat().st_size, p.stat().st_mtime_ns) if p.is_file() else () for p in paths]
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]


def payload(folders: list[Path], live: bool) -> str:
    """What the page shows, as JSON without `<`: nothing in it can end a script element."""
    version = version_of(folders) if live else ""  # before they are read: a change is not missed
    runs = [read_run(folder) for folder in folders]
    if not any(run["steps"] for run in runs) and not live:
        raise InputError(f"{folders[0] / 'metrics.jsonl'}: holds no metrics yet")
    if len({run["name"] for run in runs}) < len(runs):
        for run, folder in zip(runs, folders):
            run["name"] = str(folder)
    # ASCII, for half a surrogate pair has no bytes in UTF-8.
    text = json.dumps({"version": version, "runs": runs}, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def page(data: str, metrics_link: str) -> str:
    """The page, complete in itself."""

    def text(path: str) -> str:
        return (HERE / path).read_text(encoding="utf-8").strip()

    parts = {
        "/*UPLOT.CSS*/": text("vendor/uPlot.min.css"),
        "/*UPLOT.JS*/": text("vendor/uPlot.min.js"),
        "METRICS.MD": metrics_link,
        "/*DATA*/": data,  # the last one: nothing is replaced within it
    }
    html = text("look.html")
    for mark, part in parts.items():
        html = html.replace(mark, part, 1)
    return html


class Handler(BaseHTTPRequestHandler):
    """Serves the page, and what it shows whenever that has changed."""

    def __init__(self, folders: list[Path], *args: Any) -> None:
        self.folders = folders
        super().__init__(*args)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        # Another name for 127.0.0.1 would let any page on the web read the runs.
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            return self.answer(403, "text/plain", "ask for 127.0.0.1 or localhost")
        try:
            if url.path == "/":
                self.answer(200, "text/html", page(payload(self.folders, True), "metrics.md"))
            elif url.path == "/data.json":
                known = parse_qs(url.query).get("since") == [version_of(self.folders)]
                text = "" if known else payload(self.folders, True)
                self.answer(204 if known else 200, "application/json", text)
            elif url.path == "/metrics.md" and METRICS_MD.is_file():
                self.answer(200, "text/plain", METRICS_MD.read_text(encoding="utf-8"))
            else:
                self.answer(404, "text/plain", "not found")
        except (InputError, OSError) as e:  # a run that is being moved, say
            self.answer(503, "text/plain", str(e))

    def answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        try:
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the page was closed meanwhile
            pass

    def log_message(self, *args: Any) -> None:
        pass


def serve(folders: list[Path], port: int) -> None:
    """Serve the page to this machine alone, until Ctrl-C. Raises InputError."""
    payload(folders, True)  # its errors belong here, not in the browser
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, folders))
    except (OSError, OverflowError) as e:
        raise InputError(f"--port {port}: can't be used ({first_line(e)})") from e
    with server:
        print(f"http://127.0.0.1:{server.server_port}/ follows the runs; Ctrl-C ends it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="(look.html in the folder of the first run)")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1 instead")
    parser.add_argument("--port", type=int, default=8000, help="(8000; 0: any that is free)")
    options = parser.parse_args(args)
    if options.serve:
        return serve(options.runs, options.port)
    out = options.out or options.runs[0] / "look.html"
    data = payload(options.runs, False)
    link = os.path.relpath(METRICS_MD, out.resolve().parent) if METRICS_MD.is_file() else ""
    try:
        write_text(out, page(data, Path(link).as_posix() if link else ""))
    except OSError as e:
        raise InputError(f"--out {out}: can't be written ({e.strerror})") from e
    print(out)


if __name__ == "__main__":
    try:
        main()
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
