"""The curves of one or several runs on one page.

  python tools/plot.py runs/grpo-tiny-add-s0
  python tools/plot.py runs/*-tiny-add-s? --output curves.svg      # bands over the seeds of each

Runs whose folders differ in -s<seed> alone are one line, their mean, in a band from the lowest to
the highest.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.curves import draw
from plumbing.errors import run_tool


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="(curves.png)")
    options = parser.parse_args(args)
    draw(options.runs, options.output)
    noun = "run" if len(options.runs) == 1 else "runs"
    print(f"{options.output} shows {len(options.runs)} {noun}.")


if __name__ == "__main__":
    run_tool(main)
