"""A reward model on one page, the second step of RLHF: `python one_page/reward_model.py`

sft.py has taught a model to answer. People see two of its answers to a game, and choose the right
one; here a line of code plays the people. From such pairs alone a reward model learns to give an
answer one number, the score, so that the chosen answer's is higher (Bradley and Terry 1952; Ouyang
et al. 2022, arXiv 2203.02155, step 2 of figure 2, eq. 1).
"""

import copy
import random
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

N, B, T = 1536, 32, 16  # games that are answered twice, pairs of a step, tokens at most
LEARNING_RATE = 5e-4


def game():
    """Make up a prompt, and the ball's cup after each swap. Prompts have equally many tokens."""
    start = cups = random.choice("12345")
    swaps = random.choices("12 13 14 15 23 24 25 34 35 45".split(), k=6)
    for swap in swaps:
        ball = cups[-1]
        cups += swap.replace(ball, "") if ball in swap else ball  # to the other cup of the two
    return f"{start}:{','.join(swaps)}=", cups[1:]


@torch.no_grad()
def sample(games, greedy=False):
    """Complete and score each game: tokens (B, P + T), mask (B, T), texts, scores (B,)."""
    tokens = new = tokenizer([prompt for prompt, _ in games], return_tensors="pt").input_ids
    cache = {}  # keys and values so far, under the name by which the model returns and takes them
    for _ in range(T):
        cache = dict(policy(new, **cache))  # the new tokens are in it now, and "logits"
        probs = cache.pop("logits")[:, -1].softmax(-1)  # of the next token: (B, V)
        new = probs.argmax(-1, keepdim=True) if greedy else torch.multinomial(probs, 1)  # (B, 1)
        new[tokens[:, -1] == EOS] = EOS  # after the first EOS there are only more
        tokens = torch.cat([tokens, new], 1)
    mask = (tokens[:, -T:] == EOS).cumsum(1) <= 1  # True up to the first EOS and at it
    texts = tokenizer.batch_decode(tokens[:, -T:], skip_special_tokens=True)
    scores = torch.tensor([float(text.endswith(cups[-1])) for text, (_, cups) in zip(texts, games)])
    return tokens, mask, texts, scores


def score(tokens, mask):
    """Give each completion one number, read off at its last token: (B, P + T), (B, T) -> (B,)."""
    last = mask.sum(1) - 1 - T  # counted from the end; EOS, or the T-th token if it was cut
    return judge(tokens).logits[range(len(tokens)), last, 0]


if not Path("runs/page-sft").is_dir():
    raise SystemExit("runs/page-sft is missing: run python one_page/sft.py first")
set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
EOS = tokenizer.eos_token_id
policy = AutoModelForCausalLM.from_pretrained("runs/page-sft", dtype=torch.float32)  # of sft.py
judge = copy.deepcopy(policy)  # the reward model: one number in place of the logits; 0 at first
judge.lm_head = torch.nn.Linear(policy.config.hidden_size, 1, bias=False)
torch.nn.init.zeros_(judge.lm_head.weight)
optimizer = torch.optim.Adam(judge.parameters(), betas=(0.9, 0.95))

# 1. Sample two answers to each game. People choose where one is right and the other isn't.
tokens, mask, texts, scores = sample([game() for _ in range(N)] * 2)
rows = torch.arange(2 * N).view(2, N)  # a game's two answers stand in a column
first, second = scores.view(2, N)
rows = torch.where(first > second, rows, rows.flip(0))[:, first != second]  # chosen over rejected
heldout, rows = rows[:, :256], rows[:, 256:]  # 256 pairs aren't trained on

# 2. Maximise the log of the probability that people choose so, sigmoid(r_chosen - r_rejected).
batches = rows.split(B, dim=1)
for step, (chosen, rejected) in enumerate(batches):
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / len(batches))
    margin = score(tokens[chosen], mask[chosen]) - score(tokens[rejected], mask[rejected])
    loss = -logsigmoid(margin).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"loss {loss:.3f}")  # log 2 at first: it tosses a coin

# 3. How often does it agree with people, and what has it learnt from them?
rows = heldout.flatten()  # the 256 chosen, then the 256 rejected
tokens, mask, right = tokens[rows], mask[rows], scores[rows] == 1
worked_out = mask.sum(1) > 2  # more than a digit and EOS
moved = torch.cat([tokens[:, :-T], tokens[:, -T:].roll(1, 0)], 1)  # answers behind the next game
with torch.no_grad():
    scores, scores_moved = score(tokens, mask), score(moved, mask.roll(1, 0)).roll(-1)
agrees, differ = scores[:256] > scores[256:], worked_out[:256] != worked_out[256:]
for kind, pairs in {"one worked out": differ, "both or none": ~differ}.items():
    print(f"{pairs.sum()} new pairs, {kind}: agrees with people {agrees[pairs].float().mean():.2f}")
print(f"mean score {scores[worked_out & right].mean():+.2f}: worked out, right")
print(f"mean score {scores_moved[worked_out & right].mean():+.2f}: for another game, mostly wrong")
print(f"mean score {scores[~worked_out & right].mean():+.2f}: at once, right")
print(f"mean score {scores[~worked_out & ~right].mean():+.2f}: at once, wrong")
torch.save(judge.state_dict(), "runs/page-judge.pt")
