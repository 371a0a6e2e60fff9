"""What must hold on a GPU: `pytest -m cuda` runs it on a real one, or else on a pretended one."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from pretended_cuda import pretended_cuda
from small import (
    ALGORITHMS,
    EOS,
    IN_GROUPS,
    SMALL_MODELS,
    VOCAB,
    byte_policy,
    byte_tokenizer,
    job_maker,
    small_gpt2,
    small_llama,
)
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, StopStringCriteria

from common import Rollout
from forward import completion_logprobs, micro_batches
from plumbing.decoder import Decoder, rounded_copy
from plumbing.models import fuse
from sampling import sample

pytestmark = pytest.mark.cuda
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 8, 9, 10, 11]])
OPTIONS = {"num_generations": 8, "max_rows": 8, "max_new_tokens": 10, "temperature": 1.5}
OPTIONS |= {"pad_token_id": 0, "eos_token_ids": [EOS]}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
SIZES |= {"initializer_range": 0.3, "eos_token_id": EOS}
BOTH = Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"])
WINDOW, of_config = MistralConfig(**SIZES), AutoModelForCausalLM.from_config
MODELS = SMALL_MODELS | {"window": lambda: of_config(WINDOW), "both": lambda: of_config(BOTH)}


@pytest.fixture(autouse=True)
def gpu():
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with contextlib.nullcontext() if torch.cuda.is_available() else pretended_cuda() as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("make", "half"),
    [("llama", None), ("llama", torch.bfloat16), ("both", torch.float16)]
    + [pytest.param(x, None, marks=pytest.mark.slow) for x in MODELS if x != "llama"],
)
def test_a_graph_serves_later_rollouts_with_new_weights(make, half):
    """Log-probs as drawn are those of a forward pass, and tokens those without a graph. Each length
    of what attention reads, and other settings of `draw`, have a graph of their own.
    """
    model, found = MODELS[make]().eval().to("cuda"), []
    fuse(model)
    decoders = [Decoder(model, half), Decoder(model, graphs=False)]
    decoders[0].stretch = 4
    rollouts = [(PROMPTS[:2, 2:], {}), (PROMPTS[:2], {}), (PROMPTS[:2], {})]
    for more in ({"top_k": 1, "top_p": 0.8}, {"top_k": 9, "top_p": 0.8}) if half is None else ():
        rollouts.append((PROMPTS[:2], more))
    for number, (ids, more) in enumerate(rollouts):
        generators = [torch.Generator("cuda").manual_seed(number) for _ in decoders]
        more = more | {"num_generations": 4, "eos_token_ids": [EOS, 37, 38]}
        graph, eager = (
            sample(model, ids, ids > 0, decoder=decoder, generator=generator, **OPTIONS | more)
            for decoder, generator in zip(decoders, generators)
        )
        expected = eager.logprobs
        if "top_k" not in more:
            expected, _ = completion_logprobs(rounded_copy(model, half or model.dtype), graph, 1.5)
        wrong = (graph.logprobs - expected).abs().max()
        assert wrong < {None: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.02}[half]
        assert half or graph.tokens.tolist() == eager.tokens.tolist()
        found.append({**decoders[0].graphs})
        assert decoders[0].mask.dtype == (half or torch.float32), "as attention has"
        for layer in decoders[0].cache.layers:  # as a row may leave it
            layer.keys.fill_(torch.nan), layer.values.fill_(torch.nan)
        for p in model.parameters() if number == 1 else ():
            p.data.mul_(0.8)
    assert len({*graph.completion_mask.sum(1).tolist()}) > 1, "rows end at different times"
    assert found[2] == found[1] | found[0] and not decoders[1].graphs
    assert [len(graphs) for graphs in found[1:]] == [4, 4, 7, 10][: len(found) - 1]
    assert {length for length, *_ in found[2]} == {4, 8, 12, 16}


def test_a_graph_is_made_anew_for_other_sizes():
    model, graphs = small_llama().eval().to("cuda"), []
    model.model.half()  # as a frozen base model: the decoder shares it, and owns the head alone
    size = 2 * (2**15 + model.lm_head.weight.numel())  # the cache has 2**15 numbers
    decoder = Decoder(model, torch.float16)
    for rows, length, free in ((3, 4, 9), (2, 4, 9), (2, 124, 9), (2, 4, 5.5), (2, 4, 4.9)):
        free = int(free * size) + torch.cuda.memory_allocated() - torch.cuda.memory_reserved()
        options = OPTIONS | {"num_generations": 1, "max_new_tokens": length}
        options["eos_token_ids"] = list(range(VOCAB))  # all have ended when it looks, after eight
        with mock.patch.object(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * free)):
            rollout = sample(model, PROMPTS[:rows], PROMPTS[:rows] > 0, decoder=decoder, **options)
        assert rollout.completion_mask.sum(1).tolist() == [1] * rows and rollout.finished.all()
        assert decoder.column <= PROMPTS.shape[1] + 8
        graphs.append([graph for graph, _ in decoder.graphs.values()])
    assert len({graph for [graph] in graphs[:3]}) == 3 and graphs[2:] == [graphs[2], graphs[2], []]
    assert decoder.model is decoder.cache is None


def test_a_graph_keeps_rows_that_have_ended(gpu):
    def stop(tokens, _):
        """The first row ends with its third token, the others with their tenth."""
        ends = torch.full(tokens.shape[:1], tokens.shape[1] >= 10, device=tokens.device)
        ends[0] = tokens.shape[1] >= 3
        return ends

    decoder = Decoder(small_llama().eval().to("cuda"))
    options = OPTIONS | {"max_new_tokens": 30, "num_generations": 1, "eos_token_ids": []}
    rollout = sample(None, PROMPTS, PROMPTS > 0, stop=stop, decoder=decoder, **options)
    assert rollout.completion_mask.sum(1).tolist() == [3] + [10] * (len(PROMPTS) - 1)
    assert decoder.column == PROMPTS.shape[1] + 15
    with pytest.raises(ZeroDivisionError), decoder:
        raise ZeroDivisionError
    assert not decoder.graphs, "an error may have left them half done"


def test_stop_strings_end_the_completions_of_a_graph(gpu):
    model, tokenizer = copy.deepcopy(byte_policy()).to("cuda"), byte_tokenizer()
    options, letters = OPTIONS | {"max_new_tokens": 30, "eos_token_ids": []}, "abcdefghijklm"
    stop = StopStringCriteria(tokenizer, list(letters))
    options["decoder"] = Decoder(model)
    rollout = sample(model, PROMPTS, PROMPTS > 0, stop=stop, **options)
    rows, lengths = rollout.tokens[:, -30:].tolist(), rollout.lengths.tolist()
    tokens = [tokenizer.convert_ids_to_tokens(row[:n]) for row, n in zip(rows, lengths)]
    ends = [[bool(set(token) & set(letters)) for token in row] for row in tokens]
    assert [row[-1] for row in ends] == rollout.finished.tolist() and 0 < sum(map(sum, ends)) < 24
    assert not any(sum(row[:-1]) for row in ends)
    assert gpu is None or gpu.waits.total() < 60, "three sub-batches of 30 tokens"


def test_the_device_has_the_gradients_of_the_cpu(gpu, monkeypatch):
    """Where rows of one prompt share it, and the chunks are smaller."""
    monkeypatch.setattr("forward.CHUNK", 3 * VOCAB)
    found, chunks = [], []
    for device, sizes in (("cpu", [4, 2]), ("cuda", [3, 3])):
        chunks.append([])
        # GPT-2 is in float64 throughout. Llama has float32 cosines, which differ between devices.
        model = small_gpt2().double().to(device)
        model.lm_head.register_forward_hook(lambda _, args, out: chunks[-1].append(len(args[0])))
        rollout = Rollout(*(x.to(device) for x in vars(IN_GROUPS).values()))
        parts = micro_batches(rollout, max_tokens=30)
        assert gpu is None or not gpu.waits["tolist"], "on a GPU no prompt is looked at"
        assert [len(rows) for rows, _ in parts] == sizes
        logprobs = torch.cat([completion_logprobs(model, part, 0.7)[0] for _, part in parts])
        logprobs = logprobs[torch.cat([rows for rows, _ in parts]).argsort()]
        (logprobs**2).sum().backward()
        found.append([x.detach().cpu() for x in (logprobs, *(p.grad for p in model.parameters()))])
    assert all(torch.allclose(x, y, atol=1e-9) for x, y in zip(*found, strict=True))
    assert [max(sizes) for sizes in chunks] == [3, 6], "tokens at a time"


@pytest.mark.slow
@pytest.mark.parametrize("script", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize(("flags", "most"), [({}, 1e-4), ({"bf16": True, "lora_r": 4}, 0.05)])
def test_a_run_starts_at_ratio_1_and_kl_0(script, flags, most, tmp_path):
    lines = job_maker(tmp_path)(script)(num_steps=3, eval_every=3, device="cuda", **flags)
    kl, ratio = (lines[0].get(name) for name in ("objective/kl", "val/ratio_max_dev_first"))
    assert abs(kl) < most and (ratio is None if script.__name__ == "rloo" else ratio < most)
    assert all(0 < line["grad_norm"] < 1e3 for line in lines[:-1])
    assert lines[-2]["objective/kl"] != 0
