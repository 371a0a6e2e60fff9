"""What bfloat16 hides of small steps, and what weights that begin at random points of their
rounding interval change: for docs/precision.md.

  python benchmarks/precision.py --model FOLDER     # about two hours of one CPU core
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
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpo
from common import Rollout, completion_logprobs, disable_dropout, logits_from
from plumbing import models
from plumbing.models import load, load_tokenizer, set_up_training, spread_weights

RESULTS = Path(__file__).with_suffix(".json")
STEPS = 12
SUMS = "--prompts {folder}/sums.jsonl --eval_prompts {folder}/heldout.jsonl "
SUMS += f"--reward numeric_match --max_new_tokens 4 --num_steps {STEPS} --prompts_per_step 8"
TEXT = "--task sentiment"
KEPT = ("objective/scores", "objective/kl", "policy/approxkl_avg", "val/sampler_kl")
MODES = ("float32", "bfloat16", "spread")
OTHER_RATES = ("5e-6", "1e-5", "4e-5", "8e-5")


# --- Runs of grpo.py ---


def shuffled(rewards: Tensor, *args: object) -> Tensor:
    """Advantages that have nothing to do with the completions: noise is all there is to learn."""
    found = GROUP_ADVANTAGES(rewards, *args)
    return found[torch.randperm(len(found))]


def mistaken(change: dict, *args: object) -> dict:
    """Draw from another distribution than the one that trains."""
    return SAMPLING_OPTIONS(*args) | change


GROUP_ADVANTAGES, SAMPLING_OPTIONS = grpo.group_advantages, grpo.sampling_options
CONTROL = [(grpo, "group_advantages", shuffled)]
MISTAKES = {"no mistake": {}, "top_k 50": {"top_k": 50}, "top_p 0.95": {"top_p": 0.95}}
MISTAKES |= {"temperature 0.9": {"temperature": 0.9}, "temperature 0.7": {"temperature": 0.7}}


def jobs() -> Iterator[tuple[str, str, str, int, list]]:
    """(name, mode, flags, seed, changes) of each run, the most wanted first."""
    for seed in range(5):
        for mode in MODES:
            yield "rate 2e-5", mode, SUMS, seed, []
    for seed in range(3):
        for mode in MODES:
            for rate in OTHER_RATES:
                yield f"rate {rate}", mode, f"{SUMS} --learning_rate {rate}", seed, []
        if seed == 0:
            for task, flags in {"sums": SUMS, "text": TEXT}.items():
                for name, change in MISTAKES.items():
                    changes = [(grpo, "sampling_options", partial(mistaken, change))]
                    yield f"{task}, {name}", "spread", f"{flags} --num_steps 2", 0, changes
        if seed < 2:
            for mode in MODES:
                yield "shuffled advantages", mode, SUMS, seed, CONTROL
                yield "LoRA of rank 16", mode, f"{SUMS} --lora_r 16", seed, []
            yield "rate 2e-5", "float32, spread", SUMS, seed, []


def train(model: str, mode: str, flags: str, seed: int, changes: list) -> dict:
    """Run grpo.py in a mode: what is kept of it."""
    bf16 = not mode.startswith("float32")
    if mode == "bfloat16":
        changes = [*changes, (models, "spread_weights", lambda backbone: None)]
    if mode == "float32, spread":
        changes = [*changes, (grpo, "set_up_training", set_up_and_spread)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_sums(Path(folder))
        for where, name, change in changes:
            stack.enter_context(mock.patch.object(where, name, change))
        args = flags.format(folder=folder).split() + ["--stop", "\n"] * ("sums" in flags)
        args += f"--model {model} --bf16 {bf16} --seed {seed} --output_dir {folder}/run".split()
        args += "--eval_every 1000 --num_eval_prompts 1 --save_every 1000".split()
        started = time.process_time()
        quiet = stack.enter_context(open(os.devnull, "w"))
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            grpo.main(args)
        found = {"cpu_seconds": round(time.process_time() - started, 1)}
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        lines = [line for line in map(json.loads, lines) if "episode" in line]
        found |= {key: [round(line[key], 5) for line in lines] for key in KEPT}
        if len(lines) == STEPS and "lora_r" not in flags:
            found["served"] = served(f"{folder}/run/model", bf16)
        return found


def set_up_and_spread(config: object, *policies: nn.Module) -> None:
    set_up_training(config, *policies)
    for policy in policies:
        spread_weights(policy.base_model)


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
    )
    mask = torch.tensor(
        [[0] * (P - len(p)) + [1] * len(p + c) + [0] * (T - len(c)) for p, c in zip(prompts, ends)]
    ).bool()
    completion = torch.tensor([[1] * len(c) + [0] * (T - len(c)) for c in ends]).bool()
    return Rollout(tokens, mask, completion, completion.float(), completion[:, 0])


@torch.no_grad()
def logits_of(model: nn.Module, rollout: Rollout, bf16: bool, head: Tensor | None = None) -> Tensor:
    """Logits (n, V) of the n completion tokens, by the forward pass that trains."""
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
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
    logprobs, right = torch.zeros(mask.shape), torch.ones(mask.shape, dtype=torch.bool)
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
    model, tokenizer = load(AutoModelForCausalLM, folder), load_tokenizer(folder)
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
    return policy


def step_batches(tokenizer: object) -> list[Rollout]:
    """Four batches of eight sums, each with a right and a wrong answer, and one to look at."""
    rows = [(a, b) for a in range(30) for b in range(30)]
    random.Random(1).shuffle(rows)
    texts = []
    for a, b in rows[:40]:
        texts += [(f"3+4=7\n{a}+{b}=", f"{a + b + wrong}\n") for wrong in (0, 1)]
    return [rows_of(tokenizer, texts[i : i + 16]) for i in range(0, 80, 16)]


def steps(start: nn.Module, batches: list[Rollout], rate: float, numbers: list[int]) -> Iterator:
    """AdamW in float32 on right answers against wrong ones: after each of the `numbers` of steps
    (number, {name: how far each weight has moved}). Moments are grpo.py's.
    """
    policy = copy.deepcopy(start)
    options = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(policy.parameters(), **options)
    sign = torch.tensor([1.0, -1.0] * 8).unsqueeze(1)
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
        head = (lambda: ten_bits(start.lm_head.weight)) if mode == "ten bits" else (lambda: None)
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
        start = checkpoint_of(model, file, kind)
        # As the training forward: attention written out, dropout off.
        set_up_training(SimpleNamespace(bf16=False, gradient_checkpointing=False), start)
        start.set_attn_implementation("eager")
        disable_dropout(start)
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


# --- All of it ---


def measure(model: str, file: str | None, results: dict, save: Callable[[], None]) -> None:
    """Make the measurements that aren't in `results`, and save each."""
    for name, of_model in (("spacings", spacings), ("set-up, CPU seconds", set_up_seconds)):
        if name not in results:
            results[name] = of_model(model)
            save()
    for line in one_step(model, file, results.setdefault("steps", {})):
        save()
        print(line, flush=True)
    for name, mode, flags, seed, changes in jobs():
        runs = results.setdefault("runs", {}).setdefault(name, {}).setdefault(mode, {})
        if str(seed) not in runs:
            runs[str(seed)] = train(model, mode, flags, seed, changes)
            save()
            print(f"{name}, {mode}, seed {seed}: {runs[str(seed)]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder or name; default: tables and pictures alone")
    parser.add_argument("--four_bit", help="folder with the weights of the 4-bit file, unrounded")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.model:
        save = lambda: RESULTS.write_text(json.dumps(results, indent=1) + "\n")  # noqa: E731
        measure(options.model, options.four_bit, results, save)


if __name__ == "__main__":
    main()
