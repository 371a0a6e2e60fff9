"""The page that curves.py draws."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from plumbing import curves

REPOSITORY = Path(__file__).parent.parent
NAMES = ["objective/scores", "objective/kl", "objective/entropy", "length/mean"]


def write_run(folder: Path, seed: int, accuracy: bool = True) -> Path:
    folder = folder / f"ppo-tiny-add-s{seed}"
    folder.mkdir()
    lines = []
    for step in range(4):
        line = {"step": step, "policy/clipfrac_avg": None} | dict.fromkeys(NAMES, step + seed)
        if step % 2 == 0:
            line |= {"eval/accuracy": 0.5 if accuracy else None, "eval/reward": 1.0}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def axes_of(folders: list[Path], output: Path, monkeypatch) -> list:
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    curves.draw(folders, output)
    return figures[0].axes


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_seeds_become_one_line_of_means_in_a_band(ending, tmp_path, monkeypatch):
    folders = [write_run(tmp_path, seed) for seed in (0, 1, 11)]
    axes = axes_of(folders, tmp_path / f"page.{ending}", monkeypatch)
    line = axes[0].lines[0]
    assert len(axes) == 6 and len(axes[0].lines) == 1
    assert np.allclose(line.get_ydata(), [4, 5, 6, 7]) and list(line.get_xdata()) == [0, 1, 2, 3]
    band = axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0, 14)
    assert line.get_label() == "ppo-tiny-add (3 seeds)"
    assert "bands: lowest to highest" in axes[0].figure.get_suptitle()
    assert not axes[4].lines, "unknown values are no curve"
    assert list(axes[5].lines[0].get_xdata()) == [0, 2]
    assert (tmp_path / f"page.{ending}").stat().st_size < 300_000
    if ending == "png":
        assert Image.open(tmp_path / "page.png").size == (1200, 620)


def test_without_right_and_wrong_answers_the_held_out_reward_is_drawn(tmp_path, monkeypatch):
    axes = axes_of([write_run(tmp_path, 0, accuracy=False)], tmp_path / "page.png", monkeypatch)
    assert list(axes[5].lines[0].get_ydata()) == [1.0, 1.0]


def test_a_folder_without_a_run_ends_in_one_line_and_code_2(tmp_path):
    command = [sys.executable, "tools/plot.py", str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1 and not ended.stdout


def test_a_line_that_the_run_is_just_writing_is_left_out(tmp_path):
    run = write_run(tmp_path, 0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "objective/sc')
    assert curves.read_metrics(run)["objective/scores"] == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_script_has_its_colour_whatever_else_is_on_the_page():
    assert curves.line_colours(["rloo-tiny-add", "ppo-tiny-add"]) == ["C2", "C0"]
    several = curves.line_colours(["ppo-tiny-add", "ppo-gpt2-sentiment", "mine", "grpo-tiny-add"])
    assert several[0] == "C0" and several[3] == "C1" and len(set(several)) == 4
