"""tools/plot.py: curves of several runs."""

import json

from matplotlib.figure import Figure

from tools import plot


def test_runs_that_differ_by_their_seed_alone_have_one_colour_and_one_name(tmp_path, monkeypatch):
    folders, axes, save = [], [], Figure.savefig
    for name, seed in (("ppo", 0), ("ppo", 11), ("grpo", 0)):
        folders.append(tmp_path / f"{name}-tiny-add-s{seed}")
        folders[-1].mkdir()
        lines = [{"step": step, "objective/scores": step + seed} for step in range(4)]
        lines[0] |= {"eval/reward": 1.0, "eval/accuracy": None}
        (folders[-1] / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), '{"st']))

    def spy(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    plot.main([*map(str, folders), "--output", str(tmp_path / "page.svg")])
    assert (tmp_path / "page.svg").stat().st_size > 1000
    first, second, other = axes[0].lines
    assert list(second.get_xdata()) == [0, 1, 2, 3] and list(second.get_ydata()) == [11, 12, 13, 14]
    assert first.get_color() == second.get_color() != other.get_color()
    names = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert names == ["ppo-tiny-add", "grpo-tiny-add"]
    assert axes[5].lines[0].get_ydata() == [1], "the reward, where nothing is right or wrong"
