"""Preferences: pairs of completions, reward models, and how well they judge."""

from __future__ import annotations

import math
import random
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import base_model, disable_dropout, evaluating, store_in_bfloat16
from plumbing.config import TaskConfig
from plumbing.data import (
    Prompt,
    as_messages,
    check_ids,
    load_task,
    pad_rows,
    prompt_batch,
    read_rows,
    sampling_options,
    split_prompts,
    text_of,
    text_or_messages,
    token_ids,
)
from plumbing.errors import Fault, InputError, first_line
from plumbing.metrics import Evaluation, Metrics, Totals
from plumbing.models import (
    TINY,
    add_adapter,
    context_length,
    from_hub_or_folder,
    load_causal,
    load_tokenizer,
    mask_is_known,
)
from sampling import sample

Completion = str | list[dict[str, str]]  # text, or the messages that follow the prompt


def last_real_token(x: Tensor, mask: Tensor) -> Tensor:
    """Of each row what stands at its last real token: x (B, L) or (B, L, D) and mask (B, L), padded
    on either side -> (B,) or (B, D).
    """
    # By the mask, not by the pad id: where pad is EOS, the last token that isn't pad is the one
    # before EOS, and a row that fills the width has none. argmax finds the first of the largest.
    last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return x[torch.arange(len(x), device=x.device), last]


def sequence_scores(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """The score of each row: tokens and mask (B, L), padded on the right -> (B,), with gradient."""
    model = base_model(model)
    device = tokens.device.type
    if not hasattr(model, "score"):
        # BERT and its kin, bidirectional, have read the whole text at every token. In bfloat16 a
        # score would have three digits, and the loss is made of differences.
        with torch.autocast(device, enabled=False):
            return model(input_ids=tokens, attention_mask=mask).logits[:, 0]
    # A causal model has read the whole text at its last token alone. No real token sees the padding
    # on its right: so it needs no position ids, and no mask.
    with mask_is_known(no_padding=True):
        hidden = model.base_model(input_ids=tokens, attention_mask=mask).last_hidden_state
    last = last_real_token(hidden, mask)  # (B, L, D) -> (B, D)
    with torch.autocast(device, enabled=False):  # float32 here as well
        return model.score(last.to(next(model.score.parameters()).dtype))[:, 0]


def text_ids(
    tokenizer: Tokenizer,
    prompt: Prompt,
    completion: Completion,
    source: str = "--pairs",
    ends_with_eos: bool = False,
) -> list[int]:
    """The tokens of a prompt with its completion, as a reward model reads them: in its own chat
    template where both are messages, else as text, with EOS at the end if `ends_with_eos`. Reward
    models are trained and asked with the same tokens. Raises InputError, which names the source.
    """
    if isinstance(completion, str):
        text = prompt + completion
    else:
        text = _joined(prompt, completion)
        if tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in text)
    ids, eos = token_ids(tokenizer, text, f"{source}:"), tokenizer.eos_token_id
    is_text = isinstance(text, str)
    if ends_with_eos and is_text and eos is not None and ids[-1] != eos:
        ids = [*ids, eos]  # unless the text holds one itself
    return ids


def _joined(prompt: list[dict], completion: list[dict]) -> list[dict]:
    """The messages of both; a last message of the assistant in the prompt is continued."""
    if prompt and prompt[-1]["role"] == "assistant" == completion[0]["role"]:
        content = prompt[-1]["content"] + completion[0]["content"]
        return [*prompt[:-1], prompt[-1] | {"content": content}, *completion[1:]]
    return [*prompt, *completion]


def reads_eos(model: PreTrainedModel) -> bool:
    """Whether plain text gets EOS at its end for this reward model: what its config.json says under
    `ends_with_eos`, which reward_model.py writes. Without a word there it is so for a causal model,
    because TRL and OpenRLHF train with EOS; others read the end that their tokenizer adds.
    """
    # The scores themselves don't tell: their spread is larger with EOS for models that were trained
    # with it, but also for pretrained models that were not.
    return bool(getattr(model.config, "ends_with_eos", hasattr(model, "score")))


def longest_text(model: PreTrainedModel, tokenizer: Tokenizer) -> float:
    """How many tokens the model reads, infinity if there is no limit."""
    # RoBERTa takes 2 less than its config says, and its tokenizer knows.
    return min(context_length(model) or math.inf, tokenizer.model_max_length)


@torch.no_grad()
def check_scores(model: PreTrainedModel, flag: str, name: str) -> None:
    """Check that the score of a text doesn't depend on the padding beside it. Raises InputError.

    It does where a model looks for the last token by itself, and encoder-decoders need more.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    short, long = ([i % vocab_size for i in range(2, length)] for length in (5, 9))
    try:
        alone = sequence_scores(model, *pad_rows([short], 0, "right", model.device))
        beside = sequence_scores(model, *pad_rows([short, long], 0, "right", model.device))[:1]
        if not torch.allclose(alone, beside, rtol=1e-3, atol=1e-3):
            raise ValueError("the score of a text depends on its padding")
    except Exception as e:  # a model of another kind raises anything
        fault = f"can't be used as a reward model ({type(e).__name__}: {first_line(e)})"
        raise InputError(f"{flag} {name}: {fault}") from e


def _load_classifier(name: str, flag: str, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """(model, names of missing weights). Raises InputError."""
    if (Path(name) / "adapter_config.json").exists():
        remedy = "give the model that it is merged into, model/ in the folder of its run"
        raise InputError(f"{flag} {name}: is an adapter; {remedy}")
    path = str(TINY) if name == "tiny" else name
    return from_hub_or_folder(AutoModelForSequenceClassification, path, flag, **options)


def load_for_training(name: str, lora_r: int = 0) -> nn.Module:
    """A model to train as a reward model: a causal language model or a sequence classifier, which
    keeps its head if it has one label. A new head starts at 0, so the first scores are 0. Raises
    InputError.
    """
    options = {"num_labels": 1, "ignore_mismatched_sizes": True}
    model, missing = _load_classifier(name, "--model", **options)
    prefix = f"{model.base_model_prefix}."
    # A pooler is part of the head: BERT has it where it was trained to classify.
    if lost := [w for w in missing if w.startswith(prefix) and "pooler" not in w]:
        raise InputError(f"--model {name}: its checkpoint has no {lost[0]}")
    check_scores(model.eval(), "--model", name)  # while a new head is still random
    if missing:
        model.config.ends_with_eos = False
        if any("SequenceClassification" in x for x in model.config.architectures or []):
            print(f"{name}: a classifier of several labels; its head is replaced by one of one.")
        for weight, p in model.named_parameters():
            if not weight.startswith(prefix) and len(p) == 1:  # of one output
                nn.init.zeros_(p)
    model.config.ends_with_eos = reads_eos(model)
    return add_adapter(model, lora_r, "SEQ_CLS") if lora_r > 0 else model


class RewardModel:
    """A sequence classifier with one label, and its tokenizer, as a reward. Raises InputError."""

    __name__ = "reward_model"

    def __init__(
        self, name: str, device: torch.device, batch_size: int = 32, bf16: bool = False
    ) -> None:
        flag = "--reward_model"
        self.model, missing = _load_classifier(name, flag)
        labels = self.model.config.num_labels
        if labels != 1:
            raise InputError(f"{flag} {name}: has {labels} labels, and a reward model has one")
        if missing:
            raise InputError(f"{flag} {name}: no reward model, its checkpoint has no {missing[0]}")
        check_scores(self.model.eval().requires_grad_(False), flag, name)
        # BERT and its kin score in float32: see sequence_scores.
        self.bf16 = bf16 and hasattr(self.model, "score")
        if self.bf16:
            store_in_bfloat16(self.model, device)
        self.model.to(device)
        self.tokenizer = load_tokenizer(name, flag)
        self.batch_size = batch_size
        self.what = f"{flag} {name}"

    def tokens(
        self, prompts: list[Prompt], completions: list[Completion], new_tokens: int = 0
    ) -> list[list[int]]:
        """What the model reads of each prompt with its completion. Raises InputError where it can't
        read that with `new_tokens` more.
        """
        eos, both = reads_eos(self.model), zip(prompts, completions, strict=True)
        ids = [text_ids(self.tokenizer, p, c, self.what, eos) for p, c in both]
        check_ids(self.model, max(map(max, ids)), self.what)
        limit, longest = longest_text(self.model, self.tokenizer), max(map(len, ids)) + new_tokens
        if longest > limit:  # it may need more tokens than the policy
            fault = f"takes {limit} tokens, and a prompt with its completion has {longest} of them"
            remedy = "begin anew with a lower --max_new_tokens or shorter prompts"
            raise InputError(f"{self.what}: {fault}: {remedy}")
        return ids

    def check_prompts(self, prompts: list[Prompt], max_new_tokens: int) -> None:
        """Check now that the model can read the prompts, with max_new_tokens more, and show how it
        reads one. Raises InputError.
        """
        empty = [
            "" if isinstance(p, str) else [{"role": "assistant", "content": ""}] for p in prompts
        ]
        shown = self.tokenizer.decode(self.tokens(prompts, empty, max_new_tokens)[0])
        shown = shown if len(shown) <= 120 else f"{shown[:60]} ... {shown[-60:]}"
        print(f"The reward model reads the first prompt, with an empty completion, as {shown!r}.")
        if isinstance(prompts[0], str) and not hasattr(self.model.config, "ends_with_eos"):
            print(
                "EOS is at its end because TRL and OpenRLHF train so; if this model was trained"
                ' without, write "ends_with_eos": false into its config.json.'
            )

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], completions: list, **columns) -> list[float]:
        ids = self.tokens(prompts, completions)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little padding in a batch
        device, scores = self.model.device, []
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            for start in range(0, len(ids), self.batch_size):
                some = [ids[i] for i in order[start : start + self.batch_size]]
                scores.append(sequence_scores(self.model, *pad_rows(some, 0, "right", device)))
        found = dict(zip(order, torch.cat(scores).tolist(), strict=True))
        return [found[i] for i in range(len(ids))]


KEYS = ("chosen", "rejected")
PAIR_FORMAT = 'each line must be like {"prompt": "...", "chosen": "...", "rejected": "..."}'
# The pairs that the embedded model makes: completions of a prompt, pairs to train on, and the share
# of their labels that are flipped, as people err.
OWN_SAMPLES, OWN_PAIRS, LABEL_NOISE = 8, 10_000, 0.1
MOST_TEXTS = 256  # of a forward pass


@dataclass
class Pairs:
    """Pairs: dicts with prompt, chosen, rejected, margin, and chosen_ids, rejected_ids: tokens."""

    train: list[dict]
    heldout: list[dict]  # evaluated, never trained on
    tokenizer: Tokenizer
    name: str = "pairs"


def load_pairs(config: Any, tasks: ModuleType, model: nn.Module, tokenizer: Tokenizer) -> Pairs:
    """The pairs that the flags name, with their tokens. Raises InputError."""
    if config.pairs is None:
        if config.model != "tiny":
            raise InputError(f"--pairs: is needed for --model {config.model}; tiny makes its own")
        if config.eval_pairs is not None:
            raise InputError(f"--eval_pairs {config.eval_pairs}: needs --pairs")
        train, heldout = _own_pairs(config, tasks, tokenizer)
    elif config.eval_pairs is None:
        train, heldout = split_prompts(
            read_pairs(config.pairs), "pairs", lambda pair: pair.get("texts", pair["prompt"])
        )
    else:
        train = read_pairs(config.pairs)
        heldout = read_pairs(config.eval_pairs, "test", "--eval_pairs")
    limit = longest_text(base_model(model), tokenizer)
    if config.max_length is not None and config.max_length > limit:
        raise InputError(f"--max_length {config.max_length}: the model takes {limit} tokens")
    limit = min(limit, config.max_length or math.inf)
    source = "--pairs" if config.eval_pairs is None else "--eval_pairs"  # of those held out
    eos = reads_eos(base_model(model))
    train = _with_tokens(train, tokenizer, eos, limit, "--pairs", "to train on")
    heldout = _with_tokens(heldout, tokenizer, eos, limit, source, "held out")
    largest = max(max(p["chosen_ids"] + p["rejected_ids"]) for p in train + heldout)
    check_ids(base_model(model), largest, f"--model {config.model}")
    return Pairs(train, heldout[: config.num_eval_pairs], tokenizer)


def read_pairs(name: str, split: str = "train", flag: str = "--pairs") -> list[dict]:
    """Pairs from a file or a dataset, in the formats that TRL takes: chosen and rejected are text
    or messages, after a prompt or with it in them; a margin may be there. Raises InputError with
    the first bad one.
    """
    return read_rows(name, split, flag, PAIR_FORMAT, pair_of)


def _begins_with(text: list[dict], prompt: list[dict]) -> bool:
    """Whether a conversation begins with these messages, or with a system message and these."""
    start = int(text[0]["role"] == "system" != prompt[0]["role"])
    own = text[start : start + len(prompt)]
    said, asked = ([(m["role"], m["content"].strip()) for m in x] for x in (own, prompt))
    return said == asked


def pair_of(row: object) -> dict:
    """prompt, chosen, rejected and margin of a row: chosen and rejected follow the prompt. Where
    the row has none, it is what the two have in common. Raises ValueError.
    """
    if not isinstance(row, dict):
        raise ValueError("not an object with keys")
    if lacks := [key for key in KEYS if key not in row]:
        raise ValueError(f'no key "{lacks[0]}"')
    prompt = text_or_messages(row["prompt"], "prompt") if row.get("prompt") else ""
    # An answer may be empty, a whole text may not.
    texts = [text_or_messages(row[key], key, may_be_empty=bool(prompt)) for key in KEYS]
    margin = 0.0 if row.get("margin") is None else row["margin"]
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) < 1e6:
        raise ValueError(f'"margin" is {margin!r}, and must be a number')
    if len({type(x) for x in texts}) == 2:
        raise ValueError('"chosen" and "rejected" must be both text or both messages')
    if isinstance(texts[0], list):
        # Many datasets have whole conversations, and the prompt beside them once more.
        prompt = as_messages(prompt) if prompt else []
        if any(text[0]["role"] in ("system", "user") for text in texts):
            if prompt and not all(_begins_with(text, prompt) for text in texts):
                raise ValueError('the conversations don\'t begin with "prompt"')
            prompt = []
        if any(text[-1]["role"] != "assistant" for text in texts):
            raise ValueError("a conversation must end with the assistant's answer")
    elif isinstance(prompt, list):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    whole = None
    if not prompt and texts[0] != texts[1]:
        # Of messages the last one is the answer, whatever it has in common with the other.
        inner = (text[:-1] if isinstance(text, list) else text for text in texts)
        length = [*(x == y for x, y in zip(*inner)), False].index(False)
        whole, prompt = texts, texts[0][:length]
        texts = [text[length:] for text in texts]
    pair = {"prompt": prompt, "chosen": texts[0], "rejected": texts[1], "margin": float(margin)}
    if whole is not None and isinstance(prompt, str):
        # What two texts happen to begin with tells no pair from another one.
        pair["texts"] = whole
    return pair


def _own_pairs(
    config: Any, tasks: ModuleType, tokenizer: Tokenizer
) -> tuple[list[dict], list[dict]]:
    """Pairs of the embedded model's own samples: (train, held out). A right sum is preferred to a
    wrong one; some labels of the training pairs are flipped, as people sometimes err.
    """
    policy = load_causal(config.model).to(config.device)
    disable_dropout(policy)
    own = TaskConfig(
        model=config.model, task=config.task, num_generations=OWN_SAMPLES, max_new_tokens=5,
        rollout_batch_size=2048, seed=config.seed, device=config.device, bf16=False, fp16=False,
    )  # fmt: skip
    task, rng = load_task(own, tasks, policy, tokenizer), random.Random(config.seed)
    sampling = sampling_options(own, policy, tokenizer)

    def pairs(rows: list[dict], count: int, label_noise: float) -> list[dict]:
        found, batch = [], 0
        while len(found) < count:
            prompts = prompt_batch(rows, batch, 256, config.seed)
            rollout = sample(policy, *task.encode(prompts), **sampling)
            scores, texts = task.score(prompts, rollout)
            for number, row in enumerate(prompts):
                group = range(number * OWN_SAMPLES, (number + 1) * OWN_SAMPLES)
                right = [texts[i] for i in group if scores[i] == 1]
                wrong = [texts[i] for i in group if scores[i] == 0]
                for pair in zip(right, wrong):  # each sample in one pair at most
                    chosen, rejected = pair if rng.random() >= label_noise else pair[::-1]
                    found.append(pair_of(row | {"chosen": chosen, "rejected": rejected}))
            batch += 1
        return found[:count]

    train = pairs(task.train, OWN_PAIRS, LABEL_NOISE)
    return train, pairs(task.heldout, config.num_eval_pairs, 0.0)


def _with_tokens(
    pairs: list[dict], tokenizer: Tokenizer, eos: bool, limit: float, source: str, which: str
) -> list[dict]:
    """The pairs with their tokens, without those that teach nothing. Raises InputError."""
    kept, same, long = [], 0, 0
    for pair in pairs:
        texts = [text_ids(tokenizer, pair["prompt"], pair[key], source, eos) for key in KEYS]
        ids = {"chosen_ids": texts[0], "rejected_ids": texts[1]}
        if ids["chosen_ids"] == ids["rejected_ids"]:
            same += 1  # the loss would be log 2 whatever the scores are
        elif max(map(len, ids.values())) > limit:
            long += 1  # cut, the two may be the same text, or the better one without its point
        else:
            kept.append(pair | ids)
    for count, why in ((same, "both texts are the same"), (long, f"longer than {limit} tokens")):
        if count:
            print(f"{count} of the {len(pairs)} pairs {which} are left out: {why}.")
    if not kept:
        remedy = "; raise --max_length" if long else ""
        raise InputError(f"no pair is left {which}{remedy}")
    return kept


def pair_batches(pairs: list[dict], max_tokens: int | None) -> list[list[dict]]:
    """Cut pairs, sorted by length, into parts whose texts, padded to the longest, have at most
    max_tokens tokens; a pair alone may have more.
    """

    def length(pair: dict) -> int:
        return max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))

    parts, longest = [[]], 0
    for pair in pairs:
        longest = max(longest, length(pair))
        num_texts = 2 * (len(parts[-1]) + 1)
        too_many = max_tokens is not None and num_texts * longest > max_tokens
        if parts[-1] and (too_many or num_texts > MOST_TEXTS):
            parts.append([])
            longest = length(pair)
        parts[-1].append(pair)
    return parts


def pair_scores(
    model: nn.Module, pairs: list[dict], bf16: bool = False
) -> tuple[Tensor, Tensor, int]:
    """The scores of b pairs by one forward pass of 2b rows: (chosen (b,), rejected (b,), number of
    tokens), with gradient.
    """
    ids = [pair[f"{key}_ids"] for key in KEYS for pair in pairs]
    tokens, mask = pad_rows(ids, 0, "right", model.device)  # (2b, L)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        chosen, rejected = sequence_scores(model, tokens, mask).chunk(2)
    return chosen, rejected, sum(map(len, ids))


@torch.no_grad()
def evaluate_pairs(config: Any, model: nn.Module, pairs: Pairs) -> Evaluation:
    """How well the model judges the N held-out pairs. Raises Fault where a score isn't finite."""
    rows = pairs.heldout
    lengths = torch.tensor([[len(p[f"{key}_ids"]) for p in rows] for key in KEYS])  # (2, N)
    order = lengths.amax(0).argsort().tolist()  # a batch is as wide as its longest text
    found = []
    with evaluating(model):
        for part in pair_batches([rows[i] for i in order], config.micro_batch_tokens):
            chosen, rejected, _ = pair_scores(model, part, config.bf16)
            found.append(torch.stack([chosen, rejected]).cpu().double())
    scores = torch.cat(found, dim=1)[:, torch.tensor(order).argsort()]  # (2, N)
    if not scores.isfinite().all():
        raise Fault("the scores of held-out pairs are not finite: lower --learning_rate")
    margins, longer = scores[0] - scores[1], (lengths[0] - lengths[1]).double()
    metrics = {
        "eval/accuracy": _share(margins),
        "eval/loss": -logsigmoid(margins).mean().item(),
        "eval/margin": margins.mean().item(),
        "eval/score_mean": scores.mean().item(),
        "eval/score_std": scores.std().item(),
        "eval/longer_is_better": _share(longer),
        "eval/length_correlation": length_correlation(margins, longer),
    }
    return Evaluation(metrics, ["eval/accuracy", "eval/loss"], *pair_records(rows, scores))


def _share(differences: Tensor) -> float:
    """The share of the differences that are above 0; a tie counts half."""
    return (differences.sign() / 2 + 0.5).mean().item()


def length_correlation(margins: Tensor, longer: Tensor) -> float:
    """How far the score follows the length within pairs: differences of the scores and of the
    lengths, each (N,) -> -1 to 1; 0 where one of the two is 0 throughout.

    Between the two texts of a pair, so the length of the prompt doesn't count; about 0, not about
    the mean, because which text comes first means something.
    """
    size = margins.norm() * longer.norm()
    return (margins @ longer / size).item() if size > 0 else 0.0


def pair_records(pairs: list[dict], scores: Tensor) -> tuple[list[dict], list[str]]:
    """Of N pairs with scores (2, N) the records for samples.jsonl, and lines to print."""
    records, lines = [], []
    for pair, (better, worse) in zip(pairs, scores.T.tolist(), strict=True):
        kept = {key: pair[key] for key in ("prompt", *KEYS, "margin")}
        records.append(kept | {"score_chosen": better, "score_rejected": worse})
        texts = (text_of(pair[key]) if pair[key] else "" for key in ("prompt", *KEYS))
        prompt, good, bad = (textwrap.shorten(text, 26, placeholder=" ...") for text in texts)
        lines.append(f"  {better:6.2f} {worse:6.2f}  {prompt} {good} | {bad}")
    return records, lines


class PairMeter(Totals):
    """The metrics of an update of a reward model."""

    def add_pairs(self, loss: Tensor, chosen: Tensor, rejected: Tensor, num_tokens: int) -> None:
        """Add the losses and the scores of b pairs, each (b,): how often the model agrees with the
        labels, and where its scores are.
        """
        self.num_tokens += num_tokens
        self.add("loss/pairs", loss)
        self.add("reward/accuracy", (chosen - rejected).sign() / 2 + 0.5)
        self.add("reward/margin", chosen - rejected)
        self.add("reward/mean", (chosen + rejected) / 2)

    @staticmethod
    def progress(metrics: Metrics) -> str:
        return (
            f"loss {metrics['loss/pairs']:.3f}, accuracy {metrics['reward/accuracy']:.2f}, "
            f"margin {metrics['reward/margin']:.2f}, {metrics['tokens_per_second']:.0f} tokens/s"
        )

    @staticmethod
    def warnings(history: list[Metrics], bf16: bool = False) -> list[tuple[str, str]]:
        """As metrics.warnings_about, of pairs."""
        found, now, last = [], history[-1], history[-20:]
        evaluations = [m for m in history if "eval/loss" in m]
        losses = [m["eval/loss"] for m in evaluations]
        if losses and losses[-1] > min(losses) + 0.1:
            text = f"the held-out loss has risen from {min(losses):.2f} to {losses[-1]:.2f}: the"
            remedy = "model learns pairs by heart; take more pairs or fewer steps"
            found += [("overfitting", f"{text} {remedy}")]
        if abs(now["reward/mean"]) > 10:
            text = f"the mean score is {now['reward/mean']:.0f}, and differences alone are learnt:"
            found += [("far scores", f"{text} raise --center_rewards_coef, to 0.01 say")]
        for m in evaluations[-1:]:
            if abs(m["eval/length_correlation"]) > 0.7:
                text = f"score and length correlate by {m['eval/length_correlation']:.2f}: a policy"
                found += [("length", f"{text} will learn the length; balance it in the pairs")]
        if len(last) == 20 and statistics.mean(m["reward/accuracy"] for m in last) < 0.5:
            text = "for 20 steps not even half of the pairs were judged right:"
            found += [("worse than chance", f"{text} lower --learning_rate, look at the labels")]
        return found
