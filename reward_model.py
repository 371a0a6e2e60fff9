"""A reward model: learns from pairs of completions, of which people prefer one.

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

  python reward_model.py         # pairs of sums: judges 96% of those held out, a minute on a CPU
  python ppo.py --reward_model runs/reward_model-tiny-add-s0/model --kl_coef 0.1  # sums 46% -> 90%
  python reward_model.py --model gpt2 --pairs my_pairs.jsonl
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import tasks
from common import base_model, clear_cache, disable_dropout, set_learning_rate
from plumbing.config import TrainConfig, flag, parse_flags
from plumbing.data import prompt_batch
from plumbing.models import load_tokenizer, set_up_training
from plumbing.pairs import PairMeter, evaluate_pairs, load_pairs, pair_batches, pair_scores
from plumbing.preferences import load_classifier
from plumbing.run import Run, run_main


@dataclass(kw_only=True)
class Config(TrainConfig):
    script = "reward_model"
    task = "add"  # of the embedded model's own pairs

    pairs: str | None = flag(None, "file or dataset: chosen, rejected, maybe prompt and margin")
    eval_pairs: str | None = flag(None, "held-out pairs; default: a tenth of the pairs")
    num_eval_pairs: int = flag(512, "most held-out pairs per evaluation")
    max_length: int | None = flag(None, "of a text; longer ones are left out; default: context")
    num_steps: int | None = flag(None, "default: one pass over the pairs")
    pairs_per_step: int = flag(32, "pairs of one optimiser step, N")
    learning_rate: float = flag(2e-5, "of AdamW, at its highest; adapters: 10 times")
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
    """The loss of each pair: scores (N,), margin (N,) or a number -> (N,). [2] eq. 1; [3]; [4]."""
    # logsigmoid, not log(sigmoid): for a pair that is badly wrong the sigmoid is 0 in float32.
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_rewards_coef * (chosen + rejected) ** 2


def main(args: list[str] | None = None) -> None:
    # The flags, and the random numbers.
    config = parse_flags(Config, __doc__, TINY, args)
    torch.manual_seed(config.seed)

    # The model: a backbone with a head. A new head starts at 0: the first loss is log 2. Dropout
    # is off: it would give the same text two scores.
    model = load_classifier(config.model, config.lora_r, new_head=True).to(config.device)
    tokenizer = load_tokenizer(config.model)
    if config.disable_dropout:
        disable_dropout(model)

    # The pairs, as tokens: some to train on, some held out.
    pairs = load_pairs(config, tasks, base_model(model), tokenizer)
    N = config.pairs_per_step
    config.num_steps = config.num_steps or math.ceil(len(pairs.train) / N)
    set_up_training(config, model)

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
        set_learning_rate(optimizer, config, step)

        meter = PairMeter()
        for part in pair_batches(batch, config.micro_batch_tokens):
            # 3. Score both texts of each pair in one forward pass, at their last real token.
            chosen, rejected = pair_scores(model, part, config.bf16)  # (b,) each

            # 4. The loss: a micro-batch of b pairs adds its share of the mean over all N.
            margin = torch.tensor([pair["margin"] for pair in part]).to(chosen.device)
            loss = preference_loss(chosen, rejected, margin, config.center_rewards_coef)
            (loss.sum() / N).backward()
            meter.add_pairs(part, loss, chosen, rejected)

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
