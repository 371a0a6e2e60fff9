"""What the experiments of the labs are made of: rewards, mistakes, figures of their own.

experiments.py names these functions, labs.py runs them. A mistake changes a fresh copy of the
module of a script; a figure is a function of the seed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "ppo.py").exists() else HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

import torch
from experiments import GROUPS
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)  # faster for a model this small, and the same on every machine


def module_of(script: str, change: str = "") -> ModuleType:
    """A fresh copy of a script's module, with a change made to it."""
    spec = importlib.util.spec_from_file_location(f"lab_{script}", ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    if change:
        globals()[change](module)
    return module


def start(module: ModuleType, flags: str, seed: int, folder: Path) -> list[dict]:
    """Call module.main, quietly, with a run in `folder`: its metrics, a dict per step."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options = ["--output_dir", str(folder), "--seed", str(seed), "--device", "cpu"]
        module.main([*shlex.split(flags), *options])
    return read(folder / "metrics.jsonl")


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train_judge(pairs: int, flags: str, seed: int, folder: Path) -> list[dict]:
    """Run reward_model.py on so many pairs of sums."""
    from tasks import add_pairs

    train, heldout = add_pairs()
    files = f"{folder}-pairs.jsonl", f"{folder}-heldout.jsonl"
    for file, rows in zip(files, (random.Random(seed).sample(train, pairs), heldout)):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags += f" --pairs {shlex.quote(files[0])} --eval_pairs {shlex.quote(files[1])}"
    return start(module_of("reward_model"), flags, seed, folder)


# --- Rewards that ask for something else than right sums ---


def nines(completions: list[str], **columns: object) -> list[float]:
    """How many digits are a 9: easy to get, and not what was meant."""
    return [float(text.count("9")) for text in completions]


def short(completions: list[str], **columns: object) -> list[float]:
    """1 for no text at all, 1/2 for one character, and so on: end early."""
    return [1 / (1 + len(text)) for text in completions]


def right_less_tokens(
    completions: list[str], answer: list[str], completion_ids: list[list[int]], **columns: object
) -> list[float]:
    """1 for the right number, less 0.02 for each token, EOS included."""
    from tasks import numeric_match

    right = numeric_match(completions, answer)
    return [x - 0.02 * len(ids) for x, ids in zip(right, completion_ids, strict=True)]


# --- Mistakes, and what else no flag asks for ---


def top_5(module: ModuleType) -> None:
    module.sample = functools.partial(module.sample, top_k=5)


def take_eos_for_padding(module: ModuleType) -> None:
    """A mask inferred from ids, where pad and EOS are the same id."""
    original = module.sample

    def sample(model, prompt_ids, *args, **options):
        rollout = original(model, prompt_ids, *args, **options)
        completions = rollout.tokens[:, prompt_ids.shape[1] :]
        is_eos = torch.isin(completions, torch.tensor(options["eos_token_ids"]))
        seen = rollout.completion_mask & ~is_eos
        return replace(rollout, completion_mask=seen, finished=torch.zeros_like(rollout.finished))

    module.sample = sample


def leave_advantages_raw(module: ModuleType) -> None:
    module.masked_whiten = lambda x, mask: x


def whiten_rewards_too(module: ModuleType) -> None:
    """Rewards divided by their deviation. They keep their mean: it says what to prefer."""
    from common import masked_mean

    shape, whiten = module.shape_rewards, module.masked_whiten

    def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        rewards = shape(scores, kl, mask, kl_coef)
        return whiten(rewards, mask) + masked_mean(rewards, mask) * mask

    module.shape_rewards = shape_rewards


def drop_the_ratio(module: ModuleType) -> None:
    """REINFORCE on a rollout that is used again: each update takes its own policy for the old."""
    original = module.grpo_loss
    module.grpo_loss = lambda logprobs, old_logprobs, *args, **options: original(
        logprobs, logprobs.detach(), *args, **options
    )


def divide_mixed_groups(module: ModuleType, mixed: bool = True) -> None:
    """Divide by the std only in groups with right and wrong answers; with `mixed` False only in the
    others. The reward is right_less_tokens: rounded, it says what was right.
    """
    original = module.group_advantages

    def group_advantages(rewards: Tensor, num_generations: int, *_: object) -> Tensor:
        divided, raw = (original(rewards, num_generations, x) for x in ("group", "none"))
        right = rewards.view(-1, num_generations).round()
        is_mixed = (right.amax(1) > right.amin(1)).repeat_interleave(num_generations)
        return torch.where(is_mixed == mixed, divided, raw)

    module.group_advantages = group_advantages


def divide_groups_of_one_verdict(module: ModuleType) -> None:
    divide_mixed_groups(module, mixed=False)


# --- Figures without the flags of a run ---


def sampled(seed: int, temperature: float, top_k: int = 0) -> tuple[Tensor, ...]:
    """8 completions of each of 250 sums by the tiny model: logits (B, T, V), the tokens that were
    drawn (B, T), the mask (B, T), and which (B,) begin with the right digit.
    """
    from plumbing.data import pad_rows, prompt_tokens
    from plumbing.models import eos_token_ids, load, load_tokenizer
    from sampling import generate
    from tasks import add_prompts

    policy, tokenizer = load(AutoModelForCausalLM, "tiny"), load_tokenizer("tiny")
    prompts = add_prompts()[0][:250]
    ids, mask = pad_rows(prompt_tokens(tokenizer, [x["prompt"] for x in prompts]))
    rollout = generate(
        policy, ids, mask, num_generations=8, max_new_tokens=16, temperature=temperature,
        eos_token_ids=eos_token_ids(policy, tokenizer), pad_token_id=0, top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": rollout.attention_mask, "position_ids": positions}
    first = ids.shape[1]  # the logits of a column are about the next one
    with torch.no_grad():
        logits = policy(rollout.tokens, **inputs).logits[:, first - 1 : -1]
    tokens = rollout.tokens[:, first:]
    answers = [prompt["answer"] for prompt in prompts for _ in range(8)]
    texts = tokenizer.batch_decode(tokens)
    right = torch.tensor([text[:1] == a[:1] for text, a in zip(texts, answers)])
    return logits, tokens, rollout.completion_mask, right


def against_itself(seed: int, temperature: float, top_k: int = 0) -> dict[str, Tensor]:
    """The model at a temperature against itself at 1: the exact KL at each token of 2,000
    completions, from all probabilities, and its estimates from the sampled tokens, each (tokens,).
    """
    from common import kl_estimate

    logits, tokens, real, _ = sampled(seed, temperature, top_k)
    ours, theirs = (logits / temperature).log_softmax(-1), logits.log_softmax(-1)
    found = {"exact": (ours.exp() * (ours - theirs)).sum(-1)[real]}
    drawn = [x.gather(2, tokens.unsqueeze(2)).squeeze(2) for x in (ours, theirs)]
    return found | {name: kl_estimate(*drawn, name)[real] for name in ("k1", "k2", "k3")}


def estimators(seed: int) -> dict[str, float]:
    """The exact KL, and mean and spread of each estimator over the tokens."""
    found = against_itself(seed, 0.7)
    spread = {f"{name}_std": x.std().item() for name, x in found.items() if name != "exact"}
    return {name: x.mean().item() for name, x in found.items()} | spread


def kl_of_top_k(temperature: float, seed: int) -> dict[str, float]:
    """From samples of the policy, and from those with top_k 5: the exact KL at the tokens of each
    is that of the policy, without top_k.
    """
    whole, cut = against_itself(seed, temperature), against_itself(seed, temperature, top_k=5)
    found = {name: whole[name] for name in ("exact", "k1")}
    found |= {f"{name}_top_k": cut[name] for name in ("exact", "k1")}
    return {name: x.mean().item() for name, x in found.items()}


def push_on_eos(loss_type: str, scale_rewards: str, seed: int) -> dict[str, float]:
    """Which way a step moves the logit of EOS, over how far it moves it either way: -1 to 1. At
    temperature 3, where lengths vary most.
    """
    from common import token_logprobs
    from grpo import group_advantages, grpo_loss

    logits, tokens, real, right = sampled(seed, 3.0)
    eos = json.loads((ROOT / "tiny" / "config.json").read_text())["eos_token_id"]
    logprobs = token_logprobs(logits.requires_grad_() / 3.0, tokens)
    advantages = group_advantages(right.float(), 8, scale_rewards)
    options = {"clip_range": 0.2, "loss_type": loss_type, "max_new_tokens": 16}
    loss, _, _ = grpo_loss(logprobs, logprobs.detach(), advantages, real, **options)
    up = -torch.autograd.grad(loss, logits)[0][:, :, eos].masked_fill(~real, 0)
    up = up[:, 1:]  # the first token decides what is right, so EOS in its place is no length
    parts = {"right": up[right], "wrong": up[~right]}
    return {name: (x.sum() / x.abs().sum()).item() for name, x in parts.items()}


@functools.cache
def unfinished_model() -> tempfile.TemporaryDirectory:
    """A folder with the model of `python tiny/make.py --unfinished`; made once per process."""
    from tiny import make

    folder = tempfile.TemporaryDirectory()
    for part in make.make(make.UNFINISHED_STEPS, functools.partial(make.draw_sums, wrong=False)):
        part.save_pretrained(folder.name)
    return folder


# What rloo.py does with the embedded model, for any folder; but 120 steps instead of 180.
AS_EMBEDDED = """--task add --max_new_tokens 5 --num_steps 120 --prompts_per_step 64
--num_generations 4 --kl_coef 0.02 --rollout_batch_size 256 --micro_batch_tokens 4096 --bf16 false
--num_eval_prompts 8 --eval_every 120"""


def pass_at_k(unfinished: bool, rate: str, seed: int) -> dict[str, float]:
    """pass@k on the held-out sums: the chance that one of k samples is right. Of the unfinished
    model or the embedded one, before (no rate) or after RLOO at a learning rate. Exact: where a
    sample is right with chance p, one of k is with 1 - (1 - p)^k. Chen et al. 2021, 2107.03374.
    """
    from tasks import add_prompts
    from tiny.temperature import chances

    folder = unfinished_model().name if unfinished else str(ROOT / "tiny")
    with tempfile.TemporaryDirectory() as output:
        if rate:
            flags = f"--model {folder} {AS_EMBEDDED} --learning_rate {rate}"
            start(module_of("rloo"), flags, seed, Path(output) / "run")
            folder = f"{output}/run/model"
        greedy, chance = chances(Path(folder), add_prompts()[1], [0.02, 1.0])
    of_k = {f"pass@{k}": (1 - (1 - chance) ** k).mean().item() for k in (1, 4, 16, 64, 256)}
    return {"greedy": greedy.mean().item()} | of_k


def by_difficulty(scale_rewards: str, seed: int) -> dict[str, float]:
    """The sum of |A| of a group with one right answer of 8, over that of one with 4; and after
    training the mean chance of a right sample of the held-out sums that were hard and easy before
    (below 1/2 and above). The chances are exact, as in pass_at_k.
    """
    from grpo import group_advantages
    from tasks import add_prompts
    from tiny.temperature import chances

    rewards = (torch.arange(8.0) < torch.tensor([[1.0], [4.0]])).float().flatten()
    one, half = group_advantages(rewards, 8, scale_rewards).view(2, 8).abs().sum(1).tolist()
    prompts = add_prompts()[1]
    hard = chances(ROOT / "tiny", prompts, [1.0])[0] < 0.5
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{GROUPS} --kl_coef 0 --scale_rewards {scale_rewards}"
        start(module_of("grpo"), flags, seed, Path(folder) / "run")
        after = chances(Path(folder) / "run" / "model", prompts, [1.0])[0]
    means = {"hard": after[hard].mean().item(), "easy": after[~hard].mean().item()}
    return {"one_of_8": one / half} | means


# --- The cups ---


@functools.cache
def thinker(share: float) -> tempfile.TemporaryDirectory:
    """A folder with the model of the cups, retaught to work out this share of its answers; made
    once per process.
    """
    from tiny import make

    folder, source = tempfile.TemporaryDirectory(), ROOT / "tiny" / "cups"
    parts = [x.from_pretrained(source) for x in (AutoModelForCausalLM, AutoTokenizer)]
    if share != make.LATE:  # that of the embedded model
        # 300 batches change the share; the last traces of what isn't shown any more take 900.
        num_steps = 300 if share > 0 else 900
        with contextlib.redirect_stderr(io.StringIO()):  # its bar
            make.train(*parts, num_steps, lambda _, rng: make.draw_cups(1.0, rng, share), rate=1e-3)
    for part in parts:
        part.save_pretrained(folder.name)
    return folder


def write_games(file: Path) -> None:
    """Games of one, two and six swaps as prompts, a thousand each."""
    from tasks import cups_game, cups_path, cups_prompt

    rng, rows = random.Random(0), []
    for i in range(3000):
        ball, swaps = cups_game(rng, (1, 2, 6)[i % 3])
        rows += [{"prompt": cups_prompt(ball, swaps), "answer": cups_path(ball, swaps)[-1]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def worked_out(samples: list[dict]) -> dict[str, float]:
    """The share of answers to games of cups that are worked out: of all, and by number of swaps."""
    found = {}
    for x in samples:
        for name in ("worked_out", f"worked_out_{x['prompt'].count(',') + 1}"):
            found.setdefault(name, []).append(x["completion"].startswith(">"))
    return {name: sum(x) / len(x) for name, x in found.items()}


# What grpo.py does with the model of the cups, for any folder.
AS_CUPS = """--task cups --max_new_tokens 16 --num_steps 60 --prompts_per_step 32 --kl_coef 0.01
--learning_rate 1e-3 --rollout_batch_size 256 --micro_batch_tokens 16384 --bf16 false
--num_eval_prompts 8 --eval_every 60"""


@contextlib.contextmanager
def after_grpo(share: float, trained: bool, seed: int, flags: str = "") -> Iterator[str]:
    """The folder of the model that works out this share, before or after GRPO."""
    with tempfile.TemporaryDirectory() as output:
        folder = thinker(share).name
        if trained:
            flags = f"--model {folder} {AS_CUPS} {flags}"
            start(module_of("grpo"), flags, seed, Path(output) / "run")
            folder = f"{output}/run/model"
        yield folder


def answers_of(folder: str, num_games: int, num_answers: int, seed: int) -> tuple:
    """Answers to held-out games: the model, the rollout, and the texts and which of them are right,
    a row for each game.
    """
    from plumbing.data import completion_texts, pad_rows, prompt_tokens
    from plumbing.models import load, load_tokenizer
    from sampling import generate
    from tasks import cups_prompts, numeric_match

    policy, tokenizer = load(AutoModelForCausalLM, folder), load_tokenizer(folder)
    rows = cups_prompts()[1][:num_games]
    prompts = pad_rows(prompt_tokens(tokenizer, [row["prompt"] for row in rows]))
    rollout = generate(
        policy, *prompts, num_generations=num_answers, max_new_tokens=16, pad_token_id=0,
        eos_token_ids=[tokenizer.eos_token_id], generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    texts = completion_texts(tokenizer, rollout, [tokenizer.eos_token_id])
    right = numeric_match(texts, [row["answer"] for row in rows for _ in range(num_answers)])
    of_games = [slice(i, i + num_answers) for i in range(0, len(texts), num_answers)]
    return policy, rollout, [(texts[x], right[x]) for x in of_games]


def of_64_answers(share: float, trained: bool, seed: int) -> dict[str, float]:
    """Of 64 answers to each of 96 games: the share of right ones; the share of games with a right
    one, with a right one that is worked out, and where the commonest answer is right.
    """
    with after_grpo(share, trained, seed, "--kl_coef 0") as folder:
        *_, games = answers_of(folder, 96, 64, seed)
    found = {"pass@1": [], "pass@64": [], "thought@64": [], "majority": []}
    for texts, right in games:
        last = [text[-1:] for text in texts]
        commonest = max(set(last), key=last.count)
        found["pass@1"].append(sum(right) / len(right))
        found["pass@64"].append(max(right))
        found["thought@64"].append(max(x * text.startswith(">") for text, x in zip(texts, right)))
        found["majority"].append(right[last.index(commonest)])
    return {name: sum(x) / len(x) for name, x in found.items()}


def kl_of_places(seed: int) -> dict[str, float]:
    """The KL of the model after GRPO to the embedded one, at the first token and at all others; and
    which share of the embedded one's worked out answers is right.
    """
    from common import kl_estimate
    from forward import completion_logprobs
    from plumbing.models import load

    base = str(ROOT / "tiny" / "cups")
    with after_grpo(0.1, True, seed) as folder, torch.no_grad():
        policy, rollout, _ = answers_of(folder, 1024, 1, seed)
        pair = policy, load(AutoModelForCausalLM, base)
        logprobs = [completion_logprobs(model, rollout, 1.0)[0] for model in pair]
    kl = kl_estimate(*logprobs, "k1").mean(0)  # (T,)
    *_, games = answers_of(base, 1024, 1, seed)
    right = [x for texts, (x,) in games if texts[0].startswith(">")]
    return {
        "kl_first": kl[0].item(),
        "kl_others": kl[1:].sum().item(),
        "right_when_worked_out": sum(right) / len(right),
    }
