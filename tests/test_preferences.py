"""What a reward model reads of a prompt and what follows it, and the scores it gives."""

from unittest.mock import Mock

import pytest
import torch
from pretended_cuda import pretended_cuda
from small import letter_tokenizer, save_model, small_llama
from tokenizers import processors
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import BertConfig, BertForMaskedLM, BloomConfig, GPT2Config

from plumbing import preferences
from plumbing.errors import InputError
from plumbing.preferences import RewardModel, load_classifier, sequence_scores, text_ids

USER, GOOD = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TEMPLATE = "<eos>{% for m in messages %}{{ m.role[0] + m.content }}z{% endfor %}"


@pytest.mark.parametrize(
    ("prompt", "completion", "template", "expected"),
    [
        ("q", "a", None, "qa<eos>"),
        ("q", "a<eos>", TEMPLATE, "<eos>qa<eos>"),
        ("q", "", None, "q<eos>"),
        ("q", "a", "no EOS", "qa"),
        (None, "qa", None, "qa<eos>"),
        ([USER], [GOOD], TEMPLATE, "<eos>uqzaaz"),
        ([USER], "a", TEMPLATE, "<eos>uqzaaz"),
        (None, [USER, GOOD], TEMPLATE, "<eos>uqzaaz"),
        # A turn that the prompt has begun is one turn.
        ([USER, GOOD], [GOOD | {"content": "b"}], TEMPLATE, "<eos>uqzaabz"),
        ([GOOD, USER], "b", TEMPLATE, "<eos>aazuqzabz"),
        # Without a template a line break is between them, which this tokenizer takes for a space.
        ([USER], [GOOD], None, "q a<eos>"),
    ],
)
def test_text_ends_with_one_eos_messages_as_their_template(prompt, completion, template, expected):
    tokenizer = letter_tokenizer()
    if template == "no EOS":
        tokenizer.eos_token = None
    elif template:  # BOS, here the same token, is in the template, and put in front of text
        tokenizer.chat_template, bos = template, [("<eos>", tokenizer.eos_token_id)]
        processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=bos)
        tokenizer._tokenizer.post_processor = processor
    assert tokenizer.decode(text_ids(tokenizer, prompt, completion)) == expected


SIZES = {"vocab_size": 20, "hidden_size": 16, "num_labels": 1}
BERT = BertConfig(num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **SIZES)
BERT.initializer_range = 1.0  # or what padding adds to a score is lost in rounding
GPT2 = GPT2Config(n_layer=1, n_head=2, n_positions=64, **SIZES)
BLOOM = BloomConfig(n_layer=1, n_head=2, initializer_range=0.3, **SIZES)  # it has no context limit


@torch.no_grad()
@pytest.mark.parametrize("config", [BERT, GPT2, BLOOM, small_llama(vocab_size=20).config])
def test_a_score_is_that_of_the_text_alone(config, tmp_path, monkeypatch):
    torch.manual_seed(0)
    config.num_labels = 1
    model = Classifier.from_config(config).eval()
    prompts, completions = ["a", "a", "", "ca", "e"], ["b", "b<eos>", "cadbe", "dbe", ""]
    texts = ["ab<eos>", "ab<eos>", "cadbe<eos>", "cadbe<eos>", "e<eos>"]
    ids = [torch.tensor([letter_tokenizer()(text).input_ids]) for text in texts]
    expected = [model(row).logits.item() for row in ids]  # without a pad id the last token counts
    model.config.pad_token_id = 19  # EOS, as in many checkpoints
    folder = save_model(tmp_path / "m", model, letter_tokenizer())
    assert len({round(value, 5) for value in expected}) == 3
    for max_tokens, num_passes in ((5, 5), (13, 3), (1024, 1)):
        monkeypatch.setattr(preferences, "sequence_scores", Mock(wraps=sequence_scores))
        found = RewardModel(folder, "cpu", max_tokens=max_tokens)(prompts, completions)
        assert found == pytest.approx(expected, abs=1e-5) and {*map(type, found)} == {float}
        parts = [call.args[1] for call in preferences.sequence_scores.call_args_list]
        assert len(parts) == num_passes
        assert max(len(rows) * max(map(len, rows)) for rows in parts) <= max(6, max_tokens)
    with pretended_cuda():
        judge = RewardModel(folder, "cuda")
        assert judge.model.device.type == "cuda"
        assert judge(prompts, completions) == pytest.approx(expected, abs=1e-5)
    # In bfloat16 a causal model is rounded but for its head, and BERT is not.
    judge = RewardModel(folder, "cpu", bf16=True)
    assert len({p.dtype for p in judge.model.parameters()}) == (1 if config is BERT else 2)
    rounded = judge(prompts, completions)
    assert (rounded == found) == (config is BERT)
    assert rounded == pytest.approx(expected, abs=0.1 * (max(expected) - min(expected)))
    rows = [[1, 2], [3, 4, 5]]
    exact, scores = (sequence_scores(model, rows, bf16) for bf16 in (False, True))
    assert torch.equal(exact, scores) == (config is BERT)
    assert scores.dtype == torch.float32 and not torch.equal(scores, scores.bfloat16().float())


def test_a_text_that_is_too_long_is_refused(tmp_path):
    folder = save_model(tmp_path / "m", Classifier.from_config(GPT2), letter_tokenizer())
    model = RewardModel(folder, "cpu")
    assert len(model(["a" * 60], ["bcd"])) == 1
    long = "reads 64 tokens, .* has 65 of them: lower"
    for completion, fault in ("bcde", long), ("\ud800", "^--reward_model "):
        with pytest.raises(InputError, match=fault):
            model(["a" * 60], [completion])


TWO_LABELS = Classifier.from_config(GPT2Config(n_layer=1, n_head=2, **SIZES | {"num_labels": 2}))


@pytest.mark.parametrize("model", [BertForMaskedLM(BERT), TWO_LABELS], ids=["bert", "two labels"])
def test_a_new_head_starts_at_0_and_trains(model, tmp_path):
    folder = save_model(tmp_path / "m", model, letter_tokenizer())
    model = load_classifier(folder, new_head=True)
    scores = sequence_scores(model, [[1, 2], [3, 4, 5]], bf16=False)
    assert scores.tolist() == [0, 0]
    scores.sum().backward()
    [head] = (p for p in model.parameters() if p.shape == (1, 16))
    assert head.grad.any(), "the head gets a gradient: what it reads isn't all 0"
