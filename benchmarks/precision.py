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


# --- Runs of grpo.py ---


def shuffled(rewards: Tensor, *args: object) -> Tensor:
    """Advantages that have nothing to do with the completions: noise is all there is to learn."""
    found = GROUP_ADVANTAGES(rewards, *args)
    return found[torch.randperm(len(found))]


GROUP_ADVANTAGES = grpo.group_advantages


def jobs() -> Iterator[tuple[str, str, str, int]]:
    """(name, mode, flags, seed) of each short run, for a CPU, the most wanted first."""
    yield "README's command", "spread", README, 0
    for rate, seeds in (("2e-5", 5), ("8e-5", 3), ("4e-5", 3), ("1e-5", 2), ("5e-6", 2)):
        for seed in range(seeds):
            for mode in MODES:
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
        if "sums.jsonl" in flags:
            found["served"] = served(f"{folder}/run/model", bf16)
        return found


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
def logits_of(model: nn.Module, rollout: Rollout, bf16: bool) -> Tensor:
    """Logits (n, V) of the n completion tokens, by the forward pass that trains."""
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
        inputs = {"attention_mask": rollout.attention_mask.long(), "position_ids": positions}
        states = model.base_model(rollout.tokens, **inputs).last_hidden_state
    return logits_from(model, states[:, P - 1 : -1][rollout.completion_mask].float())


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
    """What each mode sees of the moves: KL of the model after them to the one before, and `share`
    of float32's change of the logits.
    """
    found, whole, start = {}, None, copy.deepcopy(start)
    for mode in MODES:
        if mode == "spread":
            spread_weights(start.base_model)
        before, after = logits_around(start, moves, batch, mode != "float32")
        whole = after - before if mode == "float32" else whole
        found[mode] = {"kl": kl_of(after, before, batch), **share(after - before, whole)}
    return found


def moved(start: nn.Module, moves: dict[str, Tensor]) -> nn.Module:
    """A copy whose weights have moved."""
    policy = copy.deepcopy(start)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            p.add_(moves[name])
    return policy


def logits_around(start: nn.Module, moves: dict, batch: Rollout, bf16: bool) -> list[Tensor]:
    """Logits (n, V) before and after the moves."""
    return [logits_of(policy, batch, bf16) for policy in (start, moved(start, moves))]


def share(seen: Tensor, whole: Tensor) -> dict[str, float]:
    """Of the changes of all logits: their cosine, and the gain, which is the length of what is seen
    along the whole, 1 where it is seen in full.
    """
    seen, whole = seen.flatten().double(), whole.flatten().double()
    gain = (seen @ whole / (whole @ whole)).item()
    cosine = gain * (whole.norm() / seen.norm().clamp(min=1e-30)).item()
    return {"cosine": round(cosine, 3), "gain": round(gain, 3)}


def kl_of(logits: Tensor, others: Tensor, batch: Rollout) -> float:
    """KL of the first policy to the second, in nats a completion."""
    new, old = logits.log_softmax(-1), others.log_softmax(-1)
    return round(((new.exp() * (new - old)).sum() / len(batch.tokens)).item(), 5)


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


# --- The control: where must weights begin, so that a step is seen? ---


def uniform(width: float) -> Callable[[tuple, torch.Generator], Tensor]:
    return lambda shape, numbers: (torch.rand(shape, generator=numbers) - 0.5) * width


def gaussian(shape: tuple, numbers: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=numbers) / 12**0.5


STARTS = {  # distances from the grid, in spacings of bfloat16: those from -0.5 to 0.5 round to it
    "on the grid": uniform(0),
    "uniform over half of the interval": uniform(0.5),
    "uniform over the interval": uniform(1),
    "uniform over twice the interval": uniform(2),
    "Gaussian, as wide as the interval": gaussian,
}


def begun(weights: Tensor, start: str, numbers: torch.Generator) -> Tensor:
    """Weights of bfloat16's grid, put at distances from it. Zeros stay 0."""
    distances = STARTS[start](weights.shape, numbers)
    steps = (distances * 65535).int()  # an interval without its ends, in float32 numbers
    bits = weights.view(torch.int32) + steps  # read as integers, they are in order
    return bits.view(torch.float32).where(weights != 0, weights)


def rounded_by_chance(weights: Tensor, numbers: torch.Generator) -> Tensor:
    """Stochastic rounding to bfloat16: up as often as the distance to the number below says."""
    noise = torch.randint(65536, weights.shape, generator=numbers, dtype=torch.int32)
    return ((weights.view(torch.int32) + noise) & -65536).view(torch.float32)


def put(policy: nn.Module, change: Callable[..., Tensor], *args: object) -> nn.Module:
    """The policy, with the weights of its linear layers changed in place."""
    for m in (m for m in policy.base_model.modules() if type(m) is nn.Linear):
        m.weight.data = change(m.weight.data, *args)
    return policy


def control(model: str) -> dict[str, dict]:
    """The same AdamW step of 2.5e-6, computed in bfloat16 from other starts of the linear layers'
    weights. "kl" is that of the start to the checkpoint; where each pass rounds by chance, that of
    one pass to another of the same weights. "simulated" is the gain of single weights, without a
    model. Three draws of each: mean, lowest, highest.
    """
    batches, rate = step_batches(load_tokenizer(model)), 2.5e-6
    policy, batch = prepared(checkpoint_of(model, None, "bfloat16")), batches[0]
    ((_, moves),) = steps(policy, batches, rate, [1])
    exact, exact_after = logits_around(policy, moves, batch, False)
    whole, origin = exact_after - exact, logits_of(policy, batch, True)
    found = {"float32": {"kl of the step": kl_of(exact_after, exact, batch)}}

    linear = [m.weight for m in policy.base_model.modules() if type(m) is nn.Linear]
    names = {name for name, p in policy.named_parameters() if any(p is w for w in linear)}
    others = {name: move * (name not in names) for name, move in moves.items()}
    after = logits_of(moved(policy, others), batch, True)
    found["on the grid, only embedding and norms move"] = share(after - origin, whole)

    single = torch.cat([w.detach().flatten()[::7] for w in linear])
    numbers = torch.Generator().manual_seed(0)
    step = rate * (2.0 * torch.randint(2, single.shape, generator=numbers) - 1)
    for name in STARTS:
        draws = []
        for seed in range(3):
            numbers, start = torch.Generator().manual_seed(seed), copy.deepcopy(policy)
            put(start, begun, name, numbers)
            before, after = logits_around(start, moves, batch, True)
            draws += [share(after - before, whole) | {"kl": kl_of(before, origin, batch)}]
        x = begun(single, name, numbers)
        seen = (x + step).bfloat16().float() - x.bfloat16().float()
        found[name] = means(draws) | {"simulated": share(seen, step)["gain"]}
    for name in ("on the grid", "uniform over the interval"):
        draws = []
        for seed in range(3):
            numbers, start = torch.Generator().manual_seed(seed), copy.deepcopy(policy)
            put(start, begun, name, numbers)
            passes = [start, start, moved(start, moves)]
            passes = [put(copy.deepcopy(x), rounded_by_chance, numbers) for x in passes]
            before, again, after = (logits_of(x, batch, True) for x in passes)
            draws += [share(after - before, whole) | {"kl": kl_of(again, before, batch)}]
        x = begun(single, name, numbers)
        seen = rounded_by_chance(x + step, numbers) - rounded_by_chance(x, numbers)
        found[f"{name}, each pass rounds by chance"] = means(draws)
        found[f"{name}, each pass rounds by chance"]["simulated"] = share(seen, step)["gain"]
    return found


def means(draws: list[dict[str, float]]) -> dict[str, list[float]]:
    """Of each number the mean, the lowest and the highest draw."""
    columns = {key: [draw[key] for draw in draws] for key in draws[0]}
    return {key: [round(np.mean(x), 4), min(x), max(x)] for key, x in columns.items()}


# --- How far a step is from being seen ---


def spacings(model: str) -> dict:
    """Of the weights of linear layers: median size, and how many steps of 2.5e-6 in one direction
    pass half a spacing of bfloat16 at the median.
    """
    policy = load(AutoModelForCausalLM, model)
    linear = [m.weight for m in policy.base_model.modules() if type(m) is nn.Linear]
    weights = torch.cat([p.detach().flatten()[::7] for p in linear]).abs()
    weights = weights[weights > 0]
    half = torch.exp2(weights.log2().floor() - 8)  # spacing: 2**-7 of the power of two below
    steps_to_half = round(half.median().item() / 2.5e-6, 1)
    return {"median": round(weights.median().item(), 5), "steps of 2.5e-6": steps_to_half}


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
    lines[0] += " cosine | gain |"
    lines.append("|---" * 8 + "|")
    for name, of_mode in found.items():
        cells = [name, f"{of_mode['float32']['kl']:.4f}"]
        for mode in MODES[1:]:
            seen = of_mode[mode]
            cells += [f"{seen['kl']:.4f}", f"{seen['cosine']:.2f}", f"{seen['gain']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
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
            options |= {"num_generations": 1}
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
    for rate in ("1e-6", "2e-5"):
        ((_, moves),) = steps(starts["as the checkpoint"], batches, float(rate), [1])
        for name, start in starts.items():
            exact = logits_around(start, moves, batches[0], False)
            policies = [copy.deepcopy(start), moved(start, moves)]
            rounded = [logits_of(x.half().float(), batches[0], False) for x in policies]
            found[f"{rate}, {name}"] = share(rounded[1] - rounded[0], exact[1] - exact[0])
            found[f"{rate}, {name}"]["kl"] = mean_kl(rounded[1], exact[1])
    return found


def mean_kl(logits: Tensor, others: Tensor) -> float:
    """KL of the first distributions to the second, a mean over rows."""
    new, old = logits.log_softmax(-1), others.log_softmax(-1)
    return round((new.exp() * (new - old)).sum(-1).mean().item(), 6)


# --- All of it ---


def measure(model: str, file: str | None, results: dict, save: Callable[[], None]) -> None:
    """Make the measurements that aren't in `results`, and save each."""
    alone = {"spacings": spacings, "control": control, "sampler": sampler_kl}
    alone |= {"sampler in float16": float16_sampler, "CPU seconds of passes": passes}
    alone["answers before training"] = lambda model: served(model, bf16=True)["trained"]
    for name, of_model in alone.items():
        if name not in results:
            results[name] = of_model(model)
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
