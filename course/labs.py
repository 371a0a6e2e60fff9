"""Runs the experiments of the labs: each asks what one choice, or one mistake, does to a run.

  python labs.py                              # what there is, and its seconds on two CPU cores
  python labs.py dropout                      # one seed of each variant, beside what to expect
  python labs.py dropout --predict -          # with your answer to "what will you see?", one each
  python labs.py dropout --seeds 5 --pictures here
  python labs.py all --seeds 5 --update       # what to expect from now on: reference.json
  python labs.py --pictures docs/experiments  # draws those of the page anew, runs nothing

All of them train the embedded model of 0.6 M parameters on sums, without a network. A figure stands
beside the mean and the standard deviation that are expected. Nearly all right runs lie within six
standard deviations: one that doesn't is marked.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lab_parts
from experiments import EXPERIMENTS, Prediction
from lab_parts import HERE, module_of, read, start, train_judge

REFERENCE, CURVES = HERE / "reference.json", HERE / "curves.json"
JUDGE = "--num_steps 80 --num_eval_pairs 256 --eval_every 80"
FAR = 6  # standard deviations
# Trained on the machine where it is measured, and rounding makes another model of it.
ANOTHER_MODEL = ("unfinished", "retaught")


def figures_of(lines: list[dict]) -> dict[str, float]:
    """What a run comes to: of its beginning, of its last five steps, of its last evaluation."""
    *steps, last = lines

    def mean(name: str, part: list[dict] = steps) -> float | None:
        values = [line[name] for line in part if line.get(name) is not None]
        return statistics.mean(values) if values else None

    best = max((x for x in lines if "eval/accuracy" in x), key=lambda x: x["eval/accuracy"])
    late = functools.partial(mean, part=steps[-5:])
    found = {
        "accuracy": last["eval/accuracy"],
        "accuracy_first": steps[0]["eval/accuracy"],
        "accuracy_best": best["eval/accuracy"],
        "best_step": best["step"],
        "score": last["eval/reward"],  # on held-out prompts, as the accuracy is
        "score_first": steps[0]["eval/reward"],
        "kl_first": steps[0]["objective/kl"],
        "sampler_kl_first": steps[0]["val/sampler_kl"],
        "kl": late("objective/kl"),
        "entropy": late("objective/entropy"),
        "reward": late("objective/scores"),
        "length": late("length/mean"),
        "truncated": late("length/truncated_frac"),
        "clipfrac": mean("policy/clipfrac_avg"),
        "approxkl": mean("policy/approxkl_avg"),
        "grad_norm": mean("grad_norm"),
        "explained": late("val/explained_variance"),
        "flat": late("reward/frac_flat_groups"),
        "sampler_kl_x1000": 1000 * mean("val/sampler_kl"),
    }
    return {name: value for name, value in found.items() if value is not None}


# --- Running ---


def run_variant(name: str, label: str, seed: int) -> tuple[dict[str, float], list, list[str]]:
    """(figures, curve, samples) of a variant of an experiment with a seed."""
    experiment = EXPERIMENTS[name]
    variant = experiment.variants[label]
    quiet = contextlib.redirect_stderr(io.StringIO())  # without bars of loading weights
    if variant.measure:
        with quiet:
            return getattr(lab_parts, variant.measure)(*variant.arguments, seed), [], []
    figures = {}
    flags = variant.flags.replace("REWARDS:", f"{shlex.quote(lab_parts.__file__)}:")
    with quiet, tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if variant.pairs:
            judged = train_judge(variant.pairs, JUDGE, seed, folder / "judge")
            figures["judge"] = judged[-1]["eval/accuracy"]  # on held-out pairs
            flags = flags.replace("JUDGE", shlex.quote(str(folder / "judge")))
        if variant.thinks is not None:
            flags = flags.replace("THINKER", shlex.quote(lab_parts.thinker(variant.thinks).name))
        if "GAMES" in flags:
            lab_parts.write_games(folder / "games.jsonl")
            flags = flags.replace("GAMES", shlex.quote(str(folder / "games.jsonl")))
        lines = start(module_of(variant.script, variant.change), flags, seed, folder / "run")
        samples = read(folder / "run" / "samples.jsonl")
        last = [x for x in samples if x["split"] == "heldout" and x["step"] == lines[-1]["step"]]
        figures |= lab_parts.worked_out(last)
        samples = samples[-4:]
        figures["sampled"] = lines[-2]["episode"]  # completions
    curve = [line.get(experiment.curve) for line in lines[:-1]]
    texts = [f"{x['score']:.0f}  {x['prompt']} {x['completion']}" for x in samples]
    return figures | figures_of(lines), curve, texts


def run(names: list[str], seeds: range) -> Iterator[tuple[str, dict[str, list[tuple]]]]:
    """Pairs of an experiment and {variant: what run_variant gives, for each seed}. Where a function
    isn't written yet the runs that wait are dropped.
    """
    # Processes of one thread each: two runs at a time are faster than one on two threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        made = {
            name: {x: [pool.submit(run_variant, name, x, seed) for seed in seeds] for x in variants}
            for name, variants in ((name, EXPERIMENTS[name].variants) for name in names)
        }
        try:
            for name in names:
                found = {}
                for label, parts in made[name].items():
                    found[label] = [x.result() for x in parts]
                    print(f"{name}: {label} is done", file=sys.stderr, flush=True)
                yield name, found
        finally:
            pool.shutdown(cancel_futures=True)


# --- Comparing ---


def summaries(found: list[tuple], names: str) -> dict[str, dict]:
    """{figure: mean, standard deviation and number} of what run_variant gave for each seed."""
    result = {}
    for name in names.split():
        if values := [figures[name] for figures, *_ in found if name in figures]:
            std = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.mean(values)
            result[name] = {"mean": round(mean, 5), "std": round(std, 5), "seeds": len(values)}
    return result


def is_far(label: str, value: float, expected: dict[str, float]) -> bool:
    """Whether a right run hardly ever has this figure."""
    if label.startswith(ANOTHER_MODEL):
        return False
    slack = 1e-3 + 0.01 * abs(expected["mean"])  # rounding differs between machines
    return abs(value - expected["mean"]) > slack + FAR * expected["std"]


def table(name: str, found: dict[str, list[tuple]], reference: dict) -> str:
    """The figures of an experiment, a line each, beside what is expected."""
    experiment = EXPERIMENTS[name]
    lines, width = [f"{name}: {experiment.question}"], max(map(len, found))
    for label, parts in found.items():
        for figure, x in summaries(parts, experiment.figures).items():
            line = f"  {label:{width}}  {figure} {x['mean']:.4g}"
            line += f" ± {x['std']:.2g}" if x["std"] else ""
            if expected := reference.get(name, {}).get(label, {}).get(figure):
                mark = "NOT near" if is_far(label, x["mean"], expected) else "expected"
                of = f"{expected['seeds']} seeds"
                line += f" ({mark} {expected['mean']:.4g} ± {expected['std']:.2g}, {of})"
            lines.append(line)
        if experiment.samples:
            lines += [f"  {label:{width}}  wrote {text}" for text in parts[0][2]]
    return "\n".join(lines)


def answered(prediction: Prediction, answer: str, found: dict[str, list[tuple]]) -> str:
    """What becomes of an answer, a sign or a number, once the figures are there."""

    def mean(figure: str, variant: str) -> float:
        return statistics.mean(figures[figure] for figures, *_ in found[variant])

    value, than = mean(prediction.figure, prediction.variant), prediction.than
    try:
        if than is None:
            right, truth = abs(float(answer) - value) <= max(0.05, 0.1 * abs(value)), f"{value:.3f}"
        else:
            distance = value - (mean(*than) if isinstance(than, tuple) else than)
            near = abs(distance) <= prediction.near
            truth = "0" if near else "+" if distance > 0 else "-"
            right = answer == truth
    except ValueError:
        return f"{answer} is no number."
    return f"You said {answer}: right." if right else f"It is {truth}. {prediction.hint}"


def keep(name: str, found: dict[str, list[tuple]], reference: dict, curves: dict) -> None:
    """Put what run() found into reference.json, and 5 curves of each variant into curves.json."""
    figures = EXPERIMENTS[name].figures
    reference["experiments"][name] = {k: summaries(parts, figures) for k, parts in found.items()}
    if found := curves_of(found):
        curves[name] = {label: seeds[:5] for label, seeds in found.items()}
    parts = []
    for part, entries in reference.items():  # a line per experiment
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        parts.append(f'"{part}": {{\n' + ",\n".join(lines) + "\n}")
    REFERENCE.write_text("{" + ",\n".join(parts) + "}\n")
    CURVES.write_text(json.dumps(curves) + "\n")


def curves_of(found: dict[str, list[tuple]]) -> dict[str, list]:
    """{variant: a curve per seed}, to four digits; nothing where none was drawn."""
    return {
        label: [[v if v is None else round(v, 4) for v in curve] for _, curve, _ in parts]
        for label, parts in found.items()
        if parts[0][1]
    }


def draw(name: str, curves: dict[str, list], figures: dict[str, dict], output: Path) -> None:
    """A picture of an experiment: its curves, {variant: one per seed}, with the range over the
    seeds as a band, and below them the mean and standard deviation of its first figures.
    """
    import numpy as np
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    inks = "text.color axes.labelcolor axes.edgecolor xtick.color ytick.color".split()
    # For light and for dark pages, and for those of a phone.
    rcParams.update(dict.fromkeys(inks, "#7a7f85") | {"font.size": 9, "axes.titlesize": 9})
    experiment = EXPERIMENTS[name]
    shown = experiment.figures.split()[: 2 if curves else 4]
    panels = [shown] if len(figures) == 1 else [[key] for key in shown]  # rows of one variant
    figure = Figure(figsize=(5.2, 5 if curves else 3), layout="constrained")
    figure.suptitle(textwrap.fill(experiment.question, 75), fontsize=9)
    places = [["curve"] * len(panels)] * bool(curves) + [[*range(len(panels))]]
    axes = figure.subplot_mosaic(places)
    colours = {label: f"C{index}" for index, label in enumerate(figures)}
    for label, seeds in curves.items():
        rows = np.array(seeds, dtype=float)  # None, where nothing was measured, becomes NaN
        steps = np.flatnonzero(~np.isnan(rows).any(0))
        rows, panel = rows[:, steps], axes["curve"]
        panel.plot(steps, rows.mean(0), lw=1.4, color=colours[label], label=label)
        panel.fill_between(steps, rows.min(0), rows.max(0), color=colours[label], alpha=0.15)
        panel.set(xlabel="step", ylabel=experiment.curve, title="mean and range of the seeds")
        panel.legend(fontsize=8, frameon=False, labelcolor="linecolor")
    for index, keys in enumerate(panels):
        rows, panel = [(x, key) for x in figures for key in keys if key in figures[x]], axes[index]
        for label, key in rows:
            x, y = figures[label][key], label if len(keys) == 1 else key
            panel.errorbar(x["mean"], y, xerr=x["std"], fmt="o", capsize=3, color=colours[label])
        panel.invert_yaxis()
        panel.margins(y=0.2)
        panel.locator_params(axis="x", nbins=6 - len(panels))
        panel.tick_params(labelleft=index == 0)
        title = keys[0] if len(keys) == 1 else next(iter(figures))
        panel.set(title=title, xlabel="mean ± std")
    for panel in axes.values():
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.2)
    figure.savefig(output, dpi=110, transparent=True)


def names_in(given: list[str]) -> list[str]:
    """The experiments that are meant by names, lab1 .. lab6, all. Raises KeyError."""
    groups = {f"lab{n}": [k for k, x in EXPERIMENTS.items() if x.lab == n] for n in range(1, 7)}
    groups |= {"all": [*EXPERIMENTS]} | {name: [name] for name in EXPERIMENTS}
    return [*dict.fromkeys(name for word in given for name in groups[word])]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments, lab1 .. lab6, all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each variant (1)")
    what = "what you will see in each: +, -, 0, a number"
    parser.add_argument("--predict", nargs="+", default=[], metavar="ANSWER", help=what)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the curves there")
    parser.add_argument("--update", action="store_true", help="write reference.json")
    options = parser.parse_args(args)
    reference = json.loads(REFERENCE.read_text())
    expected = reference["experiments"]
    curves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    if not options.names and options.pictures:
        for picture in sorted(options.pictures.glob("*.png")):
            draw(picture.stem, curves.get(picture.stem, {}), expected[picture.stem], picture)
    elif not options.names:
        for name, x in sorted(EXPERIMENTS.items(), key=lambda pair: pair[1].lab):
            print(f"lab {x.lab} {name:16} {reference['seconds'][name]:>4} s  {x.question}")
    try:
        names = names_in(options.names)
    except KeyError as e:
        parser.error(f"there is no experiment {e}; python labs.py lists them")
    answers = iter(options.predict)
    try:
        for name, found in run(names, range(options.seeds)):
            # Now nothing can fail any more for want of a function.
            print(f"What will you see? {EXPERIMENTS[name].predict.ask}", flush=True)
            answer = next(answers, "")
            if not answer and sys.stdin.isatty():
                answer = input("+, -, 0 or a number; Enter for no answer: ").strip()
            print(table(name, found, expected), flush=True)
            if answer:
                print(answered(EXPERIMENTS[name].predict, answer, found), flush=True)
            if options.update:
                keep(name, found, reference, curves)
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                figures = {k: summaries(x, EXPERIMENTS[name].figures) for k, x in found.items()}
                draw(name, curves_of(found), figures, options.pictures / f"{name}.png")
    except NotImplementedError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
