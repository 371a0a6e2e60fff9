"""PPO on one page (Schulman et al. 2017, arXiv 1707.06347): `python one_page/ppo.py`

A prompt is a game: 4:12,25,24,25,14,14= puts a ball under cup 4, swaps cups 1 and 2, then 2 and 5,
and so on. The model can follow the ball, >4>4>2>5>5>5, but nine times out of ten it guesses, 3.
Only the last digit is scored. Your task needs another model, game, score: docs/architecture.md.

After sft.py and reward_model.py, `python one_page/ppo.py rlhf` is the last step of RLHF (Ouyang et
al. 2022, arXiv 2203.02155, step 3 of figure 2): the policy begins as people taught it, and the
reward model scores. A number behind `rlhf` is KL_COEF. With 0, nothing holds what isn't scored.
"""

import copy
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

N, G, T = 32, 8, 16  # prompts of a step, completions of each, tokens of a completion at most
STEPS, LEARNING_RATE, CLIP = 18, 1e-3, 0.2  # CLIP: the paper's epsilon
GAMMA, LAMBDA = 1.0, 0.95  # the discount; how far GAE trusts rewards rather than values
RLHF = "rlhf" in sys.argv[1:2]
KL_COEF = float((sys.argv[2:] or [0.05])[0]) if RLHF else 0.01  # the weight of the KL


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


if RLHF and not Path("runs/page-judge.pt").exists():
    sys.exit("run python one_page/sft.py and python one_page/reward_model.py first")
set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
EOS = tokenizer.eos_token_id
path = "runs/page-sft" if RLHF else "tiny/cups"
policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # no dropout
ref_model = copy.deepcopy(policy).requires_grad_(False)
value_model = copy.deepcopy(policy)  # one number, V, in place of the logits; it is 0 at first
value_model.lm_head = torch.nn.Linear(policy.config.hidden_size, 1, bias=False)
torch.nn.init.zeros_(value_model.lm_head.weight)
if RLHF:
    judge = copy.deepcopy(value_model).requires_grad_(False)  # the reward model has its form
    judge.load_state_dict(torch.load("runs/page-judge.pt"))
optimizer = torch.optim.Adam([*policy.parameters(), *value_model.parameters()], betas=(0.9, 0.95))

for step in range(STEPS):
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)  # to 0, so that it settles
    # 1. Sample a group of G completions of each of N prompts, and score them: B = N * G rows.
    games = [g for _ in range(N) for g in [game()] * G]  # a group is G consecutive rows
    tokens, mask, texts, right = sample(games)
    last = range(N * G), mask.sum(1) - 1 - T  # the last token of each row, counted from the end
    scores = judge(tokens).logits[..., 0][last] if RLHF else right  # (B,)

    # 2. The reward of each token is minus its KL to the reference; the last one has the score too.
    old_logprobs = completion_logprobs(policy, tokens).detach()  # (B, T)
    ref_logprobs = completion_logprobs(ref_model, tokens)
    kl = (old_logprobs - ref_logprobs) * mask
    rewards = -KL_COEF * kl
    rewards[last] += scores

    # 3. Advantages by GAE, eq. 11 and 12, from the last token to the first. Then whiten them.
    old_values = value_model(tokens).logits[:, -T - 1 : -1, 0].detach() * mask  # before each token
    advantages, next_advantage, next_value = torch.zeros_like(rewards), 0, 0
    for t in reversed(range(T)):
        delta = rewards[:, t] + GAMMA * next_value - old_values[:, t]
        next_advantage = (delta + GAMMA * LAMBDA * next_advantage) * mask[:, t]
        advantages[:, t], next_value = next_advantage, old_values[:, t]
    returns = advantages + old_values  # what the value model is to learn
    var, mean = torch.var_mean(advantages[mask])
    advantages = (advantages - mean) / (var + 1e-8).sqrt()

    # 4. Two epochs of four minibatches: eq. 7 for the policy, the squared error for the values.
    for _ in range(2):
        for rows in torch.randperm(N * G).split(N * G // 4):
            A, logprobs = advantages[rows], completion_logprobs(policy, tokens[rows])
            ratio = (logprobs - old_logprobs[rows]).exp()
            # The larger loss counts: moving the ratio beyond CLIP, the way A pushes, gains nothing.
            pg = torch.max(-A * ratio, -A * ratio.clamp(1 - CLIP, 1 + CLIP))
            values = value_model(tokens[rows]).logits[:, -T - 1 : -1, 0]
            vf = (values - returns[rows]) ** 2  # no coefficient: the models share no weight
            loss = (pg + vf)[mask[rows]].mean()  # over all tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    told = f"right {right.mean():.2f} tokens {mask.sum() / N / G:.1f} score {scores.mean():.2f}"
    print(step, told, f"KL {kl.sum(1).mean():.2f}", *games[0], texts[0])

_, _, _, right = sample([game() for _ in range(512)], greedy=True)  # 99% new; a third with rlhf
print(f"greedy: right {right.mean():.3f}")
