"""A reward model: learns from pairs of completions, of which people prefer one.

A pair is a prompt x with two completions, the chosen y_w and the rejected y_l. The model gives a
text one number, its score r: a linear head, without a bias, on the last hidden state of the last
real token. Bradley and Terry say how likely y_w is to be preferred. On the left are the names of
the code; c is center_rewards_coef, m is the margin of the pair, 0 unless the data has one.

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

  python reward_model.py         # pairs of sums: judges 91 to 93% of those held out, a minute
  python ppo.py --reward_model runs/reward_model-tiny-add-s0/model    # sums 46% -> 76 to 86%
  python reward_model.py --model gpt2 --pairs my_pairs.jsonl
"""

import math
from dataclasses import dataclass

import torch
from plumbing.forward import to
from torch import Tensor
from torch.nn.functional import logsigmoid

import tasks
from common import base_model, clear_cache, disable_dropout, set_learning_rate
from plumbing.config import TrainConfig, flag, parse_flags
from plumbing.data import prompt_batch
from plumbing.models import load_tokenizer, set_up_training
from plumbing.preferences import (
    PairMeter,
    evaluate_pairs,
    load_for_training,
    load_pairs,
    pair_batches,
    pair_scores,
)
from plumbing.run import Run, run_main


@dataclass(kw_only=True)
class Config(TrainConfig):
    script = "reward_model"
    task = "add"  # of the pairs that the embedded model makes

    # The flags that this script has alone.
    pairs: str | None = flag(
        None,
        "file of JSON lines, or dataset NAME:SUBSET:SPLIT: chosen, rejected; tiny makes its own",
        "the job",
    )
    eval_pairs: str | None = flag(None, "held-out pairs; default: a tenth of the pairs", "the job")
    num_eval_pairs: int = flag(512, "most held-out pairs per evaluation", "the run")
    max_length: int | None = flag(
        None, "a longer text's pair is left out; default: the context", "the job"
    )
    pairs_per_step: int = flag(
        help="pairs of one optimisation step", group="update", tiny=128, other=32
    )
    center_rewards_coef: float = flag(
        0.0, "weight of the squared sum of a pair's two scores", least=0
    )

    # Its defaults of shared flags. The defaults that all scripts share: plumbing/config.py.
    num_steps: int | None = flag(
        help="default: one pass over the pairs", group="update", tiny=200, other=None
    )
    learning_rate: float = flag(tiny=1e-3, other=2e-5)
    micro_batch_tokens: int | None = flag(tiny=None, other=4096)
    eval_every: int = flag(50)


def preference_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_rewards_coef: float = 0.0
) -> Tensor:
    """The loss of each pair: scores (N,), margin (N,) or a number -> (N,). [2] eq. 1; [3]; [4]."""
    # logsigmoid, not log(sigmoid): for a pair that is badly wrong the sigmoid is 0 in float32.
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_rewards_coef * (chosen + rejected) ** 2


def main(args: list[str] | None = None) -> None:
    # The flags, and the random numbers.
    config = parse_flags(Config, __doc__, args)
    torch.manual_seed(config.seed)

    # The model: a backbone with a head. A new head starts at 0: the first loss is log 2. Dropout
    # is off: it would give the same text two scores.
    model = load_for_training(config.model, config.lora_r).to(config.device)
    tokenizer = load_tokenizer(config.model)
    # For other tools that load the saved model: transformers finds the last token by the pad id.
    if getattr(base_model(model).config, "pad_token_id", None) is None:
        ids = tokenizer.pad_token_id, tokenizer.eos_token_id
        base_model(model).config.pad_token_id = next((i for i in ids if i is not None), None)
    if config.disable_dropout:
        disable_dropout(model)

    # The pairs, as tokens: some to train on, some held out. A pair that is too long is left out: a
    # text that is cut could lose the very words that decide.
    pairs = load_pairs(config, tasks, model, tokenizer)
    N = config.pairs_per_step
    if config.num_steps is None:
        config.num_steps = math.ceil(len(pairs.train) / N)
    set_up_training(config, model)

    # What trains: all weights, or an adapter and the head.
    parameters = [p for p in model.parameters() if p.requires_grad]
    # beta2 is 0.95: with 0.999, a large gradient after some small ones makes too long a step.
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    with Run(config, pairs, {"policy": model}, optimizer) as run:
        for step in run.steps(evaluate=lambda: evaluate_pairs(config, model, pairs)):
            # 1. The pairs of this step, from endless passes, each in a new order. Then by length,
            #    for a micro-batch is as wide as its longest text: the gradient is the same sum.
            batch = prompt_batch(pairs.train, step, N, config.seed)
            batch.sort(key=lambda pair: len(pair["chosen_ids"]) + len(pair["rejected_ids"]))

            # 2. The learning rate rises over the first steps, then falls linearly.
            set_learning_rate(optimizer, config, step)

            meter = PairMeter()
            for part in pair_batches(batch, config.micro_batch_tokens):
                # 3. Score both texts of each pair in one forward pass, at their last real token.
                chosen, rejected, num_tokens = pair_scores(model, part, config.bf16)  # (b,) each

                # 4. The loss: a micro-batch of b pairs adds its share of the mean over all N.
                margin = to(chosen.device, torch.tensor([pair["margin"] for pair in part]))
                loss = preference_loss(chosen, rejected, margin, config.center_rewards_coef)
                (loss.sum() / N).backward()
                meter.add_pairs(loss, chosen, rejected, num_tokens)

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
