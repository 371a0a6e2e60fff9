"""GRPO on one page (Shao et al. 2024, arXiv 2402.03300): `python one_page/grpo.py`

A prompt is a game: 4:12,25,24,25,14,14= puts a ball under cup 4, swaps cups 1 and 2, then 2 and 5,
and so on. The model can follow the ball, >4>4>2>5>5>5, but nine times out of ten it guesses, 3.
Only the last digit is scored. Your task needs another model, game, score: docs/architecture.md.
"""

import copy
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

N, G, T = 32, 8, 16  # prompts of a step, completions of each, tokens of a completion at most
STEPS, LEARNING_RATE, KL_COEF, CLIP = 25, 1e-3, 0.01, 0.2  # last two: eq. 3's beta, epsilon
assert G > 1, "a completion is compared with the others of its prompt: G must be 2 or more"


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


set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
EOS = tokenizer.eos_token_id
policy = AutoModelForCausalLM.from_pretrained("tiny/cups", dtype=torch.float32)  # no dropout
ref_model = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

for step in range(STEPS):
    # 1. Sample a group of G completions of each of N prompts, and score them: B = N * G rows.
    games = [g for _ in range(N) for g in [game()] * G]  # a group is G consecutive rows
    tokens, mask, texts, scores = sample(games)

    # 2. The advantage is the score less the group's mean, over its std: the same for every token.
    groups = scores.view(N, G)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    advantages = ((groups - mean) / (std + 1e-4)).flatten()  # (B,); 0 if all scores are equal
    old_logprobs = completion_logprobs(policy, tokens).detach()  # (B, T)
    ref_logprobs = completion_logprobs(ref_model, tokens)

    # 3. Two updates from the same samples, eq. 3. In the first the ratio is 1, but has a gradient.
    A = advantages.unsqueeze(1)  # (B, 1)
    for _ in range(2):
        logprobs = completion_logprobs(policy, tokens)
        ratio = (logprobs - old_logprobs).exp()
        kl = (ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1  # eq. 4, of a token
        # The larger loss counts: moving the ratio beyond CLIP, the way A pushes, gains nothing.
        token_loss = torch.max(-A * ratio, -A * ratio.clamp(1 - CLIP, 1 + CLIP)) + KL_COEF * kl
        loss = ((token_loss * mask).sum(1) / mask.sum(1)).mean()  # over tokens, then completions
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(step, f"right {scores.mean():.2f} tokens {mask.sum() / N / G:.1f}", *games[0], texts[0])

_, _, _, scores = sample([game() for _ in range(512)], greedy=True)  # 99% were never trained on
print(f"greedy: right {scores.mean():.3f}")
