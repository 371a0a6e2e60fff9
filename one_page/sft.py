"""Supervised fine-tuning on one page, the first step of RLHF: `python one_page/sft.py`

A prompt is a game: 4:12,25,24,25,14,14= puts a ball under cup 4, swaps cups 1 and 2, then 2 and 5,
and so on. People show how they answer, and are right. One in three follows the ball, >4>4>2>5>5>5;
the others name its last cup at once, 5. The model learns to write like them (Ouyang et al. 2022,
arXiv 2203.02155, step 1 of figure 2). Here `demonstration` plays the people.
"""

import random

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

B, T = 64, 16  # demonstrations of a step, tokens of a completion at most
STEPS, LEARNING_RATE, WORKED_OUT = 20, 5e-4, 1 / 3  # WORKED_OUT: the share that follows the ball


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


def demonstration(cups):
    """Answer a game as people do: the ball's cups one by one, or only the last."""
    return "".join(f">{cup}" for cup in cups) if random.random() < WORKED_OUT else cups[-1]


set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
EOS = tokenizer.eos_token_id
policy = AutoModelForCausalLM.from_pretrained("tiny/cups", dtype=torch.float32)  # no dropout
optimizer = torch.optim.Adam(policy.parameters(), betas=(0.9, 0.95))

for step in range(STEPS):
    # 1. Prompts with demonstrations, and EOS behind them: the model must learn to stop, too.
    games = [game() for _ in range(B)]
    texts = [prompt + demonstration(cups) + tokenizer.eos_token for prompt, cups in games]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")

    # 2. Labels are the tokens of the demonstrations; -100 marks prompts and padding. Padding is
    #    known by its mask: where EOS also pads, its id would leave out the EOS that ends a text.
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[:, : len(tokenizer(games[0][0]).input_ids)] = -100

    # 3. Maximise log pi of the demonstrations.
    logits = policy(**batch).logits[:, :-1]  # those at position i predict token i + 1
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)  # to 0, so that it settles
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())  # over tokens, without -100
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    _, mask, texts, scores = sample(games)
    told = f"loss {loss:.3f} right {scores.mean():.2f} tokens {mask.sum() / B:.1f}"
    print(step, told, *games[0], texts[0])

for greedy in (False, True):
    games = [game() for _ in range(512)]
    _, mask, texts, scores = sample(games, greedy)
    told = f"right {scores.mean():.2f} tokens {mask.sum() / 512:.1f}"
    print("greedy:" if greedy else "sampled:", told, *games[0], texts[0])
policy.save_pretrained("runs/page-sft")
