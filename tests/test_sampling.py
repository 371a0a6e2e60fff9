"""The decode loop: what it draws from, where rows end, that its shortcuts change nothing, and that
what it draws is what is rewarded and trained on.
"""

import copy
import gc
import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from small import EOS, VOCAB, letter_tokenizer, save_model, small_gpt2, small_llama
from torch import Tensor
from transformers import DynamicCache

import grpo
import ppo
import rloo
from common import Rollout, completion_mask
from plumbing.decoding import Decoder, PreallocatedLayer
from plumbing.errors import Fault, InputError
from plumbing.forward import completion_logprobs
from plumbing.half import attend, half_precision_copy
from plumbing.models import model_inputs
from sampling import concatenate, draw, generate
from sampling import sample as sample_in_parts

PROMPTS = torch.tensor([[1, 2, 3], [0, 0, 4], [0, 5, 6]])
PROMPT_MASK = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]])


def sample(model, seed=0, prompts=PROMPTS, prompt_mask=PROMPT_MASK, **options) -> Rollout:
    how = options.pop("half", None), options.pop("static", None)
    options.setdefault("decoder", Decoder(model, *how))
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0} | options
    generator = torch.Generator().manual_seed(seed)
    return generate(model, prompts, prompt_mask, generator=generator, **options)


# --- Masks ---


def test_the_mask_ends_with_the_first_eos_whichever_id_it_is():
    completions = torch.tensor([[5, 38, 7], [5, 39, 7], [5, 6, 7], [39, 39, 39]])
    expected = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    assert torch.equal(completion_mask(completions, [38, 39]), expected)
    assert completion_mask(completions, []).all(), "without an EOS id nothing is masked"


@pytest.mark.problem("generate", 2)
@pytest.mark.parametrize(("pad", "ends"), [(0, [EOS]), (EOS, [EOS]), (0, [EOS, 7])])
def test_eos_is_kept_and_all_after_it_is_padding_even_where_pad_equals_eos(pad, ends):
    """Gemma 3 ends at either of two ids (huggingface/trl#7039)."""
    model = small_gpt2()
    rollout = sample(
        model, num_generations=40, pad_token_id=pad, eos_token_ids=ends, temperature=2.0
    )
    tokens, mask = rollout.tokens[:, 3:], rollout.completion_mask
    assert 10 < rollout.finished.sum() < 120
    last = set()
    for row, m, finished in zip(tokens, mask, rollout.finished, strict=True):
        n = int(m.sum())
        assert m[:n].all() and (row[n:] == pad).all()
        assert not set(ends) & set(row[: n - 1].tolist())
        assert finished == (row[n - 1] in ends) and (finished or n == 8)
        last |= {int(row[n - 1])} if finished else set()
    assert last == set(ends)
    assert torch.equal(rollout.attention_mask[:, 3:], mask)
    assert (rollout.logprobs[~mask] == 0).all() and (rollout.logprobs[mask] < 0).all()


# --- The distribution ---


@pytest.mark.problem("generate", 2)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tokens_are_drawn_from_softmax_of_logits_over_temperature_whatever_generation_config(
    small_model, temperature
):
    """huggingface/trl#5783: Qwen2.5 was sampled nearly greedily through its generation_config."""
    config = small_model.generation_config
    config.temperature, config.top_k, config.repetition_penalty = 1e-6, 1, 1.3
    config.suppress_tokens, config.do_sample, config.max_new_tokens = [3, 4, 5], False, 1
    n, prompt = 4000, {"prompts": PROMPTS[:1], "prompt_mask": PROMPT_MASK[:1]}
    options = {"num_generations": n, "max_new_tokens": 1, "temperature": temperature}
    rollout = sample(small_model, **prompt, **options)
    counts = torch.bincount(rollout.tokens[:, -1], minlength=VOCAB)
    p = (small_model(PROMPTS[:1]).logits[0, -1] / temperature).softmax(-1)
    common = n * p > 5  # the number of rarer tokens is far from normal
    deviation = (counts / n - p).abs() / (p * (1 - p) / n).sqrt()
    assert deviation[common].max() < 4.5 and counts[~common].sum() < 3 * n * p[~common].sum() + 10


@pytest.mark.problem("generate", 1)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "num_generations": 4}])
def test_recorded_logprobs_are_those_of_the_training_forward(small_model, options):
    """Sampled at a temperature and scored without it is the commonest mistake of all."""
    rollout = sample(small_model, **options)
    assert rollout.tokens.shape == (3 * options.get("num_generations", 1), 11)
    assert not rollout.logprobs.requires_grad
    recomputed, _ = completion_logprobs(small_model, rollout, options.get("temperature", 1.0))
    assert torch.allclose(rollout.logprobs, recomputed, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 1000])
def test_the_token_drawn_is_the_first_whose_cumulative_probability_exceeds_the_number(vocab, dtype):
    """Found block by block, in float32; here over the whole row, in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(500, vocab, generator=generator)).to(dtype)
    uniform = torch.rand(500, generator=generator)
    drawn, logprobs = draw(logits, uniform, temperature=0.7)
    exact = (logits.double() / 0.7).softmax(-1)
    cumulative = exact.cumsum(-1).gather(1, drawn.unsqueeze(1)).squeeze(1)
    p = exact.gather(1, drawn.unsqueeze(1)).squeeze(1)
    hint = "lost between the block and the token in it?"
    assert ((cumulative - p - 1e-6 <= uniform) & (uniform < cumulative + 1e-6)).all(), hint
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), p.log(), atol=1e-5)


def test_a_token_of_probability_0_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, _ = draw(logits, torch.tensor([0.0, 1.0]))
    assert tokens.tolist() == [1, 2], "at the extremes of the uniform number"
    # At the start of the second block of 128 tokens, which rounding reaches a little too early.
    logits = torch.full((5000, 256), -torch.inf)
    weights = torch.rand(5000, 2, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 129]] = weights.log()
    tokens, _ = draw(logits, weights[:, 0] / weights.sum(1))
    assert set(tokens.tolist()) == {0, 129}


def test_top_k_keeps_the_k_likeliest_tokens_and_no_other():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(500, 4)
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(0))
    drawn, logprobs = draw(logits, uniform, top_k=3)
    assert sorted(drawn.unique().tolist()) == [1, 2, 3]
    kept = torch.tensor([-torch.inf, 3.0, 1.0, 2.0]).log_softmax(-1)
    assert torch.allclose(logprobs, kept[drawn])
    _, logprob = draw(logits[:1], uniform[:1], top_k=3)
    assert torch.equal(logprob, logprobs[:1]), "k counts tokens, not rows"
    greedy, _ = draw(logits, uniform, top_k=1)
    assert set(greedy.tolist()) == {1}


def test_greedy_takes_the_first_of_equally_likely_tokens_whatever_the_random_number():
    """Logits in bfloat16 are often equal: greedy answers would differ from one call to the next."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.5, 0.5, -1.0, 0.5]]).bfloat16()
    for number in (0.0, 0.6, 0.99):
        tokens, logprobs = draw(logits, torch.full((2,), number), temperature=0.7, top_k=1)
        assert tokens.tolist() == [1, 0] and tokens.tolist() == logits.argmax(-1).tolist()
        assert logprobs.dtype == torch.float32 and logprobs.tolist() == [0, 0], "it is certain"


def test_top_p_keeps_the_smallest_set_of_likeliest_tokens_that_reaches_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(1000, 1)
    uniform = torch.linspace(0, 0.9999, 1000)
    tokens, logprobs = draw(logits, uniform, top_p=0.7)
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs.exp().unique().tolist() == pytest.approx([0.3 / 0.8, 0.5 / 0.8])
    _, logprobs = draw(torch.zeros(1, 4), torch.tensor([0.9]), top_p=0.5)
    assert logprobs.exp().item() == pytest.approx(0.5), "two of four equal tokens reach a half"


@pytest.mark.parametrize(("row", "value"), [(0, torch.nan), (2, torch.inf)])
def test_logits_of_one_row_that_are_not_finite_are_a_fault(small_model, row, value):
    """The weights have diverged: there is no distribution to draw from."""
    head, rows = small_model.get_output_embeddings(), torch.tensor([row])
    head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(0, rows, value))
    with pytest.raises(Fault, match="the model's logits are not finite: lower --learning_rate"):
        sample(small_model)
    with pytest.raises(Fault, match="--fp16 false"):
        sample(small_model, half=torch.float16)


@pytest.mark.parametrize(("half", "top_k"), [(None, 0), (torch.float16, 0), (torch.float16, 1)])
def test_a_later_token_whose_logits_are_not_finite_is_a_fault(small_model, half, top_k):
    """On a GPU an index out of range would end the process before it has saved anything."""
    calls = []

    def overflow(module, inputs, logits):
        calls.append(len(calls))
        bad = torch.inf if half == torch.float16 else torch.nan  # it overflows
        return torch.full_like(logits, bad) if len(calls) == 2 else logits

    head = small_model.get_output_embeddings()
    head.register_forward_hook(overflow)
    remedy = "give --fp16 false" if half == torch.float16 else "lower --learning_rate"
    with pytest.raises(Fault, match=f"not finite: {remedy}"):
        sample(small_model, half=half, top_k=top_k)


# --- The model is left as it was ---


@pytest.mark.problem("generate", 1)
@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_dropout_never_touches_a_sample_and_the_mode_stays_as_it_was(make):
    model, drawn = make(dropout=0.5), []
    for training in (True, False):
        model.train(training)
        drawn.append(sample(model, num_generations=4).tokens)
        assert model.training is training
    assert torch.equal(*drawn)


def test_after_an_error_the_mode_is_what_it_was():
    model = small_gpt2().train()
    with pytest.raises(IndexError):
        sample(model, prompts=PROMPTS + 1000)
    assert model.training


def test_bfloat16_decodes_with_a_rounded_copy_of_the_weights_as_they_are_now(small_model):
    before = {name: p.clone() for name, p in small_model.state_dict().items()}
    first = sample(small_model, half=torch.bfloat16)
    assert first.logprobs.dtype == torch.float32
    for name, p in small_model.state_dict().items():
        assert p.dtype == before[name].dtype and torch.equal(p, before[name])
    with torch.no_grad():
        for p in small_model.parameters():
            p.mul_(1.5)
    second = sample(small_model, half=torch.bfloat16)
    assert (second.logprobs - first.logprobs).abs().max() > 0.1


def test_half_precision_rounds_no_rotary_frequencies():
    model = small_llama()
    copied = half_precision_copy(model, torch.bfloat16)
    assert torch.equal(copied.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_attention_of_one_token_is_that_of_pytorch_to_rounding(kv_heads):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, length, 8, generator=generator)
        for heads, length in ((4, 1), (kv_heads, 7), (kv_heads, 7))
    )
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]])
    mask = mask.bool()[:, None, None]
    options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    module = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        states = (x.to(dtype) for x in (query, key, value))
        found, _ = attend(module, *states, mask.clone(), scaling=0.3)
        assert torch.allclose(found.float(), expected.transpose(1, 2), atol=rounding)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("half", "digits"), [(torch.bfloat16, 1), (torch.float16, 8)])
def test_log_probs_of_half_precision_decoding_are_those_of_a_forward_pass_to_rounding(
    small_model, half, digits, static
):
    """Not token for token: each machine rounds a bfloat16 product in its own way, and one token
    that is drawn otherwise changes the rest of its row. Float16 has three more binary digits.
    """
    options = {"num_generations": 40, "seed": 2, "temperature": 2.0, "static": static, "half": half}
    rollout = sample(small_model, **options)
    assert rollout.finished.any() and not rollout.finished.all()
    expected, _ = completion_logprobs(small_model, rollout, 2.0)
    wrong = (rollout.logprobs - expected).abs()[rollout.completion_mask] * digits
    assert 1e-4 < wrong.mean() < 0.02 and wrong.max() < 0.2


# --- Shortcuts that must change nothing ---


@torch.no_grad()
def plainly(model, prompt_ids, prompt_mask, uniforms, temperature, eos) -> tuple[Tensor, Tensor]:
    """The decode loop without a shortcut: all rows to the end, a cache that grows by a token.

    prompts (B, P), uniforms (T, B) -> (tokens, mask), each (B, T).
    """
    cache, tokens, mask, drawn = DynamicCache(), prompt_ids, prompt_mask, []
    for uniform in uniforms:
        inputs = model_inputs(model, tokens, mask, cache=cache, use_cache=True)
        logits = model(**inputs).logits[:, -1]
        cumulative = (logits / temperature).softmax(-1).cumsum(-1)
        tokens = (cumulative <= uniform.unsqueeze(1)).sum(1, keepdim=True)  # or multinomial
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        drawn.append(tokens)
    drawn = torch.cat(drawn, dim=1)
    return drawn, completion_mask(drawn, [eos])


@pytest.mark.parametrize("static", [False, True])
def test_completions_are_those_of_the_plain_loop(small_model, static):
    options = {"num_generations": 8, "max_new_tokens": 20, "temperature": 2.0, "static": static}
    rollout = sample(small_model, **options)
    uniforms = torch.rand(20, 24, generator=torch.Generator().manual_seed(0))
    rows = (PROMPTS.repeat_interleave(8, 0), PROMPT_MASK.repeat_interleave(8, 0))
    tokens, mask = plainly(small_model.eval(), *rows, uniforms, 2.0, EOS)
    assert rollout.finished.sum() > 3 and torch.equal(rollout.completion_mask, mask)
    assert torch.equal(rollout.tokens[:, 3:][mask], tokens[mask])


def count_forwards(model) -> list[tuple[int, int]]:
    """The shapes (rows, tokens) that the model is asked to read, from here on."""
    shapes = []
    forward = model.forward

    def counted(input_ids, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **kwargs)

    counted.__signature__ = inspect.signature(forward)
    model.forward = counted
    return shapes


@pytest.mark.problem("generate", 1)
def test_the_completions_of_a_prompt_are_consecutive_and_top_k_1_takes_the_likeliest_token():
    model = small_gpt2().eval()
    rollout = sample(model, num_generations=5, top_k=1, temperature=3.0)
    assert torch.equal(rollout.tokens[:, :3], PROMPTS.repeat_interleave(5, dim=0))
    assert torch.equal(rollout.attention_mask[:, :3], PROMPT_MASK.bool().repeat_interleave(5, 0))
    whole = model(**model_inputs(model, rollout.tokens, rollout.attention_mask)).logits
    mask = rollout.completion_mask
    assert torch.equal(whole[:, 2:-1].argmax(-1)[mask], rollout.tokens[:, 3:][mask])


def test_each_distinct_prompt_is_read_once():
    model = small_gpt2()
    shapes = count_forwards(model)
    prompts, mask = PROMPTS[[0, 1, 0, 2]], PROMPT_MASK[[0, 1, 0, 2]]
    sample(model, prompts=prompts, prompt_mask=mask, num_generations=5, eos_token_ids=[])
    assert shapes == [(3, 3)] + [(20, 1)] * 7


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_passed_by_the_name_that_this_version_of_transformers_gives_it(name):
    """It was renamed in 5.24. A model that doesn't get it decodes without the prompt."""
    forward = {"cache": lambda input_ids, cache: 0, "past_key_values": lambda past_key_values: 0}
    model, tokens = SimpleNamespace(forward=forward[name]), torch.ones(1, 2)
    assert model_inputs(model, tokens, tokens, cache="full")[name] == "full"


def test_gradient_checkpointing_leaves_the_cache_on():
    """With it transformers drops the cache in training mode: decoding would be quadratic."""
    model = small_llama().train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    shapes = count_forwards(model)
    sample(model, eos_token_ids=[])
    assert all(length == 1 for _, length in shapes[1:])


def test_finished_rows_leave_the_batch_and_the_others_do_not_notice():
    """A row's tokens depend on its own random numbers alone, so stopping early shifts nothing."""
    model = small_gpt2()
    shapes = count_forwards(model)
    stopping = sample(model, num_generations=40, temperature=2.0)
    sizes = [rows for rows, _ in shapes[1:]]
    assert sizes[-1] <= 0.95 * sizes[0] and sizes == sorted(sizes, reverse=True)
    endless = sample(model, num_generations=40, temperature=2.0, eos_token_ids=[])
    mask = stopping.completion_mask
    assert torch.equal(stopping.tokens[:, 3:][mask], endless.tokens[:, 3:][mask])
    assert torch.allclose(stopping.logprobs[mask], endless.logprobs[mask], atol=1e-4)
    shapes.clear()
    sample(model, eos_token_ids=list(range(VOCAB)))
    assert len(shapes) == 1, "decoding ends when all rows have"


def test_the_static_step_that_cuda_graphs_replay_samples_the_same_tokens(small_model):
    """Rows end at different times. Each number of rows is another graph, so it is halved."""
    options = {"num_generations": 32, "temperature": 2.0, "max_new_tokens": 60}
    plain = sample(small_model, **options)
    shapes = count_forwards(small_model)
    static = sample(small_model, static=True, **options)
    assert plain.finished.any()
    assert torch.equal(plain.tokens, static.tokens)
    assert torch.allclose(plain.logprobs, static.logprobs, atol=1e-5)
    rows = [shape[0] for shape in shapes[1:]]
    assert set(rows) <= {96, 48, 24, 12, 6, 3, 1} and rows[-1] < 96


@pytest.mark.parametrize("max_rows", [4, 5, 8, 100])
def test_sub_batches_are_generated_in_turn_and_put_together(max_rows):
    """Bit for bit: the same calls of generate, with the same use of the generator."""
    model, order = small_gpt2().eval(), [0, 1, 2, 0, 1]
    prompts, mask = PROMPTS[order], PROMPT_MASK[order]
    generator = torch.Generator().manual_seed(0)
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0}
    options |= {"num_generations": 4, "generator": generator}
    shapes = count_forwards(model)
    rollout = sample_in_parts(model, prompts, mask, max_rows=max_rows, **options)
    assert rollout.tokens.shape == (20, 11)
    assert max(rows for rows, length in shapes if length == 1) <= max_rows
    generator.manual_seed(0)
    parts = zip(prompts.split(max_rows // 4), mask.split(max_rows // 4))
    expected = concatenate([generate(model, *part, **options) for part in parts])
    for name, value in vars(expected).items():
        assert torch.equal(getattr(rollout, name), value), name


def test_after_a_rollout_its_memory_is_given_back():
    """An update needs it. On a GPU the rest of a step may leave room for it, which is asked."""
    model = small_gpt2()
    decoder, options = Decoder(model), {"eos_token_ids": [EOS], "pad_token_id": 0}
    options |= {"num_generations": 2, "max_rows": 2, "max_new_tokens": 3}
    sample_in_parts(model, PROMPTS, PROMPT_MASK, decoder=decoder, **options)
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is PreallocatedLayer]


def test_a_rollout_may_fill_the_context_to_the_last_token(small_model):
    limit = small_model.config.max_position_embeddings
    rollout = sample(small_model, eos_token_ids=[], max_new_tokens=limit - 3)
    assert rollout.tokens.shape[1] == limit
    with pytest.raises(InputError, match=f"don't fit into the model's context of {limit}"):
        sample(small_model, eos_token_ids=[], max_new_tokens=limit - 2)


# --- What is sampled is what is rewarded and trained on ---


EOS_IDS = [3, 5, 19]
FLAGS = {"temperature": 3.0, "num_epochs": 1}
REWARD = """
import json
def reward(completions, completion_ids, **columns):
    with open(__file__ + ".jsonl", "a") as file:
        file.writelines(json.dumps(ids) + "\\n" for ids in completion_ids)
    return [sum(ids) % 7 - 3.0 for ids in completion_ids]
"""


@pytest.fixture
def early_stopper(tmp_path) -> str:
    """A small model that ends its completions at any of three tokens, so that rows are ragged; pad
    is one of them.
    """
    model, tokenizer = small_gpt2(0.1, vocab_size=20), letter_tokenizer()
    model.generation_config.eos_token_id = EOS_IDS
    tokenizer.pad_token = tokenizer.eos_token
    return save_model(tmp_path / "early-stopper", model, tokenizer)


def watch(monkeypatch, script, name: str, keep) -> None:
    """Call keep(result, *args) whenever the script has called the function of this name."""
    original = getattr(script, name)

    def watched(*args, **options):
        result = original(*args, **options)
        keep(result, *args)
        return result

    monkeypatch.setattr(script, name, watched)


@pytest.mark.parametrize("script", [grpo, ppo, pytest.param(rloo, marks=pytest.mark.slow)])
def test_rewarded_and_trained_on_are_the_sampled_tokens_up_to_the_first_eos(
    script, make_job, early_stopper, tmp_path, monkeypatch
):
    """Not text that was encoded again (huggingface/trl#5242), nor without EOS where it is the pad
    too (huggingface/trl#4970).
    """
    sampled, trained = [], []

    def keep(result, model, rows, *args) -> None:
        if result[0].requires_grad:
            result[0].retain_grad()
            trained.append((rows, result[0]))

    watch(monkeypatch, script, "sample", lambda rollout, *_: sampled.append(copy.deepcopy(rollout)))
    watch(monkeypatch, script, "completion_logprobs", keep)
    (tmp_path / "ids.py").write_text(REWARD)
    flags = FLAGS | {"reward": tmp_path / "ids.py:reward", "num_mini_batches": 1}
    make_job(script)(model=early_stopper, completions=32, **flags)

    def rows(rollouts) -> list[list[int]]:
        fields = [(r.tokens, r.attention_mask, r.completion_mask) for r in rollouts]
        return sorted(row for parts in fields for row in torch.cat(parts, dim=1).tolist())

    assert len(rows(sampled)) == 32 and rows(sampled) == rows(r for r, _ in trained)
    lines = (tmp_path / "ids.py.jsonl").read_text().splitlines()
    rewarded, num_eos = [json.loads(line) for line in lines], 0
    for rollout, logprobs in trained:
        width = logprobs.shape[1]
        for ids, gradient in zip(rollout.tokens[:, -width:].tolist(), logprobs.grad, strict=True):
            n = next((i + 1 for i, token in enumerate(ids) if token in EOS_IDS), width)
            assert ids[:n] in rewarded, "the reward is given other ids?"
            assert (gradient[n:] == 0).all(), "what follows EOS is in the loss?"
            if gradient.any():  # the advantage is not 0
                num_eos += n < width
                assert (gradient[:n] != 0).all(), "the EOS token is not in the loss?"
    assert num_eos > 5, "no row ended with EOS"


def test_in_ppo_every_token_of_a_minibatch_weighs_the_same_and_padding_nothing(
    make_job, early_stopper, monkeypatch
):
    """The derivative of the loss by the loss of each token, in micro-batches of several sizes."""
    terms, masks = [], []

    def keep_term(result, *args) -> None:
        result[0].retain_grad()
        terms.append(result[0])

    def keep_mask(values, model, rows, *args) -> None:
        if values.requires_grad:
            masks.append(rows.completion_mask)

    watch(monkeypatch, ppo, "policy_loss", keep_term)
    watch(monkeypatch, ppo, "completion_values", keep_mask)
    flags = FLAGS | {"num_mini_batches": 2, "micro_batch_tokens": 30}
    make_job(ppo)(model=early_stopper, completions=16, **flags)
    sizes = [len(mask) for mask in masks]
    half = next(i for i in range(len(sizes)) if sum(sizes[:i]) == 8)  # of two minibatches
    assert len(set(sizes)) > 1 and sum(sizes) == 16 and half > 1
    for part in (slice(half), slice(half, None)):
        num_tokens = torch.cat(masks[part]).sum()
        assert num_tokens < 8 * 6, "no row ended early: nothing is padded"
        for term, mask in zip(terms[part], masks[part], strict=True):
            assert torch.allclose(term.grad, mask / num_tokens)


@pytest.mark.parametrize("function", [generate, draw])
def test_top_k_and_top_p_are_off_by_default(function):
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert defaults["top_k"] == 0 and defaults["top_p"] == 1 and defaults["temperature"] == 1


def test_top_p_keeps_the_likeliest_tokens_that_reach_p_together_and_no_other():
    logits = torch.tensor([0.1, 0.5, 0.05, 0.35]).log().expand(1000, 4)
    drawn, logprobs = draw(logits, torch.linspace(0, 0.999, 1000), top_p=0.6)
    assert set(drawn.tolist()) == {1, 3}
    assert logprobs.exp()[drawn == 3][0].item() == pytest.approx(0.35 / 0.85)
