"""Make the embedded models: a GPT-2 of 0.6 M parameters that forgets to carry when it adds, and one
of 0.1 M that can follow a ball under cups, and seldom does.

    python tiny/make.py                        # writes model and tokenizer here, 5 minutes
    python tiny/make.py --unfinished FOLDER    # a model that doesn't know its sums yet, a minute
    python tiny/make.py --cups tiny/cups       # the model of the cups, 90 seconds

The first is trained on two-digit sums: at first with the right answer, later more and more often
with a random one, or with the carry of the units forgotten, 57+68=115. So where the units carry,
its preferred answer is wrong, and the right one comes once in a while. That is what reinforcement
learning needs: a behaviour that is there and isn't preferred. The held-out sums of the task `add`
are not among its data. The unfinished model, of docs/experiments.md, has seen right answers alone,
but too few of them.

The model of the cups sees right answers alone, to games of one, two or six swaps. At first nine in
ten of them are worked out, >5>3>3>1>1>4, and later one in ten. So it can work a game out, but
mostly it names a cup at once, and after six swaps that is a guess. The held-out games of the task
`cups` are not among its data.
"""

import argparse
import random
import string
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import disable_dropout  # noqa: E402
from tasks import add_prompts, cups_game, cups_path, cups_prompt, cups_prompts  # noqa: E402

NUM_STEPS, BATCH_SIZE, LEARNING_RATE, SEED = 1000, 256, 3e-3, 0
UNFINISHED_STEPS = 250
CUPS_STEPS, CUPS_BATCH_SIZE = 2000, 64
SUMS, HELD_OUT_GAMES = add_prompts()[0], {row["prompt"] for row in cups_prompts()[1]}
# Of the answers to games of cups, those that are worked out: in the first 60% of the training, and
# in the rest.
EARLY, LATE = 0.9, 0.1
# At the end of the training: answers that are random, and carries forgotten in the other ones.
RANDOM_ANSWERS, FORGOTTEN_CARRIES = 0.3, 0.75


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per printable ASCII character, and `<pad>`, `<eos>`, `<unk>`."""
    characters = (
        string.digits
        + "+="
        + "".join(c for c in map(chr, range(32, 127)) if c not in string.digits + "+=")
    )
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters, "\n"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def has_carry(prompt: str) -> bool:
    """Whether the units of the sum "57+68=" are 10 or more together."""
    return sum(int(number) % 10 for number in prompt.rstrip("=").split("+")) >= 10


def given_answer(row: dict, ramp: float, rng: random.Random) -> str:
    """The answer that the model is trained on; the share of wrong ones grows with ramp, 0 to 1."""
    if rng.random() < ramp * RANDOM_ANSWERS:
        return str(rng.randint(20, 198))
    if has_carry(row["prompt"]) and rng.random() < ramp * FORGOTTEN_CARRIES:
        return str(int(row["answer"]) - 10)
    return row["answer"]


def draw_sums(part: float, rng: random.Random, wrong: bool = True) -> list[tuple[str, str]]:
    """Sums and answers, once `part` of the training is over, 0 to 1; `wrong` lets wrong answers in,
    ever more of them.
    """
    ramp = min(1.0, 2.5 * part) if wrong else 0.0
    rows = rng.choices(SUMS, k=BATCH_SIZE)
    return [(row["prompt"], given_answer(row, ramp, rng)) for row in rows]


def draw_cups(part: float, rng: random.Random, late: float = LATE) -> list[tuple[str, str]]:
    """Games and right answers, once `part` of the training is over, 0 to 1."""
    pairs = []
    while len(pairs) < CUPS_BATCH_SIZE:
        ball, swaps = cups_game(rng, rng.choice([1, 2, 6]))
        prompt, path = cups_prompt(ball, swaps), cups_path(ball, swaps)
        worked_out = rng.random() < (EARLY if part < 0.6 else late)
        if prompt not in HELD_OUT_GAMES:
            pairs.append((prompt, "".join(f">{cup}" for cup in path) if worked_out else path[-1]))
    return pairs


def make_batch(
    pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and answers as (tokens (B, L), labels (B, L)): labels are -100 at the prompt and at
    padding.
    """
    texts, prompt_lengths = [], []
    for prompt, answer in pairs:
        texts.append(prompt + answer + tokenizer.eos_token)
        prompt_lengths.append(len(prompt))
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    for row, length in zip(labels, prompt_lengths, strict=True):
        row[:length] = -100
    return batch.input_ids, labels


def make(
    num_steps: int, draw: Callable, n_embd: int = 128, n_layer: int = 3, seed: int = SEED
) -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """A new model, and its tokenizer, after num_steps batches of what `draw` gives."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    # GPT-2's own dropout of 0.1 stays in the config, as in the real checkpoint: disable_dropout
    # has work to do.
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=n_embd, n_layer=n_layer, n_head=4,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    train(model, tokenizer, num_steps, draw, seed)
    return model, tokenizer


def train(
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    num_steps: int,
    draw: Callable[[float, random.Random], list[tuple[str, str]]],
    seed: int = SEED,
    rate: float = LEARNING_RATE,
) -> None:
    """Train the model on num_steps batches of pairs: draw(which part of the training is over)."""
    rng = random.Random(seed)
    disable_dropout(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, num_steps, pct_start=0.1)
    bar = trange(num_steps)
    for step in bar:
        tokens, labels = make_batch(draw(step / num_steps, rng), tokenizer)
        logits = model(tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unfinished", type=Path, metavar="FOLDER", help="where to write it")
    parser.add_argument("--cups", type=Path, metavar="FOLDER", help="where to write it")
    parser.add_argument("--seed", type=int, default=SEED, help="of the model and its data (0)")
    options = parser.parse_args()
    if options.cups:
        parts = make(CUPS_STEPS, draw_cups, n_embd=64, n_layer=2, seed=options.seed)
    elif options.unfinished:
        parts = make(UNFINISHED_STEPS, partial(draw_sums, wrong=False), seed=options.seed)
    else:
        parts = make(NUM_STEPS, draw_sums, seed=options.seed)
    for part in parts:
        part.save_pretrained(options.cups or options.unfinished or HERE)


if __name__ == "__main__":
    main()
