"""Writes docs/experiments.md, docs/evidence/experiments.md and their pictures from what was
measured. The claims and the words are in experiments_text.py; a figure in them is looked up.

python course/labs.py all --seeds 5 --update     # the runs
python docs/experiments.py                       # the pages, from course/reference.json
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parent
COURSE = DOCS.parent / "course"
sys.path[:0] = [str(DOCS), str(COURSE), str(DOCS.parent / "benchmarks")]

import numpy as np
import overoptimisation
from drawing import BAND, VARIANTS, mean_and_range, plain, save
from experiments_text import CLAIMS, EVIDENCE, INTRODUCTION, UNDECIDED, Claim
from labs import AS_EMBEDDED, CURVES, EXPERIMENTS, PASS_AT, REFERENCE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PAGE, EVIDENCE_PAGE = DOCS / "experiments.md", DOCS / "evidence" / "experiments.md"
PLACE = re.compile(r"\{([^{}|]+)\|([^{}|]+)\}")
AXES = {
    "objective/scores": "reward in training",
    "objective/kl": "KL, nats per completion",
    "objective/entropy": "entropy, nats per token",
    "length/mean": "tokens per completion",
    "length/truncated_frac": "share without EOS",
}


def shown(found: dict[str, float], std: bool = True) -> str:
    """`0.75 ± 0.06`: two decimals, three where a figure is below 0.1 and varies by less than 0.01,
    none from 10 on.
    """
    size = abs(found["mean"])
    digits = 0 if size >= 10 else 3 if size < 0.1 and found["std"] < 0.01 else 2
    text = f"{found['mean']:,.{digits}f}".replace("-", "\u2212")
    return f"{text} ± {found['std']:,.{digits}f}" if std and found["std"] else text


def filled(text: str, name: str, reference: dict) -> str:
    """The text with {variant|figure} replaced by what was measured, {variant|=figure} by its mean;
    {experiment/variant|figure} is that of another experiment.
    """

    def write(match: re.Match) -> str:
        variant, figure = match.groups()
        other, _, rest = variant.partition("/")
        place = (other, rest) if other in reference else (name, variant)
        found = reference[place[0]][place[1]][figure.removeprefix("=")]
        return shown(found, std=not figure.startswith("="))

    return PLACE.sub(write, re.sub(r"(?<!\n)\n(?!\n)", " ", text))


def wrapped(text: str) -> str:
    """Its paragraphs in lines of at most 100 columns."""
    options = {"width": 100, "break_long_words": False, "break_on_hyphens": False}
    return "\n\n".join(textwrap.fill(part, **options) for part in text.split("\n\n"))


def page() -> str:
    """docs/experiments.md."""
    reference = json.loads(REFERENCE.read_text())["experiments"]
    curves = json.loads(CURVES.read_text())
    seeds = len(next(iter(curves["dropout"].values())))
    lines = [wrapped(INTRODUCTION.format(seeds=seeds)), ""]
    lines += ["| claim | result | picture |", "|---|---|---|"]
    for claim in CLAIMS:
        anchor = claim.heading.lower().replace(" ", "-")
        result = filled(claim.result, claim.name, reference)
        picture = f"[{Path(claim.picture).stem}]({claim.picture})" if claim.picture else ""
        lines.append(f"| [{claim.claim}](#{anchor}) | {result} | {picture} |")
    for claim in CLAIMS:
        lines += ["", f"## {claim.heading}", "", f"    {claim.command}", ""]
        if claim.picture:
            lines += [f"![{claim.claim}]({claim.picture})", ""]
        lines.append(wrapped(filled(claim.text, claim.name, reference)))
    return "\n".join(lines).rstrip() + "\n"


def runs_of(name: str) -> list[str]:
    """The commands of an experiment, a line each."""
    variants = EXPERIMENTS[name].variants
    trained = [v for v in variants if v.measure is None]
    judges = dict.fromkeys(v.judge for v in trained if v.judge)
    runs = [f"- first: `python reward_model.py {judge} --output_dir JUDGE`" for judge in judges]
    if name == "base_model":
        flags = " ".join(AS_EMBEDDED.split())
        runs = ["- the unfinished model: `python tiny/make.py --unfinished FOLDER`"]
        runs += [f"- RLOO: `python rloo.py {flags} --learning_rate ...`, with `--model FOLDER`"]
    for v in trained:
        made = f"; `{v.change.__name__}` of course/labs.py changes the script" if v.change else ""
        flags = " ".join(v.flags.replace(str(COURSE), "course").split())
        runs.append(f"- {v.label}: `python {v.script}.py {flags}`{made}")
    return runs


def evidence() -> str:
    """docs/evidence/experiments.md: every experiment of the labs, its runs and its figures."""
    reference = json.loads(REFERENCE.read_text())
    lines = [wrapped(EVIDENCE), ""]
    for name, variants in reference["experiments"].items():
        experiment = EXPERIMENTS[name]
        lines += [f"## {name}", "", experiment.question, ""]
        lines += [f"    python course/labs.py {name} --seeds 5", ""]
        runs = runs_of(name)
        lines += [*runs, ""] if runs else []
        head = " | ".join(f"`{figure}`" for figure in experiment.figures)
        lines += [f"| | {head} |", f"|---|{'---|' * len(experiment.figures)}"]
        for label, found in variants.items():
            cells = [
                f"{found[f]['mean']:.3f} ± {found[f]['std']:.3f}" if f in found else ""
                for f in experiment.figures
            ]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
        for label, texts in reference["samples"].get(name, {}).items():
            lines += [f"Reward, prompt and completion, {label}:", ""]
            lines += [*(f"    {text}" for text in texts), ""]
        if name in UNDECIDED:
            lines += [wrapped(filled(UNDECIDED[name], name, reference["experiments"])), ""]
    judge = overoptimisation.REWARD_MODEL.format("N", "S")
    policy = overoptimisation.PPO.format("C", "S")
    lines += ["## Trusted too far", "", "    python benchmarks/overoptimisation.py", ""]
    lines += [f"- the reward models: `python reward_model.py {judge}`"]
    lines += [f"- PPO on each: `python ppo.py {policy} --reward_model FOLDER`", ""]
    lines += [overoptimisation.NOTES, ""]
    lines += [overoptimisation.section(json.loads(overoptimisation.RESULTS.read_text()))]
    return "\n".join(lines).rstrip() + "\n"


# --- Pictures ---


def draw(claim: Claim, figures: dict[str, dict], curves: dict[str, list]) -> None:
    """Curves of training on the left, what they come to on the right, a colour per variant."""
    figure = Figure(figsize=(8.6, 3.4 if curves else 2.6), layout="constrained")
    figure.suptitle(claim.claim, fontsize=11)
    widths = [1.7] * bool(curves) + [1] * len(claim.dots)
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    colours = dict(zip(figures, claim.colours or VARIANTS, strict=False))
    if curves:
        draw_curves(panels[0], claim, curves, colours)
    for index, (panel, (key, title)) in enumerate(
        zip(panels[-len(claim.dots) :], claim.dots.items())
    ):
        rows = [(label, found[key], colours[label]) for label, found in figures.items()]
        rows = [(claim.labels.get(label, label), *row) for label, *row in rows]
        hollow = {claim.labels.get(label, label) for label in claim.styles}
        draw_dots(panel, rows, hollow, claim.most.get(key, 0.0))
        plain(panel, "", title)
        if index > 0:
            panel.tick_params(labelleft=False)
    panels[-1].set_title("mean ± standard deviation", fontsize=8.5, loc="right")
    save(figure, DOCS / claim.picture)


def draw_curves(
    panel: Axes, claim: Claim, curves: dict[str, list], colours: dict[str, str]
) -> None:
    """One curve per variant, with a band where they are few; of rewards a mean over five steps."""
    curve = EXPERIMENTS[claim.name].curve
    what = "a line per seed" if claim.each_seed else BAND
    what = what if len(curves) <= 4 else "lines: means of the seeds"
    name = AXES[curve] + (", mean of 5 steps" if curve == "objective/scores" else "")
    plain(panel, what, "step", name)
    panel.title.set_fontsize(8.5)
    for label, seeds in curves.items():
        rows = np.array(seeds, dtype=float)  # None, where a step has no such value, is NaN
        x, style, colour = np.arange(rows.shape[1]), claim.styles.get(label, "-"), colours[label]
        if curve == "objective/scores":
            rows, x = np.array([np.convolve(row, np.ones(5) / 5, "valid") for row in rows]), x[2:-2]
        if claim.each_seed:
            panel.plot(x, rows.T, style, color=colour, lw=1)
        elif len(curves) <= 4:
            mean_and_range(panel, x, rows, colour, style)
        else:
            panel.plot(x, rows.mean(0), style, color=colour, lw=1.6)
    panel.set_xlim(0, None)
    if claim.zero:
        panel.axhline(0, color="black", lw=0.8)


def draw_dots(
    panel: Axes, rows: list[tuple[str, dict, str]], hollow: set[str] = frozenset(), most: float = 0
) -> None:
    """A line per (name, figure, colour): mean, standard deviation, and both in numbers."""
    for y, (name, found, colour) in enumerate(rows):
        style = {"marker": "s", "mfc": "white"} if name in hollow else {"marker": "o"}
        panel.errorbar(found["mean"], -y, xerr=found["std"], capsize=3, ms=6, color=colour, **style)
        panel.annotate(
            shown(found), (found["mean"], -y), (0, 7), textcoords="offset points", ha="center",
            fontsize=8, color=colour, annotation_clip=False, zorder=3,
            bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 0.5},
        )  # fmt: skip
    panel.set_yticks([-y for y in range(len(rows))], [name for name, *_ in rows], fontsize=9)
    for tick, (*_, colour) in zip(panel.get_yticklabels(), rows):
        tick.set_color(colour)
    low = min(0.0, *(found["mean"] - found["std"] for _, found, _ in rows))
    high = max(most, *(found["mean"] + found["std"] for _, found, _ in rows))
    room = 0.2 * (high - low)
    panel.set(xlim=(low - room, high + room), ylim=(0.5 - len(rows), 0.7))
    if most == 1:
        panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    else:
        panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.axvline(0, color="black", lw=0.8)


def draw_together(claim: Claim, figures: dict[str, dict]) -> None:
    """Figures of the same unit in one panel: a line per variant and figure."""
    figure = Figure(figsize=(8.6, 3), layout="constrained")
    figure.suptitle(claim.claim, fontsize=11)
    panel = figure.subplots()
    rows = []
    for (label, found), colour in zip(figures.items(), claim.colours or VARIANTS, strict=False):
        before = f"{label}: " if len(figures) > 1 else ""
        rows += [(before + title, found[key], colour) for key, title in claim.dots.items()]
    draw_dots(panel, rows)
    plain(panel, "mean ± standard deviation", claim.together)
    panel.title.set_fontsize(8.5)
    save(figure, DOCS / claim.picture)


def draw_pass_at_k(claim: Claim, figures: dict[str, dict]) -> None:
    """pass@k against k: a colour per model, dashed before the training."""
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    figure.suptitle(claim.claim, fontsize=11)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, model in zip(panels, ("embedded", "unfinished")):
        plain(panel, f"the {model} model", "k samples (bands: ± standard deviation)")
        lines = {label: found for label, found in figures.items() if label.startswith(model)}
        for (label, found), colour in zip(lines.items(), ("#333333", VARIANTS[2], VARIANTS[1])):
            means, std = (
                np.array([found[f"pass@{k}"][key] for k in PASS_AT]) for key in ("mean", "std")
            )
            colour = VARIANTS[1] if label.endswith("8e-4") else colour
            style = "--" if label.endswith("before") else "-"
            name = label.removeprefix(f"{model}, ")
            panel.plot(PASS_AT, means, style, marker="o", ms=4, color=colour, label=name)
            panel.fill_between(PASS_AT, means - std, means + std, color=colour, alpha=0.2, lw=0)
        panel.set_xscale("log")
        panel.set_xticks(PASS_AT, [str(k) for k in PASS_AT])
        panel.minorticks_off()
        panel.set_ylim(0.3, 1.02)
        panel.legend(fontsize=8, frameon=False, loc="lower right")
    panels[0].set_ylabel("pass@k, held-out sums")
    save(figure, DOCS / claim.picture)


def main() -> None:
    reference = json.loads(REFERENCE.read_text())["experiments"]
    curves = json.loads(CURVES.read_text())
    for claim in CLAIMS:
        if claim.name == "base_model":
            draw_pass_at_k(claim, reference[claim.name])
        elif claim.together:
            draw_together(claim, reference[claim.name])
        elif claim.dots:
            own = curves.get(claim.name, {}) if claim.curves else {}
            draw(claim, reference[claim.name], own)
    PAGE.write_text(page(), encoding="utf-8")
    EVIDENCE_PAGE.write_text(evidence(), encoding="utf-8")


if __name__ == "__main__":
    main()
