"""What must hold on a GPU: `pytest -m cuda` runs it on a real one, or else on a pretended one."""

import contextlib

import pytest
import torch
from pretended_cuda import pretended_cuda
from small import EOS, SMALL_MODELS, VOCAB, byte_tokenizer, job_maker, reads_bytes, small_llama
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, StopStringCriteria

import grpo
import ppo
import rloo
from common import completion_logprobs, rounded_copy
from plumbing.models import fuse
from sampling import Decoder, sample

pytestmark = pytest.mark.cuda
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 8, 9, 10, 11]])
OPTIONS = {"num_generations": 8, "max_rows": 8, "max_new_tokens": 10, "temperature": 1.5}
OPTIONS |= {"pad_token_id": 0, "eos_token_ids": [EOS]}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
SIZES |= {"initializer_range": 0.3, "eos_token_id": EOS, "pad_token_id": None}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS = SMALL_MODELS | {
    "window": lambda: AutoModelForCausalLM.from_config(MistralConfig(**SIZES)),
    "both": lambda: AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, **BOTH)),
}
TOLERANCE = {None: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.02}


@pytest.fixture(autouse=True)
def gpu():
    torch.manual_seed(0)
    with contextlib.nullcontext() if torch.cuda.is_available() else pretended_cuda() as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("make", "half"),
    [*((make, None) for make in MODELS), ("llama", torch.bfloat16), ("both", torch.float16)],
)
def test_a_graph_serves_later_rollouts_with_the_weights_of_then(make, half):
    """In three rollouts, before and after an update, each with sub-batches of two widths: log-probs
    as drawn are those of a forward pass of the weights of then, tokens those without a graph.
    """
    model, found = MODELS[make]().eval().to("cuda"), []
    fuse(model)
    decoders = [Decoder(model, half), Decoder(model, graphs=False)]
    generators = [torch.Generator("cuda").manual_seed(0) for _ in decoders]
    for number, ids in enumerate((PROMPTS[:2, 2:], PROMPTS[:2], PROMPTS[:2])):
        graph, eager = (
            sample(model, ids, ids > 0, decoder=decoder, generator=generator, **OPTIONS)
            for decoder, generator in zip(decoders, generators)
        )
        expected, _ = completion_logprobs(rounded_copy(model, half or model.dtype), graph, 1.5)
        assert (graph.logprobs - expected).abs().max() < TOLERANCE[half]
        assert half or graph.tokens.tolist() == eager.tokens.tolist()
        found.append(decoders[0].graph)
        if number == 1:
            for x in (x for layer in decoders[0].cache.layers for x in (layer.keys, layer.values)):
                x.fill_(torch.nan)  # as a row may leave it
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.8)
    lengths = graph.completion_mask.sum(1)
    assert lengths.min() < lengths.max(), "rows end at different times"
    assert found[0] is found[1] is found[2] is not None and decoders[1].graph is None


def test_a_graph_is_made_anew_for_other_sizes_and_given_back_where_memory_is_short(monkeypatch):
    model, graphs = small_llama().eval().to("cuda"), []
    cache = 2 * 2 * 2 * 256 * 16  # layers, keys and values, rows, columns, numbers
    size = 2 * (cache + sum(p.numel() for p in model.parameters()))
    decoder = Decoder(model, torch.float16)
    for rows, length, free in ((3, 4, 9), (2, 4, 9), (2, 130, 9), (2, 4, 6), (2, 4, 4)):
        answers = {"memory_allocated": 0, "memory_reserved": 0, "mem_get_info": (free * size, 0)}
        for name, x in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, x=x: x)
        # Every token ends a completion: all rows have ended when it looks, after eight.
        options = OPTIONS | {"eos_token_ids": list(range(VOCAB)), "max_new_tokens": length}
        options["num_generations"] = 1
        rollout = sample(model, PROMPTS[:rows], PROMPTS[:rows] > 0, decoder=decoder, **options)
        assert rollout.completion_mask.sum(1).tolist() == [1] * rows and rollout.finished.all()
        graphs.append(decoder.graph)
    assert len({*graphs[:3]}) == 3 and graphs[2] is graphs[3] and graphs[4] is None


def test_stop_strings_end_the_completions_of_a_graph():
    model, tokenizer, letters = reads_bytes().to("cuda"), byte_tokenizer(), "abcdefghijklm"
    options = OPTIONS | {"max_new_tokens": 30, "eos_token_ids": []}
    stop = StopStringCriteria(tokenizer, list(letters))
    rollout = sample(model, PROMPTS, PROMPTS > 0, stop=stop, **options)
    rows, lengths = rollout.tokens[:, -30:].tolist(), rollout.completion_mask.sum(1).tolist()
    tokens = [tokenizer.convert_ids_to_tokens(row[:n]) for row, n in zip(rows, lengths)]
    ends = [[bool(set(token) & set(letters)) for token in row] for row in tokens]
    assert [row[-1] for row in ends] == rollout.finished.tolist() and 0 < sum(map(sum, ends)) < 24
    assert not any(any(row[:-1]) for row in ends)


@pytest.mark.slow
@pytest.mark.parametrize("script", [ppo, grpo, rloo], ids=lambda script: script.__name__)
@pytest.mark.parametrize(("flags", "most"), [({}, 1e-4), ({"bf16": True, "lora_r": 4}, 0.05)])
def test_a_run_starts_at_ratio_1_and_kl_0_and_its_weights_move(script, flags, most, tmp_path):
    lines = job_maker(tmp_path)(script)(num_steps=3, eval_every=3, device="cuda", **flags)
    assert abs(lines[0]["objective/kl"]) < most and lines[0]["val/ratio_max_dev_first"] < most
    assert all(0 < line["grad_norm"] < 1e3 for line in lines[:-1])
    assert lines[-2]["objective/kl"] != 0
