"""What a GPU does with this project, without network or models. One command, four minutes:

  python benchmarks/gpu.py --out FOLDER             # a line for each result in FOLDER/gpu.jsonl
  python benchmarks/gpu.py --smoke --out FOLDER     # jobs of ten kinds, some minutes more
  python benchmarks/gpu.py qwen-grpo qwen-trl --out FOLDER
  python benchmarks/gpu.py --rehearse --out FOLDER  # on a CPU: tiny sizes and a pretended GPU
  python benchmarks/gpu.py --count                  # on a CPU: the kernels that a GPU would launch

"grpo" is steps of grpo.py, in seconds: rollout, the reference's pass, which is a part of it, and
update. "trl" is TRL's on the same prompts, where trl is installed. "decode" is tokens a second:
ours, ours with one graph for all columns, model.generate, and what the memory's bandwidth allows.
In smoke jobs val/sampler_kl should be below 1e-3 (decoding agrees with training), and
val/ratio_max_dev_first 0 or of the size of rounding.

Models have random weights and a tokenizer of words. Each case is a process of its own, whose output
goes to FOLDER/<case>.log, and is ended if it takes too long. Exit code 1: a case has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import speed
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from pretended_cuda import Graph, pretended_cuda  # noqa: E402

import grpo  # noqa: E402
from common import disable_dropout  # noqa: E402
from forward import completion_logprobs  # noqa: E402
from plumbing import models  # noqa: E402
from plumbing.decoder import Decoder  # noqa: E402
from plumbing.run import run_main  # noqa: E402
from sampling import sample  # noqa: E402

SHAPE = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
head_dim vocab_size num_experts""".split()
MODELS = {  # of the published config.json files, but for the last two
    "gpt2": ("GPT2", {"n_embd": 768, "n_layer": 12, "vocab_size": 50257}),
    "smollm2": ("Llama", dict(zip(SHAPE, (576, 1536, 30, 9, 3, 64, 49152)))),
    "qwen": ("Qwen2", dict(zip(SHAPE, (896, 4864, 24, 14, 2, 64, 151936)))),
    "qwen3": ("Qwen3", dict(zip(SHAPE, (1024, 3072, 28, 16, 8, 128, 151936)))),
    "gemma": ("Gemma3Text", dict(zip(SHAPE, (640, 2048, 18, 4, 1, 256, 262144)))),
    "judge": ("Qwen2", dict(zip(SHAPE, (896, 4864, 2, 14, 2, 64, 151936)))),
    "experts": ("Qwen3Moe", dict(zip(SHAPE, (1024, 2048, 4, 16, 4, 64, 50000, 16)))),
}
CASES = [f"{model}-{what}" for model in ("qwen", "gpt2") for what in ("grpo", "trl", "decode")]
RUN = "--num_steps 3 --eval_every 100 --device cuda --output_dir {folder}/{name} "
OWN = "--model {folder}/{model} --prompts {folder}/prompts.jsonl --num_eval_prompts 8 "
OWN += "--learning_rate 1e-6 --prompts_per_step {N} --max_new_tokens {T} "
GROUPS = f"{OWN} --num_generations 8 --reward {__file__}:brief"
SMOKE = {  # MODEL-SCRIPT-...: the flags of a run
    "tiny-ppo": "",
    "gpt2-grpo-eager": f"{GROUPS} --cuda_graphs false",
    "gpt2-grpo-fp16": f"{GROUPS} --bf16 false --fp16 true",
    "gpt2-grpo-stop": f"{GROUPS} --stop w77",
    "qwen-ppo-judge": f"{OWN} --reward_model {{folder}}/judge",
    "qwen-grpo-lora": f"{GROUPS} --lora_r 16 --gradient_checkpointing",
    "qwen-grpo-large": f"{GROUPS} --micro_batch_tokens 4000000",
    "qwen3-rloo": GROUPS,
    "gemma-rloo": GROUPS,
    "experts-grpo": GROUPS,
}


def brief(completions: list[str], **columns: object) -> list[float]:
    """Minus the number of characters, in hundreds: words of different lengths have all scores."""
    return [-len(text) / 100 for text in completions]


def model_of(name: str, narrow: bool = False, layers: int = 0) -> transformers.PreTrainedModel:
    """A model of random weights, narrow or with fewer layers where that is asked for."""
    family, sizes = MODELS[name]
    width = 8 * sizes.get("num_attention_heads", 12)
    changes = dict.fromkeys(("num_hidden_layers", "n_layer"), layers) if layers else {}
    if narrow:
        changes |= {"hidden_size": width, "n_embd": width, "head_dim": 8, "vocab_size": 300}
    sizes = sizes | {key: x for key, x in changes.items() if key in sizes}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), sizes["vocab_size"] - 1)
    config = getattr(transformers, f"{family}Config")(**sizes, **ids, num_labels=1)
    config.tie_word_embeddings = True
    kind = "SequenceClassification" if name == "judge" else "CausalLM"
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # where it is faster
        return getattr(transformers, f"AutoModelFor{kind}").from_config(config)


def save_model(name: str, folder: Path, small: bool) -> None:
    """Write a model, a tokenizer of words w0, w1, ..., and prompts of different lengths."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    model = model_of(name, narrow=small, layers=2 * small).bfloat16()  # as checkpoints are
    model.save_pretrained(folder / name)
    last = model.config.vocab_size - 1
    words = ["abcdef", *(f"w{i}" for i in range(1, last)), "<eos>"]  # abcdef serves --stop
    tokenizer = Tokenizer(WordLevel(dict(zip(words, range(last + 1))), "abcdef"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.save_pretrained(folder / name)
    rows = (" ".join(words[i + 1 :][: 20 + i % 60]) for i in range(200))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": row}) for row in rows))


def do_case(name: str, folder: Path, small: bool) -> None:
    """Do a case and print its results, a line of JSON each; all else goes to the log."""
    for model in {name.split("-")[0], "judge" if "judge" in name else "tiny"} - {"tiny"}:
        if not (folder / model).exists():
            save_model(model, folder, small)
    do = smoke if name in SMOKE else decode if "decode" in name else step
    pretended = small and "trl" not in name  # TRL asks more of a device
    of_integers = torch.histc  # on a CPU of floats alone
    histc = lambda x, **options: of_integers(x.float() if pretended else x, **options)  # noqa: E731
    # AutoTokenizer would make Qwen2's tokenizer of the words.
    words = transformers.PreTrainedTokenizerFast.from_pretrained
    with (
        pretended_cuda() if pretended else contextlib.nullcontext(),
        contextlib.redirect_stdout(sys.stderr),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", words),
        mock.patch.object(torch, "histc", histc),
    ):
        for record in do(name, folder, small):
            record |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}
            print(json.dumps({"case": name} | record), file=sys.__stdout__, flush=True)


def step(name: str, folder: Path, small: bool) -> Iterator[dict]:
    """Steps of grpo.py or of TRL's GRPOTrainer."""
    model, system = name.split("-")
    N, T = (4, 9) if small else (32, 256)
    rows = (folder / "prompts.jsonl").read_text().splitlines()[:N]
    job = {"kind": "grpo", "prompts": N, "generations": 8, "max_new_tokens": T, "bf16": not small}
    job |= {"model": str(folder / model), "asked": [json.loads(row)["prompt"] for row in rows]}
    job |= {"device": "cpu" if small and system == "trl" else "cuda", "batch": 32}
    whole, seconds = grpo.rollout_logprobs, []

    def reference(*args: object) -> Tensor:
        seconds.append({})
        result, seconds[-1]["reference"] = timed(whole, *args)
        return result

    with mock.patch.object(grpo, "rollout_logprobs", reference):
        steps = speed.ours(job) if system == "grpo" else speed.trl_groups(job)
    for number, found in enumerate(steps):
        found |= seconds[number] if seconds else {}
        yield {"step": number, "seconds": found["rollout"] + found["update"]} | found


def smoke(name: str, folder: Path, small: bool) -> Iterator[dict]:
    """Three steps of a script."""
    model, script, *_ = name.split("-")
    sizes = {"N": 4, "T": 9} if small else {"N": 32, "T": 256}
    flags = (RUN + SMOKE[name]).format(folder=folder, name=name, model=model, **sizes).split()
    run_main(lambda: importlib.import_module(script).main(flags))
    yield from map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())


def decode(name: str, folder: Path, small: bool) -> Iterator[dict]:
    """Tokens a second of rollouts in bfloat16."""
    load, path = transformers.AutoModelForCausalLM.from_pretrained, folder / name.split("-")[0]
    model, half = (load(path, dtype=x).to("cuda") for x in (torch.float32, torch.bfloat16))
    models.fuse(model)
    config = SimpleNamespace(bf16=True, half=None, gradient_checkpointing=False)
    models.set_up_training(config, model)
    numbers = torch.empty(2**18 if small else 2**30, device="cuda")
    bandwidth = 2 * numbers.nbytes / min(timed(numbers.add_, 1)[1] for _ in range(5))
    P, sizes = (16, [(8, 9)]) if small else (128, [(64, 256), (256, 256), (256, 800)])
    for rows, T in sizes:
        ids = torch.arange(rows // 8 * P).view(-1, P) % 290
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        options = {"max_new_tokens": T, "pad_token_id": 0, "temperature": 1.0, "top_k": 0}
        own = {"eos_token_ids": [], "num_generations": 8, "max_rows": rows} | options
        found = {"rows": rows, "new_tokens": T}
        for what, columns in (("ours", 128), ("one graph", -(-(P + T) // 128) * 128)):
            decoder = Decoder(model, torch.bfloat16)
            decoder.stretch = columns
            runs = [timed(sample, model, ids, mask, decoder=decoder, **own) for _ in range(3)]
            found[what] = round(rows * T / min(seconds for _, seconds in runs))
        cache = sum(x.nbytes for layer in decoder.cache.layers for x in (layer.keys, layer.values))
        read = cache * (P + T / 2) / decoder.mask.shape[3] + 2 * model.num_parameters()  # a token
        found["bandwidth"] = round(rows * bandwidth / read)
        if T < 800:  # model.generate takes long
            there = [x.repeat_interleave(8, dim=0).to("cuda") for x in (ids, mask)]
            options |= {"attention_mask": there[1], "do_sample": True, "min_new_tokens": T}
            found["model.generate"] = round(rows * T / timed(half.generate, there[0], **options)[1])
        yield found


def timed(work: Callable, *args: object, **options: object) -> tuple:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    result = work(*args, **options)
    torch.cuda.synchronize()
    return result, time.perf_counter() - begun


# --- Kernels, counted without a GPU ---

# `attention` copies what the real one gives: that copy is counted, as its kernel.
VIEWS = set(
    """view _unsafe_view expand transpose t permute slice select unsqueeze squeeze as_strided alias
    detach split split_with_sizes unbind lift_fresh empty empty_like new_empty empty_strided
    _reshape_alias _scaled_dot_product_flash_attention_for_cpu promote_types""".split()
)


def attention(*args: Tensor, attend: Callable = F.scaled_dot_product_attention, **options: object):
    """As CUDA's kernel lays out what it gives."""
    return attend(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)


def rms_norm(x: Tensor, shape: tuple, weight: Tensor, eps: float) -> Tensor:
    """One kernel, as on CUDA; on a CPU it is several. A layer norm takes its place."""
    return torch.ops.aten.native_layer_norm(x, shape, weight, None, eps)[0]


class Kernels(TorchDispatchMode):
    """Counts operations, those of the backward pass as well."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        operation: torch._ops.OpOverload,
        types: object,
        args: tuple = (),
        kwargs: object = None,
    ) -> object:
        self.total += operation.overloadpacket.__name__ not in VIEWS
        with torch._C.DisableTorchFunction():  # the pretended device has seen it
            return operation(*args, **kwargs or {})


def count(model: transformers.PreTrainedModel) -> dict[str, int]:
    """Kernels of a token in the graph, and those outside; those of a micro-batch."""
    ids, totals = torch.arange(32).view(4, 8), []
    options = {"num_generations": 2, "max_rows": 8, "eos_token_ids": [], "pad_token_id": 0}
    disable_dropout(model)
    models.fuse(model)
    functions = {"rms_norm": rms_norm, "scaled_dot_product_attention": attention}
    with pretended_cuda(), mock.patch.multiple(F, **functions):
        options["decoder"] = decoder = Decoder(model.to("cuda").eval(), torch.bfloat16)
        for length in (5, 6, 7):  # the first one makes the graph
            with Kernels() as eager, mock.patch.object(Graph, "replay"):
                rollout = sample(model, ids, ids > 0, max_new_tokens=length, **options)
            totals.append(eager.total)
        with Kernels() as graph, torch.no_grad():
            decoder._step({})
        with Kernels() as micro_batch:
            completion_logprobs(model.train(), rollout, 1.0, bf16=True)[0].sum().backward()
    totals = {"graph": graph.total, "eager": totals[2] - totals[1]}
    return totals | {"micro_batch": micro_batch.total}


def run_case(command: list[str], limit: float, results: object, log: Path) -> str:
    """Run a command for at most `limit` seconds; what is wrong with its end, or ""."""
    files = {"stdout": results, "stderr": log.open("w")}
    process = subprocess.Popen(command, **files, start_new_session=True)
    try:
        code = process.wait(limit)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"not done within {limit:.0f} seconds"
    finally:  # also at SIGTERM, and for all that it has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=" ".join([*CASES, *SMOKE]))
    parser.add_argument("--out", type=Path, help="the folder of results and logs")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--do", nargs=2, help=argparse.SUPPRESS)  # a case, and a folder for models
    options = parser.parse_args()
    if options.count:
        for name in list(MODELS)[:5]:
            print(json.dumps({"model": name} | count(model_of(name, narrow=True))), flush=True)
        return
    if options.do:
        return do_case(options.do[0], Path(options.do[1]), options.rehearse)
    if options.out is None or not (options.rehearse or torch.cuda.is_available()):
        sys.exit("error: give --out FOLDER; without a CUDA device, --rehearse or --count as well")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    path, failed = options.out / "gpu.jsonl", False

    gpu = torch.cuda.is_available() and torch.cuda.get_device_name()
    versions = {"gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__}
    with path.open("a") as results, tempfile.TemporaryDirectory() as folder:
        print(json.dumps(versions), file=results, flush=True)
        for name in options.cases or (SMOKE if options.smoke else CASES):
            if name.endswith("trl") and importlib.util.find_spec("trl") is None:
                continue
            command = [sys.executable, __file__, "--do", name, folder]
            command += ["--rehearse"] * options.rehearse
            limit = 600 if options.rehearse else 90
            if fault := run_case(command, limit, results, options.out / f"{name}.log"):
                print(json.dumps({"case": name, "error": fault}), file=results, flush=True)
                failed = True
    print(path.read_text())
    sys.exit(failed)


if __name__ == "__main__":
    main()
