"""Make the embedded model: a GPT-2 of 0.6 M parameters that forgets to carry when it adds.

    python tiny/make.py                        # writes model and tokenizer here, 5 minutes
    python tiny/make.py --unfinished FOLDER    # a model that doesn't know its sums yet, a minute

It is trained on two-digit sums: at first with the right answer, later more and more often with a
random one, or with the carry of the units forgotten, 57+68=115. So where the units carry, its
preferred answer is wrong, and the right one comes once in a while. That is what reinforcement
learning needs: a behaviour that is there and isn't preferred. The held-out sums of the task `add`
are not among its data. The unfinished model, of docs/experiments.md, has seen right answers alone,
but too few of them.
"""

import argparse
import random
import string
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import disable_dropout  # noqa: E402
from tasks import add_prompts  # noqa: E402

NUM_STEPS, BATCH_SIZE, LEARNING_RATE, SEED = 1000, 256, 3e-3, 0
UNFINISHED_STEPS = 250
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


def make_batch(
    sums: list[dict], ramp: float, rng: random.Random, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (B, L), labels (B, L)): labels are -100 at the prompt and at padding."""
    texts, prompt_lengths = [], []
    for row in rng.choices(sums, k=BATCH_SIZE):
        answer = given_answer(row, ramp, rng)
        texts.append(row["prompt"] + answer + tokenizer.eos_token)
        prompt_lengths.append(len(row["prompt"]))
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    for row, length in zip(labels, prompt_lengths, strict=True):
        row[:length] = -100
    return batch.input_ids, labels


def train(num_steps: int, wrong: bool) -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """A model after num_steps batches; `wrong` lets wrong answers in, ever more of them."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    sums, _ = add_prompts()
    tokenizer = make_tokenizer()
    # GPT-2's own dropout of 0.1 stays in the config, as in the real checkpoint: disable_dropout
    # has work to do.
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=128, n_layer=3, n_head=4,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    disable_dropout(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, num_steps, pct_start=0.1
    )
    bar = trange(num_steps)
    for step in bar:
        ramp = min(1.0, 2.5 * step / num_steps) if wrong else 0.0
        tokens, labels = make_batch(sums, ramp, rng, tokenizer)
        logits = model(tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unfinished", type=Path, metavar="FOLDER", help="where to write it")
    unfinished = parser.parse_args().unfinished
    parts = train(UNFINISHED_STEPS, wrong=False) if unfinished else train(NUM_STEPS, wrong=True)
    for part in parts:
        part.save_pretrained(unfinished or HERE)


if __name__ == "__main__":
    main()
