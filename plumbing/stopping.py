"""Stop strings: a completion ends with the token that completes one of them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

CONTEXT = 8  # tokens before a text, so that it is decoded as within a longer one


class StopStrings:
    """The stop strings of a run, and the tokenizer that makes text of tokens."""

    def __init__(self, tokenizer: Tokenizer, strings: list[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        # A token has a byte of text or more, but for special ones.
        self.longest = max(len(string.encode()) for string in strings) + CONTEXT

    def end(self, prompt: list[int], ids: list[int], start: int) -> int | None:
        """After how many of the completion's ids a stop string is complete; None: none is. The
        first `start` ids are known to have none.
        """
        first = max(0, start - self.longest)
        before = (prompt + ids[:first])[-CONTEXT:]

        def is_complete(end: int) -> bool:
            text = text_after(self.tokenizer, before, ids[first:end])
            return any(string in text for string in self.strings)

        if not is_complete(len(ids)):  # nearly always
            return None
        return next(filter(is_complete, range(start + 1, len(ids) + 1)))


class StopSearch:
    """Looks for stop strings in the B rows of a batch while they are drawn."""

    def __init__(
        self, stops: StopStrings, prompt_ids: Tensor, prompt_mask: Tensor, eos_token_ids: list[int]
    ) -> None:
        rows = zip(prompt_ids.cpu(), prompt_mask.cpu().bool())
        self.stops, self.eos = stops, set(eos_token_ids)
        self.prompts = [ids[mask][-CONTEXT:].tolist() for ids, mask in rows]
        self.drawn: list[list[int]] = [[] for _ in self.prompts]
        self.recent: list[Tensor] = []  # drawn since the last look, (R,) each
        self.running = set(range(len(self.prompts)))  # by what is known here
        self.ends: dict[int, int] = {}  # row -> its number of tokens, the stop string's included

    def note(self, drawn: Tensor) -> None:
        """Note the tokens just drawn (R,), without looking at them."""
        self.recent.append(drawn)

    def look(self, rows: Tensor) -> Tensor:
        """Which of `rows` (R,), those that the noted tokens belong to, have a stop string: (R,)."""
        # One transfer, for each one waits until the device has done all its work.
        columns, self.recent = torch.stack([rows, *self.recent], dim=1).tolist(), []
        for row, *ids in columns:
            if row not in self.running:
                continue
            drawn, start = self.drawn[row], len(self.drawn[row])
            drawn += ids
            if (end := self.stops.end(self.prompts[row], drawn, start)) is not None:
                self.ends[row] = end
            if end is not None or not self.eos.isdisjoint(ids):
                self.running.discard(row)
        return torch.tensor([row in self.ends for row, *_ in columns])

    def cut(self, mask: Tensor) -> Tensor:
        """mask (B, T) up to the token that completes a stop string."""
        ends = [self.ends.get(row, mask.shape[1]) for row in range(len(mask))]
        columns = torch.arange(mask.shape[1])
        return mask & (columns < torch.tensor(ends).unsqueeze(1)).to(mask.device)


def text_after(tokenizer: Tokenizer, prompt: list[int], completion: list[int]) -> str:
    """The text of the completion's ids. They are decoded together with the prompt: SentencePiece
    tokenizers drop the space in front of the first word of what they decode.
    """
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    text = tokenizer.decode(prompt + completion, skip_special_tokens=True)
    if not text.startswith(before):  # a character whose bytes begin in the prompt
        before, text = "", tokenizer.decode(completion, skip_special_tokens=True)
    return text[len(before) :]
