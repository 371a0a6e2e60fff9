"""PPO on one page (Schulman et al. 2017, arXiv 1707.06347): `python one_page/ppo.py`

A prompt is a game: 4:12,25,24,25,14,14= puts a ball under cup 4, swaps cups 1 and 2, then 2 and 5,
and so on. The model can follow the ball, >4>4>2>5>5>5, but nine times out of ten it guesses, 3.
Only the last digit is scored. Your task needs another model, game, score: docs/architecture.md.
"""

import copy
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

N, G, T = 32, 8, 16  # prompts of a step, completions of each, tokens of a completion at most
STEPS, LEARNING_RATE, KL_COEF, CLIP = 18, 1e-3, 0.01, 0.2  # CLIP: the paper's epsilon
GAMMA, LAMBDA = 1.0, 0.95  # the discount; how far GAE trusts rewards rather than values


def game():
    """Make up a prompt, and the cup where the ball ends. All prompts have equally many tokens."""
    start = ball = random.choice("12345")
    swaps = random.choices("12 13 14 15 23 24 25 34 35 45".split(), k=6)
    for swap in swaps:
        ball = swap.replace(ball, "") if ball in swap else ball  # to the other cup of the two
    return f"{start}:{','.join(swaps)}=", ball


@torch.no_grad()
def rollout(games, greedy=False):
    """Complete and score each game: tokens (B, P + T), mask (B, T), texts, scores (B,)."""
    tokens = new = tokenizer([prompt for prompt, _ in games], return_tensors="pt").input_ids
    cache = {}  # the keys and values of all tokens that the policy has read
    for _ in range(T):
        cache = dict(policy(new, **cache))  # the cache with the new tokens in it, and "logits"
        probs = cache.pop("logits")[:, -1].softmax(-1)  # of the next token: (B, V)
        new = probs.argmax(-1, keepdim=True) if greedy else torch.multinomial(probs, 1)  # (B, 1)
        new[tokens[:, -1] == EOS] = EOS  # after the first EOS there are only more
        tokens = torch.cat([tokens, new], 1)
    mask = (tokens[:, -T:] == EOS).cumsum(1) <= 1  # no second EOS yet: up to the first, and at it
    texts = tokenizer.batch_decode(tokens[:, -T:], skip_special_tokens=True)
    scores = torch.tensor([float(text.endswith(cup)) for text, (_, cup) in zip(texts, games)])
    return tokens, mask, texts, scores


def logprobs(model, tokens):
    """Compute log pi of each token of the completions: (B, P + T) -> (B, T)."""
    logits = model(tokens).logits[:, -T - 1 : -1]  # those at position i predict token i + 1
    return logits.log_softmax(-1).gather(2, tokens[:, -T:, None]).squeeze(2)


set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
EOS = tokenizer.eos_token_id
policy = AutoModelForCausalLM.from_pretrained("tiny/cups", dtype=torch.float32)  # no dropout
reference = copy.deepcopy(policy).requires_grad_(False)
critic = copy.deepcopy(policy)  # the value model: one number, V, in place of the logits; 0 at first
critic.lm_head = torch.nn.Linear(policy.config.hidden_size, 1, bias=False)
torch.nn.init.zeros_(critic.lm_head.weight)
optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], betas=(0.9, 0.95))

for step in range(STEPS):
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)  # to 0, so that it settles
    # 1. Sample a group of G completions of each of N prompts, and score them: B = N * G rows.
    games = [game() for _ in range(N)] * G  # so each column of scores.view(G, N) is a group
    tokens, mask, texts, scores = rollout(games)

    # 2. The reward of each token is minus its KL to the reference; the last one has the score too.
    old, ref = logprobs(policy, tokens).detach(), logprobs(reference, tokens)  # (B, T)
    rewards = -KL_COEF * (old - ref) * mask
    rewards[range(N * G), mask.sum(1) - 1] += scores

    # 3. Advantages by GAE, eq. 11 and 12, from the last token to the first. Then whiten them.
    old_V = critic(tokens).logits[:, -T - 1 : -1, 0].detach() * mask  # of the text before a token
    A, next_A, next_V = torch.zeros_like(rewards), 0, 0
    for t in reversed(range(T)):
        delta = rewards[:, t] + GAMMA * next_V - old_V[:, t]
        next_A = A[:, t] = (delta + GAMMA * LAMBDA * next_A) * mask[:, t]
        next_V = old_V[:, t]
    returns = A + old_V  # what V is to learn
    A = (A - A[mask].mean()) / (A[mask].var() + 1e-8).sqrt()

    # 4. Two epochs of four minibatches: eq. 7 for the policy, the squared error for the critic.
    for rows in torch.cat([torch.randperm(N * G) for _ in range(2)]).split(N * G // 4):
        ratio = (logprobs(policy, tokens[rows]) - old[rows]).exp()
        objective = torch.min(ratio * A[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * A[rows])
        V = critic(tokens[rows]).logits[:, -T - 1 : -1, 0]
        error = (V - returns[rows]) ** 2  # no coefficient: the models share no weight
        loss = (error - objective)[mask[rows]].mean()  # over all tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(step, f"right {scores.mean():.2f} tokens {mask.sum() / N / G:.1f}", *games[0], texts[0])

_, _, _, scores = rollout([game() for _ in range(512)], greedy=True)  # 99% were never trained on
print(f"greedy: right {scores.mean():.3f}")
