"""Evaluate a model on held-out prompts, as the scripts do while they train, without training.

python tools/evaluate.py --model runs/ppo-tiny-add-s0/model --task add
python tools/evaluate.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts openai/gsm8k --subset main
    --eval_split test --prompt_column question --system_prompt "" --reward gsm8k
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from plumbing.config import TaskConfig, flag, parse_flags
from plumbing.data import check_prompts, load_task, sampling_options, text_of
from plumbing.errors import Fault, InputError
from plumbing.metrics import evaluate, headline
from plumbing.models import fast_at_bfloat16, load_policy, load_tokenizer
from plumbing.run import run_main
from tasks import REWARDS, TASKS


@dataclass(kw_only=True)
class Config(TaskConfig):
    num_generations: int = flag(1)
    max_new_tokens: int = flag(256)
    num_eval_prompts: int = flag(10**9, "the first of the held-out prompts", group="the run")
    eval_generations: int = flag(1, "completions per prompt, K: pass@1 and pass@K", group="rollout")
    rollout_batch_size: int = flag(64, "most completions at a time", group="rollout")
    bf16: bool | None = flag(None, "decode in bfloat16; default: where it is fast", group="rollout")
    output: str | None = flag(None, "file of JSON lines for the completions", group="the run")


def main(args: list[str] | None = None) -> None:
    """Print rewards, accuracy with its standard error, and pass@K."""
    config = parse_flags(Config, __doc__, args)
    device = torch.device(config.device)
    if config.bf16 is None:
        config.bf16 = fast_at_bfloat16(device)
    model, tokenizer = load_policy(config.model).to(device), load_tokenizer(config.model)
    task = load_task(config, TASKS, REWARDS, tokenizer, device)
    task.train, rows = [], task.heldout[: config.num_eval_prompts]
    check_prompts(config, model, tokenizer, task)
    if config.num_generations != 1:
        remedy = "of an evaluation they are --eval_generations"
        raise InputError(f"--num_generations {config.num_generations}: {remedy}")
    if config.output and Path(config.output).exists():  # said now, not after the work is done
        raise InputError(f"--output {config.output}: is there already")
    sampling = sampling_options(config, model, tokenizer)
    metrics, texts, scores = evaluate(config, model, tokenizer, task, sampling, rows)
    K = config.eval_generations
    print(f"{len(rows)} prompts: {headline(0, metrics, metrics, K)}")
    if (error := metrics["eval/accuracy_se"]) is not None and not math.isnan(error):
        print(f"the standard error of the sampled accuracy is {error:.4f}")
    prompts = [row["prompt"] for row in rows for _ in range(K)]
    samples = list(zip(prompts, texts, scores, strict=True))
    if config.output:
        keys = "prompt", "completion", "score"
        records = [dict(zip(keys, (p, t, None if math.isnan(s) else s))) for p, t, s in samples]
        lines = [json.dumps(record) + "\n" for record in records]
        try:
            Path(config.output).write_text("".join(lines), encoding="utf-8")
        except OSError as e:
            raise Fault(f"--output {config.output}: can't be written ({e.strerror})") from e
    for prompt, text, value in samples[:: max(1, len(samples) // 4)][:4]:
        print(f"  {value:5.2f}  {text_of(prompt)[-60:]!r} \N{RIGHTWARDS ARROW} {text[:100]!r}")


if __name__ == "__main__":
    run_main(main)
