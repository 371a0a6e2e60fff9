"""What bfloat16 hides of small steps, and what weights that begin at random points of their
rounding interval change: for docs/precision.md.

  python benchmarks/precision.py --model FOLDER     # about two hours of one CPU core
  python benchmarks/precision.py --model FOLDER --workers 8    # on a GPU, where runs are longer
  python benchmarks/precision.py                    # tables and pictures alone

FOLDER holds SmolLM2-135M-Instruct on bfloat16's grid. A measurement that is in precision.json isn't
repeated: an interrupted command goes on where the file ends. The modes:

  float32     --bf16 false
  bfloat16    --bf16 true, with the weights as the checkpoint has them: spread_weights is left out
  spread      --bf16 true, as plainrlhf trains
  float32, spread    --bf16 false, but the weights are spread first
"""

import argparse
import contextlib
import copy
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import matplotlib as mpl
import numpy as np
import torch
from learning import COLOURS, INK, REPOSITORY, TEXTS
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpo
import tasks
from common import Rollout, disable_dropout, kl_estimate, masked_mean
from forward import completion_logprobs, logits_from, rollout_logprobs
from plumbing import models
from plumbing.config import parse_flags
from plumbing.data import load_task, sampling_options
from plumbing.models import load, load_policy, load_tokenizer, set_up_training, spread_weights
from plumbing.run import Run
from sampling import sample

RESULTS = Path(__file__).with_suffix(".json")
STEPS = 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUMS = "--prompts {folder}/sums.jsonl --eval_prompts {folder}/heldout.jsonl "
SUMS += f"--reward numeric_match --max_new_tokens 4 --num_steps {STEPS} --prompts_per_step 8"
LONG = SUMS.replace(f"--num_steps {STEPS}", "--num_steps 100")
README = "--task add --max_new_tokens 16 --num_steps 24 --prompts_per_step 8 --num_eval_prompts 200"
KEPT = ("objective/scores", "objective/kl", "val/sampler_kl")
MODES = ("float32", "bfloat16", "spread")
OTHER_RATES = ("8e-5", "1e-5", "4e-5", "5e-6")


# --- Runs of grpo.py ---


def shuffled(rewards: Tensor, *args: object) -> Tensor:
    """Advantages that have nothing to do with the completions: noise is all there is to learn."""
    found = GROUP_ADVANTAGES(rewards, *args)
    return found[torch.randperm(len(found))]


GROUP_ADVANTAGES = grpo.group_advantages


def jobs() -> Iterator[tuple[str, str, str, int]]:
    """(name, mode, flags, seed) of each run, the most wanted first."""
    for seed in (0, 1):
        for mode in MODES:
            yield "rate 2e-5", mode, SUMS, seed
    yield "README's command", "spread", README, 0
    for mode in ("spread", "float32"):
        yield "shuffled advantages", mode, SUMS, 0
    rates = [("8e-5", "bfloat16", 0), ("8e-5", "bfloat16", 1), ("8e-5", "spread", 0)]
    rates += [("4e-5", "bfloat16", 0), ("8e-5", "float32", 0)]
    rates += [(x, mode, seed) for seed in range(3) for x in OTHER_RATES for mode in MODES]
    for rate, mode, seed in rates[:5]:
        yield f"rate {rate}", mode, f"{SUMS} --learning_rate {rate}", seed
    yield "rate 2e-5", "float32, spread", SUMS, 0
    for seed in (2, 3, 4):
        for mode in MODES:
            yield "rate 2e-5", mode, SUMS, seed
    yield "shuffled advantages", "bfloat16", SUMS, 0
    for mode in MODES[1:]:
        yield "LoRA of rank 16", mode, f"{SUMS} --lora_r 16", 0
    for rate, mode, seed in rates[5:]:
        yield f"rate {rate}", mode, f"{SUMS} --learning_rate {rate}", seed


def long_jobs() -> Iterator[tuple[str, str, str, int]]:
    """Runs of 100 steps, for a GPU."""
    for seed in range(5):
        for rate in ("1e-6", "1e-5", "2.5e-6"):
            for mode in MODES:
                yield f"100 steps, rate {rate}", mode, f"{LONG} --learning_rate {rate}", seed
        for mode in MODES:
            flags = f"{LONG} --learning_rate 1e-5"
            yield "100 steps, rate 1e-5, shuffled advantages", mode, flags, seed


def train(model: str, name: str, mode: str, flags: str, seed: int) -> dict:
    """Run grpo.py in a mode: what is kept of it."""
    gc.collect()  # the run before may have left a cache of keys and values
    torch.cuda.empty_cache()
    bf16, changes = not mode.startswith("float32"), []
    if "shuffled" in name:
        changes = [(grpo, "group_advantages", shuffled)]
    if mode == "bfloat16":
        changes += [(module, "spread_weights", lambda *args: None) for module in (grpo, models)]
    if mode == "float32, spread":
        changes += [(grpo, "load_policy", load_and_spread)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_sums(Path(folder))
        for where, name, change in changes:
            stack.enter_context(mock.patch.object(where, name, change))
        args = f"--model {model} --bf16 {bf16} --seed {seed} --output_dir {folder}/run".split()
        args += "--eval_every 1000 --num_eval_prompts 1 --save_every 1000".split()
        args += flags.format(folder=folder).split() + ["--stop", "\n"] * ("sums.jsonl" in flags)
        # A checkpoint would be 1.6 GB that nobody resumes.
        stack.enter_context(mock.patch.object(Run, "_write_state", lambda run, file: file.touch()))
        started = time.process_time()
        quiet = stack.enter_context(open(os.devnull, "w"))
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            grpo.main(args)
        found = {"cpu_seconds": round(time.process_time() - started, 1)}
        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name()
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        lines = list(map(json.loads, lines))
        for key in ("eval/accuracy", "eval/accuracy_greedy") if "eval_prompts 200" in flags else ():
            found[key] = [round(line[key], 4) for line in (lines[0], lines[-1])]
        lines = [line for line in lines if "episode" in line]
        found |= {key: [round(line[key], 5) for line in lines] for key in KEPT}
        if "sums.jsonl" in flags and "lora_r" not in flags:
            found["served"] = served(f"{folder}/run/model", bf16)
        return found


def load_and_spread(config: object) -> tuple[nn.Module, object]:
    policy, tokenizer = load_policy(config)
    spread_weights(policy.base_model)
    return policy, tokenizer


def write_sums(folder: Path) -> None:
    """Sums of numbers below 30 after an example: 100 are held out, 800 are to train on."""
    rows = [(a, b) for a in range(30) for b in range(30)]
    random.Random(0).shuffle(rows)
    rows = [{"prompt": f"3+4=7\n{a}+{b}=", "answer": str(a + b)} for a, b in rows]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "heldout.jsonl").write_text("".join(lines[:100]))
    (folder / "sums.jsonl").write_text("".join(lines[100:]))


# --- What a model answers ---


def rows_of(tokenizer: object, texts: list[tuple[str, str]]) -> Rollout:
    """Prompts and the completions to score them with, as a rollout."""
    prompts, ends = zip(*[[tokenizer(x).input_ids for x in pair] for pair in texts])
    P, T = max(map(len, prompts)), max(map(len, ends))
    tokens = torch.tensor(
        [[0] * (P - len(p)) + p + c + [0] * (T - len(c)) for p, c in zip(prompts, ends)]
    ).to(DEVICE)
    mask = torch.tensor(
        [[0] * (P - len(p)) + [1] * len(p + c) + [0] * (T - len(c)) for p, c in zip(prompts, ends)]
    ).bool().to(DEVICE)  # fmt: skip
    completion = torch.tensor([[1] * len(c) + [0] * (T - len(c)) for c in ends]).bool().to(DEVICE)
    return Rollout(tokens, mask, completion, completion.float(), completion[:, 0])


@torch.no_grad()
def logits_of(model: nn.Module, rollout: Rollout, bf16: bool, head: Tensor | None = None) -> Tensor:
    """Logits (n, V) of the n completion tokens, by the forward pass that trains."""
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
        inputs = {"attention_mask": rollout.attention_mask.long(), "position_ids": positions}
        states = model.base_model(rollout.tokens, **inputs).last_hidden_state
    states = states[:, P - 1 : -1][rollout.completion_mask].float()
    return logits_from(model, states) if head is None else states @ head.T


def answers(model: nn.Module, tokenizer: object, texts: list[tuple[str, str]], bf16: bool) -> dict:
    """How probable the right completions are, and how many of them are the greedy ones."""
    rollout = rows_of(tokenizer, texts)
    logits, mask = logits_of(model, rollout, bf16), rollout.completion_mask
    tokens = rollout.tokens[:, -mask.shape[1] :]
    logprobs, right = torch.zeros(mask.shape, device=DEVICE), torch.ones_like(mask)
    chosen = logits.log_softmax(-1).gather(1, tokens[mask].unsqueeze(1)).squeeze(1)
    logprobs[mask], right[mask] = chosen, logits.argmax(-1) == tokens[mask]
    probability, greedy = logprobs.sum(1).exp().mean().item(), right.all(1).float().mean().item()
    return {"probability": round(probability, 4), "greedy": round(greedy, 4)}


def served(folder: str, bf16: bool) -> dict:
    """Of a saved model, on the sums that are held out: as it was trained, and with all its weights
    rounded to bfloat16, by the same arithmetic.
    """
    with tempfile.TemporaryDirectory() as sums:
        write_sums(Path(sums))
        rows = map(json.loads, Path(sums, "heldout.jsonl").read_text().splitlines())
        texts = [(row["prompt"], row["answer"] + "\n") for row in rows]
    model, tokenizer = load(AutoModelForCausalLM, folder).to(DEVICE), load_tokenizer(folder)
    found = {"trained": answers(model, tokenizer, texts, bf16)}
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    return found | {"rounded": answers(model, tokenizer, texts, bf16)}


# --- The same steps in each mode ---


def checkpoint_of(model: str, file: str | None, kind: str) -> nn.Module:
    """Weights on bfloat16's grid, on float16's, of the 4-bit file, or on no grid."""
    policy = load(AutoModelForCausalLM, file if kind == "4-bit file" else model)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            if kind == "float16":  # of weights that aren't on bfloat16's
                p.mul_(1 + 0.01 * torch.randn(p.shape, generator=numbers)).copy_(p.half())
            if kind == "no grid":
                p.mul_(1 + 0.01 * torch.randn(p.shape, generator=numbers))
    return policy.to(DEVICE)


def prepared(policy: nn.Module) -> nn.Module:
    """As the training forward in float32: attention written out, dropout off."""
    set_up_training(SimpleNamespace(bf16=False, gradient_checkpointing=False), policy)
    policy.set_attn_implementation("eager")
    disable_dropout(policy)
    return policy


def step_batches(tokenizer: object) -> list[Rollout]:
    """Batches of eight sums, each with a right and a wrong answer."""
    rows = [(a, b) for a in range(30) for b in range(30)]
    random.Random(1).shuffle(rows)
    texts = []
    for a, b in rows[:32]:
        texts += [(f"3+4=7\n{a}+{b}=", f"{a + b + wrong}\n") for wrong in (0, 1)]
    return [rows_of(tokenizer, texts[i : i + 16]) for i in range(0, 64, 16)]


def steps(start: nn.Module, batches: list[Rollout], rate: float, numbers: list[int]) -> Iterator:
    """AdamW in float32 on right answers against wrong ones: after each of the `numbers` of steps
    (number, {name: how far each weight has moved}). Moments are grpo.py's.
    """
    policy = copy.deepcopy(start)
    options = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(policy.parameters(), **options)
    sign = torch.tensor([1.0, -1.0] * 8, device=DEVICE).unsqueeze(1)
    for number in range(1, max(numbers) + 1):
        batch = batches[(number - 1) % 4]
        logprobs, _ = completion_logprobs(policy, batch, 1.0, entropy=False)
        (-(sign * logprobs).sum() / batch.completion_mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number in numbers:
            old = dict(start.named_parameters())
            yield number, {k: p.detach() - old[k].detach() for k, p in policy.named_parameters()}


def compare(start: nn.Module, moves: dict[str, Tensor], batch: Rollout) -> dict[str, dict]:
    """What each mode sees of the moves: KL (nats a completion) of the model after them to the one
    before; the change of all logits against float32's: cosine, and gain, which is its length along
    float32's, 1 where the moves are seen in full. "ten bits": spread, and the head's weights are
    read with ten bits, as TF32 does.
    """
    found, changes = {}, {}
    start = copy.deepcopy(start)
    for mode in (*MODES, "ten bits"):
        if mode == "spread":
            spread_weights(start.base_model)
        # A GPU reads ten bits by itself, where it may.
        torch.backends.cuda.matmul.allow_tf32 = mode == "ten bits"
        imitate = mode == "ten bits" and DEVICE == "cpu"
        head = (lambda: ten_bits(start.lm_head.weight)) if imitate else (lambda: None)
        before = logits_of(start, batch, mode != "float32", head())
        origin = {name: p.detach().clone() for name, p in start.named_parameters()}
        with torch.no_grad():
            for name, p in start.named_parameters():
                p.add_(moves[name])
        after = logits_of(start, batch, mode != "float32", head())
        with torch.no_grad():
            for name, p in start.named_parameters():
                p.copy_(origin[name])
        new, old = after.log_softmax(-1), before.log_softmax(-1)
        kl = (new.exp() * (new - old)).sum() / len(batch.tokens)
        torch.backends.cuda.matmul.allow_tf32 = False  # the steps are in float32
        changes[mode] = (after - before).flatten().double()
        seen, whole = changes[mode], changes["float32"]
        gain = (seen @ whole / (whole @ whole)).item()
        cosine = gain * (whole.norm() / seen.norm().clamp(min=1e-30)).item()
        found[mode] = {
            "kl": round(kl.item(), 5),
            "cosine": round(cosine, 3),
            "gain": round(gain, 3),
        }
    return found


def ten_bits(weights: Tensor) -> Tensor:
    """To the nearest numbers with ten bits behind the leading one."""
    bits = weights.detach().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def one_step(model: str, file: str | None, results: dict) -> None:
    """The table of the first steps."""
    batches = step_batches(load_tokenizer(model))
    wanted = [("bfloat16", rate, [1]) for rate in ("1e-6", "2.5e-6", "2e-5")]
    wanted += [("float16", "1e-6", [1]), ("no grid", "2.5e-6", [1])]
    wanted += [("4-bit file", "1e-6", [1])] if file else []
    wanted += [("bfloat16", rate, [2, 4, 8, 16, 32]) for rate in ("1e-6", "5e-6")]
    for kind, rate, numbers in wanted:
        names = {number: f"{kind}, {rate}, {number}" for number in numbers}
        if set(names.values()) <= set(results):
            continue
        start = prepared(checkpoint_of(model, file, kind))
        for number, moves in steps(start, batches, float(rate), numbers):
            results[names[number]] = compare(start, moves, batches[0])
            yield f"{names[number]}: {results[names[number]]}"


# --- How far a step is from being seen ---


def spacings(model: str) -> dict:
    """Of the weights of linear layers: median size, and how many steps of a rate in one direction
    pass half a spacing of bfloat16 for a tenth, half and nine tenths of them.
    """
    policy = load(AutoModelForCausalLM, model)
    linear = [m.weight for m in policy.base_model.modules() if type(m) is nn.Linear]
    weights = torch.cat([p.detach().flatten()[::7] for p in linear]).abs()
    weights = weights[weights > 0]
    half = torch.exp2(weights.log2().floor() - 8)  # spacing: 2**-7 of the power of two below
    found = {"median": round(weights.median().item(), 5)}
    found["on the grid"] = round((weights == weights.bfloat16().float()).float().mean().item(), 4)
    for rate in (1e-6, 2.5e-6, 5e-6, 2e-5):
        shares = torch.quantile(half[::50], torch.tensor([0.1, 0.5, 0.9])) / rate
        found[f"{rate:g}"] = [round(x, 1) for x in shares.tolist()]
    return found


def set_up_seconds(model: str) -> float:
    """CPU seconds that spreading all linear weights takes: the median of five."""
    policy, seconds = load(AutoModelForCausalLM, model), []
    for _ in range(5):
        started = time.process_time()
        spread_weights(policy.base_model)
        seconds.append(time.process_time() - started)
    return round(sorted(seconds)[2], 2)


def halfway(file: str) -> float:
    """The share of the linear weights that lie halfway between two numbers of bfloat16."""
    policy = load(AutoModelForCausalLM, file)
    linear = [m.weight for m in policy.base_model.modules() if type(m) is nn.Linear]
    bits = torch.cat([p.detach().flatten() for p in linear]).view(torch.int32)
    return round((bits & 0xFFFF == 0x8000).float().mean().item(), 4)


def passes(model: str) -> dict[str, list[float]]:
    """CPU seconds of forward and backward pass of 16 rows of 16 + 4 tokens, without and with
    --bf16: medians of five rounds in which they alternate.
    """
    tokens = torch.randint(40_000, (16, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    rollout = Rollout(tokens, mask, mask[:, -4:], mask[:, -4:].float(), mask[:, -1])
    policies, seconds = {}, {"float32": [], "bfloat16": []}
    for mode in seconds:
        policies[mode] = load(AutoModelForCausalLM, model)
        config = SimpleNamespace(bf16=mode == "bfloat16", gradient_checkpointing=False)
        set_up_training(config, policies[mode])
        if config.bf16:
            spread_weights(policies[mode].base_model)
    for _ in range(6):
        for mode, policy in policies.items():
            started = time.process_time()
            logprobs, _ = completion_logprobs(policy, rollout, 1.0, bf16=mode == "bfloat16")
            between = time.process_time()
            logprobs.sum().backward()
            seconds[mode].append((between - started, time.process_time() - between))
            policy.zero_grad()
    # The first round also fills caches.
    return {mode: np.median(x[1:], 0).round(2).tolist() for mode, x in seconds.items()}


# --- Tables and pictures ---


def half(run: dict, key: str) -> float:
    """The mean over the second half of the steps."""
    return float(np.mean(run[key][len(run[key]) // 2 :]))


def spread_of(values: list[float], digits: int) -> str:
    """Mean ± standard deviation."""
    error = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}" if values else ""


def table_of_steps(found: dict[str, dict]) -> str:
    lines = ["| checkpoint, rate, steps | float32 KL | bfloat16: KL | cosine | gain | spread: KL |"]
    lines[0] += " cosine | gain | gain, head of ten bits |"
    lines.append("|---" * 9 + "|")
    for name, of_mode in found.items():
        cells = [name, f"{of_mode['float32']['kl']:.4f}"]
        for mode in MODES[1:]:
            seen = of_mode[mode]
            cells += [f"{seen['kl']:.4f}", f"{seen['cosine']:.2f}", f"{seen['gain']:.2f}"]
        lines.append(f"| {' | '.join([*cells, format(of_mode['ten bits']['gain'], '.3f')])} |")
    return "\n".join(lines)


def table_of_runs(found: dict[str, dict]) -> str:
    """Means over the second half of the steps; the right answer's probability on held-out sums, as
    trained and rounded to bfloat16; the largest val/sampler_kl of a step; CPU seconds of a run.
    """
    lines = ["| run | mode | seeds | accuracy | KL | as trained | rounded | greedy | rounded |"]
    lines[0] += " sampler_kl | seconds |"
    lines.append("|---" * 11 + "|")
    for name, of_mode in found.items():
        for mode, by_seed in of_mode.items():
            runs = by_seed.values()
            cells = [name, mode, str(len(runs))]
            cells += [spread_of([half(run, key) for run in runs], 3) for key in KEPT[:2]]
            for what in ("probability", "greedy"):
                for form in ("trained", "rounded"):
                    values = [run["served"][form][what] for run in runs if "served" in run]
                    cells.append(spread_of(values, 3))
            cells.append(f"{max(max(run['val/sampler_kl']) for run in runs):.4f}")
            cells.append(f"{np.mean([run['cpu_seconds'] for run in runs]):.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_weight() -> None:
    """Weights between the numbers that bfloat16 has, before and after a step."""
    mpl.rcParams.update(dict.fromkeys(TEXTS, INK))
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axes = figure.subplots()
    step, numbers = 0.15, np.random.default_rng(0)  # the step is of a spacing
    spread = numbers.permutation((np.arange(20) + 0.5) / 20 - 0.5)
    rows = [
        (3.1, [0.0], "On the grid, where checkpoints lie: no step is seen."),
        (
            2.15,
            [-0.4999, 0.4999],
            "Halfway, as in a 4-bit file: half of the steps show, as a whole spacing.",
        ),
        (1.2, spread, "Spread: {} of 20 steps show, each as a whole spacing."),
    ]
    axes.axvspan(-0.5, 0.5, color=INK, alpha=0.15, lw=0)
    for grid in (-1, 0, 1):
        axes.plot([grid, grid], [-0.1, 3.6], color=INK, lw=0.8, ls=":")
    for height, points, text in rows:
        for i, x in enumerate(points):
            y, seen = height - 0.06 * i * (len(points) > 2), x + step > 0.5
            options = {"color": COLOURS["RLOO" if seen else "GRPO"], "lw": 1.5}
            arrow = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0} | options
            axes.annotate("", (x + step, y), (x, y), arrowprops=arrow)
            axes.plot(x, y, "o", color=options["color"], ms=4)
        text = text.format(sum(x + step > 0.5 for x in points))
        axes.text(0, height + 0.25, text, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-1.45, 1.45), ylim=(-0.1, 3.6), yticks=[], xticks=[-1, 0, 1])
    axes.set_xticklabels(["0.1196", "0.1201", "0.1206"])
    axes.set_xlabel("three numbers of bfloat16; a weight in the grey band is read as 0.1201")
    axes.xaxis.label.set_size(9)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    figure.savefig(REPOSITORY / "docs" / "precision-weight.png", dpi=130, transparent=True)


def draw_runs(results: dict) -> None:
    """KL and accuracy of the runs of 100 steps, and what is seen of many small steps."""
    mpl.rcParams.update(dict.fromkeys(TEXTS, INK))
    figure = Figure(figsize=(6.4, 9.4), layout="constrained")
    grid = figure.add_gridspec(4, 2)
    colours = dict(zip(MODES, (INK, COLOURS["GRPO"], COLOURS["RLOO"])))
    for row, rate in enumerate(("1e-6", "2.5e-6", "1e-5")):
        for column, key in enumerate(KEPT[:2]):
            axes = figure.add_subplot(grid[row, column])
            by_mode = results["runs"][f"100 steps, rate {rate}"]
            for mode, line in zip(("bfloat16", "spread", "float32"), ("-", "-", ":")):
                by_seed = by_mode[mode]
                y = np.array(
                    [np.convolve(run[key], np.full(5, 0.2), "valid") for run in by_seed.values()]
                )
                x = np.arange(3, 3 + y.shape[1])
                axes.plot(x, y.mean(0), line, label=mode, color=colours[mode], lw=1.9)
                axes.fill_between(x, y.min(0), y.max(0), color=colours[mode], alpha=0.14, lw=0)
            what = ("accuracy", "KL (nats)")[column]
            axes.set(ylabel=f"{what}, rate {rate}", ylim=(0, (0.9, 4.6)[column]))
            axes.grid(alpha=0.2)
    axes.set_xlabel("step (means over five)")
    axes = figure.add_subplot(grid[3, :])
    for rate, style in (("1e-6", "-"), ("5e-6", "--")):
        numbers = [n for n in (1, 2, 4, 8, 16, 32) if f"bfloat16, {rate}, {n}" in results["steps"]]
        for mode in MODES[1:]:
            y = [results["steps"][f"bfloat16, {rate}, {n}"][mode]["gain"] for n in numbers]
            axes.plot(numbers, y, style, color=colours[mode], lw=1.7, label=f"{mode}, {rate}")
    axes.set(ylabel="share that is seen", xlabel="AdamW steps")
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, map(str, numbers))
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    lines = figure.axes[0].get_lines()
    names = [line.get_label() for line in lines]
    figure.legend(lines, names, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(REPOSITORY / "docs" / "precision.png", dpi=110, transparent=True)


# --- Decoding that differs from training, by mistake ---

MISTAKES = {"none": {}, "top_k 50": {"top_k": 50}, "top_p 0.95": {"top_p": 0.95}}
MISTAKES |= {"temperature 0.9": {"temperature": 0.9}, "temperature 0.7": {"temperature": 0.7}}


def sampler_kl(model: str) -> dict[str, dict[str, float]]:
    """val/sampler_kl before training, where the sampler is mistaken: of film reviews, and of the
    sums of the runs above.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_sums(Path(folder))
        sums = f"--prompts {folder}/sums.jsonl --reward numeric_match --max_new_tokens 4"
        for task, flags in (("reviews", "--max_new_tokens 16"), ("sums", sums)):
            args = f"--model {model} --bf16 true {flags}".split()
            config = parse_flags(grpo.Config, "", {"tiny": grpo.TINY}, args)
            policy, tokenizer = load_policy(config)
            prompts = load_task(config, tasks, policy, tokenizer)
            spread_weights(policy.base_model)
            options = sampling_options(config, policy, tokenizer)
            options |= {"num_generations": 1, "temperature": config.temperature}
            for name, change in MISTAKES.items():
                change = {"generator": torch.Generator().manual_seed(0)} | change
                rollout = sample(policy, *prompts.encode(prompts.train[:24]), **options | change)
                policy.train()
                off = kl_estimate(rollout.logprobs, rollout_logprobs(policy, rollout, config), "k3")
                mean = masked_mean(off, rollout.completion_mask).item()
                found.setdefault(task, {})[name] = round(mean, 5)
    return found


def float16_sampler(model: str) -> dict[str, dict[str, float]]:
    """What a sampler with weights in float16 sees of AdamW steps, where training is in float32: the
    gain, as in `compare`, and the KL of sampler to policy in nats a token.
    """
    batches = step_batches(load_tokenizer(model))
    starts = {"as the checkpoint": prepared(checkpoint_of(model, None, "bfloat16"))}
    starts["spread"] = copy.deepcopy(starts["as the checkpoint"])
    spread_weights(starts["spread"].base_model, torch.float16)
    origin = logits_of(starts["as the checkpoint"], batches[0], False)
    before = logits_of(starts["spread"], batches[0], False)
    found = {"KL of the spread policy to the checkpoint": mean_kl(before, origin)}
    for rate, numbers in (("1e-6", [1, 8, 16]), ("2e-5", [1, 4])):
        for number, moves in steps(starts["as the checkpoint"], batches, float(rate), numbers):
            for name, start in starts.items():
                policies = [start, copy.deepcopy(start)]
                with torch.no_grad():
                    for key, p in policies[1].named_parameters():
                        p.add_(moves[key])
                exact = [logits_of(policy, batches[0], False) for policy in policies]
                policies = map(copy.deepcopy, policies)
                rounded = [
                    logits_of(policy.half().float(), batches[0], False) for policy in policies
                ]
                whole, seen = ((x[1] - x[0]).flatten().double() for x in (exact, rounded))
                found[f"{rate}, {number}, {name}"] = {
                    "gain": round((seen @ whole / (whole @ whole)).item(), 3),
                    "kl": mean_kl(rounded[1], exact[1]),
                }
    return found


def mean_kl(logits: Tensor, others: Tensor) -> float:
    """KL of the first distributions to the second, a mean over rows."""
    new, old = logits.log_softmax(-1), others.log_softmax(-1)
    return round((new.exp() * (new - old)).sum(-1).mean().item(), 6)


# --- All of it ---


def measure(model: str, file: str | None, results: dict, save: Callable[[], None]) -> None:
    """Make the measurements that aren't in `results`, and save each."""
    alone = {"spacings": spacings, "set-up, CPU seconds": set_up_seconds, "sampler": sampler_kl}
    alone |= {"sampler in float16": float16_sampler, "CPU seconds of passes": passes}
    alone["answers before training"] = lambda model: served(model, bf16=True)["trained"]
    for name, of_model in alone.items():
        if name not in results:
            results[name] = of_model(model)
            save()
    if file and "halfway, 4-bit file" not in results:
        results["halfway, 4-bit file"] = halfway(file)
        save()
    for line in one_step(model, file, results.setdefault("steps", {})):
        save()
        print(line, flush=True)


def measure_runs(model: str, workers: int, results: dict, save: Callable[[], None]) -> None:
    """Make the runs that aren't in `results`, several at a time, and save each."""
    runs, wanted = results.setdefault("runs", {}), jobs() if DEVICE == "cpu" else long_jobs()
    wanted = [job for job in wanted if str(job[3]) not in runs.get(job[0], {}).get(job[1], {})]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = {pool.submit(train, model, *job): job for job in wanted}
        for future in as_completed(done):
            name, mode, _, seed = done[future]
            found = runs.setdefault(name, {}).setdefault(mode, {})[str(seed)] = future.result()
            save()
            print(f"{name}, {mode}, seed {seed}: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder or name; default: tables and pictures alone")
    parser.add_argument("--four_bit", help="folder with the weights of the 4-bit file, unrounded")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (default: 1)")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.model:
        save = lambda: RESULTS.write_text(json.dumps(results) + "\n")  # noqa: E731
        if DEVICE == "cpu":
            measure(options.model, options.four_bit, results, save)
        else:
            found = results.setdefault("steps on a GPU", {})
            for line in one_step(options.model, None, found):
                save()
                print(line, flush=True)
        measure_runs(options.model, options.workers, results, save)
    print(table_of_steps(results["steps"]), table_of_runs(results["runs"]), sep="\n\n")
    draw_weight()
    draw_runs(results)


if __name__ == "__main__":
    main()
