"""A page that shows every token's credit, step by step, in one run or in several side by side.

  python tools/look.py runs/ppo-tiny-add-s0
  python tools/look.py runs/ppo-tiny-add-s0 runs/grpo-tiny-add-s0 --out both.html
  python tools/look.py runs/ppo-tiny-add-s0 --serve      # follows a run that is still going

The page is one file that needs no network: look.html in the folder of the first run, or --out.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.errors import InputError, first_line, run_tool
from plumbing.metrics import pair_warnings, warnings_about
from tools.plot import OF_REWARD_MODELS, PANELS

HERE = Path(__file__).resolve().parent
METRICS_MD = HERE.parent / "docs" / "metrics.md"
# The panel, counted from 0, at which a warning is marked; the others at the first.
PANEL_OF = {"negative KL": 1, "large KL": 1, "truncated": 3, "ratio": 4}
PANEL_OF |= {"worse than chance": 1, "far scores": 3, "length": 4}


def read_lines(path: Path, *needed: str) -> list[dict[str, Any]]:
    """The records of a .jsonl file, each with the keys that are needed. Raises InputError.

    A last line that is not complete is left out: the run may be writing it.
    """
    records = []
    try:
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            # What isn't a number in JSON (NaN, Infinity) becomes unknown, as null is.
            record = json.loads(line, parse_constant=lambda name: None)
            if not isinstance(record, dict) or not {"step", *needed} <= set(record):
                raise ValueError(f"line {number} lacks something")
            records.append(record)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: can't be read ({first_line(e)})") from e
    return records


def warnings_of(metrics: list[dict[str, Any]], judge: bool, bf16: bool) -> list[dict[str, Any]]:
    """The warnings that a run has printed, computed once more: each name where it first came."""
    history, found = [], {}
    for line in metrics:
        if judge or "grad_norm" in line:  # not the last evaluation
            # Unknown is a NaN of its own: no comparison with it holds, and no two are equal.
            history.append({k: float("nan") if v is None else v for k, v in line.items()})
            new = pair_warnings(history) if judge else warnings_about(history, bf16)
            for name, text in new:
                where = {"step": line["step"], "panel": PANEL_OF.get(name, 0)}
                found.setdefault(name, where | {"text": text})
    return list(found.values())


def read_run(folder: Path) -> dict[str, Any]:
    """What the page shows of a run. Raises InputError."""
    if not (folder / "metrics.jsonl").is_file():
        raise InputError(f"{folder}: is not the folder of a run, it has no metrics.jsonl")
    metrics = read_lines(folder / "metrics.jsonl")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        judge = config["script"] == "reward_model"
        warnings = warnings_of(metrics, judge, bool(config.get("bf16")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{folder}: is no run of this version ({first_line(e)})") from e

    def curve(name: str) -> list[tuple[int, float | None]] | None:
        points = [(line["step"], line[name]) for line in metrics if name in line]
        return points if any(y is not None for _, y in points) else None

    curves = []
    for title, names in (OF_REWARD_MODELS if judge else PANELS).items():
        if not any(map(curve, names)):  # a task without right and wrong answers
            names = [name.replace("accuracy", "reward") for name in names]
        curves.append({"title": title, "lines": [curve(name) for name in names]})
    path, lines = folder / "tokens.jsonl", []
    if path.is_file():
        lines = read_lines(path, *"split prompt prompt_index completion_index tokens score".split())
        note = "" if lines else "No tokens are recorded yet."
    elif judge:
        note = "A reward model judges whole texts: there are no tokens to show."
    else:
        note = "There is no tokens.jsonl: the run was made with --record_tokens false, or is old."
    steps = [line["step"] for line in metrics]
    run = {"name": folder.resolve().name, "note": note, "steps": steps, "curves": curves}
    return run | {"warnings": warnings, "lines": lines}


def version_of(folders: list[Path]) -> str:
    """What changes whenever a file of the runs does."""
    paths = [folder / f"{name}.jsonl" for folder in folders for name in ("metrics", "tokens")]
    stats = [path.stat() for path in paths if path.is_file()]
    return ".".join(f"{s.st_ino}-{s.st_size}-{s.st_mtime_ns}" for s in stats)


def data_of(folders: list[Path], live: bool) -> str:
    """What the page shows, as JSON without `<`: nothing in it can end a script element."""
    version = version_of(folders) if live else ""  # before they are read: no change is missed
    runs = [read_run(folder) for folder in folders]
    if not (live or any(run["steps"] for run in runs)):
        raise InputError(f"{folders[0] / 'metrics.jsonl'}: holds no metrics yet")
    if len({run["name"] for run in runs}) < len(runs):
        for run, folder in zip(runs, folders):
            run["name"] = str(folder)
    # In ASCII: half a surrogate pair has no bytes in UTF-8.
    text = json.dumps({"version": version, "runs": runs}, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def page(data: str, metrics_link: str) -> str:
    """The page, complete in itself."""
    parts = {
        "/*UPLOT.CSS*/": (HERE / "vendor" / "uPlot.min.css").read_text(encoding="utf-8"),
        "/*UPLOT.JS*/": (HERE / "vendor" / "uPlot.min.js").read_text(encoding="utf-8"),
        "METRICS.MD": metrics_link,
        "/*DATA*/": data,  # the last: nothing is replaced within it
    }
    html = (HERE / "look.html").read_text(encoding="utf-8")
    for mark, part in parts.items():
        html = html.replace(mark, part, 1)
    return html


class Handler(BaseHTTPRequestHandler):
    """Serves the page, and what it shows once that has changed."""

    def do_GET(self) -> None:
        url, kind, code, folders = urlsplit(self.path), "plain", 200, self.server.folders
        try:
            # By another name for 127.0.0.1 any page of the web could read the runs.
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                code, text = 403, "ask for 127.0.0.1 or localhost"
            elif url.path == "/":
                kind, text = "html", page(data_of(folders, True), "metrics.md")
            elif url.path == "/data.json":
                known = url.query == version_of(folders)
                code, text = (204, "") if known else (200, data_of(folders, True))
            elif url.path == "/metrics.md":
                text = METRICS_MD.read_text(encoding="utf-8")
            else:
                code, text = 404, "not found"
        except (InputError, OSError) as e:  # the run is being moved, say
            code, text = 503, str(e)
        self.send_response(code)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Print no line for each request."""


def serve(folders: list[Path], port: int) -> None:
    """Serve the page to this machine alone, until Ctrl-C. Raises InputError."""
    data_of(folders, True)  # its errors belong here, not in the browser
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as e:
        raise InputError(f"--port {port}: can't be used ({first_line(e)})") from e
    server.folders = folders
    server.handle_error = lambda *args: None  # the page was closed meanwhile
    print(f"http://127.0.0.1:{server.server_port} follows the runs; Ctrl-C ends it", flush=True)
    server.serve_forever()


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="(look.html in the folder of the first run)")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1 instead")
    parser.add_argument("--port", type=int, default=8000, help="(8000; 0: one that is free)")
    options = parser.parse_args(args)
    if options.serve:
        return serve(options.runs, options.port)
    out, data = options.out or options.runs[0] / "look.html", data_of(options.runs, False)
    link = Path(os.path.relpath(METRICS_MD, out.resolve().parent)).as_posix()
    try:
        new = out.with_name(f"{out.name}.new")  # a page that is open is never half written
        new.write_text(page(data, quote(link)) + "\n", encoding="utf-8")
        new.replace(out)
    except (OSError, ValueError) as e:  # of a name like "."
        raise InputError(f"--out {out}: can't be written ({first_line(e)})") from e
    print(out)


if __name__ == "__main__":
    run_tool(main)
