"""DPO on one page (Rafailov et al. 2023, arXiv 2305.18290): `python one_page/dpo.py`

sft.py has taught a model to answer. People see two of its answers to a game, and choose the right
one, as in reward_model.py. DPO has no reward model, and samples nothing while it learns: the reward
of an answer is BETA times the log of how much more likely it has become since the policy began. The
loss asks for a difference of rewards alone, so the chosen answer may become less likely, too.
"""

import random
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

N, B, T = 1536, 32, 16  # games that are answered twice, pairs of a step, tokens at most
LEARNING_RATE, BETA = 5e-4, 0.1  # BETA: the weight of the KL that this loss implies


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


def completion_logprobs(model, tokens):
    """Compute log pi of each token of the completions: (B, P + T) -> (B, T)."""
    logits = model(tokens).logits[:, -T - 1 : -1]  # those at position i predict token i + 1
    return logits.log_softmax(-1).gather(2, tokens[:, -T:, None]).squeeze(2)


if not Path("runs/page-sft").is_dir():
    raise SystemExit("runs/page-sft is missing: run python one_page/sft.py first")
set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
EOS = tokenizer.eos_token_id
policy = AutoModelForCausalLM.from_pretrained("runs/page-sft", dtype=torch.float32)  # of sft.py
optimizer = torch.optim.Adam(policy.parameters(), betas=(0.9, 0.95))

# 1. Sample two answers to each game. People choose where one is right and the other isn't.
tokens, mask, texts, scores = sample([game() for _ in range(N)] * 2)
print(f"sampled before: right {scores.mean():.2f} tokens {mask.sum() / 2 / N:.1f}")
rows = torch.arange(2 * N).view(2, N)  # a game's two answers stand in a column
first, second = scores.view(2, N)
rows = torch.where(first > second, rows, rows.flip(0))[:, first != second]  # chosen over rejected
with torch.no_grad():
    ref_logprobs = completion_logprobs(policy, tokens)  # (2 N, T): the reference is how it begins

# 2. Maximise the log of the probability that people choose so, sigmoid(r_chosen - r_rejected).
batches = rows.split(B, dim=1)
for step, pairs in enumerate(batches):
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / len(batches))
    pairs = pairs.flatten()  # the chosen, then the rejected
    log_ratios = completion_logprobs(policy, tokens[pairs]) - ref_logprobs[pairs]  # (2 B, T)
    chosen, rejected = BETA * (log_ratios * mask[pairs]).sum(1).view(2, -1)
    loss = -logsigmoid(chosen - rejected).mean()  # eq. 7
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"loss {loss:.3f} chosen {chosen.mean():+.2f} rejected {rejected.mean():+.2f}")

for greedy in (False, True):
    games = [game() for _ in range(512)]
    _, mask, texts, scores = sample(games, greedy)
    told = f"right {scores.mean():.2f} tokens {mask.sum() / 512:.1f}"
    print("greedy:" if greedy else "sampled:", told, *games[0], texts[0])
