"""The CUDA path on a pretended device: its runs equal those of the CPU."""

import itertools
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pretended_cuda import CPU, CUDA, Generator, pretended_cuda
from small import computed, reward_model_job, small_gpt2, small_llama
from torch.optim.optimizer import register_optimizer_step_post_hook

import grpo
import ppo
import rloo
from plumbing import models
from plumbing.decoder import Decoder
from plumbing.errors import Fault, InputError
from plumbing.run import Run, run_main
from sampling import sample

UPDATES = {  # of a step, and the flags for them
    grpo: (2, {"num_mini_batches": 2}),
    ppo: (2, {"num_epochs": 2}),
    rloo: (1, {}),
}


@pytest.mark.parametrize("script", UPDATES, ids=lambda script: script.__name__)
def test_a_run_tries_a_micro_batch_and_clears_caches(script, make_job, monkeypatch):
    (updates, flags), order, sample, end_phase = UPDATES[script], [], script.sample, Run.end_phase
    spies = [(script, "sample", sample), (script, "clear_cache", lambda: None)]
    spies += [(Run, "end_phase", end_phase)]
    for place, name, function in (*spies, (script, "fit_micro_batch", lambda *_: None)):
        spy = lambda *args, n=name, f=function, **options: order.append(n) or f(*args, **options)  # noqa: E731
        monkeypatch.setattr(place, name, spy)
    hook = register_optimizer_step_post_hook(lambda *_: order.append("update"))
    make_job(script)(**flags)
    hook.remove()
    update = [*["update"] * updates, "end_phase", "clear_cache"]
    assert order == ["fit_micro_batch", "sample", "end_phase", "clear_cache", *update]


def test_a_resumed_run_on_the_device_equals_the_cpu(
    make_job,
):
    """Rows that share a micro-batch share their prompt on the CPU alone, which rounds otherwise: so
    each has one of its own.
    """
    flags = {"num_steps": 2, "eval_every": 2, "max_new_tokens": 9, "save_every": 1}
    flags |= {"completions": 4, "micro_batch_tokens": 1, "num_mini_batches": 2}
    run, clears = make_job(ppo), []
    expected = computed(run(**flags)), (run.folder / "samples.jsonl").read_text()

    def clear():
        clears.append("clear")
        if len(clears) == 5:  # after a trial of the micro-batch, at the end of the second step
            raise KeyboardInterrupt

    with pretended_cuda() as gpu, mock.patch.object(torch.cuda, "empty_cache", clear):
        with pytest.raises(KeyboardInterrupt):
            run(**flags, device="cuda")
        assert gpu.waits["synchronize"] == 4, "phases are measured, the work of the device as well"
        lines = computed(run(**flags, device="cuda", resume=run.folder))
    for line in expected[0] + lines:  # tensors of other shapes round otherwise in decoding
        line.pop("val/sampler_kl", None), line.pop("objective/entropy", None)
    assert (lines, (run.folder / "samples.jsonl").read_text()) == expected
    assert lines[0]["grad_norm"] > 0 and gpu.replays > 40


def test_a_reward_model_on_the_device_equals_the_cpu(tmp_path):
    job = reward_model_job(tmp_path)
    expected = computed(job(num_steps=2))
    with pretended_cuda():
        assert computed(job(num_steps=2, device="cuda")) == expected


def test_half_precision_is_what_the_device_multiplies_fast(
    monkeypatch,
):
    for capability, expected in (
        ((6, 0), None),  # P100
        ((7, 5), torch.float16),  # T4
        ((8, 0), torch.bfloat16),  # A100
    ):
        of_device = mock.Mock(return_value=capability)
        with pretended_cuda(), mock.patch.object(torch.cuda, "get_device_capability", of_device):
            assert models.fast_half(CUDA) is expected
            assert torch.cuda.is_bf16_supported(), "by emulation"
    for has_avx512, has_amx in itertools.product((False, True), repeat=2):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda x=has_avx512: x)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda x=has_amx: x)
        expected = torch.bfloat16 if has_avx512 or has_amx else None
        assert models.fast_half(CPU) is expected and models.fast_half(torch.device("mps")) is None


def test_a_run_in_bfloat16_takes_tf32_for_its_head():
    with pretended_cuda():
        model = small_llama().to("cuda")
        for bf16 in (False, True, False):
            models.set_up_training(SimpleNamespace(bf16=bf16, gradient_checkpointing=False), model)
            assert torch.backends.cuda.matmul.allow_tf32 == bf16
            assert model.config._attn_implementation == "sdpa"


def test_a_fault_within_a_capture_is_named(capsys):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"num_generations": 1, "max_rows": 2, "max_new_tokens": 4}
    options |= {"eos_token_ids": [], "pad_token_id": 0}

    def wait(module, inputs, output):
        output.sum().item()

    def run_out(module, inputs, output):
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pretended_cuda():
        model = small_gpt2().eval().to("cuda")
        hook = model.transformer.ln_f.register_forward_hook(wait)
        with pytest.raises(Fault, match=r"--cuda_graphs false \(_local_scalar_dense"):
            sample(model, prompts, prompts > 0, decoder=Decoder(model), **options)
        sample(model, prompts, prompts > 0, decoder=Decoder(model, graphs=False), **options)
        hook.remove()
        model.transformer.ln_f.register_forward_hook(run_out)
        with pytest.raises(SystemExit):
            run_main(lambda: sample(model, prompts, prompts > 0, decoder=Decoder(model), **options))
        sample(model, prompts, prompts > 0, decoder=Decoder(model, graphs=False), **options)
    assert capsys.readouterr().err.startswith("error: out of memory: lower --micro_batch_tokens")


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch, capsys):
    error = RuntimeError("CUDA error: no kernel image is available\nFor debugging")
    broken = mock.patch.object(torch.Tensor, "item", side_effect=error)
    with pretended_cuda(), broken, pytest.raises(InputError) as raised:
        models.pick_device(None)
    message = "--device cuda: RuntimeError: CUDA error: no kernel image is available"
    assert str(raised.value) == message
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    with pretended_cuda():
        assert models.pick_device(None) == CUDA and not capsys.readouterr().out
        torch.cuda.set_device.assert_called_once_with(CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with broken, pytest.raises(InputError, match="--device mps: "):
        models.pick_device(None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for found, lines in ((None, 0), ("/usr/bin/nvidia-smi", 1)):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        assert models.pick_device(None).type == "cpu"
        assert capsys.readouterr().out.count("On the CPU: this torch is a CPU build, or") == lines


def test_a_micro_batch_that_does_not_fit_is_halved(make_job, monkeypatch, capsys):
    run, sizes, states, one_pass, tested = make_job(ppo), [], [], models._one_pass, []
    for name in ("completion_logprobs", "completion_values"):
        monkeypatch.setattr(models, name, mock.Mock(wraps=getattr(models, name)))

    def tried(config, trained, part):
        sizes.append(len(part.finished)), states.append(torch.get_rng_state().tolist())
        weights = [p for model in trained for p in model.parameters() if p.requires_grad]
        assert gpu.operations.pop("empty_like") == 2 * len(weights), "Adam keeps two moments"
        kept = mock.call(2**34 // 5, dtype=torch.uint8, device=CUDA)  # what a Decoder may keep
        assert empty.call_args == kept and part.completion_mask.shape[1] == 6
        assert not part.attention_mask.all(), "a mask of padding takes memory"
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        one_pass(config, trained, part)
        assert all(p.grad is not None for p in weights)
        tested.extend(weights)
        # With a bonus for the entropy more logits are kept.
        options = {"bf16": True, "entropy_grad": config.entropy_coef > 0}
        assert models.completion_logprobs.call_args.kwargs == options
        assert models.completion_values.call_args.kwargs == {"bf16": True}

    monkeypatch.setattr(models, "_one_pass", tried)
    reset = mock.patch.object(torch.cuda, "reset_peak_memory_stats", lambda: sizes.append("reset"))
    empty = mock.patch.object(torch, "empty", wraps=torch.empty)
    with pretended_cuda() as gpu, reset, empty as empty:
        flags = {"device": "cuda", "num_steps": 0, "num_generations": 2, "lora_r": 1, "bf16": True}
        run(micro_batch_tokens=2 * (4 + 6), entropy_coef=0.1, **flags)
        assert "doesn't fit" not in capsys.readouterr().out
        sizes.clear(), states.clear(), gpu.operations.clear()
        run(micro_batch_tokens=1000, **flags)
        monkeypatch.setattr(models, "_one_pass", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            run(output_dir=run.folder.parent / "none-fits", **flags)
    tokens = json.loads((run.folder / "config.json").read_text())["micro_batch_tokens"]
    assert sizes == [8, 4, 2, "reset"] and states == states[:1] * 3
    assert tokens == 2 * (4 + 6)  # the longest prompt, and max_new_tokens
    assert "--micro_batch_tokens 1000 doesn't fit: it is 20 here" in capsys.readouterr().out
    assert tested and all(p.grad is None for p in tested)


def test_the_device_is_as_strict_as_a_real_one():
    on_cpu = torch.ones(3)
    with pretended_cuda() as gpu:
        x = torch.arange(3.0, device="cuda", requires_grad=True)
        (x**2).sum().backward()
        assert x.grad.device == (2 * x).view(3, 1).device == CUDA and on_cpu.device.type == "cpu"
        for wrong in (
            lambda: x + on_cpu,
            lambda: on_cpu[x.long()],
            lambda: torch.rand(2, device="cuda", generator=Generator("cpu")),
        ):
            with pytest.raises(RuntimeError, match=r"on the CPU|generator"):
                wrong()
        assert not gpu.waits
        x.sum().item(), x.tolist(), x.cpu(), x[x > 1], x[torch.tensor([0])], x.nonzero()
        assert gpu.waits.total() == 6
        y, graph = x.detach().clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = 2 * y
            y += 1
        assert doubled.cpu().isnan().all() and y.tolist() == [0, 1, 2], "capturing runs nothing"
        graph.replay(), graph.replay()
        assert doubled.tolist() == [2, 4, 6]
        y = y + 1
        graph.replay()
        assert doubled.tolist() == [4, 6, 8], "a tensor that was replaced is stale"
        with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(graph):
            y.sum().item()
