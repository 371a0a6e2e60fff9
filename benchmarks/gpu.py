"""Everything worth knowing of this project on a CUDA GPU, in one command of at most eight minutes.

  python benchmarks/gpu.py               # writes gpu.json, and its part of docs/performance.md
  python benchmarks/gpu.py --rehearse    # on a CPU, tiny sizes and a pretended GPU; writes nothing
  python benchmarks/gpu.py --draw        # that part of the page and its picture, from gpu.json

In the order of what matters if the time runs out: do the tests pass on the device; how fast is a
rollout, beside `model.generate` and the memory bandwidth; what do CUDA graphs and clear_cache
change; is tools/fit.py right; a step beside TRL's, where TRL is installed; where the time goes.
Each part runs in a process of its own, and is saved as soon as it is measured. One that fails
leaves its error in the place of its figures.
Models have random weights, so that nothing is downloaded and all completions have full length.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PAGE, PICTURE = REPOSITORY / "docs" / "performance.md", REPOSITORY / "docs" / "gpu.png"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), str(REPOSITORY / "tests")]

import speed  # noqa: E402


@dataclass
class Sizes:
    """Of the jobs: rows of a rollout, its new tokens, and the GPT-2 that is run."""

    rows: tuple[int, ...]
    new_tokens: int
    compiled_rows: int  # the number of rows at which model.generate is compiled as well
    step_rows: int
    model: dict[str, int]
    tests: str = "cuda"  # pytest -k
    trl: bool = importlib.util.find_spec("trl") is not None
    limit: float = 420.0  # seconds of all parts; no part is begun after it


REAL = Sizes((32, 64, 128, 256, 512, 1024), 128, 256, 256, {})
TINY = {"vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 2}
REHEARSAL = Sizes((2, 4), 9, 4, 4, TINY, tests="greedy and gpt2", trl=False)


def job(path: str, rows: int, sizes: Sizes, **more: object) -> dict:
    """A job of speed.py: GPT-2, a quarter of the rows are prompts, four completions of each."""
    shape = {"prompts": max(1, rows // 4), "generations": min(4, rows)}
    return {"model": "gpt2", "path": path, "max_new_tokens": sizes.new_tokens} | shape | more


# --- The parts ---


def tests(path: str, sizes: Sizes) -> dict:
    """The tests of the CUDA path, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", sizes.tests, "tests/test_cuda.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    last = done.stdout.strip().splitlines()[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {"result": last, "failed": failed}


def rollouts(path: str, sizes: Sizes) -> dict:
    """Tokens per second, by the number of rows: ours, model.generate, and the floor."""
    bandwidth, found = memory_bandwidth(), {}
    for rows in sizes.rows:
        wanted = job(path, rows, sizes)
        systems = {"ours": {}, "ours, no CUDA graphs": {"static": False}, "model.generate": {}}
        if rows == sizes.compiled_rows:
            systems["model.generate, static cache, compiled"] = {"cache_implementation": "static"}
        found[rows] = {}
        for name, options in systems.items():
            system = "ours" if name.startswith("ours") else "generate"
            steps = speed.rollouts(wanted | {"options": options}, system, bf16=True)[1:]
            best = max(step["tokens"] / step["rollout"] for step in steps)
            found[rows][name] = round(best)
        found[rows]["floor"] = round(rows * sizes.new_tokens / least_seconds(wanted, bandwidth))
    return {"gb_per_s": round(bandwidth / 1e9), "tokens_per_s": found}


def memory_bandwidth() -> float:
    """Bytes per second, of a copy that reads and writes."""
    x = torch.ones(2**26 if torch.cuda.mem_get_info()[0] > 2**32 else 2**18, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / speed.best_seconds(lambda: y.copy_(x))


def least_seconds(wanted: dict, bandwidth: float) -> float:
    """What decoding takes if memory is all that costs: at each token every weight is read once, in
    bfloat16, and the keys and values of all tokens so far.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(wanted["path"])
    with torch.device("meta"):
        num_weights = AutoModelForCausalLM.from_config(config).num_parameters()
    rows, new = wanted["prompts"] * wanted["generations"], wanted["max_new_tokens"]
    width = 2 * config.n_layer * config.n_embd * 2  # bytes of a token's keys and values
    columns = sum(range(16, 16 + new))  # prompts have 16 tokens
    return (2 * num_weights * new + rows * width * columns) / bandwidth


def memory(path: str, sizes: Sizes) -> dict:
    """Peak memory of GRPO steps in GB, what tensors took and what was reserved for them, with
    clear_cache between the phases and without; and what tools/fit.py expects.
    """
    import grpo

    wanted = job(path, sizes.step_rows, sizes, script="grpo")
    command = [sys.executable, "tools/fit.py", "--script", "grpo", "--model", str(path)]
    command += [f"--prompts_per_step={wanted['prompts']}", "--prompt_tokens=16"]
    command += [
        f"--num_generations={wanted['generations']}",
        f"--max_new_tokens={sizes.new_tokens}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    estimate = re.search(r"peak +([\d.]+) GB", done.stdout)[1]

    found, original = {}, grpo.clear_cache
    for name, function in (("with clear_cache", original), ("without", lambda: None)):
        begin()
        grpo.clear_cache = function
        try:
            steps = speed.ours(wanted, bf16=True)
        finally:
            grpo.clear_cache = original
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures = dict(zip(("allocated_gb", "reserved_gb"), (round(x / 1e9, 3) for x in peaks)))
        found[name] = figures | {"estimate_gb": float(estimate), "step_s": seconds_of(steps)}
    return found


def begin() -> None:
    """Free what the run before has left, and start to look for the peak anew."""
    gc.collect()  # a run and its optimiser refer to each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def steps(path: str, sizes: Sizes) -> dict:
    """Seconds and memory of a step, with our default micro-batches and with all rows at once, as
    TRL and a plain loop take them. Of PPO (four epochs) ours alone: TRL's needs an environment of
    its own, see speed.py.
    """
    found, at_once = {}, {"micro_batch_tokens": sizes.step_rows * (sizes.new_tokens + 16)}
    for script in ("grpo", "rloo", "ppo"):
        wanted = job(path, sizes.step_rows, sizes, script=script, trl_batch=sizes.step_rows)
        systems = {"ours": (speed.ours, {}), "ours, all rows at once": (speed.ours, at_once)}
        if sizes.trl and script != "ppo":
            systems["TRL, all rows at once"] = speed.trl_groups, {}
        if script == "grpo":
            systems["plain loop, all rows at once"] = speed.plain, {}
        for name, (function, flags) in systems.items():
            begin()
            found[f"{script}, {name}"] = {
                "step_s": seconds_of(function(wanted | {"flags": flags}, bf16=True)),
                "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
            }
    return found


def seconds_of(steps: list[dict]) -> float:
    """The fastest step but for the first, which warms up."""
    return round(min(step["rollout"] + step["update"] for step in steps[1:]), 4)


def profile(path: str, sizes: Sizes) -> dict:
    """The share of the device's time of the ten dearest kernels of GRPO steps; without a device,
    that of the CPU's time of its operations.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as record:
        speed.ours(job(path, sizes.step_rows, sizes, script="grpo"), bf16=True)
    # An operation also has the time of its kernels: either these or those count, not both.
    events = record.key_averages()
    kernels = [x for x in events if x.device_type == DeviceType.CUDA and not x.is_user_annotation]
    costs = {x.key: x.self_device_time_total for x in kernels}
    costs = costs or {x.key: x.self_cpu_time_total for x in events}
    dearest = sorted(costs, key=costs.get, reverse=True)[:10]
    return {key[:60]: round(costs[key] / sum(costs.values()), 3) for key in dearest}


PARTS: dict[str, Callable[[str, Sizes], dict]] = {
    "tests": tests,
    "rollouts": rollouts,
    "memory": memory,
    "steps": steps,
    "profile": profile,
}


def in_own_process(name: str, path: str, seconds: float) -> dict:
    """A part on the GPU. One that hangs, or breaks the device, leaves the others alone."""
    command = [sys.executable, str(Path(__file__)), "--part", name, str(path)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(1, seconds))
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {seconds:.0f} seconds"}
    if done.returncode != 0:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_part(name: str, path: str, sizes: Sizes) -> dict:
    """A part, or its error in the place of its figures."""
    try:
        with warnings.catch_warnings():
            # Else "ours" would be measured without graphs, and nobody would know.
            warnings.filterwarnings("error", "decoding without CUDA graphs")
            return PARTS[name](path, sizes)
    except Exception as e:  # the other parts must not be lost
        return {"error": f"{type(e).__name__}: {e}"[:300]}


def measure(
    sizes: Sizes, work: Callable[[str, str, float], dict], save: Callable[[dict], object]
) -> dict:
    """All parts, by work(name, path, seconds left), each saved with what came before it."""
    started = time.perf_counter()
    results = {"machine": speed.machine(), "new_tokens": sizes.new_tokens, "parts": {}}
    results["machine"]["cuda"] = torch.version.cuda
    with tempfile.TemporaryDirectory() as folder:
        path = speed.random_gpt2(Path(folder) / "gpt2", **sizes.model)
        for name in PARTS:
            begun = time.perf_counter()
            left = sizes.limit - (begun - started)
            if left < 0:
                found = {"error": f"not begun: {sizes.limit:.0f} seconds were over"}
            else:
                found = work(name, path, left)
            found["seconds"] = round(time.perf_counter() - begun, 1)
            results["parts"][name] = found
            print(f"{name}: {json.dumps(found)}", flush=True)
            save(results)
    return results


# --- The page ---


def section(results: dict) -> str:
    """The part of docs/performance.md, in Markdown."""
    machine, parts = results["machine"], results["parts"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    lines = [f"{machine.get('gpu', 'No GPU')}, CUDA {machine['cuda']}, {versions}.", ""]
    failed = [f"{name}: {part['error']}" for name, part in parts.items() if "error" in part]
    lines += [f"- {line}" for line in failed] + ([""] if failed else [])
    if "result" in parts.get("tests", {}):
        names = ", ".join(f"`{name}`" for name in parts["tests"]["failed"])
        failures = f"; failed: {names}" if names else ""
        lines += [f"`pytest -m cuda`: {parts['tests']['result'].strip('= ')}{failures}.", ""]
    if "tokens_per_s" in parts.get("rollouts", {}):
        lines += rollout_table(parts["rollouts"])
    for name, title in (("memory", "GRPO"), ("steps", "step")):
        rows = {k: v for k, v in parts.get(name, {}).items() if isinstance(v, dict)}
        columns = list(next(iter(rows.values()), {}))
        if columns:
            lines += [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            lines += [
                f"| {k} | {' | '.join(str(v[c]) for c in columns)} |" for k, v in rows.items()
            ]
            lines += [""]
    shares = {k: v for k, v in parts.get("profile", {}).items() if k not in ("seconds", "error")}
    if shares:
        lines += ["Where the time of a GRPO step goes: "]
        lines[-1] += "; ".join(f"`{name}` {share:.0%}" for name, share in shares.items()) + "."
    return "\n".join(lines).rstrip() + "\n"


def rollout_table(part: dict) -> list[str]:
    found = {int(rows): systems for rows, systems in part["tokens_per_s"].items()}
    names = list(dict.fromkeys(name for systems in found.values() for name in systems))
    lines = [f"Tokens per second; the floor reads memory at {part['gb_per_s']:,} GB/s:", ""]
    lines += [f"| rows | {' | '.join(names)} | ours / generate | floor / ours |"]
    lines += ["|---" * (len(names) + 3) + "|"]
    for rows, systems in found.items():
        cells = [f"{systems[name]:,}" if name in systems else "" for name in names]
        faster = systems["ours"] / max(1, systems["model.generate"])
        cells += [f"{faster:.1f}", f"{systems['floor'] / max(1, systems['ours']):.1f}"]
        lines += [f"| {rows} | {' | '.join(cells)} |"]
    return [*lines, "", "![Tokens per second against the number of rows](gpu.png)", ""]


def draw(part: dict, output: Path) -> None:
    """Tokens per second against rows, a line per system."""
    from matplotlib.figure import Figure

    found = {int(rows): systems for rows, systems in part["tokens_per_s"].items()}
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="rows", ylabel="tokens per second")
    for name in dict.fromkeys(name for systems in found.values() for name in systems):
        points = [(rows, systems[name]) for rows, systems in found.items() if name in systems]
        axes.plot(*zip(*points), "k--" if name == "floor" else "o-", label=name)
    axes.set_title("Rollout of GPT-2 small: tokens per second", fontsize=10)
    axes.set_xticks(list(found), [str(rows) for rows in found])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(output, dpi=100)


BEGIN, END = "<!-- made by benchmarks/gpu.py -->", "<!-- end of what gpu.py makes -->"


def with_section(page: str, results: dict) -> str:
    """The page with the part between the marks replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n\n" + section(results) + "\n" + END + rest.split(END)[1]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, a pretended GPU")
    parser.add_argument("--draw", action="store_true", help="write page and picture from gpu.json")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.rehearse:
        from pretended_cuda import pretended_cuda

        torch.set_num_threads(1)
        speed.STEPS = 2
        with pretended_cuda(), contextlib.redirect_stderr(sys.stdout):
            results = measure(
                REHEARSAL,
                work=lambda name, path, seconds: run_part(name, path, REHEARSAL),
                save=lambda found: None,
            )
        print(section(results))
        if any("error" in part for part in results["parts"].values()):
            raise SystemExit(1)
        return
    if options.part:
        with contextlib.redirect_stdout(sys.stderr):
            found = run_part(*options.part, REAL)
        print(json.dumps(found))
        return
    if not options.draw:
        if not torch.cuda.is_available():
            sys.exit("error: no CUDA device is there; --rehearse runs without one")
        measure(
            REAL,
            work=in_own_process,
            save=lambda found: RESULTS.write_text(json.dumps(found) + "\n"),
        )
    results = json.loads(RESULTS.read_text())
    if "tokens_per_s" in results["parts"].get("rollouts", {}):
        draw(results["parts"]["rollouts"], PICTURE)
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
