"""Everything worth knowing of this project on a CUDA GPU, in one command of at most eight minutes.

  python benchmarks/gpu.py               # writes gpu.json, and its part of docs/performance.md
  python benchmarks/gpu.py --rehearse    # on a CPU, tiny sizes and a pretended GPU; writes nothing
  python benchmarks/gpu.py --draw        # that part of the page, from gpu.json

In the order of what matters if the time runs out: do the tests pass on the device; how fast is a
rollout, beside `model.generate`; what the pieces of a rollout take; which micro_batch_tokens is
best; is tools/fit.py right; a step beside TRL's, where TRL is installed; where the time goes.

Nothing measured is lost. Each part runs in a process of its own with a limit of its own, after
which the process and all that it has started are ended. Each measurement is a line of JSON, saved
as soon as it is made; where one fails its error is saved, and the next one follows. cuDNN's
attention is off for all systems: plumbing/models.py says why. Models have random weights, so that
nothing is downloaded and all completions have full length.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PAGE = REPOSITORY / "docs" / "performance.md"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), str(REPOSITORY / "tests")]

import speed  # noqa: E402

from common import clear_cache  # noqa: E402
from plumbing.metrics import Evaluation  # noqa: E402
from plumbing.run import Run  # noqa: E402


@dataclass
class Sizes:
    """Of the jobs: rows of a rollout, its new tokens, and the GPT-2 that is run."""

    rows: tuple[int, ...]
    new_tokens: int
    step_rows: int
    micro_batch_tokens: tuple[int, ...]
    model: dict[str, int]
    tests: str = "cuda"  # pytest -k
    trl: bool = importlib.util.find_spec("trl") is not None


REAL = Sizes((32, 64, 128, 256, 512, 1024), 128, 256, (1024, 4096, 16384), {})
REHEARSAL = Sizes(
    (2, 4), 9, 4, (20, 100), {"vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 2},
    tests="greedy and gpt2", trl=False,
)  # fmt: skip

# What is measured: the row and the column of a table, and a function that returns a figure, or
# several by their columns.
Measurement = tuple[str, str, Callable[[], Any]]


def job(path: str, rows: int, sizes: Sizes, **more: object) -> dict:
    """A job of speed.py: GPT-2, a quarter of the rows are prompts, four completions of each."""
    shape = {"prompts": max(1, rows // 4), "generations": min(4, rows), "kind": "rollout"}
    shape |= {"model": "gpt2", "path": path, "max_new_tokens": sizes.new_tokens, "bf16": True}
    return shape | more


# --- The parts ---


def tests(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """The tests of the CUDA path, in a process of their own."""

    def run() -> dict[str, str]:
        command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-k", sizes.tests]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": REPOSITORY}
        try:  # within the limit of this part, or nothing would be known of the tests that have run
            limit = PARTS["tests"][1] - 10
            done = subprocess.run([*command, "tests/test_cuda.py"], timeout=limit, **options)
            text, last = done.stdout.decode(), done.stdout.decode().strip().splitlines()[-1]
        except subprocess.TimeoutExpired as e:
            text = (e.stdout or b"").decode()
            last = f"not done in time, {text.count(' PASSED')} passed"
        failed = re.findall(r"(\S+) (?:FAILED|ERROR)", text)
        return {"result": last.strip("= "), "failed": " ".join(failed)}

    yield "pytest -m cuda", "", run


def rollouts(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """Tokens per second, by the number of rows: ours and model.generate."""
    for rows in sizes.rows:
        for name, system, options in (
            ("ours", "ours", {}),
            ("ours, no CUDA graphs", "ours", {"static": False}),
            ("model.generate", "generate", {}),
        ):
            wanted = job(path, rows, sizes, system=system, options=options)
            yield f"{rows} rows", name, lambda wanted=wanted: tokens_per_second(wanted)


def compiled(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """model.generate with a static cache, which compiles the forward pass."""
    options = {"cache_implementation": "static"}
    wanted = job(path, sizes.step_rows, sizes, system="generate", options=options)
    row = f"{sizes.step_rows} rows"
    yield row, "model.generate, compiled", lambda: tokens_per_second(wanted)


def tokens_per_second(wanted: dict) -> int:
    steps = speed.rollouts(wanted)[1:]
    return round(max(step["tokens"] / step["rollout"] for step in steps))


def pieces(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """What a rollout is made of: milliseconds, and kernels per token."""
    from transformers import AutoModelForCausalLM

    import sampling
    from plumbing.decoding import Decoder
    from plumbing.half import half_precision_copy

    model = AutoModelForCausalLM.from_pretrained(path).to(speed.device()).eval()
    ids = torch.arange(sizes.step_rows).unsqueeze(1).repeat(1, 16) % 100

    def decode(new_tokens: int, **options: object) -> None:
        sampling.generate(
            model, ids, ids > -1, max_new_tokens=new_tokens, eos_token_ids=[], pad_token_id=0,
            decoder=Decoder(model, torch.bfloat16, **options),
        )  # fmt: skip

    def first_token(**options: object) -> float:
        """Seconds from one new token to two: a forward pass, and a capture if there is one."""
        one, two = (best_seconds(lambda n=n: decode(n, **options)) for n in (1, 2))
        return two - one

    def draw(rows: int) -> float:
        logits = torch.randn(rows, model.config.vocab_size, device=model.device).bfloat16()
        uniform = torch.rand(rows, device=model.device)
        best_seconds(lambda: sampling.draw(logits, uniform))
        events = kernels(lambda: sampling.draw(logits, uniform))  # launched by a graph in a run
        return sum(event.time_range.elapsed_us() for event in events) / 1e6

    def per_token() -> float:
        fewer, more = (len(kernels(lambda n=n: decode(n))) for n in (4, 7))
        return (more - fewer) / 3

    rows, ms = f"{sizes.step_rows} rows", lambda seconds: round(1000 * seconds, 3)
    half = torch.bfloat16
    yield (
        rows,
        "copy in bfloat16, ms",
        lambda: ms(best_seconds(lambda: half_precision_copy(model, half))),
    )
    yield rows, "capture, ms", lambda: ms(first_token() - first_token(static=False))
    yield rows, "kernels per token", per_token
    for number in sizes.rows:
        yield f"{number} rows", "draw, ms", lambda number=number: ms(draw(number))


def best_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(10):
        started = speed.clock()
        work()
        seconds.append(speed.clock() - started)
    return min(seconds)


def kernels(work: Callable[[], object]) -> list:
    """What the device ran, without copies; where there is no device, the operations of the CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as record:
        work()
        speed.clock()
    events = [event for event in record.events() if not event.name.startswith("Mem")]
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return on_device or events


def micro_batches(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """A GRPO step by micro_batch_tokens."""
    for tokens in sizes.micro_batch_tokens:
        wanted = job(path, sizes.step_rows, sizes, kind="grpo")
        wanted["flags"] = {"micro_batch_tokens": tokens}
        yield f"micro_batch_tokens {tokens}", "", lambda w=wanted: step_of(speed.ours, w)


def memory(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """Peak memory of GRPO steps, and the estimate of tools/fit.py."""
    from plumbing.memory import CONTEXT, estimate
    from tools import fit

    tokens = max(sizes.micro_batch_tokens)
    wanted = job(path, sizes.step_rows, sizes, kind="grpo", flags={"micro_batch_tokens": tokens})

    def expected() -> dict[str, float]:
        flags = [f"--model={path}", f"--prompts_per_step={wanted['prompts']}"]
        flags += [f"--num_generations={wanted['generations']}", "--num_eval_prompts=1"]
        flags += [f"--max_new_tokens={sizes.new_tokens}", f"--micro_batch_tokens={tokens}"]
        config = fit.config_of("grpo", [*flags, f"--rollout_batch_size={sizes.step_rows}"], "cuda")
        total = torch.cuda.mem_get_info()[1]
        parts = estimate(fit.counts_of(config, 16), config, 16, total)
        # The allocator knows nothing of CUDA's own memory.
        found = {"tensors_gb": parts["peak"], "reserved_gb": parts["needed"] - CONTEXT}
        return {name: round(size / 1e9, 3) for name, size in found.items()}

    yield "estimate", "", expected
    yield "measured", "", lambda: step_of(speed.ours, wanted)


def steps(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """A step with our default micro-batches and with all rows at once, as TRL takes them. Of PPO
    (four epochs) ours alone: TRL's needs an environment of its own, see speed.py. TRL decodes with
    model.generate, its default; many of its users let vLLM do it.
    """
    at_once = {"micro_batch_tokens": sizes.step_rows * (sizes.new_tokens + 16)}
    for script in ("grpo", "rloo", "ppo"):
        wanted = job(path, sizes.step_rows, sizes, kind=script, trl_batch=sizes.step_rows)
        systems = {"ours": (speed.ours, {}), "ours, all rows at once": (speed.ours, at_once)}
        if sizes.trl and script != "ppo":
            systems["TRL, all rows at once"] = speed.trl_groups, {}
        for name, (system, flags) in systems.items():
            work = wanted | {"flags": flags}
            yield f"{script}, {name}", "", lambda system=system, work=work: step_of(system, work)


def step_of(system: Callable[..., list[dict]], wanted: dict) -> dict[str, float]:
    """Seconds of the fastest step but for the first, and the peak of all, in GB: what tensors took
    at the same time, and what was reserved for them.
    """
    gc.collect()  # a run and its optimiser refer to each other
    clear_cache()
    torch.cuda.reset_peak_memory_stats()
    steps = system(wanted)[1:]
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    found = {"step_s": round(min(step["rollout"] + step["update"] for step in steps), 4)}
    return found | dict(zip(("tensors_gb", "reserved_gb"), (round(x / 1e9, 3) for x in peaks)))


def profile(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """The share of the device's time of the ten dearest kernels of one GRPO step."""
    flags = {"micro_batch_tokens": max(sizes.micro_batch_tokens)}
    wanted = job(path, sizes.step_rows, sizes, kind="grpo", flags=flags)

    def shares() -> dict[str, float]:
        import grpo

        speed.STEPS = 1
        grpo.evaluate = lambda *args: Evaluation({}, [], [], [])
        costs: dict[str, float] = {}
        for event in kernels(lambda: speed.ours(wanted)):
            name = event.name[:60]
            costs[name] = costs.get(name, 0.0) + event.time_range.elapsed_us()
        dearest = sorted(costs, key=costs.get, reverse=True)[:10]
        return {name: round(costs[name] / sum(costs.values()), 3) for name in dearest}

    yield "share of a GRPO step", "", shares


def hang(path: str, sizes: Sizes) -> Iterator[Measurement]:
    """For the rehearsal: one measurement, one that fails, and a child that never ends."""
    yield "before", "", lambda: 1
    yield "fails", "", lambda: 1 / 0
    yield "never", "", lambda: subprocess.run(["sleep", "86399"])


# Each with its limit in seconds: eight minutes together.
PARTS: dict[str, tuple[Callable[[str, Sizes], Iterator[Measurement]], float]] = {
    "tests": (tests, 90),
    "rollouts": (rollouts, 100),
    "pieces": (pieces, 30),
    "micro_batches": (micro_batches, 45),
    "memory": (memory, 40),
    "steps": (steps, 75),
    "compiled": (compiled, 70),
    "profile": (profile, 30),
}
HANGS = {"hangs": (hang, 60)}


def save_nothing() -> None:
    """Let the runs of a part save nothing: it takes time, and belongs to no figure."""
    for name in ("_write_checkpoint", "_save_at_exit", "show"):
        setattr(Run, name, lambda *args: None)


def run_part(name: str, path: str, sizes: Sizes) -> None:
    """Print a line of JSON for each measurement of a part, as it is made, or its error."""

    def say(record: dict) -> None:
        print(json.dumps(record), file=sys.__stdout__, flush=True)

    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always")
        for row, column, work in (PARTS | HANGS)[name][0](path, sizes):
            try:
                found = work()
                say({"row": row, "found": found if isinstance(found, dict) else {column: found}})
            except Exception as e:  # the other measurements must not be lost
                say({"error": f"{row}, {column}: {type(e).__name__}: {e}"[:300]})
            for text in dict.fromkeys(str(w.message) for w in warned):
                if "decoding without CUDA graphs" in text:  # "ours" is slow, and this is the reason
                    say({"error": f"{row}, {column}: {text}"})
            warned.clear()


def in_own_process(limit: float, command: list[str], keep: Callable[[dict], None]) -> str:
    """Run a part, keep its records as they come; what went wrong with the whole, or "". After
    `limit` seconds it is ended with all that it has started.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):  # else a library has written it
                keep(json.loads(line))
        code = process.wait()
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it may have left behind
    if late.is_set():
        return f"not done within {limit:.0f} seconds"
    return f"exit code {code}" if code else ""


def measure(sizes: Sizes, parts: dict, mode: list[str], save: Callable[[dict], object]) -> dict:
    """All parts, saved after each measurement."""
    results = {"machine": speed.machine(), "new_tokens": sizes.new_tokens, "parts": {}}
    results["machine"]["cuda"] = torch.version.cuda
    with tempfile.TemporaryDirectory() as folder:
        path = speed.random_gpt2(Path(folder) / "gpt2", **sizes.model)
        for name, (_, limit) in parts.items():
            begun = time.perf_counter()
            part = results["parts"][name] = {"rows": {}, "errors": []}

            def keep(record: dict, name: str = name, part: dict = part) -> None:
                print(f"{name}: {json.dumps(record)}", flush=True)
                if "error" in record:
                    part["errors"].append(record["error"])
                else:
                    part["rows"].setdefault(record["row"], {}).update(record["found"])
                save(results)

            command = [sys.executable, str(Path(__file__)), *mode, "--part", name, str(path)]
            if fault := in_own_process(limit, command, keep):
                keep({"error": fault})
            part["seconds"] = round(time.perf_counter() - begun, 1)
            save(results)
    return results


def rehearse() -> None:
    """All parts on a pretended GPU, and one that has to be ended in the middle."""
    parts = HANGS | {name: (part, 10 * limit) for name, (part, limit) in PARTS.items()}
    results = measure(REHEARSAL, parts, ["--rehearse"], save=lambda found: None)
    print(section(results))
    hangs = results["parts"].pop("hangs")
    assert hangs["rows"] == {"before": {"": 1}}, hangs
    assert len(hangs["errors"]) == 2 and "not done within" in hangs["errors"][1], hangs
    left = subprocess.run(["pgrep", "-f", "sleep 86399"], capture_output=True, text=True)
    assert not left.stdout, "a child of the part that was ended is still running"
    for name, part in results["parts"].items():
        assert part["rows"] and not part["errors"], (name, part)


# --- The page ---


def section(results: dict) -> str:
    """The part of docs/performance.md, in Markdown: a table for each part."""
    machine = results["machine"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    lines = [
        f"{machine.get('gpu', 'No GPU')}, CUDA {machine['cuda']}, {versions}. GPT-2 small with"
    ]
    lines[-1] += " random weights; cuDNN's attention is off for all systems."
    for name, part in results["parts"].items():
        lines += ["", f"**{name}**", ""]
        lines += [*(f"- {error}" for error in part["errors"]), ""] if part["errors"] else []
        columns = list(dict.fromkeys(x for row in part["rows"].values() for x in row))
        if columns and len(part["rows"]) == 1:  # a list is easier to read
            ((row, found),) = part["rows"].items()
            lines += [f"{row}: " + "; ".join(f"{k} {v}".strip() for k, v in found.items()) + "."]
        elif columns:
            lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            for row, found in part["rows"].items():
                cells = [str(found.get(column, "")) for column in columns]
                lines += [f"| {row} | {' | '.join(cells)} |"]
    return "\n".join(lines).rstrip() + "\n"


BEGIN, END = "<!-- made by benchmarks/gpu.py -->", "<!-- end of what gpu.py makes -->"


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, a pretended GPU")
    parser.add_argument("--draw", action="store_true", help="write the page from gpu.json")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.part and options.rehearse:
        from pretended_cuda import pretended_cuda

        torch.set_num_threads(1)
        speed.STEPS = 2
        save_nothing()
        with pretended_cuda():
            return run_part(*options.part, REHEARSAL)
    if options.part:
        save_nothing()
        return run_part(*options.part, REAL)
    if options.rehearse:
        return rehearse()
    if not options.draw:
        if not torch.cuda.is_available():
            sys.exit("error: no CUDA device is there; --rehearse runs without one")
        measure(REAL, PARTS, [], lambda found: RESULTS.write_text(json.dumps(found) + "\n"))
    results = json.loads(RESULTS.read_text())
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    page = f"{before}{BEGIN}\n\n{section(results)}\n{END}{rest.split(END)[1]}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
