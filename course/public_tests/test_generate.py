import torch

from plumbing.loading import eos_token_ids, load_policy, load_tokenizer
from plumbing.scoring import decode, encode_prompts
from sampling import generate


def test_near_temperature_0_the_tiny_model_adds():
    model, tokenizer = load_policy("tiny"), load_tokenizer("tiny")
    eos = eos_token_ids(model, tokenizer)
    rows = [{"prompt": "12+34="}, {"prompt": "70+29="}]
    ids, mask = encode_prompts(tokenizer, rows)
    rollout = generate(
        model, ids, mask, num_generations=2, max_new_tokens=5, temperature=0.001,
        eos_token_ids=eos, pad_token_id=0, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert decode(tokenizer, rollout) == ["46", "46", "99", "99"]
    assert rollout.finished.all() and rollout.tokens.shape == (4, ids.shape[1] + 5)
    assert rollout.completion_mask.sum(1).tolist() == [3, 3, 3, 3]
