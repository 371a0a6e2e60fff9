"""The CUDA path on a pretended device: its runs equal those of the CPU, and hardly wait."""

import contextlib
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from pretended_cuda import CUDA, Generator, pretended_cuda
from small import EOS, job_maker, letter_tokenizer, reward_model_job, save_model, small_gpt2
from torch.optim.optimizer import register_optimizer_step_post_hook

import common
import grpo
import plumbing.memory  # noqa: F401  # here, or it would keep what a test replaces in forward.py
import ppo
import rloo
from common import Rollout
from plumbing import decoding, forward
from plumbing.decoding import Decoder
from plumbing.forward import micro_batches, on_cpu, rollout_logprobs
from plumbing.run import Run
from sampling import generate, sample
from tools import evaluate, inspect_reward

SCRIPTS = [
    pytest.param(ppo, id="ppo", marks=pytest.mark.slow),
    pytest.param(grpo, id="grpo"),
    pytest.param(rloo, id="rloo", marks=pytest.mark.slow),
]
# Decoding rounds otherwise in tensors of one shape: the log-probs as drawn differ by that.
LEFT_OUT = ("time/", "memory/", "tokens_per_second", "val/sampler")


def compared(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(LEFT_OUT)} for line in lines]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (grpo, {"num_mini_batches": 2, "micro_batch_tokens": 40, "disable_dropout": False}),
        pytest.param(
            ppo, {"lora_r": 2, "num_epochs": 2, "micro_batch_tokens": 80}, marks=pytest.mark.slow
        ),
        pytest.param(rloo, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_the_device_equals_one_on_the_cpu_to_the_bit(script, flags, make_job, monkeypatch):
    """With prompts and completions in the same forward passes as on a CPU."""
    monkeypatch.setattr(forward, "worth_sharing", lambda rows, prompts, *_: prompts < rows)
    monkeypatch.setattr(forward, "WITHOUT_GRADIENT", 1)
    flags |= {"num_steps": 2, "eval_every": 2, "max_new_tokens": 12, "num_eval_prompts": 8}
    run, found = make_job(script), []
    for device in ("cpu", "cuda"):
        with pretended_cuda() if device == "cuda" else contextlib.nullcontext() as gpu:
            lines = run(**flags, device=device)
        found.append((compared(lines), (run.folder / "samples.jsonl").read_text()))
    assert found[0] == found[1]
    assert gpu.replays > 10, "the decode loop ran without CUDA graphs"
    assert len([x for x in lines if "eval/reward" in x]) == 2 and lines[0]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("script", [ppo, grpo], ids=["ppo", "grpo"])
def test_a_sliding_window_and_a_reward_model_agree_with_the_cpu_to_rounding(script, tmp_path):
    torch.manual_seed(0)
    size = {"vocab_size": 20, "bos_token_id": None, "eos_token_id": 19, "pad_token_id": 0}
    gpt2 = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, num_labels=1, **size)
    judge = transformers.GPT2ForSequenceClassification(gpt2)
    judge = save_model(tmp_path / "judge", judge, letter_tokenizer())
    size |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    gemma = transformers.Gemma3TextConfig(sliding_window=4, sliding_window_pattern=2, **size)
    policy = transformers.AutoModelForCausalLM.from_config(gemma)
    policy = save_model(tmp_path / "policy", policy, letter_tokenizer())
    run = job_maker(tmp_path)(script)
    flags = {"model": policy, "reward_model": judge, "max_new_tokens": 12}
    flags |= {"num_steps": 2, "learning_rate": 1e-3, "kl_coef": 0.1}
    expected = compared(run(**flags))
    with pretended_cuda() as gpu:
        found = compared(run(**flags, device="cuda"))
    assert gpu.replays > 10
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            expected_value = pytest.approx(other[name] or 0.0, rel=1e-3, abs=1e-5)
            assert (value or 0.0) == expected_value, name


# --- What waits for the device ---


@contextlib.contextmanager
def waits_per_step():
    """Gives a list that fills with the waits of each step but the first, which is evaluated."""
    end_step, waits = Run._end_step, []
    with pretended_cuda() as gpu, pytest.MonkeyPatch.context() as m:

        def ended(self, steps_done):
            if steps_done > 1:
                waits.append(gpu.waits.copy())
            end_step(self, steps_done)
            gpu.waits.clear()

        m.setattr(Run, "_end_step", ended)
        yield waits


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_waits_for_the_device_a_few_times_whatever_the_micro_batches(script, make_job):
    """The decode loop looks every eighth token whether rows are left, and an optimiser step needs
    to know that its gradient is finite; all metrics leave the device together.
    """
    totals, length = [], 16
    for tokens in (1000, 20):
        with waits_per_step() as waits:
            flags = {"device": "cuda", "num_steps": 3, "eval_every": 10, "completions": 16}
            flags |= {"max_new_tokens": length, "rollout_batch_size": 16}
            make_job(script)(**flags, micro_batch_tokens=tokens)
        totals.append([step.total() for step in waits])
    updates = {ppo: 8, grpo: 1, rloo: 1}[script]
    # Prefill, the rollout's end and its copy, what the update reads on the CPU, the metrics.
    bound = 5 + updates + length // 8 - 1
    assert totals[0] == totals[1] and 2 < totals[0][0] <= bound, waits


@pytest.mark.slow
def test_training_a_reward_model_on_the_device_equals_the_cpu_and_waits_twice_a_step(tmp_path):
    """For the norm of the gradient, and for the metrics: whatever the micro-batches."""
    job = reward_model_job(tmp_path)
    flags = {"center_rewards_coef": 0.1, "num_steps": 4, "eval_every": 10}
    expected = compared(job(**flags))
    for tokens in (1000, 20):
        with waits_per_step() as waits:
            found = compared(job(**flags, device="cuda", micro_batch_tokens=tokens))
        assert [step.total() for step in waits] == [2, 2, 2]
        for line, other in zip(found, expected, strict=True):
            for name, value in line.items():
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_cache_is_cleared_between_the_phases_of_a_step(script, make_job, monkeypatch):
    order, sample = [], script.sample

    def noted(*args, **options):
        order.append("sample")
        return sample(*args, **options)

    with pretended_cuda() as gpu:
        hook = register_optimizer_step_post_hook(lambda *_: order.append("update"))
        monkeypatch.setattr(script, "sample", noted)
        monkeypatch.setattr(decoding, "clear_cache", lambda: None)  # before the first capture
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("clear"))
        make_job(script)(device="cuda", num_steps=2, num_mini_batches=1, num_epochs=1)
        hook.remove()
    assert order == ["sample", "clear", "update", "clear"] * 2 and gpu.replays > 0


# --- Mistakes that only a device shows ---


@pytest.mark.parametrize(("half", "least"), [(None, 1.0), (torch.float16, 0.8)])
def test_graphs_and_memory_of_a_rollout_serve_later_ones_with_the_weights_of_then(half, least):
    """Sub-batches whose rows end at different times, of several widths. In half precision a token
    that is drawn otherwise, by rounding, changes the rest of its row.
    """
    options = {"max_new_tokens": 20, "eos_token_ids": [EOS], "pad_token_id": 0, "max_rows": 8}
    options |= {"num_generations": 8, "temperature": 2.0}
    prompts = [torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 0, 7, 8, 9, 6, 5]])]
    graphs = []

    def rollouts(device: str) -> list[Rollout]:
        model, found = small_gpt2().eval().to(device), []
        decoder = Decoder(model, half)
        generator = torch.Generator(device).manual_seed(0)
        for ids in 3 * prompts:
            how = options | {"generator": generator, "decoder": decoder}
            found.append(on_cpu(sample(model, ids, ids > 0, **how)))
            graphs.append(len(decoder.graphs))
            for layer in decoder.buffers.values() if half else ():
                for x in layer:
                    x.fill_(torch.nan)  # as a row leaves them that overflows after its end
            if ids is prompts[1]:  # an update: all weights become 10% smaller
                for p in model.parameters():
                    p.grad = p.detach().clone()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
        return found

    expected = rollouts("cpu")
    graphs.clear()
    with pretended_cuda() as gpu, pytest.MonkeyPatch.context() as m:
        m.setattr(decoding, "COLUMNS", 8)  # several widths in so few tokens
        found = rollouts("cuda")
    for ours, theirs in zip(found, expected, strict=True):
        same = (ours.tokens == theirs.tokens).cumprod(1).bool()
        assert same.float().mean() >= least
        same = same[:, -20:]
        wrong = (ours.logprobs - theirs.logprobs)[same].abs()
        assert wrong.max() < (0.05 if half else 1e-5), "the weights of an earlier rollout?"
    assert graphs[:2] == [0, 0], "before an update nobody knows whether they fit beside it"
    assert 2 < graphs[2] <= graphs[3] <= graphs[4] <= graphs[5] < gpu.replays / 10


@pytest.mark.parametrize(("peak", "kept"), [(2**33, True), (2**34, False)])
def test_memory_that_does_not_fit_beside_an_update_is_given_back(peak, kept, monkeypatch):
    options = {"max_new_tokens": 3, "eos_token_ids": [EOS], "pad_token_id": 0, "max_rows": 2}
    prompts = torch.tensor([[1, 2, 3]])
    with pretended_cuda():
        decoder = Decoder(model := small_gpt2().to("cuda"))
        monkeypatch.setattr(decoding, "num_updates", decoding.num_updates + 1)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: peak)
        sample(model, prompts, prompts > 0, num_generations=2, decoder=decoder, **options)
    assert bool(decoder.graphs) == bool(decoder.buffers) == kept


@pytest.mark.parametrize("waits", ["always", "while captured"])
def test_a_forward_pass_that_waits_is_decoded_without_graphs(waits, monkeypatch):
    monkeypatch.setattr(common, "capture_failed", False)
    model, prompts = small_gpt2().eval(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"eos_token_ids": [], "pad_token_id": 0, "max_new_tokens": 8}
    numbers = torch.Generator().manual_seed(0)
    expected = generate(model, prompts, prompts > 0, generator=numbers, **options)

    def wait(module, inputs, output):
        if waits == "always" or torch.cuda.is_current_stream_capturing():
            output.last_hidden_state.sum().item()

    with pretended_cuda() as gpu, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        model.to("cuda").transformer.register_forward_hook(wait)
        for _ in range(2):
            numbers = torch.Generator("cuda").manual_seed(0)
            found = on_cpu(generate(model, prompts, prompts > 0, generator=numbers, **options))
            assert torch.equal(found.tokens, expected.tokens)
            assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-5)
            common.clear_cache()
        assert gpu.replays == 0 and gpu.in_disorder == (waits == "while captured")
    told = [str(w.message).rpartition(":")[0] for w in warned]
    assert told == ["decoding without CUDA graphs, slowly: _local_scalar_dense"]


@pytest.mark.parametrize(("free", "limits"), [(0, (32, 1024)), (4 * 10**9, (1024, 16384))])
def test_the_limits_come_from_the_free_memory_and_a_resumed_run_keeps_them(
    free, limits, make_job, monkeypatch, capsys
):
    run, flags = make_job(grpo), {"device": "cuda", "num_steps": 2, "save_every": 1}
    names = ("rollout_batch_size", "micro_batch_tokens")
    flags |= dict.fromkeys(names)  # not given
    for memory, more in ((free, {}), (10**9, {"resume": True, "overwrite": False})):
        with pretended_cuda():
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, x=memory: (x, 10**11))
            run(**flags | more)
        config = json.loads((run.folder / "config.json").read_text())
        assert tuple(config[name] for name in names) == limits
        out = capsys.readouterr().out
        printed = f"--rollout_batch_size {limits[0]} --micro_batch_tokens {limits[1]}"
        assert (printed in out) == (more == {})
        assert ("GB are free, and this run needs about" in out) == (free == 0 and not more)


def test_a_limit_that_is_given_counts_for_the_other_one(make_job, monkeypatch, capsys):
    with pretended_cuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10**9, 10**11))
        flags = {"rollout_batch_size": None, "micro_batch_tokens": 10**9, "num_steps": 1}
        make_job(grpo)(device="cuda", max_new_tokens=16, **flags)
    assert ": --rollout_batch_size" in (out := capsys.readouterr().out)
    assert "--micro_batch_tokens" not in out


@pytest.mark.parametrize("tool", [evaluate, inspect_reward], ids=lambda tool: tool.__name__)
def test_a_tool_runs_on_the_device(tool, make_job, tmp_path, capsys):
    make_job(grpo)  # saves a model, prompts and a reward
    flags = f"--model {tmp_path}/small-gpt2 --prompts {tmp_path}/prompts.jsonl --bf16 false"
    flags += f" --reward {tmp_path}/reward.py:spread --max_new_tokens 4 --device cuda"
    with pretended_cuda():
        tool.main(flags.split())
    assert " -> " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("completions", "read", "trained"), [(2, ["4x7"], [2, 2]), (4, ["2x4", "8x3"], [3, 2, 3])]
)
def test_a_prompt_is_computed_once_where_that_saves_a_gpu_a_third_of_the_tokens(
    completions, read, trained
):
    """Prompts and completions of 4 tokens; the last token is not read. micro_batch_tokens is 16:
    all 32 or 40 tokens are read at a time, because without gradient the limit is four times that.
    """
    prompts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]).repeat_interleave(completions, dim=0)
    ones = torch.ones_like(prompts).bool()
    tokens, mask = torch.cat([prompts, prompts + 5], dim=1), torch.cat([ones, ones], dim=1)
    rollout = Rollout(tokens, mask, ones, torch.zeros(ones.shape), ones.any(1))
    config = SimpleNamespace(temperature=1.0, bf16=False)
    config.rollout_batch_size, config.micro_batch_tokens = 64, 16
    expected = rollout_logprobs(small_gpt2().eval(), rollout, config)
    shapes = []

    def note(module, args, kwargs):
        shapes.append("x".join(map(str, kwargs["input_ids"].shape)))

    with pretended_cuda():
        model = small_gpt2().eval().to(CUDA)
        model.transformer.register_forward_pre_hook(note, with_kwargs=True)
        there = Rollout(*(x.to(CUDA) for x in vars(rollout).values()))
        found = rollout_logprobs(model, there, config)
        assert torch.allclose(found.cpu(), expected, atol=1e-5) and shapes == read
        parts = micro_batches(there, max_tokens=config.micro_batch_tokens)
        assert [len(rows) for rows, _ in parts] == trained


def test_the_flag_cuda_graphs_switches_them_off(make_job):
    with pretended_cuda() as gpu:
        make_job(grpo)(device="cuda", num_steps=1, cuda_graphs=False)
    assert gpu.replays == 0


@contextlib.contextmanager
def captured(graph):
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def test_the_device_is_as_strict_as_a_real_one():
    on_cpu = torch.ones(3)
    with pretended_cuda() as gpu:
        x = torch.arange(3.0, device="cuda", requires_grad=True)
        assert torch.cuda.CUDAGraph | torch.cuda.Stream, "type annotations of transformers"
        assert x.device == CUDA and (2 * x).view(3, 1).device == CUDA and x.is_cuda
        assert on_cpu.device.type == "cpu" and torch.ones(2).device.type == "cpu"
        (x**2).sum().backward()
        assert x.grad.device == CUDA
        assert (x + torch.tensor(1.0)).device == CUDA, "a scalar may come from the CPU"
        for wrong in (
            lambda: x + on_cpu,
            lambda: x[torch.tensor([0, 1])],
            lambda: torch.stack([x[0], torch.tensor(1.0)]),
            lambda: torch.rand(2, device="cuda", generator=Generator("cpu")),
            lambda: x.detach().numpy(),
        ):
            with pytest.raises((RuntimeError, TypeError), match=r"on the CPU|generator|numpy"):
                wrong()
        assert not gpu.waits
        x.sum().item(), x.tolist(), x.cpu(), x[x > 1], torch.tensor([1], device="cuda")
        on_cpu.to("cuda"), x + 1, torch.cuda.synchronize(), bool(x.isfinite().all()), x.nonzero()
        torch.cuda.synchronize(), x.cpu(), torch.cuda.synchronize()
        assert gpu.waits.total() == 10, "one of an idle device isn't counted"
        on_cpu.to("cuda", non_blocking=True)
        y = x.detach().clone()
        y[:2] = 0.0
        assert gpu.waits.total() == 10
        y[0] = torch.tensor(7.0)
        assert gpu.waits.total() == 11, "a copy into a tensor waits as well"


def test_a_graph_of_the_device_repeats_its_operations_on_the_same_tensors():
    with pretended_cuda():
        x, graph = torch.arange(3.0, device="cuda"), torch.cuda.CUDAGraph()
        with captured(graph):
            doubled = 2 * x
        assert doubled.cpu().isnan().all(), "capturing runs nothing"
        x += 1
        graph.replay()
        assert doubled.tolist() == [2, 4, 6]
        x = x + 1
        graph.replay()
        assert doubled.tolist() == [2, 4, 6], "a tensor that was replaced is stale"
        on_cpu = torch.ones(3)
        for forbidden in (lambda: x.sum().item(), lambda: on_cpu.to("cuda", non_blocking=True)):
            with pytest.raises(RuntimeError, match="captured"), captured(torch.cuda.CUDAGraph()):
                forbidden()
    assert torch.ones(1).device.type == "cpu"
