"""The experiments of the labs: each asks what one choice, or one mistake, does to a run.

  python labs.py                          # what there is
  python labs.py dropout                  # one seed of each variant, beside what to expect
  python labs.py dropout --seeds 5 --pictures here
  python labs.py all --seeds 5 --update   # makes reference.json, from which the bounds come

All of them train the embedded model of 0.6 M parameters on sums, without a network. A mistake is
put into a fresh copy of the script: the files stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "ppo.py").exists() else HERE.parent
REFERENCE = HERE / "reference.json"
CURVES = HERE / "curves.json"
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

PPO = "--num_steps 30 --prompts_per_step 64 --num_eval_prompts 256 --eval_every 30"
GROUPS = "--num_steps 60 --prompts_per_step 8 --num_generations 8 --num_eval_prompts 256"
GROUPS += " --eval_every 60"
# Of Student's t with 4 degrees of freedom, 99.5%: one more run lies within mean -+ this many
# standard deviations of 5 runs, times sqrt(1 + 1/5), 99 times in 100.
T_99 = 4.604
SHARES = {"accuracy", "flat", "truncated", "clipfrac", "clip_first"}


@dataclass
class Variant:
    """A run: a script, its flags, and for a mistake what is done to the script's module."""

    label: str
    script: str
    flags: str = ""
    change: Callable[[ModuleType], None] | None = None


@dataclass
class Experiment:
    """Variants that differ in one thing, and the figures in which it shows."""

    lab: int
    question: str
    variants: list[Variant]
    figures: list[str]
    curve: str = "objective/scores"


# --- Rewards that ask for something else than right sums ---


def nines(completions: list[str], **columns: object) -> list[float]:
    """How many digits are a 9: easy to get, and not what was meant."""
    return [float(text.count("9")) for text in completions]


def short(completions: list[str], **columns: object) -> list[float]:
    """1 for no text at all, 1/2 for one character, and so on: end early."""
    return [1 / (1 + len(text)) for text in completions]


# --- Mistakes, and what else no flag asks for ---


def top_5(module: ModuleType) -> None:
    module.generate = functools.partial(module.generate, top_k=5)


def forget_the_temperature(module: ModuleType) -> None:
    original = module.completion_logprobs

    def unscaled(model, rollout, temperature, *args, **options):
        return original(model, rollout, 1.0, *args, **options)

    module.completion_logprobs = unscaled


def take_eos_for_padding(module: ModuleType) -> None:
    """A mask inferred from ids, where pad and EOS are the same id."""
    original = module.generate

    def generate(model, prompt_ids, *args, **options):
        rollout = original(model, prompt_ids, *args, **options)
        completions = rollout.tokens[:, prompt_ids.shape[1] :]
        is_eos = torch.isin(completions, torch.tensor(options["eos_token_ids"]))
        seen = rollout.completion_mask & ~is_eos
        return replace(rollout, completion_mask=seen, finished=torch.zeros_like(rollout.finished))

    module.generate = generate


def one_slot_after(module: ModuleType) -> None:
    """The score one slot after EOS, as in TRL's PPO; there V is 0."""
    gae, shape = module.gae, module.shape_rewards

    def longer(mask: Tensor) -> Tensor:
        return mask | torch.nn.functional.pad(mask, (1, 0))[:, :-1]

    def shape_rewards(scores, kl, mask, kl_coef):
        zeros = torch.zeros_like(scores)
        penalty = shape(zeros, kl, mask, kl_coef)
        return penalty + shape(scores, torch.zeros_like(kl), longer(mask), 0.0)

    def gae_with_a_slot_more(rewards, values, mask, gamma, lam):
        advantages, returns = gae(rewards, values, longer(mask), gamma, lam)
        return advantages.masked_fill(~mask, 0), returns.masked_fill(~mask, 0)

    module.shape_rewards, module.gae = shape_rewards, gae_with_a_slot_more


def leave_advantages_raw(module: ModuleType) -> None:
    original = module.masked_whiten

    def whiten_rewards_only(x, mask, shift_mean=True):
        return x if shift_mean else original(x, mask, shift_mean=False)

    module.masked_whiten = whiten_rewards_only


REWARD = f"--reward {shlex.quote(str(Path(__file__).resolve()))}"
EXPERIMENTS = {
    "estimators": Experiment(
        1,
        "k1, k2 and k3 estimate the same KL from samples. Which is unbiased, which varies least?"
        " (No training: the tiny model at temperature 0.7 against itself at 1, and the exact KL.)",
        [],
        ["exact", "k1", "k2", "k3", "k1_std", "k2_std", "k3_std"],
    ),
    "dropout": Experiment(
        2,
        "What does dropout that is left on do before the first update, where ratio 1 and KL 0"
        " should be, and to what is learnt?",
        [
            Variant("off", "rloo", GROUPS),
            Variant("left on", "rloo", f"{GROUPS} --disable_dropout false"),
        ],
        ["clip_first", "kl_first", "reward", "accuracy"],
        "policy/clipfrac_avg",
    ),
    "top_k": Experiment(
        2,
        "top_k 5 samples from something else than the policy whose log-probs are trained. Which way"
        " does it move KL and entropy? (It is often said to make the KL negative. Does it?)",
        [
            Variant("softmax alone", "rloo", f"{GROUPS} --temperature 1.5"),
            Variant("top_k 5", "rloo", f"{GROUPS} --temperature 1.5", top_5),
        ],
        ["entropy_first", "kl", "reward", "accuracy"],
        "objective/kl",
    ),
    "temperature": Experiment(
        2,
        "Sampled at temperature 1.5, log-probs at 1: a mistake that raises no error, and the ratio"
        " is 1 all the same. Where does it show?",
        [
            Variant("right", "rloo", f"{GROUPS} --temperature 1.5"),
            Variant("forgotten", "rloo", f"{GROUPS} --temperature 1.5", forget_the_temperature),
        ],
        ["ratio_dev", "kl", "reward", "accuracy"],
        "objective/kl",
    ),
    "kl_coef": Experiment(
        2,
        "The reward counts nines, and right sums are what was meant. How much of them is left, for"
        " which weight of the KL? Read samples.jsonl.",
        [
            Variant(f"kl_coef {c}", "rloo", f"{GROUPS} {REWARD}:nines --kl_coef {c}")
            for c in (0, 0.05, 0.5)
        ],
        ["reward", "kl", "accuracy"],
        "objective/scores",
    ),
    "missing_eos": Experiment(
        3,
        "With room for 3 tokens a sum of three digits has none left for EOS. What does a penalty"
        " for the missing EOS teach?",
        [
            Variant(f"penalty {p}", "ppo", f"{PPO} --max_new_tokens 3 --missing_eos_penalty {p}")
            for p in (0, 2)
        ],
        ["truncated", "reward", "accuracy"],
        "length/truncated_frac",
    ),
    "group_size": Experiment(
        2,
        "64 completions a step, in groups of 2 to 32: more prompts, or a better baseline?",
        [
            Variant(
                f"G = {g}",
                "rloo",
                f"--num_steps 80 --prompts_per_step {64 // g} --num_generations {g}"
                " --num_eval_prompts 256 --eval_every 80 --learning_rate 3e-4",
            )
            for g in (2, 4, 8, 16, 32)
        ],
        ["accuracy", "flat", "grad_norm"],
    ),
    "lambda": Experiment(
        3,
        "lambda 1 trusts the rewards, lambda 0 the value model. What does a value model that starts"
        " at 0 need?",
        [Variant(f"lam {x}", "ppo", f"{PPO} --lam {x}") for x in (0.0, 0.95, 1.0)],
        ["accuracy", "explained"],
    ),
    "whitening": Experiment(
        3,
        "Advantages whitened or not, rewards whitened as well: what happens to the gradient, and to"
        " what is learnt?",
        [
            Variant("advantages", "ppo", PPO),
            Variant("both", "ppo", f"{PPO} --whiten_rewards"),
            Variant("neither", "ppo", PPO, leave_advantages_raw),
        ],
        ["accuracy", "grad_norm", "clipfrac"],
    ),
    "epochs": Experiment(
        3,
        "1 or 4 passes over a rollout: what is gained per episode, and what does the clip have to"
        " do with it?",
        [Variant(f"{n} epochs", "ppo", f"{PPO} --num_epochs {n}") for n in (1, 4)],
        ["accuracy", "clipfrac", "approxkl", "kl"],
    ),
    "score_slot": Experiment(
        3,
        "The score on EOS, or one slot after it: for lambda 0.5, how much of it arrives at EOS?",
        [
            Variant("on EOS", "ppo", f"{PPO} --lam 0.5"),
            Variant("one slot after", "ppo", f"{PPO} --lam 0.5", one_slot_after),
        ],
        ["accuracy", "explained", "clipfrac"],
    ),
    "pad_is_eos": Experiment(
        4,
        "Pad and EOS are the same id, and the mask is inferred from the ids: EOS gets no gradient."
        " The reward is for short text. Who learns to end, and how can one learn it without?",
        [
            Variant(
                "mask carried",
                "grpo",
                f"{GROUPS} {REWARD}:short --temperature 1.5 --max_new_tokens 10",
            ),
            Variant(
                "mask inferred",
                "grpo",
                f"{GROUPS} {REWARD}:short --temperature 1.5 --max_new_tokens 10",
                take_eos_for_padding,
            ),
        ],
        ["reward", "entropy", "truncated"],
    ),
    "loss_types": Experiment(
        5,
        "GRPO, Dr. GRPO, DAPO: they weigh the tokens of long completions differently. Does it show"
        " where completions have three or four tokens?",
        [
            Variant(
                kind,
                "grpo",
                f"{GROUPS} --temperature 1.5 --max_new_tokens 12 --num_mini_batches 2 {flags}",
            )
            for kind, flags in (
                ("grpo", "--loss_type grpo"),
                ("dr_grpo", "--loss_type dr_grpo --scale_rewards none"),
                ("dapo", "--loss_type dapo --clip_range_high 0.28"),
            )
        ],
        ["accuracy", "length", "clipfrac"],
        "length/mean",
    ),
}


def figures_of(lines: list[dict]) -> dict[str, float]:
    """What a run comes to: of its beginning, of its last five steps, of its last evaluation."""
    steps, last = lines[:-1], lines[-1]

    def late(name: str) -> float | None:
        values = [line[name] for line in steps[-5:] if line.get(name) is not None]
        return statistics.mean(values) if values else None

    found = {
        "accuracy": last["eval/accuracy"],
        "ratio_dev": steps[0]["val/ratio_max_dev_first"],
        "clip_first": steps[0]["policy/clipfrac_avg"],
        "kl_first": steps[0]["objective/kl"],
        "entropy_first": steps[0]["objective/entropy"],
        "length_first": steps[0]["length/mean"],
        "kl": late("objective/kl"),
        "entropy": late("objective/entropy"),
        "reward": late("objective/scores"),
        "length": late("length/mean"),
        "truncated": late("length/truncated_frac"),
        "clipfrac": statistics.mean(line["policy/clipfrac_avg"] for line in steps),
        "approxkl": statistics.mean(line["policy/approxkl_avg"] for line in steps),
        "grad_norm": statistics.mean(line["grad_norm"] for line in steps),
        "explained": late("val/explained_variance"),
        "flat": late("reward/frac_flat_groups"),
    }
    return {name: value for name, value in found.items() if value is not None}


def module_of(script: str, change: Callable[[ModuleType], None] | None = None) -> ModuleType:
    """A fresh copy of a script's module, with a change made to it."""
    spec = importlib.util.spec_from_file_location(f"lab_{script}", ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    if change is not None:
        change(module)
    return module


def train(module: ModuleType, flags: str, seed: int) -> list[dict]:
    """The metrics of a run of module.main, a dict per step."""
    torch.set_num_threads(1)  # faster for a model this small, and the same on every machine
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            options = ["--output_dir", f"{folder}/run", "--seed", str(seed), "--device", "cpu"]
            module.main([*shlex.split(flags), *options])
        text = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def run_variant(job: tuple[str, int, int]) -> tuple[dict[str, float], list]:
    """(figures, curve) of a variant of an experiment with a seed."""
    name, index, seed = job
    experiment = EXPERIMENTS[name]
    if name == "estimators":
        return estimators(seed), []
    variant = experiment.variants[index]
    lines = train(module_of(variant.script, variant.change), variant.flags, seed)
    return figures_of(lines), [line.get(experiment.curve) for line in lines[:-1]]


def estimators(seed: int) -> dict[str, float]:
    """Per-token estimates of KL(policy || reference) on 2,000 completions, and the exact KL at the
    same positions, from all probabilities.
    """
    from common import completion_states, kl_estimate, logits_from
    from loading import eos_token_ids, load_policy, load_tokenizer
    from sampling import generate
    from tasks import add_prompts, encode_prompts

    torch.set_num_threads(1)
    policy, tokenizer = load_policy("tiny").eval(), load_tokenizer("tiny")
    ids, mask = encode_prompts(tokenizer, add_prompts()[0][:250], torch.device("cpu"))
    rollout = generate(
        policy, ids, mask, num_generations=8, max_new_tokens=5, temperature=0.7,
        eos_token_ids=eos_token_ids(policy, tokenizer), pad_token_id=0,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    real = rollout.completion_mask
    with torch.no_grad():
        states = completion_states(policy.base_model, rollout)
        logits = logits_from(policy, states)
    tokens = rollout.tokens[:, -real.shape[1] :][:, : logits.shape[1]].unsqueeze(2)
    real = real[:, : logits.shape[1]]
    ours, theirs = (logits / 0.7).log_softmax(-1), logits.log_softmax(-1)
    exact = (ours.exp() * (ours - theirs)).sum(-1)
    found = {"exact": exact[real].mean().item()}
    for name in ("k1", "k2", "k3"):
        sampled = kl_estimate(ours.gather(2, tokens), theirs.gather(2, tokens), name).squeeze(2)
        found |= {name: sampled[real].mean().item(), f"{name}_std": sampled[real].std().item()}
    return found


def run(name: str, seeds: int) -> dict[str, dict]:
    """{variant: {"figures": one dict per seed, "curves": one list per seed}} of an experiment."""
    variants = EXPERIMENTS[name].variants or [Variant("tiny", "")]
    jobs = [(name, index, seed) for index in range(len(variants)) for seed in range(seeds)]
    found = {variant.label: {"figures": [], "curves": []} for variant in variants}
    # Processes of one thread each: two runs at a time are faster than one on two threads.
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for (_, index, _), (figures, curve) in zip(jobs, pool.imap(run_variant, jobs)):
            found[variants[index].label]["figures"].append(figures)
            found[variants[index].label]["curves"].append(curve)
    return found


def curves_of(name: str, found: dict[str, dict]) -> dict[str, list]:
    """{variant: a curve per seed}, rounded; {} for an experiment without training."""
    if not EXPERIMENTS[name].variants:
        return {}
    return {
        label: [[v if v is None else round(v, 4) for v in curve] for curve in part["curves"]]
        for label, part in found.items()
    }


def summary(figures: list[dict[str, float]], names: list[str]) -> dict[str, dict[str, float]]:
    """{figure: mean, std over the seeds, and the bounds within which one more run is expected}."""
    found = {}
    for name in names:
        values = [f[name] for f in figures if name in f]
        if not values:
            continue
        mean = statistics.mean(values)
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        room = T_99 * std * (1 + 1 / len(values)) ** 0.5
        low, high = mean - room, mean + room
        if name in SHARES:
            low, high = max(0.0, low), min(1.0, high)
        found[name] = {"mean": mean, "std": std, "low": low, "high": high}
        found[name] = {key: round(value, 5) for key, value in found[name].items()}
    return found


def table(name: str, found: dict[str, dict], reference: dict) -> str:
    """The figures of an experiment, a line per variant, beside what is expected."""
    experiment = EXPERIMENTS[name]
    lines = [f"{name}: {experiment.question}"]
    width = max(map(len, found))
    for label, part in found.items():
        cells = []
        for figure, x in summary(part["figures"], experiment.figures).items():
            cell = f"{figure} {x['mean']:.3f}" + (f" ± {x['std']:.3f}" if x["std"] else "")
            expected = reference.get(name, {}).get(label, {}).get(figure)
            if expected is not None:
                slack = 1e-4 + 0.01 * abs(expected["mean"])  # rounding differs between machines
                inside = expected["low"] - slack <= x["mean"] <= expected["high"] + slack
                bounds = f"{expected['low']:.3f} to {expected['high']:.3f}"
                cell += f" (expected {bounds})" if inside else f" (NOT within {bounds})"
            cells.append(cell)
        lines += [f"  {label:{width}}  {cell}" for cell in cells[:1]]
        lines += [f"  {'':{width}}  {cell}" for cell in cells[1:]]
    return "\n".join(lines)


def draw(name: str, curves: dict[str, list[list[float | None]]], output: Path) -> None:
    """The curves of an experiment, {variant: one per seed}, the range over the seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for label, seeds in curves.items():
        columns = [[v for v in column if v is not None] for column in zip(*seeds)]
        steps = [step for step, column in enumerate(columns) if column]
        columns = [column for column in columns if column]
        [line] = axes.plot(steps, [statistics.mean(c) for c in columns], lw=1.4, label=label)
        band = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(steps, *band, color=line.get_color(), alpha=0.2, lw=0)
    axes.set_xlabel("step")
    axes.set_ylabel(EXPERIMENTS[name].curve)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="experiments, lab1 .. lab5, or all"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each variant (1)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the curves there")
    parser.add_argument("--update", action="store_true", help="write reference.json, curves.json")
    options = parser.parse_args()
    if not options.names:
        for name, x in EXPERIMENTS.items():
            print(f"lab {x.lab}  {name:12} {x.question}")
        return 0
    labs = {f"lab{n}": [k for k, x in EXPERIMENTS.items() if x.lab == n] for n in range(1, 6)}
    labs["all"] = list(EXPERIMENTS)
    names = [name for given in options.names for name in labs.get(given, [given])]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or options.seeds < 1:
        fault = f"there is no experiment {unknown[0]}" if unknown else "--seeds must be 1 or more"
        print(f"error: {fault}; python labs.py lists them", file=sys.stderr)
        return 2
    started = time.perf_counter()
    reference = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    expected = reference.setdefault("experiments", {})
    curves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    for name in names:
        try:
            found = run(name, options.seeds)
        except NotImplementedError as e:
            print(f"error: {name} needs a function that is not written yet: {e}", file=sys.stderr)
            return 2
        print(table(name, found, {} if options.update else expected), flush=True)
        if experiment_curves := curves_of(name, found):
            curves[name] = experiment_curves
        if options.update:
            expected[name] = {
                label: summary(part["figures"], EXPERIMENTS[name].figures)
                for label, part in found.items()
            }
            REFERENCE.write_text(json.dumps(reference, indent=1) + "\n")
            CURVES.write_text(json.dumps(curves) + "\n")
        if options.pictures and name in curves:
            options.pictures.mkdir(parents=True, exist_ok=True)
            draw(name, curves[name], options.pictures / f"{name}.png")
    print(f"{time.perf_counter() - started:.0f} seconds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
