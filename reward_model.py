"""A reward model learns from pairs of completions, of which people prefer one.

It is here because the HF of RLHF is human feedback, and in many tasks nobody can program a reward.

A pair is a prompt x with two completions, the chosen y_w and the rejected y_l. The model reads the
whole text, up to its EOS or to the end of its chat template, and gives it one number, the score r:
a linear head, without a bias, on the last hidden state of the last real token. Bradley and Terry
say how likely y_w is to be preferred. On the left are the names of the code; c is
center_rewards_coef, m is the margin of the pair, 0 unless the data has one.

  chosen, rejected  r(x, y_w), r(x, y_l)
  probability       sigmoid(r(x, y_w) - r(x, y_l))                                    [1]
  loss              -log sigmoid(r(x, y_w) - r(x, y_l) - m)                           [2] eq. 1
                    + c (r(x, y_w) + r(x, y_l))^2                                     [4]
                    a mean over the pairs; with a margin: [3] eq. 2

Only differences of scores count in the first term: adding 5 to every score changes nothing. The
second term keeps their mean near 0. A policy is then trained on r alone, and finds what the pairs
didn't say: see docs/experiments.md, "Trusted too far".

[1] Bradley and Terry 1952, Biometrika 39. [2] Ouyang et al. 2022, arXiv 2203.02155.
[3] Touvron et al. 2023, arXiv 2307.09288. [4] Eisenstein et al. 2023, arXiv 2312.09244.

  python reward_model.py         # pairs of sums: 96% of the held-out ones right, a minute on a CPU
  python ppo.py --reward_model runs/reward_model-tiny-add-s0/model --kl_coef 0.1  # sums 46% -> 86%
  python reward_model.py --model gpt2 --pairs my_pairs.jsonl
"""

import functools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, logsigmoid
from transformers import PreTrainedTokenizerBase as Tokenizer

import tasks
from common import clear_cache, disable_dropout, evaluating, schedule, unwrap
from plumbing.config import TrainConfig, flag, parse_flags
from plumbing.data import prompt_batch, read_rows, split_rows, text_of
from plumbing.errors import InputError, blame
from plumbing.metrics import Evaluation, Metrics, Totals, shorten
from plumbing.models import context_length, load_tokenizer, set_up_training
from plumbing.preferences import load_classifier, sequence_scores, text_ids
from plumbing.run import Run, run_main


@dataclass
class Config(TrainConfig):
    script = "reward_model"
    task = "add"  # of the embedded model's own pairs

    pairs: str | None = flag(None, "file or dataset: chosen, rejected, maybe prompt and margin")
    eval_pairs: str | None = flag(None, "held-out pairs; default: a tenth of the pairs")
    num_eval_pairs: int = flag(512, "most held-out pairs per evaluation")
    max_length: int | None = flag(
        None, "tokens of a text; longer ones are left out; default: context"
    )
    num_steps: int | None = flag(None, "default: one pass over the pairs")
    pairs_per_step: int = flag(32, "pairs of one optimiser step, N")
    learning_rate: float = flag(2e-5, "AdamW's peak rate; with an adapter the default is tenfold")
    center_rewards_coef: float = flag(0.0, "weight of a pair's squared sum of scores", least=0)
    eval_every: int = flag(50, "steps between evaluations on held-out pairs")


# The embedded model's own defaults. It has pairs of its own: add_pairs in tasks.py.
TINY = {
    "num_steps": 200,
    "pairs_per_step": 128,
    "learning_rate": 5e-4,
    "micro_batch_tokens": 16384,
    "bf16": False,
}


def preference_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_rewards_coef: float = 0.0
) -> Tensor:
    """Compute the loss of each pair: scores (N,), margin (N,) or a number -> (N,). [2] eq. 1; [3];
    [4]. It is finite, and so is its gradient, however far apart the scores are.
    """
    # logsigmoid, not log(sigmoid): for a pair that is badly wrong the sigmoid is 0 in float32.
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_rewards_coef * (chosen + rejected) ** 2


# --- Pairs of texts: read, cut into parts, judged ---

KEYS = ("chosen", "rejected")


@dataclass
class Pairs:
    """Dicts with chosen, rejected, margin, perhaps prompt, and ids: the tokens of both texts."""

    train: list[dict]
    heldout: list[dict]  # evaluated, never trained on
    tokenizer: Tokenizer
    name: str = "pairs"


def load_pairs(config: Config, model: nn.Module, tokenizer: Tokenizer) -> Pairs:
    """Read the pairs that the flags name, with their tokens. Raises InputError."""
    limit = min(context_length(model) or math.inf, config.max_length or math.inf)
    with_ids = functools.partial(_with_ids, tokenizer=tokenizer, limit=limit)
    if config.pairs:
        train = with_ids(read_rows(config.pairs, "train"))
    elif config.model == "tiny":
        train, heldout = map(with_ids, tasks.add_pairs())
    else:
        raise InputError(f"--pairs: is needed for --model {config.model}; tiny has its own")
    if config.eval_pairs:
        heldout = with_ids(read_rows(config.eval_pairs, "test"))
        random.Random(0).shuffle(heldout)  # the file may be sorted, and be cut below
    elif config.pairs:
        begins = [(x["chosen"][:30], x["rejected"][:30]) for x in train if not x.get("prompt")]
        if sum(isinstance(a, str) and a == b for a, b in begins) > 0.9 * len(train):
            print("Chosen and rejected begin alike: give what is in front of the answer as prompt.")

        # A row without a prompt is known by its conversation before the answer, or by its text: by
        # what the model reads of it, so not by the id of a message.
        def read_as(row: dict) -> tuple[int, ...]:
            return tuple(text_ids(tokenizer, None, row.get("prompt") or row["chosen"][:-1] or ""))

        train, heldout = split_rows(train, read_as)
    return Pairs(train, heldout[: config.num_eval_pairs], tokenizer)


def _with_ids(rows: list[dict], tokenizer: Tokenizer, limit: float) -> list[dict]:
    """Add their tokens to the rows, without those that teach nothing. Raises InputError."""
    pairs = []
    for row in rows:
        with blame(f"chosen or rejected of {str(row)[:60]} can't be read"):
            ids = [text_ids(tokenizer, row.get("prompt"), row[key]) for key in KEYS]
            pair = row | {"ids": ids, "margin": float(row.get("margin") or 0)}
        if not math.isfinite(pair["margin"]):
            raise InputError(f"a margin is {pair['margin']}, and must be a finite number or none")
        # A text that is cut could lose the very words that decide.
        if ids[0] != ids[1] and max(map(len, ids)) <= limit:
            pairs.append(pair)
    if len(pairs) < len(rows):
        left_out = f"{len(rows) - len(pairs)} of {len(rows)} pairs are left out"
        print(f"{left_out}: longer than {limit} tokens, or both texts are the same.")
    if not pairs:
        raise InputError("no pair is left to train on, or none to evaluate")
    return pairs


def pair_batches(pairs: list[dict], max_tokens: int) -> list[list[dict]]:
    """Cut pairs, those of short texts first, into parts whose texts, padded to the longest, have at
    most max_tokens tokens; a single pair may have more.
    """

    def width(pair: dict) -> int:
        return max(map(len, pair["ids"]))

    parts = [[]]
    for pair in sorted(pairs, key=width):
        if parts[-1] and 2 * (len(parts[-1]) + 1) * width(pair) > max_tokens:
            parts.append([])
        parts[-1].append(pair)
    return parts


def pair_scores(model: nn.Module, pairs: list[dict], bf16: bool) -> Tensor:
    """Score b pairs by one forward pass, chosen and rejected: (2, b), with gradient."""
    rows = [pair["ids"][which] for which in (0, 1) for pair in pairs]
    return sequence_scores(model, rows, bf16).view(2, -1)


def above_0(x: Tensor) -> Tensor:
    """Return 1 where an element is above 0, a half where it is 0, else 0."""
    return x.sign() / 2 + 0.5


@torch.no_grad()
def evaluate_pairs(config: Config, model: nn.Module, pairs: Pairs) -> Evaluation:
    """Measure how well the model judges the held-out pairs."""
    parts = pair_batches(pairs.heldout, config.micro_batch_tokens)
    with evaluating(model):
        found = [pair_scores(model, part, config.bf16).cpu().double() for part in parts]
    rows = [pair for part in parts for pair in part]  # N, in the order of the scores
    scores = torch.cat(found, dim=1)  # (2, N)
    margins = scores[0] - scores[1]
    longer = torch.tensor([len(a) - len(b) for a, b in (row["ids"] for row in rows)]).double()
    metrics = {
        "eval/accuracy": above_0(margins).mean(),
        "eval/loss": preference_loss(*scores).mean(),
        "eval/margin": margins.mean(),
        "eval/score_mean": scores.mean(),
        "eval/score_std": scores.std(),
        "eval/longer_is_better": above_0(longer).mean(),
        # About 0, not about the mean: which of the two comes first means something.
        "eval/length_correlation": cosine_similarity(margins, longer, dim=0),
    }
    records, lines = [], []
    for row, (better, worse) in zip(rows, scores.T.tolist(), strict=True):
        kept = {key: row.get(key) for key in ("prompt", *KEYS, "margin")}
        records.append(kept | {"score_chosen": better, "score_rejected": worse})
        texts = (text_of(row.get(key) or "") for key in ("prompt", *KEYS))
        prompt, good, bad = (shorten(text, 26) for text in texts)
        lines.append(f"  {better:6.2f} {worse:6.2f}  {prompt} {good} | {bad}")
    metrics = {name: x.item() for name, x in metrics.items()}
    return Evaluation(metrics, ["eval/accuracy", "eval/loss"], records, lines)


class PairMeter(Totals):
    """Collects the metrics of an update of a reward model."""

    def add_pairs(self, pairs: list[dict], chosen: Tensor, rejected: Tensor) -> None:
        """Add b pairs with their scores, each (b,)."""
        self.num_tokens += sum(len(ids) for pair in pairs for ids in pair["ids"])
        self.add("loss/pairs", preference_loss(chosen, rejected))  # as eval/loss
        self.add("reward/accuracy", above_0(chosen - rejected))
        self.add("reward/margin", chosen - rejected)
        self.add("reward/mean", (chosen + rejected) / 2)

    @staticmethod
    def progress(metrics: Metrics) -> str:
        loss, accuracy = metrics["loss/pairs"], metrics["reward/accuracy"]
        return f"loss {loss:.3f}, accuracy {accuracy:.2f}, {metrics['tokens_per_second']:.0f} tok/s"

    @staticmethod
    def warnings(history: list[Metrics], bf16: bool = False) -> list[tuple[str, str]]:
        """Do for pairs what metrics.warnings_about does."""
        found, mean = [], history[-1]["reward/mean"]
        if abs(mean) > 10:
            text = f"the mean score is {mean:.0f}, and only differences are learnt:"
            found += [("far scores", f"{text} raise --center_rewards_coef, to 0.01 say")]
        if evaluations := [m for m in history if "eval/loss" in m]:
            now, best = evaluations[-1], min(m["eval/loss"] for m in evaluations)
            if now["eval/loss"] > best + 0.1:
                text = f"the held-out loss has risen from {best:.2f} to {now['eval/loss']:.2f}: the"
                remedy = "model learns pairs by heart; take more pairs or fewer steps"
                found += [("overfitting", f"{text} {remedy}")]
            if abs(now["eval/length_correlation"]) > 0.7:
                text = "the scores follow the length within pairs, and so will a policy:"
                found += [("length", f"{text} balance it in the pairs")]
        return found


def main(args: list[str] | None = None) -> None:
    # The flags, and the random numbers.
    config = parse_flags(Config, __doc__, {"tiny": TINY}, args)
    torch.manual_seed(config.seed)

    # The model: a backbone with a head. A new head starts at 0: the first loss is log 2. Dropout
    # is off: it would give the same text two scores.
    model = load_classifier(config.model, config.lora_r, new_head=True).to(config.device)
    tokenizer = load_tokenizer(config.model)
    set_up_training(config, model)
    if config.disable_dropout:
        disable_dropout(model)

    # The pairs, as tokens: some to train on, some held out.
    pairs = load_pairs(config, unwrap(model), tokenizer)
    N = config.pairs_per_step
    config.num_steps = config.num_steps or math.ceil(len(pairs.train) / N)

    # What trains: all weights, or an adapter and the head.
    parameters = [p for p in model.parameters() if p.requires_grad]
    # beta2 is 0.95: with 0.999, a large gradient after some small ones makes too long a step.
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    run = Run(config, pairs, {"policy": model}, optimizer)
    for step in run.steps(evaluate=lambda: evaluate_pairs(config, model, pairs)):
        # 1. The pairs of this step, from endless passes, each in a new order.
        batch = prompt_batch(pairs.train, step, N, config.seed)

        # 2. The learning rate rises over the first steps, then falls linearly.
        share = schedule(step, config.num_steps, config.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * share

        meter = PairMeter()
        for part in pair_batches(batch, config.micro_batch_tokens):
            # 3. Score both texts of each pair in one forward pass, at their last real token.
            chosen, rejected = pair_scores(model, part, config.bf16)  # (b,) each

            # 4. The loss: a micro-batch of b pairs adds its share of the mean over all N.
            margin = torch.tensor([pair["margin"] for pair in part]).to(chosen.device)
            loss = preference_loss(chosen, rejected, margin, config.center_rewards_coef)
            (loss.sum() / N).backward()
            meter.add_pairs(part, chosen, rejected)

        # 5. The gradient of all N pairs is there: one optimiser step.
        meter.end_mini_batch(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()

        # 6. Log, save when due. The number to watch is the accuracy on held-out pairs: from the
        #    second pass on, the accuracy of a step also rises as pairs are learnt by heart.
        run.log(step, meter, episode=(step + 1) * N)
        clear_cache()


if __name__ == "__main__":
    run_main(main)
