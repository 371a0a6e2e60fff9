"""tools/plot.py: curves of several runs."""

import json

from matplotlib.figure import Figure

from plumbing.metrics import COLOURS
from tools import plot


def test_seeds_of_a_job_have_one_colour_and_one_name_and_a_script_has_its_own(
    tmp_path, monkeypatch
):
    folders, axes, save = [], [], Figure.savefig
    for name, seed in (("ppo", 0), ("ppo", 11), ("grpo", 0), ("grpo-2", 0)):
        folders.append(tmp_path / f"{name}-tiny-add-s{seed}")
        folders[-1].mkdir()
        lines = [{"step": step, "objective/scores": step + seed} for step in range(4)]
        lines[0] |= {"eval/reward": 1.0, "eval/accuracy": None}
        (folders[-1] / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), '{"st']))

    def spy(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    monkeypatch.chdir(tmp_path)
    plot.main([*map(str, folders)])
    assert (tmp_path / "curves.png").stat().st_size > 1000
    _, second, *_ = axes[0].lines
    assert list(second.get_xdata()) == [0, 1, 2, 3] and list(second.get_ydata()) == [11, 12, 13, 14]
    *colours, other = [line.get_color() for line in axes[0].lines]
    assert colours == [COLOURS[x] for x in ("ppo", "ppo", "grpo")] and other not in colours
    names = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert names == ["ppo-tiny-add", "grpo-tiny-add", "grpo-2-tiny-add"]
    assert axes[5].lines[0].get_linestyle() == "-", "sampled; dashed is greedy"
    assert axes[5].lines[0].get_ydata() == [1], "the reward, where nothing is right or wrong"
    moved = tmp_path / "other" / folders[0].name
    moved.parent.mkdir()
    folders[0].rename(moved)
    folders[0].symlink_to(moved)  # two runs of one name
    axes.clear()
    plot.main(["other/" + moved.name, moved.name])
    assert len({line.get_color() for line in axes[0].lines}) == 2
    plot.main([str(folders[0]), "--output", "page.svg"])
    assert (tmp_path / "page.svg").stat().st_size > 1000
