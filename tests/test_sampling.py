"""The decode loop: what it samples from, where rows stop, and that its shortcuts change nothing."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from small import EOS, VOCAB, small_gpt2, small_llama

from common import Rollout, completion_mask, disable_dropout, kl_estimate
from plumbing.decoding import PackedLinear, bfloat16_copy, preallocated_cache
from plumbing.errors import Fault, InputError
from plumbing.forward import completion_logprobs
from plumbing.inputs import model_inputs
from plumbing.loading import set_up_training
from sampling import _first_above, concatenate, draw, generate
from sampling import sample as sample_in_parts

PROMPTS = torch.tensor([[1, 2, 3], [0, 0, 4], [0, 5, 6]])
PROMPT_MASK = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]])


def sample(model, seed: int = 0, prompts=PROMPTS, prompt_mask=PROMPT_MASK, **options) -> Rollout:
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0} | options
    generator = torch.Generator().manual_seed(seed)
    return generate(model, prompts, prompt_mask, generator=generator, **options)


# --- Masks ---


def test_the_mask_ends_with_the_first_eos_whichever_id_it_is():
    completions = torch.tensor([[5, 38, 7], [5, 39, 7], [5, 6, 7], [39, 39, 39]])
    expected = [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert completion_mask(completions, [38, 39]).tolist() == [
        [bool(x) for x in r] for r in expected
    ]


def test_without_an_eos_id_nothing_is_masked():
    assert completion_mask(torch.tensor([[1, 2]]), []).all()


@pytest.mark.parametrize("pad", [0, EOS])
def test_eos_is_kept_and_everything_after_it_is_padding_even_where_pad_equals_eos(pad):
    rollout = sample(small_gpt2(), num_generations=40, pad_token_id=pad, temperature=2.0)
    tokens, mask = rollout.tokens[:, 3:], rollout.completion_mask
    assert 10 < rollout.finished.sum() < 120
    for row, m, finished in zip(tokens, mask, rollout.finished, strict=True):
        n = int(m.sum())
        assert m[:n].all() and (row[n:] == pad).all()
        assert EOS not in row[: n - 1] and (row[n - 1] == EOS) == finished
        assert finished or n == 8
    assert torch.equal(rollout.attention_mask[:, 3:], mask)
    assert (rollout.logprobs[~mask] == 0).all() and (rollout.logprobs[mask] < 0).all()


def test_a_second_eos_id_stops_a_row_too():
    """Llama 3 stops at either of two ids (huggingface/trl#7039)."""
    rollout = sample(small_gpt2(), num_generations=60, eos_token_ids=[EOS, 7], temperature=2.0)
    last = rollout.tokens[torch.arange(180), 2 + rollout.completion_mask.sum(1)]
    assert set(last[rollout.finished].tolist()) == {EOS, 7}


# --- The distribution ---


def exact_probs(model, temperature: float) -> torch.Tensor:
    return (model(PROMPTS[:1]).logits[0, -1] / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tokens_are_drawn_from_softmax_of_logits_over_temperature_whatever_generation_config(
    small_model, temperature
):
    """huggingface/trl#5783: Qwen2.5 was sampled nearly greedily through its generation_config."""
    config = small_model.generation_config
    config.temperature, config.top_k, config.repetition_penalty = 1e-6, 1, 1.3
    config.suppress_tokens, config.do_sample, config.max_new_tokens = [3, 4, 5], False, 1
    n = 4000
    rollout = sample(
        small_model, prompts=PROMPTS[:1], prompt_mask=PROMPT_MASK[:1], num_generations=n,
        max_new_tokens=1, temperature=temperature,
    )  # fmt: skip
    counts = torch.bincount(rollout.tokens[:, -1], minlength=VOCAB)
    p = exact_probs(small_model, temperature)
    deviation = (counts / n - p).abs() / (p * (1 - p) / n).sqrt()
    assert deviation.max() < 4.5


def test_without_options_it_is_the_softmax_of_the_logits(small_model):
    options = dict(max_new_tokens=8, eos_token_ids=[], pad_token_id=0)
    drawn = [
        generate(
            small_model, PROMPTS, PROMPT_MASK, **options, **more,
            generator=torch.Generator().manual_seed(0),
        )
        for more in ({}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0})
    ]  # fmt: skip
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
    assert torch.equal(drawn[0].logprobs, drawn[1].logprobs)
    assert not drawn[0].logprobs.requires_grad


def test_the_options_of_sampling_are_given_by_name_and_the_model_and_prompts_may_be(small_model):
    prompts = dict(model=small_model, prompt_ids=PROMPTS, prompt_mask=PROMPT_MASK)
    rollout = generate(**prompts, max_new_tokens=1, eos_token_ids=[], pad_token_id=0)
    assert rollout.tokens.shape == (len(PROMPTS), PROMPTS.shape[1] + 1)
    with pytest.raises(TypeError, match="positional"):
        generate(small_model, PROMPTS, PROMPT_MASK, 2, 1, 1.0, [], 0)


def test_uniform_logits_draw_every_token_about_equally_often():
    n = 20_000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(torch.zeros(n, 100), uniform)
    counts = torch.bincount(tokens, minlength=100)
    assert counts.min() > 130 and counts.max() < 270
    assert torch.allclose(logprobs, torch.tensor(0.01).log())


def test_the_extremes_of_the_uniform_number_draw_possible_tokens_only():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, _ = draw(logits, torch.tensor([0.0, 1.0]))
    assert tokens.tolist() == [1, 2]


def test_recorded_logprobs_are_those_of_the_training_forward(small_model):
    """Sampled at a temperature and scored without it is the commonest mistake of all."""
    rollout = sample(small_model, temperature=0.7, num_generations=4)
    recomputed, _ = completion_logprobs(small_model, rollout, 0.7)
    assert torch.allclose(rollout.logprobs, recomputed, atol=1e-4)


def test_top_k_makes_the_estimate_of_a_positive_kl_negative(small_model):
    """huggingface/trl#235 and others: the usual cause of a negative KL. The reference is the same
    model at a lower temperature; plain samples of the policy give a positive KL, top-k ones don't.
    """
    for top_k, low, high in ((0, 0.05, 9.0), (3, -9.0, -0.05)):
        rollout = sample(small_model, top_k=top_k, num_generations=100)
        policy, _ = completion_logprobs(small_model, rollout, 1.0)
        ref, _ = completion_logprobs(small_model, rollout, 0.6)
        kl = kl_estimate(policy, ref, "k1")[rollout.completion_mask].mean()
        assert low < kl < high, top_k


def test_logits_of_bfloat16_are_divided_by_the_temperature_in_float32():
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    uniform = torch.linspace(0, 0.99, 64)
    found, logprobs = draw(logits, uniform, temperature=0.7)
    expected = (logits.float() / 0.7).log_softmax(-1)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected[torch.arange(64), found], atol=1e-5)


def test_top_k_keeps_the_k_likeliest_tokens_and_no_other():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(500, 4)
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(0))
    drawn, logprobs = draw(logits, uniform, top_k=3)
    assert sorted(drawn.unique().tolist()) == [1, 2, 3]
    kept = torch.tensor([-torch.inf, 3.0, 1.0, 2.0]).log_softmax(-1)
    assert torch.allclose(logprobs, kept[drawn])
    _, logprob = draw(logits[:1], uniform[:1], top_k=3)
    assert torch.equal(logprob, logprobs[:1]), "k counts tokens, not rows"


def test_a_model_in_evaluation_mode_stays_in_it_and_one_in_training_mode_too(small_model):
    prompt = torch.tensor([[1, 2]])
    for mode in (True, False):
        small_model.train(mode)
        generate(
            small_model, prompt, torch.ones_like(prompt), max_new_tokens=2, eos_token_ids=[],
            pad_token_id=0,
        )  # fmt: skip
        assert small_model.training is mode


def test_top_k_1_is_greedy_and_equals_the_library(small_model):
    small_model.generation_config.pad_token_id = 0
    ours = sample(small_model, top_k=1)
    theirs = small_model.generate(
        PROMPTS, attention_mask=PROMPT_MASK, do_sample=False, max_new_tokens=8, eos_token_id=EOS
    )[:, 3:]
    tokens = ours.tokens[:, 3 : 3 + theirs.shape[1]]
    assert torch.equal(tokens, theirs)


def test_top_p_keeps_the_smallest_set_of_likeliest_tokens_that_reaches_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(1000, 1)
    uniform = torch.linspace(0, 0.9999, 1000)
    tokens, logprobs = draw(logits, uniform, top_p=0.7)
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs.exp().unique().tolist() == pytest.approx([0.3 / 0.8, 0.5 / 0.8])
    _, logprobs = draw(torch.zeros(1, 4), torch.tensor([0.9]), top_p=0.5)
    assert logprobs.exp().item() == pytest.approx(0.5), "two of four equal tokens reach a half"


# --- Shortcuts that must change nothing ---


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


def test_each_distinct_prompt_is_read_once_and_then_a_token_at_a_time():
    model = small_gpt2()
    shapes = count_forwards(model)
    prompts, mask = PROMPTS[[0, 1, 0, 2]], PROMPT_MASK[[0, 1, 0, 2]]
    rollout = sample(model, prompts=prompts, prompt_mask=mask, num_generations=5, eos_token_ids=[])
    assert rollout.tokens.shape == (20, 11)
    assert shapes[0] == (3, 3)
    assert shapes[1:] == [(20, 1)] * 7


def test_completions_of_a_prompt_are_consecutive_rows():
    rollout = sample(small_gpt2(), num_generations=4)
    assert torch.equal(rollout.tokens[:, :3], PROMPTS.repeat_interleave(4, dim=0))
    assert torch.equal(
        rollout.attention_mask[:, :3], PROMPT_MASK.bool().repeat_interleave(4, dim=0)
    )


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


def test_decoding_ends_when_all_rows_have():
    model = small_gpt2()
    shapes = count_forwards(model)
    sample(model, eos_token_ids=list(range(VOCAB)))
    assert len(shapes) == 1


def test_a_row_alone_samples_what_it_samples_in_a_left_padded_batch(small_model):
    batch = sample(small_model, top_k=1, eos_token_ids=[])
    for row in range(3):
        prompt = PROMPTS[row : row + 1, PROMPT_MASK[row].bool()]
        alone = sample(
            small_model,
            prompts=prompt,
            prompt_mask=torch.ones_like(prompt),
            top_k=1,
            eos_token_ids=[],
        )
        assert torch.equal(alone.tokens[0, -8:], batch.tokens[row, -8:])


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(small_model):
    first, again, other = (sample(small_model, seed=s, num_generations=4) for s in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_dropout_never_touches_a_sample(make):
    model = make(dropout=0.5).train()
    with_dropout = sample(model, num_generations=4)
    assert model.training
    assert torch.equal(with_dropout.tokens, sample(model.eval(), num_generations=4).tokens)


def test_gradient_checkpointing_leaves_the_cache_on_and_an_error_leaves_the_mode_as_it_was():
    """With it transformers drops the cache in training mode: decoding would be quadratic."""
    model = small_llama().train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    shapes = count_forwards(model)
    sample(model, eos_token_ids=[])
    assert all(length == 1 for _, length in shapes[1:]) and model.training
    with pytest.raises(IndexError):
        sample(model, prompts=PROMPTS + 1000)
    assert model.training


def test_a_prompt_that_leaves_no_room_is_refused(small_model):
    with pytest.raises(InputError, match="64"):
        sample(small_model, max_new_tokens=62)


def test_rollouts_can_be_indexed_and_put_together(small_model):
    rollout = sample(small_model, num_generations=2)
    parts = concatenate([rollout[:4], rollout[torch.tensor([4, 5])]])
    for name, value in vars(rollout).items():
        assert torch.equal(getattr(parts, name), value), name


@pytest.mark.parametrize("max_rows", [4, 5, 8, 100])
def test_sub_batches_are_generated_in_turn_and_put_together(small_model, max_rows):
    """Bit for bit: the same calls of generate, with the same use of the generator."""
    prompts, mask = PROMPTS[[0, 1, 2, 0, 1]], PROMPT_MASK[[0, 1, 2, 0, 1]]
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0}
    generator = torch.Generator().manual_seed(0)
    shapes = count_forwards(small_model)
    rollout = sample_in_parts(
        small_model, prompts, mask, num_generations=4, max_rows=max_rows, generator=generator,
        **options,
    )  # fmt: skip
    assert max(rows for rows, length in shapes if length == 1) <= max_rows
    generator.manual_seed(0)
    step = max_rows // 4  # prompts
    parts = [
        generate(
            small_model, prompts[i : i + step], mask[i : i + step], num_generations=4,
            generator=generator, **options,
        )
        for i in range(0, 5, step)
    ]  # fmt: skip
    assert rollout.tokens.shape == (20, 11)
    for name, value in vars(concatenate(parts)).items():
        assert torch.equal(getattr(rollout, name), value), name


def test_rounding_leaves_no_negative_rest_of_the_threshold():
    """A rest below 0 would draw the first token of a block even where its probability is 0."""
    a, w = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)).unbind()
    assert ((a + w) - w > a).any(), "rounded away from a"
    index, rest = _first_above(torch.stack([a, w], dim=1), a)
    assert (index == 1).all() and (rest >= 0).all()


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 1000])
def test_the_token_drawn_is_the_first_whose_cumulative_probability_exceeds_the_number(vocab):
    """Found block by block; here over the whole row, in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, vocab, generator=generator)
    uniform = torch.rand(500, generator=generator)
    drawn, logprobs = draw(logits, uniform, temperature=0.7)
    exact = (logits.double() / 0.7).softmax(-1)
    cumulative = exact.cumsum(-1)
    before = cumulative.gather(1, drawn.unsqueeze(1)).squeeze(1)
    below = before - exact.gather(1, drawn.unsqueeze(1)).squeeze(1)
    hint = "lost between the block and the token in it?"
    assert ((below - 1e-6 <= uniform) & (uniform < before + 1e-6)).all(), hint
    expected = exact.log().gather(1, drawn.unsqueeze(1)).squeeze(1)
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_passed_by_the_name_that_this_version_of_transformers_gives_it(name):
    """It was renamed in 5.24. A model that doesn't get it decodes without the prompt."""
    forward = {"cache": lambda input_ids, cache: 0, "past_key_values": lambda past_key_values: 0}
    model, tokens = SimpleNamespace(forward=forward[name]), torch.ones(1, 2)
    assert model_inputs(model, tokens, tokens, cache="full")[name] == "full"


def test_keys_and_values_stay_where_they_are_while_decoding(small_model):
    """Concatenating would copy all of them at every token."""
    cache = preallocated_cache(small_model, capacity=9)
    tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 9, dtype=torch.long)
    with torch.no_grad():
        options = {"cache": cache, "use_cache": True}
        small_model(**model_inputs(small_model, tokens, mask[:, :3], **options))
        cache.batch_select_indices(torch.tensor([0, 0, 1, 1]))
        places = [layer.keys.data_ptr() for layer in cache.layers]
        for t in range(3, 9):
            seen = mask.repeat(2, 1)[:, : t + 1]
            tokens = torch.full((4, 1), t)
            small_model(**model_inputs(small_model, tokens, seen, **options))
    assert cache.get_seq_length() == 9
    assert [layer.keys.data_ptr() for layer in cache.layers] == places


def test_the_static_step_that_cuda_graphs_replay_samples_the_same_tokens(small_model):
    """Rows end at different times, so the number of rows is halved on the way."""
    options = {"num_generations": 40, "seed": 2, "temperature": 2.0}
    plain, static = sample(small_model, **options), sample(small_model, static=True, **options)
    assert plain.finished.any() and not plain.finished.all()
    assert torch.equal(plain.tokens, static.tokens)
    assert torch.allclose(plain.logprobs, static.logprobs, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_log_probs_of_bfloat16_decoding_are_those_of_a_forward_pass_to_rounding(
    small_model, static
):
    """Not token for token: each machine rounds a bfloat16 product in its own way, and one token
    that is drawn otherwise changes the rest of its row.
    """
    options = {"num_generations": 40, "seed": 2, "temperature": 2.0, "bf16": True}
    rollout = sample(small_model, static=static, **options)
    assert rollout.finished.any() and not rollout.finished.all()
    expected, _ = completion_logprobs(small_model, rollout, 2.0)
    wrong = (rollout.logprobs - expected).abs()[rollout.completion_mask]
    assert wrong.mean() < 0.02 and wrong.max() < 0.2


def test_the_static_step_sees_few_numbers_of_rows(small_model):
    """Each is another CUDA graph."""
    shapes = count_forwards(small_model)
    sample(small_model, static=True, num_generations=32, temperature=2.0, max_new_tokens=60)
    rows = [shape[0] for shape in shapes[1:]]
    whole = rows[0]
    assert set(rows) <= {whole, whole // 2, whole // 4, whole // 8, whole // 16, 3, 2, 1}
    assert rows[-1] < whole


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_a_fault(small_model, value):
    """Weights that have diverged: there is no distribution to draw from."""
    head = small_model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: logits.clone().fill_(value))
    with pytest.raises(Fault, match="the model's logits are not finite: lower --learning_rate"):
        sample(small_model)


@pytest.mark.parametrize("token", [1, 4])
def test_one_row_whose_logits_are_not_finite_is_a_fault_as_well(token):
    """The prompts of `sample` begin with different tokens."""
    model = small_gpt2()
    with torch.no_grad():
        model.transformer.wte.weight[token] = torch.nan
    model.lm_head = torch.nn.Linear(32, 40, bias=False)  # a head of its own: the rest is finite
    with pytest.raises(Fault, match="the model's logits are not finite"):
        sample(model)


def test_a_rollout_may_fill_the_context_to_the_last_token(small_model):
    limit = small_model.config.max_position_embeddings
    rollout = sample(small_model, eos_token_ids=[], max_new_tokens=limit - 3)
    assert rollout.tokens.shape[1] == limit
    with pytest.raises(InputError, match=f"don't fit into the model's context of {limit}"):
        sample(small_model, eos_token_ids=[], max_new_tokens=limit - 2)


def test_decoding_in_bfloat16_follows_the_weights(small_model):
    before = sample(small_model, bf16=True)
    with torch.no_grad():
        for p in small_model.parameters():
            p.mul_(1.5)
    after = sample(small_model, bf16=True)
    assert (after.logprobs - before.logprobs).abs().max() > 0.1


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_what_the_layer_computes(bias):
    """The biases of a new model are 0, and would hide one that is lost."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    with torch.no_grad():
        found, expected = PackedLinear(layer.weight, layer.bias)(x), layer(x)
    assert torch.allclose(found.float(), expected.float(), atol=0.02)


def test_decoding_in_bfloat16_leaves_the_model_as_it_is(small_model):
    before = {name: p.clone() for name, p in small_model.state_dict().items()}
    attention = small_model.config._attn_implementation
    rollout = sample(small_model, bf16=True)
    after = small_model.state_dict()
    assert all(
        torch.equal(after[name], p) and p.dtype == after[name].dtype for name, p in before.items()
    )
    assert small_model.config._attn_implementation == attention
    assert rollout.logprobs.dtype == torch.float32


def test_bfloat16_rounds_weights_but_not_rotary_frequencies():
    model = small_llama()
    copied = bfloat16_copy(model)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert copied.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(copied.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_decoding_in_bfloat16_uses_the_fused_attention_that_training_on_a_cpu_does_not():
    model = small_llama(dropout=0.1)
    disable_dropout(model)  # gives the layers a config of their own
    config = SimpleNamespace(bf16=True, gradient_checkpointing=False, compile=False)
    set_up_training(config, model)
    copied = bfloat16_copy(model)
    used = [m.model.layers[1].self_attn.config._attn_implementation for m in (model, copied)]
    assert used == ["eager", "sdpa"]


# --- --compile ---


def test_without_compile_sampling_sets_nothing_that_other_threads_see(small_model, monkeypatch):
    monkeypatch.setattr(torch.compiler, "set_stance", lambda *_: pytest.fail("set for all threads"))
    prompt = torch.tensor([[1, 2, 3]])
    generate(small_model, prompt, prompt > 0, eos_token_ids=[EOS], pad_token_id=0, max_new_tokens=3)


def test_a_compiled_backbone_is_not_compiled_for_the_lengths_of_sampling(small_model):
    torch._dynamo.reset()  # after too many other forward passes it compiles nothing, in silence
    small_model.base_model.compile(backend=lambda *_: pytest.fail("compiled"))
    prompt = torch.tensor([[1, 2, 3]])
    generate(small_model, prompt, prompt > 0, eos_token_ids=[EOS], pad_token_id=0, max_new_tokens=3)
