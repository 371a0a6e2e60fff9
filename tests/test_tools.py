"""tools/plot.py: curves of several runs."""

import json

import numpy as np
from matplotlib.figure import Figure

from tools import plot


def test_seeds_become_one_line_of_means_in_a_band_and_another_run_a_line_of_its_own(
    tmp_path, monkeypatch
):
    folders, axes, save = [], [], Figure.savefig
    for name, seed in (("ppo", 0), ("ppo", 1), ("ppo", 11), ("grpo", 0)):
        folders.append(tmp_path / f"{name}-tiny-add-s{seed}")
        folders[-1].mkdir()
        lines = [{"step": step, "objective/scores": float(step + seed)} for step in range(4)]
        lines[0] |= {"eval/reward": 1.0, "eval/accuracy": None}
        (folders[-1] / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def spy(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    plot.main([*map(str, folders), "--output", str(tmp_path / "page.svg")])
    assert (tmp_path / "page.svg").stat().st_size > 1000
    (mean, alone), [band] = axes[0].lines, axes[0].collections
    assert np.allclose(mean.get_ydata(), [4, 5, 6, 7]) and list(mean.get_xdata()) == [0, 1, 2, 3]
    assert list(alone.get_ydata()) == [0, 1, 2, 3]
    assert [line.get_label() for line in axes[0].lines] == ["ppo-tiny-add", "grpo-tiny-add"]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0, 14)
    assert axes[5].lines[0].get_ydata() == [1], "the reward, where nothing is right or wrong"
