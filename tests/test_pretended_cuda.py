"""The CUDA path on a pretended device: its runs equal those of the CPU."""

import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pretended_cuda import CPU, CUDA, Generator, pretended_cuda
from small import reward_model_job, small_gpt2, small_llama, without_times

import grpo
import ppo
import rloo
from forward import ValueModel
from plumbing import models
from plumbing.decoder import Decoder
from plumbing.errors import Fault, InputError
from plumbing.run import Run, run_main
from sampling import sample


@pytest.mark.parametrize(
    ("script", "flags", "updates"),
    [(grpo, {"num_mini_batches": 2}, 2), (ppo, {"num_epochs": 2}, 2), (rloo, {}, 1)],
)
def test_a_run_tries_a_micro_batch_and_clears_caches(script, flags, updates, make_job, monkeypatch):
    order = []

    def note_calls(place, name):
        function = getattr(place, name)

        def noted(*args, **options):
            order.append(name)
            return function(*args, **options)

        monkeypatch.setattr(place, name, noted)

    for name in ("fit_micro_batch", "sample", "clear_cache"):
        note_calls(script, name)
    for place, name in ((Run, "__init__"), (Run, "end_phase"), (torch.optim.AdamW, "step")):
        note_calls(place, name)
    make_job(script)(**flags)
    end = ["end_phase", "clear_cache"]
    assert order == ["fit_micro_batch", "__init__", "sample", *end, *["step"] * updates, *end]


def test_a_resumed_run_on_the_device_equals_the_cpu(make_job):
    """Rows that share a micro-batch share their prompt on the CPU alone, which rounds otherwise: so
    each has one of its own.
    """
    flags = {"num_steps": 2, "eval_every": 2, "max_new_tokens": 9, "save_every": 1}
    flags |= {"completions": 4, "micro_batch_tokens": 1, "num_mini_batches": 2}
    run = make_job(ppo)
    expected = without_times(run(**flags)), (run.folder / "samples.jsonl").read_text()
    # After a trial of the micro-batch, at the end of the second step.
    clear = mock.Mock(side_effect=[None] * 4 + [KeyboardInterrupt] + [None] * 9)
    with pretended_cuda() as gpu, mock.patch.object(torch.cuda, "empty_cache", clear):
        with pytest.raises(KeyboardInterrupt):
            run(**flags, device="cuda")
        assert gpu.waits["synchronize"] == 4, "phases are measured, the work of the device as well"
        lines = without_times(run(**flags, device="cuda", resume=run.folder))
    for line in expected[0] + lines:  # tensors of other shapes round otherwise in decoding
        line.pop("val/sampler_kl", None), line.pop("objective/entropy", None)
    assert (lines, (run.folder / "samples.jsonl").read_text()) == expected
    assert lines[0]["grad_norm"] > 0 and gpu.replays > 40


def test_a_reward_model_on_the_device_equals_the_cpu(tmp_path):
    job = reward_model_job(tmp_path)
    expected = without_times(job(num_steps=2))
    with pretended_cuda():
        assert without_times(job(num_steps=2, device="cuda")) == expected


@pytest.mark.parametrize(
    ("capability", "half"),  # of a P100, a T4 and an A100
    [((6, 0), None), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)],
)
def test_half_precision_is_what_the_gpu_multiplies_fast(capability, half):
    emulates = lambda including_emulation=True: including_emulation or half is torch.bfloat16  # noqa: E731
    of_gpu = {"get_device_capability": lambda device: capability, "is_bf16_supported": emulates}
    with mock.patch.multiple(torch.cuda, **of_gpu):
        assert models.fast_half(CUDA) is half


@pytest.mark.parametrize("has_avx512", [False, True])
@pytest.mark.parametrize("has_amx", [False, True])
def test_half_precision_is_what_the_cpu_multiplies_fast(has_avx512, has_amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert models.fast_half(CPU) is (torch.bfloat16 if has_avx512 or has_amx else None)
    assert models.fast_half(torch.device("mps")) is None


def test_a_run_in_bfloat16_takes_tf32_for_its_head():
    with pretended_cuda():
        model = small_llama().to("cuda")
        config = SimpleNamespace(half=None, gradient_checkpointing=False)
        for config.bf16 in (False, True, False):
            models.set_up_training(config, model)
            assert torch.backends.cuda.matmul.allow_tf32 == config.bf16
            assert model.config._attn_implementation == "sdpa"


def test_a_fault_within_a_capture_is_named(capsys):
    def wait(module, inputs, output):
        output.sum().item()

    def run_out(module, inputs, output):
        if gpu.graph is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def sample_with(hook, **options):
        model = small_gpt2().eval().to("cuda")
        model.transformer.ln_f.register_forward_hook(hook)
        ends = {"max_new_tokens": 4, "eos_token_ids": [], "pad_token_id": 0}
        decoder, ids = Decoder(model, **options), torch.tensor([[1, 2, 3], [4, 5, 6]])
        sample(model, ids, ids > 0, num_generations=1, max_rows=2, decoder=decoder, **ends)

    with pretended_cuda() as gpu:
        for hook in (wait, run_out):
            sample_with(hook, graphs=False)
        with pytest.raises(Fault, match=r"--cuda_graphs false \(item: not permitted"):
            sample_with(wait)
        with pytest.raises(SystemExit):
            run_main(lambda: sample_with(run_out))
    assert capsys.readouterr().err.startswith("error: out of memory: lower --micro_batch_tokens")


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch, capsys):
    error = RuntimeError("CUDA error: no kernel image is available\nFor debugging")
    broken = mock.patch.object(torch.Tensor, "item", side_effect=error)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    with pretended_cuda():
        assert models.pick_device(None) == CUDA and not capsys.readouterr().out
        torch.cuda.set_device.assert_called_once_with(CUDA)
        with (
            broken,
            pytest.raises(InputError, match=r"^--device cuda: .* no kernel image is avail"),
        ):
            models.pick_device(None)
    assert models.pick_device(None) == CPU
    assert "On the CPU: this torch is a CPU build, or" in capsys.readouterr().out
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert models.pick_device(None) == CPU and not capsys.readouterr().out
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with broken, pytest.raises(InputError, match="--device mps: "):
        models.pick_device(None)


def watched(place, *names):
    """A patch: these functions of a module are mocks that do as the functions do."""
    return mock.patch.multiple(place, **{x: mock.Mock(wraps=getattr(place, x)) for x in names})


def test_a_micro_batch_that_does_not_fit_is_halved(capsys):
    flags = {"prompts_per_step": 4, "num_generations": 2, "max_new_tokens": 6, "temperature": 1.0}
    config = SimpleNamespace(device="cuda", micro_batch_tokens=1000, bf16=True, **flags)
    prompts, fault, has_grad = {"a": [1], "b": [1, 2, 3, 4]}, torch.OutOfMemoryError, set()
    forwards = watched(models, "_one_pass", "completion_logprobs", "completion_values")
    with pretended_cuda(), forwards, watched(torch, "empty", "empty_like"):
        models._one_pass.side_effect = [fault, fault, mock.DEFAULT, mock.DEFAULT, fault, fault]
        policy = models.add_adapter(small_gpt2(), 1).to("cuda").train()
        both = policy, value_model = policy, ValueModel.on_backbone_of(policy)
        trained = [p for model in both for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_post_accumulate_grad_hook(has_grad.add)
        torch.empty_like.reset_mock()
        state = torch.get_rng_state()
        models.fit_micro_batch(config, both, prompts)
        assert torch.equal(torch.get_rng_state(), state), "no draw of the run changes"
        *_, fits = parts = [call.args[2] for call in models._one_pass.call_args_list]
        assert [part.completion_mask.shape for part in parts] == [(8, 6), (4, 6), (2, 6)]
        assert not any(part.attention_mask.all() for part in parts), "padding takes memory"
        assert has_grad == {*trained} and all(p.grad is None for p in trained)
        assert torch.empty_like.call_count == 3 * 2 * len(trained), "Adam keeps two moments"
        kept = mock.call(2**34 // 5, dtype=torch.uint8, device=CUDA)  # what a Decoder may keep
        assert torch.empty.call_args_list.count(kept) == 3
        options = {"bf16": True, "entropy_grad": False}
        models.completion_logprobs.assert_called_once_with(policy, fits, 1.0, **options)
        models.completion_values.assert_called_once_with(value_model, fits, bf16=True)
        torch.cuda.reset_peak_memory_stats.assert_called_once_with()
        assert "--micro_batch_tokens 1000 doesn't fit: it is 20 here" in capsys.readouterr().out
        config.entropy_coef = 0.1  # more logits are kept
        models.fit_micro_batch(config, both, prompts)
        assert models.completion_logprobs.call_args.kwargs["entropy_grad"]
        assert not capsys.readouterr().out, "it fits"
        with pytest.raises(torch.OutOfMemoryError):
            models.fit_micro_batch(config, both, prompts)


def test_the_device_is_as_strict_as_a_real_one():
    on_cpu = torch.ones(3)
    with pretended_cuda() as gpu:
        x = torch.arange(3.0, device="cuda", requires_grad=True)
        (x**2).sum().backward()
        assert x.grad.device == (2 * x).view(3, 1).device == CUDA and on_cpu.device.type == "cpu"
        for wrong in (
            lambda: x + on_cpu,
            lambda: on_cpu[x.long()],
            lambda: torch.stack([x.sum(), on_cpu.sum()]),
            lambda: torch.rand(2, device="cuda", generator=Generator("cpu")),
        ):
            with pytest.raises(RuntimeError, match=r"on the CPU|generator"):
                wrong()
        assert not gpu.waits
        x.sum().item(), x.tolist(), x.cpu(), x[x > 1], x[torch.tensor([0])], x.nonzero()
        assert gpu.waits.total() == 6
        y, graph = x.detach().clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None):
            doubled = 2 * y
            y += 1
        assert doubled.cpu().isnan().all() and y.tolist() == [0, 1, 2], "capturing runs nothing"
        graph.replay(), graph.replay()
        y = y + 1
        graph.replay()
        assert doubled.tolist() == [4, 6, 8], "a tensor that was replaced is stale"
        with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(graph, None):
            y.sum().item()
