"""The curves of one or several runs on one page.

python tools/plot.py runs/grpo-tiny-add-s0
python tools/plot.py runs/*-tiny-add-s? --output curves.svg      # seeds of a job have one colour
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.errors import blame
from plumbing.metrics import draw_curves
from plumbing.run import run_main


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="(curves.png)")
    options = parser.parse_args(args)
    with blame(f"--output {options.output}"):
        draw_curves(options.runs, options.output)
    print(options.output)


if __name__ == "__main__":
    run_main(main)
