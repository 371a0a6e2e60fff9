"""What a run reads and leaves behind: flags, metrics, samples, the model.

A run writes into runs/<script>-<model>-<task>-s<seed>/: config.json, metrics.jsonl (an object per
step; the key `step` is the number of updates before it), samples.jsonl, and model/ in Hugging Face
format.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import difflib
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from common import (
    Fault,
    InputError,
    adapter_base,
    context_length,
    first_line,
    is_flat,
    masked_mean,
)
from sampling import Rollout, generate
from tasks import Task, encode_prompts, prompt_tokens, score, verify

try:
    import resource
except ImportError:  # Windows
    resource = None

# TRL's names for our flags: they are accepted as well.
TRL_NAMES = {
    "beta": "kl_coef",
    "cliprange": "clip_range",
    "cliprange_value": "clip_range_value",
    "epsilon": "clip_range",
    "epsilon_high": "clip_range_high",
    "local_rollout_forward_batch_size": "rollout_batch_size",
    "max_completion_length": "max_new_tokens",
    "num_iterations": "num_epochs",
    "num_ppo_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "response_length": "max_new_tokens",
}


def flag(default: Any, help: str) -> Any:
    """A field of a Config, with the help text of its flag."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def parse_flags(config_class: type, doc: str, args: list[str] | None = None) -> Any:
    """Parse the command line into `config_class`. Raises InputError at the first fault."""
    # allow_abbrev would take --learn for --learning_rate.
    parser = HfArgumentParser(config_class, description=doc, allow_abbrev=False)
    parser.formatter_class = _HelpFormatter
    fields = {field.name for field in dataclasses.fields(config_class)}

    def fail(message: str) -> None:
        raise InputError(re.sub(r"^argument (--\w+)[^:]*", r"\1", message))

    def our_name(arg: str) -> str:
        name, equals, value = arg.partition("=")
        ours = TRL_NAMES.get(name.removeprefix("--").replace("-", "_"))
        return f"--{ours}{equals}{value}" if arg.startswith("--") and ours in fields else arg

    parser.error = fail
    args = [our_name(arg) for arg in (sys.argv[1:] if args is None else args)]
    config, unknown = parser.parse_args_into_dataclasses(
        args, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise InputError(f"{name!r} belongs to no flag: flags are written --name value")
        candidates = [*fields, *(name for name, ours in TRL_NAMES.items() if ours in fields)]
        nearest = difflib.get_close_matches(name.strip("-").replace("-", "_"), candidates, n=1)
        hint = f"did you mean --{nearest[0]}?" if nearest else "--help lists the flags"
        raise InputError(f"unknown flag {name}: {hint}")
    return config


def apply_defaults(config: Any, defaults: dict[str, Any]) -> None:
    """Fill the fields of `config` that the user left open (None).

    Adapters take ten times the learning rate: Schulman et al. 2025, "LoRA without regret".
    """
    has_adapter = config.lora_r > 0 or adapter_base(config.model) is not None
    for name, value in defaults.items():
        if getattr(config, name) is None:
            for_adapter = has_adapter and name == "learning_rate"
            setattr(config, name, value * 10 if for_adapter else value)
    if config.merge_adapter and not has_adapter:
        raise InputError("--merge_adapter: there is no adapter to merge; --lora_r 8 trains one")


def check_flags(config: Any, smallest_group: int = 1) -> None:
    """Check what can be checked before anything is loaded. Raises InputError."""
    for name, value in vars(config).items():
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
            raise InputError(f"--{name} {value}: must be a finite number")
    positive = (
        "num_steps prompts_per_step num_generations max_new_tokens temperature rollout_batch_size"
        " learning_rate num_epochs num_mini_batches micro_batch_size micro_batch_tokens clip_range"
        " clip_range_high clip_range_value max_grad_norm eval_every num_eval_prompts"
    )
    for name in positive.split():
        value = getattr(config, name, None)
        if value is not None and value <= 0:
            raise InputError(f"--{name} {value}: must be greater than 0")
    for name in ("kl_coef", "vf_coef", "lora_r"):
        if getattr(config, name, 0) < 0:
            raise InputError(f"--{name} {getattr(config, name)}: must be 0 or greater")
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name, 1) <= 1:
            raise InputError(f"--{name} {getattr(config, name)}: must be between 0 and 1")
    if config.temperature < 1e-3:
        raise InputError(
            f"--temperature {config.temperature}: too close to 0, choose 0.001 or more"
        )
    if not 0 <= config.seed < 2**63 - 1:
        raise InputError(f"--seed {config.seed}: must be between 0 and 2^63 - 2")
    if config.num_generations < smallest_group:
        raise InputError(
            f"--num_generations {config.num_generations}: must be {smallest_group} or more, a"
            " completion is compared with the others of its prompt"
        )
    clip_to = getattr(config, "reward_clip_range", [])
    if clip_to and not (len(clip_to) == 2 and clip_to[0] < clip_to[1]):
        raise InputError(f"--reward_clip_range {clip_to}: give the lowest and the highest reward")
    if config.rollout_batch_size < config.num_generations:
        raise InputError(
            f"--rollout_batch_size {config.rollout_batch_size}: must hold the"
            f" {config.num_generations} completions of a prompt (num_generations)"
        )
    batch, parts = config.prompts_per_step * config.num_generations, config.num_mini_batches
    if batch % parts:
        below = next(n for n in range(parts, 0, -1) if batch % n == 0)
        above = next((n for n in range(parts, batch + 1) if batch % n == 0), None)
        raise InputError(
            f"--num_mini_batches {parts} doesn't divide the {batch} completions of a step"
            f" (prompts_per_step * num_generations): choose {below}"
            + (f" or {above}" if above else "")
        )


def check_prompts(
    config: Any, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task
) -> None:
    """Check that the model can read each prompt and has room for max_new_tokens after it.

    Raises InputError.
    """
    limit, new = context_length(policy), config.max_new_tokens
    if limit is not None and new >= limit:
        raise InputError(f"--max_new_tokens {new}: the model's context is {limit}, prompt included")
    vocab_size = policy.get_input_embeddings().weight.shape[0]
    for row in task.train + task.heldout:
        ids = prompt_tokens(tokenizer, row["prompt"])
        if limit is not None and len(ids) + new > limit:
            raise InputError(
                f"a prompt of {len(ids)} tokens leaves no room for {new} new ones in a context of"
                f" {limit}: lower --max_new_tokens or shorten {str(row['prompt'])[:60]!r}"
            )
        if max(ids) >= vocab_size:
            raise InputError(
                f"--model {config.model}: its tokenizer gives id {max(ids)}, and the model knows"
                f" {vocab_size} tokens: they don't belong together"
            )


class Meter:
    """Means over the tokens of a whole update: masked sums over masked counts.

    A mean of the means of micro-batches would weigh the tokens of short rows more, and so change
    with the micro-batch (huggingface/trl#6380).
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor | int] = {}

    def add(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the elements of x where mask is True (all of them without a mask)."""
        x = x.detach().float()
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        # The sums stay on the device: reading them here would wait for it at every micro-batch.
        self.sums[name] = self.sums.get(name, 0) + x.masked_fill(~mask, 0).sum()
        self.counts[name] = self.counts.get(name, 0) + mask.sum()

    def maximum(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Keep the largest element of x (not negative) where mask is True."""
        largest = (x if mask is None else x.masked_fill(~mask, 0)).detach().max()
        self.sums[name] = torch.maximum(self.sums.get(name, largest), largest)
        self.counts[name] = 1

    def means(self) -> dict[str, float]:
        """The mean, or the maximum, under each name; 0 where nothing was counted."""
        return {
            name: float(total) / max(1, int(self.counts[name])) for name, total in self.sums.items()
        }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 is perfect, 0 no better than a
    constant, below 0 worse. 0 where the returns are constant."""
    errors, targets = (returns - values)[mask], returns[mask]
    variance = targets.var(correction=0)
    return float(1 - errors.var(correction=0) / variance) if variance > 0 else 0.0


def objective_metrics(
    scores: Tensor, kl: Tensor | None, logprobs: Tensor, mask: Tensor, kl_coef: float
) -> dict[str, float | None]:
    """The two sides of the bargain, of the policy that sampled, the same in all scripts whatever
    they do with them: scores (B,) as the reward gave them, NaN left out, and KL estimates (B, T)
    summed per completion. Without a reference the KL is unknown, not 0.
    """
    kl_per_row = torch.zeros_like(scores) if kl is None else kl.masked_fill(~mask, 0).sum(1)
    known = kl is not None
    return {
        "objective/kl": kl_per_row.mean().item() if known else None,
        "objective/kl_token": masked_mean(kl, mask).item() if known else None,
        "objective/entropy": masked_mean(-logprobs, mask).item(),  # per token, from the sample
        "objective/scores": scores.nanmean().item(),
        "objective/non_score_reward": (-kl_coef * kl_per_row).mean().item(),
        "objective/rlhf_reward": (scores - kl_coef * kl_per_row).nanmean().item(),
    }


def group_metrics(scores: Tensor, num_generations: int) -> dict[str, float]:
    """Of the scores (B,) as the reward gave them, NaN left out: their standard deviation within a
    group, averaged over the groups, and the share of groups whose scores are all the same. Those
    teach nothing but the KL.
    """
    groups = scores.cpu().view(-1, num_generations)
    flat = is_flat(groups).squeeze(1)
    stds = [group[~group.isnan()].std().item() for group in groups[~flat]]
    return {
        "reward/std_within_group": sum(stds) / len(groups),
        "reward/frac_flat_groups": flat.float().mean().item(),
    }


def rollout_metrics(
    rollout: Rollout, rollout_seconds: float, update_seconds: float
) -> dict[str, float]:
    """Lengths in tokens (EOS included), speed and peak memory of one step."""
    lengths = rollout.completion_mask.sum(1)
    memory = math.nan
    if lengths.is_cuda:
        memory = torch.cuda.max_memory_allocated(lengths.device)
    elif resource is not None:  # resident memory: in kilobytes on Linux, in bytes on macOS
        unit = 1 if sys.platform == "darwin" else 1024
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "length/mean": lengths.float().mean().item(),
        "length/max": lengths.max().item(),
        "length/truncated_frac": 1 - rollout.finished.float().mean().item(),
        "val/num_eos_tokens": rollout.finished.sum().item(),
        "tokens_per_second": lengths.sum().item() / (rollout_seconds + update_seconds),
        "time/rollout": rollout_seconds,
        "time/update": update_seconds,
        "memory/peak_gb": memory / 1e9,
    }


def progress(metrics: dict[str, float | None]) -> dict[str, str]:
    """What the progress bar shows."""
    kl = metrics["objective/kl"]
    return {
        "reward": f"{metrics['objective/scores']:.2f}",
        "kl": "off" if kl is None else f"{kl:.2f}",
        "tokens/s": f"{metrics['tokens_per_second']:.0f}",
    }


def seconds_since(start: float, device: torch.device) -> float:
    """Seconds since `start` (time.perf_counter()), once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def choose_folder(script: str, config: Any) -> Path:
    """The folder of a run. Raises InputError where it holds something that must not be lost."""
    model = Path(config.model).resolve().name if os.path.isdir(config.model) else config.model
    task = Path(config.prompts).stem if config.prompts else config.task
    name = f"{script}-{model.replace('/', '-')}-{task}-s{config.seed}"
    folder = Path(config.output_dir or f"runs/{name}")
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return folder
        if not (folder / "metrics.jsonl").exists():
            raise InputError(f"--output_dir {folder}: holds something that is not a run")
        if (folder / "metrics.jsonl").stat().st_size > 0 and not config.overwrite:
            remedy = "give --overwrite or another --output_dir"
            raise InputError(f"{folder} already holds a run: {remedy}")
    except OSError as e:
        raise InputError(f"--output_dir {folder}: can't be used ({e.strerror})") from e
    return folder


class Run:
    """The records of a run. Leaving the `with` block, even by an exception, saves the model.

    A run that is overwritten is moved aside, and deleted when the first step of the new one is
    done: a mistake in the new command loses nothing.
    """

    def __init__(
        self,
        script: str,
        folder: Path,
        config: Any,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        sampling: dict[str, Any],
    ) -> None:
        """Create the folder and print the configuration. Raises InputError if that fails."""
        self.script, self.config, self.policy, self.tokenizer = script, config, policy, tokenizer
        self.task, self.sampling, self.folder = task, sampling, folder
        self.steps_done, self.first_metrics = 0, {}
        self.aside = None  # where the run that this one replaces waits
        try:
            if folder.exists() and any(folder.iterdir()):
                self.aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-old-", dir=folder.parent))
                folder.rename(self.aside / folder.name)
            folder.mkdir(parents=True, exist_ok=True)
            settings = json.dumps(dataclasses.asdict(config), indent=2)
            (folder / "config.json").write_text(settings + "\n")
            self._metrics = (folder / "metrics.jsonl").open("w", encoding="utf-8")
            self._samples = (folder / "samples.jsonl").open("w", encoding="utf-8")
        except OSError as e:
            raise InputError(f"--output_dir {folder}: can't be written ({e.strerror})") from e
        print(self._description())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self._metrics.close()
        self._samples.close()
        if self.steps_done > 0:
            self._save()
            print(f"{self.folder}/model holds the model after {self.steps_done} steps.")
        elif self.aside:
            shutil.rmtree(self.folder)
            (self.aside / self.folder.name).rename(self.folder)
            self.aside.rmdir()

    def _save(self) -> None:
        """The model; of a policy with an adapter the adapter, and the two merged if asked for."""
        policy, folder = self.policy, self.folder / "model"
        # peft would ask the hub whether the vocabulary has grown: it hasn't.
        options = {"save_embedding_layers": False} if hasattr(policy, "peft_config") else {}
        if self.config.merge_adapter:
            policy.save_pretrained(self.folder / "adapter", **options)
            self.tokenizer.save_pretrained(self.folder / "adapter")
            policy, options = policy.merge_and_unload(), {}
        policy.save_pretrained(folder, **options)
        self.tokenizer.save_pretrained(folder)

    def _description(self) -> str:
        """What this run is, and every setting that has a value."""
        sizes = {p: p.numel() / 1e6 for p in self.policy.parameters()}
        size = f"{sum(sizes.values()):.1f} M parameters"
        trained = sum(size for p, size in sizes.items() if p.requires_grad)
        if trained < sum(sizes.values()):
            size = f"an adapter of {trained:.2f} M on {size}"
        num_heldout = min(len(self.task.heldout), self.config.num_eval_prompts)
        settings = dataclasses.asdict(self.config).items()
        shown = "  ".join(f"{name}={value}" for name, value in settings if value not in (None, []))
        return (
            f"{self.script}: {size} on {self.policy.device}, "
            f"{len(self.task.train)} prompts to train on, {num_heldout} held out, "
            f"writing to {self.folder}\n"
            + textwrap.fill(shown, 98, initial_indent="  ", subsequent_indent="  ")
        )

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """Append one line to metrics.jsonl, at once: a later fault doesn't lose it."""
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        self.steps_done = min(step + 1, self.config.num_steps)
        if self.aside:
            shutil.rmtree(self.aside)
            self.aside = None

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float | None]:
        """Sample one completion of each held-out prompt: record all, print the first few.

        The random numbers are the same every time and not those of training: two evaluations
        differ by the policy alone, and evaluating more often changes no run.
        """
        rows = self.task.heldout[: self.config.num_eval_prompts]
        generator = torch.Generator(self.policy.device).manual_seed(self.config.seed + 1)
        sampling = self.sampling | {"generator": generator}
        scores, texts = [], []
        for start in range(0, len(rows), self.config.rollout_batch_size):
            part = rows[start : start + self.config.rollout_batch_size]
            prompt_ids, prompt_mask = encode_prompts(self.tokenizer, part, self.policy.device)
            rollout = generate(self.policy, prompt_ids, prompt_mask, **sampling)
            part_scores, part_texts = score(self.task, part, rollout, self.tokenizer)
            scores += part_scores.tolist()
            texts += part_texts
        known = [value for value in scores if not math.isnan(value)]
        metrics = {
            "eval/reward": sum(known) / max(1, len(known)),
            "eval/accuracy": verify(self.task, rows, texts),
        }
        self.first_metrics = self.first_metrics or metrics
        title = "  ".join(
            f"{name} {value:.3f}" + (f" (was {self.first_metrics[name]:.3f})" if step > 0 else "")
            for name, value in metrics.items()
            if value is not None
        )
        lines = [f"step {step}: {title}"]
        for index, (row, text, value) in enumerate(zip(rows, texts, scores, strict=True)):
            sample = {"prompt": row["prompt"], "completion": text, "score": _finite(value)}
            self._samples.write(json.dumps({"step": step} | sample, ensure_ascii=False) + "\n")
            if index < 4:
                prompt = row["prompt"]
                prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                shown = " ".join(f"{prompt} \N{RIGHTWARDS ARROW} {text}".split())
                lines.append(f"  {value:5.2f}  {textwrap.shorten(shown, 90, placeholder=' ...')}")
        self._samples.flush()
        tqdm.write("\n".join(lines))  # print would tear the progress bar
        return metrics


def _finite(x: float | None) -> float | None:
    """JSON has neither NaN nor infinity: they become null."""
    return x if x is None or math.isfinite(x) else None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of the docstring, and shows the defaults."""


def keep_freed_memory() -> None:
    """On Linux, keep the memory that tensors free instead of giving it back, and take it in huge
    pages: on a CPU getting it anew from the system costs as much as computing with it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by PyTorch at its first allocation
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30) or libc.mallopt(m_mmap_threshold, 2**25)  # older
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main(): errors are one line; exit code 2 for bad input, 1 for a fault."""
    keep_freed_memory()
    transformers_logging.set_verbosity(logging.CRITICAL)  # its errors reach us as exceptions
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # from peft
    try:
        main()
    except InputError as e:
        code, message = 2, f"error: {e}"
    except Fault as e:
        code, message = 1, f"error: {e}"
    except torch.OutOfMemoryError as e:
        code, message = 1, f"error: {first_line(e)} Lower --micro_batch_size, --rollout_batch_size"
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    else:
        return
    print(message, file=sys.stderr)
    raise SystemExit(code)
