"""What the metrics of a run warn of, with the cause and the remedy.

No file of ours that imports torch is imported here: tools/look.py shall open at once.
"""

from __future__ import annotations

import math
import statistics


def warnings_about(history: list[dict[str, float | None]], bf16: bool) -> list[tuple[str, str]]:
    """What the metrics of all steps so far warn of: (name, line with cause and remedy) each."""
    now, found = history[-1], []
    kl, last = now["objective/kl"], [m["objective/kl"] for m in history[-10:]]
    if len(last) == 10 and all(x is not None and math.isfinite(x) for x in last):
        # The sampled KL may be negative by chance; its mean over ten steps hardly.
        error = statistics.stdev(last) / len(last) ** 0.5
        if statistics.mean(last) < -0.02 - 4 * error:
            text = "the KL is negative beyond chance: samples and log-probs are of two"
            remedy = "distributions; look at temperature, top_k and dropout"
            found += [("negative KL", f"{text} {remedy}")]
    # Judged per token as well: 10 nats are much for 24 tokens and little for 500.
    if kl is not None and kl > 10 and now.get("objective/kl_token", math.inf) > 0.1:
        text = f"the KL is {kl:.0f}: the policy has left the reference, and what the reward"
        remedy = "doesn't measure is lost; raise --kl_coef or lower --learning_rate"
        found += [("large KL", f"{text} {remedy}")]
    deviation = now["val/ratio_max_dev_first"]
    if deviation > (0.5 if bf16 else 0.01):
        text = f"the ratio is off by {deviation:.2g} before the first update, and should be 1;"
        found += [("ratio", f"{text} leave dropout off, or try --bf16 false")]
    flat = now.get("reward/frac_flat_groups", 0)
    if flat > 0.5:
        text = f"in {flat:.0%} of the groups all rewards are equal, and they teach nothing:"
        remedy = "prompts solved already or too hard, or too few generations (--num_generations)"
        found += [("flat groups", f"{text} {remedy}")]
    truncated = now["length/truncated_frac"]
    if truncated > 0.5:
        text = f"{truncated:.0%} of the completions were cut at --max_new_tokens: raise it, unless"
        found += [("truncated", f"{text} the reward means unfinished text")]
    last = history[-5:]
    if len(last) == 5 and len({m["objective/scores"] for m in last}) == 1:
        text = "the mean reward has been the same for five steps: is the reward function constant?"
        found += [("constant reward", f"{text} python tools/inspect_reward.py shows it")]
    return found


def pair_warnings(history: list[dict[str, float]]) -> list[tuple[str, str]]:
    """What the metrics of all steps and evaluations so far warn of: (name, line with cause and
    remedy) each.
    """
    found = []
    steps = [m for m in history if "reward/mean" in m]
    evaluations = [m for m in history if "eval/loss" in m]
    losses = [m["eval/loss"] for m in evaluations]
    if losses and losses[-1] > min(losses) + 0.1:
        text = f"the held-out loss has risen from {min(losses):.2f} to {losses[-1]:.2f}: the model"
        remedy = "take more pairs, fewer steps, or --save_best"
        found += [("overfitting", f"{text} learns pairs by heart; {remedy}")]
    if steps and abs(steps[-1]["reward/mean"]) > 10:
        text = (
            f"the mean score is {steps[-1]['reward/mean']:.0f}, and differences alone are learnt:"
        )
        found += [("far scores", f"{text} raise --center_rewards_coef, to 0.01 say")]
    for m in evaluations[-1:]:
        if abs(m["eval/length_correlation"]) > 0.7:
            text = f"score and length correlate by {m['eval/length_correlation']:.2f}: a policy"
            found += [("length", f"{text} will learn the length; balance it in the pairs")]
    last = steps[-20:]
    if len(last) == 20 and statistics.mean(m["reward/accuracy"] for m in last) < 0.5:
        text = "for 20 steps not even half of the pairs were judged right:"
        found += [("worse than chance", f"{text} lower --learning_rate, look at the labels")]
    return found
