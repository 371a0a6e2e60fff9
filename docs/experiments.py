"""Writes docs/experiments.md and its pictures from what `course/labs.py` has measured.

python course/labs.py all --seeds 5 --update     # the runs, a quarter of an hour on two CPU cores
python docs/experiments.py                       # the page, from course/reference.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
COURSE = DOCS.parent / "course"
sys.path[:0] = [str(COURSE), str(DOCS.parent / "benchmarks")]

import overoptimisation
from labs import AS_EMBEDDED, CURVES, EXPERIMENTS, PASS_AT, REFERENCE, draw

INTRODUCTION = """# Experiments

What is said of RLHF, asked of the embedded model: each claim an experiment of a command, under two
minutes a seed on two CPU cores. Made by `python docs/experiments.py` from
[course/reference.json](../course/reference.json), which `python course/labs.py all --seeds 5
--update` writes. Figures are mean and standard deviation over five seeds; bands in the pictures go
from the lowest to the highest of them.

The model has 0.6 M parameters and answers with up to four tokens: what holds here need not hold for
yours, but you can see it happen. `accuracy` is that of sampled answers on held-out sums after the
last step, at the temperature of the run (about 0.44 before the first step at temperature 1;
`accuracy_first` where it is another). `reward`, `kl`, `entropy`, `length`, `truncated`, `flat` and
`explained` are means of the last five steps, names that end in `_first` and `ratio_dev` are of step
0, `lowest` is the lowest reward of a step, `kl_largest` the largest KL, `sampler_dev` the largest
deviation and `sampled` the number of completions, dropped ones included. `judge` is the share of
held-out pairs that the reward model judges rightly, `score` what it gives to answers to held-out
sums after the last step; `accuracy_best` and `best_step` are those of the best evaluation. The
others are means of all steps. [metrics.md](metrics.md) has the definitions."""

TRUSTED_TOO_FAR = """The score rises in every run. Trusted with a KL weight of 0.01, all
four reward models end below the 43% of right sums at the start. So does that of 5,000 pairs, which
judges 92% of the held-out pairs rightly: at first it leads to 62%, after sixty steps to 26%. The
curve goes up, then down, and more pairs move its top up and to the right: with 50 pairs there is
none. The best of n samples does the same, although nothing is trained: beyond n = 2 with 50 pairs
and n = 8 with 5,000 it picks what the reward model is wrong about.

A weight of 0.1 stops the run of 5,000 pairs near its top, at 70%. With fewer pairs it saves
something, and 50 to 1,000 pairs still end at or below the start: a penalty keeps the policy near
the start, and can't add what the reward model never learnt. At the same KL the heavier weight is
the better one here (5,000 pairs, sqrt(KL) 1.1: 70% against 60%); Gao et al. saw no such gain, and
found a penalty to be worth no more than early stopping. Stopping at the best evaluation gives 63%
with the small weight and 72% with the large one. The score says nothing of when to stop: it takes
some right answers, or people. Held-out pairs don't say it either, for they are samples of the
start. What does give a hint is the KL: look at the samples long before it is 3."""

# What the figures say to the claim, by hand.
FINDINGS = {
    "estimators": """k1 and k3 agree with the exact KL, k2 is a third too low: it is biased, and
its small spread is no merit. k3 is never negative, and varies more than k1 here: where the
policy has made a token much rarer than the reference, a single draw of it counts a lot. In a
reward take k1: what acts there is the mean of k grad log pi, with k1 the gradient of the KL,
with k2 and k3 nearly nothing close to the reference ([details.md](details.md#kl)).""",
    "dropout": """Before the first update the policy is the reference, so the KL is 0, and it
sampled what it scores, so no ratio is clipped. With dropout left on nearly half of the
completions are clipped at once and the KL is -1.4: they were sampled without dropout, and the
policy with dropout gives these tokens a lower probability than the reference does. Nothing is
learnt, and what was known is lost. It is one of the ways to a negative KL.""",
    "top_k": """The reward is that of the sampling, 0.85, not of the policy. The policy itself
ends at 0.69, below the 0.77 of the right run: the tokens that top_k never draws are never
punished, and keep their probability. What a policy is worth must be measured without top_k. The
entropy of what is sampled is a quarter smaller from the first step. The KL rises faster in the
first twenty steps, and is the same at the end: it doesn't give the mistake away; top_k_kl says
when it does.""",
    "top_k_kl": """Samples from another distribution q than the policy make k1 an estimate of
KL(q, reference) - KL(q, policy), which can be anything. Where the policy is surer than the
reference it is too large. Where it is less sure, as after an entropy bonus or at a higher
temperature, it is negative, though the KL at the same tokens (`exact_top_k`) isn't: the policy
gives the five tokens that are left a lower probability than the reference does. k3 can't be
negative, and hides it.""",
    "temperature": """The ratio is 1, no error is raised, and the sums are learnt as well as in
the right run. What is wrong is the KL: it is that of another distribution, at the end less than
half of the right one. In each of the five runs it is below 0 for a while, which the right one
never is beyond 0.01: that can be seen without a right run beside it. Where sampling and log-
probs may differ, compare the log-probs that `generate` recorded with those of the training
forward: that test is in tests/test_sampling.py.""",
    "kl_coef": """The samples say at once what happened: nines. At 0 and 0.05 the sums are lost.
At 0.05 the KL tells as well: it is 16 on average, and a run warns above 10; at 0 it isn't
measured. At 0.5 the KL stays below 1 and a third of the sums are still right: the penalty keeps
what the reward doesn't ask for. That a run is far gone you see in the samples and in the held-
out accuracy, not in the reward.""",
    "missing_eos": """Without the penalty six in ten completions have no room for EOS, and the
sums are right all the same. With it the model learns to end in time: it answers with two digits
where three are right. The penalty is obeyed, and the task is lost. Give `--max_new_tokens` room
before you punish for reaching it.""",
    "learning_rate": """1e-4 crawls: 15 points in 60 steps. 8e-4, the default, learns twice as
much if the first ten steps lead up to it. Without the warm-up the reward falls to 0.08 first,
and three quarters of what the run gains after that is to win it back: Adam divides the gradient
by its size, so its first steps are as large as the learning rate, whatever the gradient says.
4e-3 destroys the model with and without. (The rate falls linearly all the while, so with the
warm-up it reaches 85% of its size. `lowest` is 0.29 in the runs that never fall: a step has 64
completions, and the lowest of 60 steps is low by chance.) When you bring a model of your own,
look at the first ten steps: if the reward falls and the KL jumps, lower the rate. The command
of each script takes four times as many completions a step, which makes the same rate safer.""",
    "base_model": """Before the training the two look alike: greedy they get more than half of
the sums right, and 256 samples find everything, so at that end nothing can be added. After it
they don't. In the embedded model pass@1 goes from 0.44 to 0.97, and pass@64 stays within 0.001:
it makes one mistake, and what undoes it on the sums of the training undoes it on the held-out
ones. In the unfinished model pass@1 goes from 0.39 to 0.46, and pass@64 falls from 0.995 to
0.92: it becomes surer of what it finds, and loses right answers that were there. Yue et al.
2025, arXiv 2504.13837, found this pattern for reasoning. Our explanation is that it has no rule
that could be put right, having seen too few sums. If your base model fails because it doesn't
know, train it on answers first. (± is over seeds of RLOO, on one unfinished model.)""",
    "group_size": """At 64 completions a step, groups of 4 and 8 are as good as groups of 2,
larger ones cost prompts: 32 completions of two prompts give a good baseline for a gradient that
knows two sums. What grows with small groups is the share of flat ones, which teach nothing:
nearly four fifths at the end for groups of 2.""",
    "lambda": """V starts at 0. With lambda 0 the first advantages are then 0 at every token but
the last, which has the whole score: a digit hears of it only through V of the next state, which
knows nothing yet. Whitening shifts these zeros, so every digit that was drawn, right or wrong,
gets the same negative advantage, and the updates lower all that the policy used to say: within
20 steps the reward falls from 0.43 to 0.2. Without whitening it falls as far, some steps later:
Adam's steps have full size, whatever the gradient says of the digits. Neither recovers.
0.95 and 1 are alike here, where an answer has four tokens. The value model explains next to
nothing of the returns in either (in one run -6.7: where nearly all returns are the same, a small
error of V is large beside their variance), and PPO learns all the same: with lambda near 1 it
is a baseline, not a source.""",
    "whitening": """The same is learnt in all three. What changes is the size of the gradient,
by a factor of 2.7: `--max_grad_norm` and the learning rate mean something else without
whitening. Adam hides most of it.""",
    "epochs": """Four passes over the same completions get to 0.93 in 30 steps, one to 0.84. They
move the policy further within an update (forty times the `approxkl`, which is a square), clip six
times as many tokens, and end at a KL that is a quarter larger.""",
    "score_slot": """While V is 0 and the score is one slot after EOS, EOS gets lambda times the
score, and the token before it lambda squared times: at lambda 0.5 half of it doesn't arrive, at
the usual 0.95 it is 5%. TRL, which has the score there, keeps and trains V in that slot, and
what V has learnt of the score arrives as well. With the score on EOS itself the last action
hears all of it, whatever V says.""",
    "pad_is_eos": """With the mask carried, EOS can be made more probable: three of the five
runs learn to end early within 60 steps, and their entropy falls; the other two hardly move.
With the inferred mask EOS has no gradient: all that can be done is to push every other token
down, and the entropy goes up (here without that of EOS, which is off the mask) while the reward
stays behind. `length/truncated_frac` is 1: nothing ever seems to end, a symptom that can be
seen at step 0.""",
    "length_bias": """GRPO pushes EOS up in right completions and down in wrong ones: a right
one gains most per token if it is short, a wrong one loses least if it is long. That makes for
short right answers and long failures, with nothing in the reward that asks for it. Dr. GRPO and
DAPO, which weigh every token of the minibatch the same, hardly push either way: by at most
0.025, a tenth of GRPO's push.""",
    "loss_types": """No difference beyond the spread. After two or three digits this model is
sure of its EOS, and 60 steps don't change that; length_bias measures the push at temperature 3,
where ending is open.""",
    "dynamic_sampling": """At the same number of completions it makes no difference: 8 prompts
with flat groups replaced take 5,195 completions and come to 0.828, 11 prompts without it take
5,280 and come to 0.832. What it does is to keep the number of groups that teach the same: 5% are
flat, not 40%, and the gradient is a sixth to a third larger. A completion that is dropped costs
as much as one that is kept. Where a prompt is dear and an update cheap, sample more prompts; where
the update is what takes the time (long completions, a large model), replace.""",
    "overlong": """Without the penalty the policy runs into the limit: 82% of the completions
are cut there. With it 4% are, and the length settles just below the 6 tokens from which the
penalty rises: there a token more is paid 1/12 by the reward and costs 1/6.""",
    "entropy_bonus": """At 0.1 the entropy stays 40% higher; at 0.01 it does what it does
without. At 0.1 accuracy is four points lower, about as much as runs differ, and pass@8 one higher,
which is less. The sums are solved without more exploration, so nothing is gained here.""",
    "importance_cap": """In float32 sampler and policy agree to 1e-5. In bfloat16 the KL between
them is 0.00008 a token, single tokens are off by 0.3 nats, and it does no harm: the accuracies
agree within their spread, with the weights and without. The decoding here rounds weights that
training keeps whole, once per batch. Yao et al. 2025 report runs that fail, of large models with
another engine for sampling; look at `val/sampler_kl` before you reach for the flag.""",
    "overoptimisation": """The score rises in all four runs. The sums get better in one of them: the
reward model of 5,000 pairs with kl_coef 0.1. With kl_coef 0.01 the same reward model gives higher
scores to a policy that gets fewer sums right than before the training. The reward model of 200
pairs ranks seven in ten held-out pairs rightly, and PPO finds what it ranks wrongly within ten
steps, with either weight: a KL keeps the policy near what the reward model has seen, and can't add
what it never learnt. The score is no warning, it rises most in the worst run. What tells is the
accuracy, for which you need right answers, or the KL: it ends above 3 in the runs that fail, and
near 1 where the sums are learnt.""",
}


def section(name: str, figures: dict[str, dict], samples: dict[str, list[str]]) -> list[str]:
    """The lines of an experiment: question, command, figures, samples, picture, what is seen."""
    experiment = EXPERIMENTS[name]
    head = " | ".join(f"`{figure}`" for figure in experiment.figures)
    rows = []
    for label, found in figures.items():
        cells = [
            f"{found[f]['mean']:.3f} ± {found[f]['std']:.3f}" if f in found else ""
            for f in experiment.figures
        ]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    trained = [v for v in experiment.variants if v.measure is None]
    judges = dict.fromkeys(v.judge for v in trained if v.judge)
    runs = [f"- first: `python reward_model.py {judge} --output_dir JUDGE`" for judge in judges]
    runs += [f"- {v.label}: `python {v.script}.py {v.flags}`" for v in trained]
    changes: dict[str, list[str]] = {}
    for v in experiment.variants:
        if v.change is not None:
            changes.setdefault(v.change.__name__, []).append(v.label)
    runs = [line.replace(str(COURSE), "course") for line in runs]
    if changes:
        runs += [
            f"- {', '.join(labels)}: with `{name}` of course/labs.py put into the script, as"
            " the command above does it"
            for name, labels in changes.items()
        ]
    picture = [f"![{experiment.curve} of {name}](experiments/{name}.png)", ""]
    lines = [f"## {name}", "", experiment.question, ""]
    lines += [f"    python course/labs.py {name} --seeds 5", "", *runs, *([""] if runs else [])]
    lines += [f"| | {head} |", f"|---|{'---|' * len(experiment.figures)}", *rows, ""]
    for label, texts in samples.items():
        lines += [
            f"Reward, prompt and completion with {label}:",
            "",
            *(f"    {t}" for t in texts),
            "",
        ]
    if name == "base_model":
        flags = " ".join(AS_EMBEDDED.split())
        runs = ["- the unfinished model: `python tiny/make.py --unfinished FOLDER`"]
        runs += [f"- RLOO: `python rloo.py {flags} --learning_rate ...`, with `--model FOLDER`"]
        lines[6:6] = [*runs, ""]
        picture = ["![pass@k before and after training](experiments/base_model.png)", ""]
    return [*lines, *(picture if trained or name == "base_model" else []), FINDINGS[name], ""]


def trusted_too_far() -> list[str]:
    """The section of benchmarks/overoptimisation.py, which isn't one of the labs."""
    results = json.loads(overoptimisation.RESULTS.read_text())
    seeds = len({name.rpartition(" ")[2] for name in results})
    judge = overoptimisation.REWARD_MODEL.format("N", "S")
    policy = overoptimisation.PPO.format("0.01", "S")
    return [
        "## Trusted too far",
        "",
        "A reward model is right near the texts that it has seen, and PPO looks for what it scores",
        "highest. What becomes of the truth? (Gao et al. 2023, arXiv 2210.10760.)",
        "",
        "    python benchmarks/overoptimisation.py",
        "",
        f"- the reward models: `python reward_model.py {judge}`",
        f"- PPO on each: `python ppo.py {policy} --reward_model FOLDER`",
        "",
        f"{seeds} seeds; the table has means, and standard deviations of the truth. The",
        "proxy is the score of the reward model; its unit is the standard deviation of the scores",
        "of the model's own samples. The truth is the share of right sums, which nothing is",
        "trained on. Its best is the best evaluation: early stopping saves it where it is known.",
        "",
        "![Score and right sums against the square root of the KL](overoptimisation.png)",
        "",
        overoptimisation.section(results),
        "",
        TRUSTED_TOO_FAR,
        "",
    ]


def page() -> str:
    """All sections, in the order of the labs' file."""
    reference = json.loads(REFERENCE.read_text())
    lines = [INTRODUCTION, ""]
    for name in EXPERIMENTS:
        samples = reference["samples"].get(name, {})
        lines += section(name, reference["experiments"][name], samples)
    lines += trusted_too_far()
    return "\n".join(lines).rstrip() + "\n"


def draw_pass_at_k(figures: dict[str, dict], output: Path) -> None:
    """pass@k against k, a line per variant: a colour per model, dashed before the training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="k samples", ylabel="pass@k, held-out sums")
    axes.set_title("Before and after RLOO: mean of 5 seeds", fontsize=10)
    for label, found in figures.items():
        color = "tab:orange" if label.startswith("unfinished") else "tab:blue"
        style = "--" if label.endswith("before") else ":" if label.endswith("1e-4") else "-"
        means = [found[f"pass@{k}"]["mean"] for k in PASS_AT]
        axes.plot(PASS_AT, means, style, color=color, lw=1.4, label=label)
    axes.set_xticks(PASS_AT, [str(k) for k in PASS_AT])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=90)


def main() -> None:
    (DOCS / "experiments").mkdir(exist_ok=True)
    for name, curves in json.loads(CURVES.read_text()).items():
        draw(name, curves, DOCS / "experiments" / f"{name}.png")
    base_model = json.loads(REFERENCE.read_text())["experiments"]["base_model"]
    draw_pass_at_k(base_model, DOCS / "experiments" / "base_model.png")
    (DOCS / "experiments.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
