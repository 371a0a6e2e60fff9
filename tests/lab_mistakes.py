"""Do the labs' bounds tell a wrong function from a right one? Into docs/evidence/labs.md.

  python tests/lab_mistakes.py          # about half an hour on two cores; labs.json has the runs

A sample of the wrong answers of test_course.py, each put into a copy of the code with which the
quick experiments of its lab run, with a seed that the bounds don't know. A mistake counts if it
changes any of their figures; one of an edge that they don't meet is for the grader. Then the right
code and right answers in other styles with seeds that the bounds don't know: what lies outside of
the bounds there is a false alarm.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "docs" / "evidence" / "labs.json"
PAGE = RESULTS.with_suffix(".md")
sys.path.insert(0, str(REPOSITORY / "course"))

import labs  # noqa: E402
import test_course  # noqa: E402
from problems import BY_NAME, splice  # noqa: E402

STEPS = ["rloo_steps", "ppo_steps", "grpo_steps"]
SEEN_BY = {
    "token_logprobs": ["draws", "estimators", *STEPS],
    "kl_estimate": ["estimators", *STEPS],
    "completion_mask": ["draws", "estimators"],
    "generate": ["draws", "estimators"],
    "masked_whiten": ["ppo_steps"],
    "disable_dropout": STEPS,
    "reference": STEPS,
    "shape_rewards": ["score_slot", "ppo_steps"],
    "gae": ["score_slot", "ppo_steps"],
    "policy_loss": ["ppo_steps"],
    "value_loss": ["ppo_steps"],
    "ppo_loop": ["ppo_steps"],
    "group_advantages": ["grpo_steps"],
    "grpo_loss": ["grpo_steps"],
    "grpo_loop": ["grpo_steps"],
    "rloo_advantages": ["rloo_steps"],
    "rloo_loss": ["rloo_steps"],
    "rloo_loop": ["rloo_steps"],
    "preference_loss": ["reward_steps"],
    "last_real_token": ["reward_steps"],
}
SAMPLE, FRESH_SEED, NUM_FRESH = 80, 1000, 24
# In a copy of the code: the figures of experiments with a seed, as JSON on the last line.
RUN = """import json, sys
sys.path.insert(0, "course")
import labs
names, seed = sys.argv[1].split(), int(sys.argv[2])
found = {n: [labs.run_variant((n, i, seed))[0] for i in range(len(labs.EXPERIMENTS[n].variants))]
         for n in names}
print(json.dumps(found))"""


def figures(source: dict[str, str], names: list[str], seed: int) -> dict | str | None:
    """{experiment: figures of each variant} with files replaced, the last line of an error, or None
    after 300 seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plumbing", "tiny", "course", "tools"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, Path(folder) / name, ignore=ignored)
        for file in REPOSITORY.glob("*.py"):
            shutil.copy(file, folder)
        for file, text in source.items():
            (Path(folder) / file).write_text(text)
        command = [sys.executable, "-c", RUN, " ".join(names), str(seed)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300
            )
        except subprocess.TimeoutExpired:  # says more of this machine than of the function
            return None
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    return json.loads(done.stdout.splitlines()[-1])


def outside(found: dict, reference: dict) -> list[str]:
    """The figures beyond their bounds, as labs.py judges them."""
    said = []
    for name, variants in found.items():
        for variant, values in zip(labs.EXPERIMENTS[name].variants, variants, strict=True):
            for figure, expected in reference[name][variant.label].items():
                if expected["low"] is None:
                    continue
                value = values.get(figure, float("nan"))
                if "NOT " in labs._beside(expected, value, variant.label):
                    said.append(f"{name} {figure}")
    return said


def num_bounds(names: list[str], reference: dict) -> int:
    every = [x for name in names for y in reference[name].values() for x in y.values()]
    return sum(x["low"] is not None for x in every)


def with_answer(problem: str, submission: str) -> dict[str, str]:
    file, function = BY_NAME[problem].file, BY_NAME[problem].function
    whole = splice((REPOSITORY / file).read_text(), submission, function)
    return {file: whole}


def styles() -> dict[str, tuple[str, str]]:
    """Two right answers to each problem, written otherwise."""
    found, count = {}, {}
    ways = test_course.answers() | {w: test_course.loop_answer(w) for w in test_course.LOOPS}
    for way, (problem, source) in ways.items():
        count[problem] = count.get(problem, 0) + 1
        # That without a cache takes minutes.
        if count[problem] <= 2 or way == "generate__multinomial":
            found[way] = problem, source
    found.pop("generate__without_a_cache", None)
    return found


def main() -> None:
    reference = json.loads(labs.REFERENCE.read_text())["experiments"]
    with_seeds = ["draws", "estimators", "reward_steps"]
    quick = [*STEPS, *with_seeds, "score_slot"]
    bugs = test_course.planted()
    chosen = sorted(bugs)
    random.Random(0).shuffle(chosen)
    jobs = [("wrong", bug, *bugs[bug], FRESH_SEED) for bug in chosen[:SAMPLE]]
    # Each right style with a fresh seed, and the right code with all of them.
    right = list(styles().items())
    jobs += [
        ("right", way, problem, source, FRESH_SEED + i % NUM_FRESH)
        for i, (way, (problem, source)) in enumerate(right)
    ]
    jobs += [("right", "as it is", "", "", FRESH_SEED + i) for i in range(NUM_FRESH)]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    base = {}

    def work(job: tuple) -> None:
        kind, label, problem, submission, seed = job
        key = f"{kind} {label} {seed}"
        if key in results:
            return
        names = SEEN_BY[problem] if problem else with_seeds
        found = figures(with_answer(problem, submission) if problem else {}, names, seed)
        if found is None:
            return
        if isinstance(found, str):
            results[key] = {"problem": problem, "error": found}
        else:
            results[key] = {
                "problem": problem,
                "outside": outside(found, reference),
                "bounds": num_bounds(names, reference),
            }
            if kind == "wrong":
                results[key]["changes"] = changed(found, base)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(key, results[key], flush=True)

    base |= figures({}, quick, FRESH_SEED)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, jobs))
    PAGE.write_text(page(results))


def changed(found: dict, base: dict) -> bool:
    """Whether any figure differs by more than rounding from that of the right code."""
    return any(
        abs(values.get(figure, float("nan")) - expected) > 1e-3 * abs(expected) + 1e-6
        or figure not in values
        for name, variants in found.items()
        for variant, values, right in zip(labs.EXPERIMENTS[name].variants, variants, base[name])
        for figure, expected in right.items()
        if figure in labs.EXPERIMENTS[name].figures
    )


def left_out() -> tuple[int, int]:
    """Of the seeds of the quick experiments, how many figures lie outside of bounds that the other
    seeds give, and how many there are.
    """
    num_outside = total = 0
    labs.FEWEST -= 1
    for name in ["draws", "estimators", "top_k_kl", "length_bias", "reward_steps"]:
        for variant in labs.EXPERIMENTS[name].variants:
            place = name, variant.label
            runs = [x for x in labs.read(labs.SEEDS) if (x["experiment"], x["variant"]) == place]
            for i, run in enumerate(runs):
                others = labs.summary(runs[:i] + runs[i + 1 :], labs.EXPERIMENTS[name].figures)
                for figure, expected in others.items():
                    if expected["low"] is not None:
                        total += 1
                        said = labs._beside(expected, run[figure], variant.label)
                        num_outside += "NOT " in said
    labs.FEWEST += 1
    return num_outside, total


def page(results: dict[str, dict]) -> str:
    wrong = {k[6:].rpartition(" ")[0]: r for k, r in results.items() if k.startswith("wrong ")}
    right = {k[6:]: r for k, r in results.items() if k.startswith("right ")}
    seen = {k: r for k, r in wrong.items() if r.get("error") or r["changes"]}
    caught = {k: r for k, r in seen.items() if r.get("error") or r["outside"]}
    alarms = {k: r for k, r in right.items() if r.get("error") or r["outside"]}
    num_figures = sum(r.get("bounds", 0) for r in right.values())
    num_outside = sum(len(r.get("outside", [])) for r in right.values())
    alone = left_out()
    lines = [
        "# The bounds of the labs",
        "",
        "The quick experiments of the course's labs have bounds: `rloo_steps`, `ppo_steps`,",
        "`grpo_steps` and `score_slot` draw nothing, so their figures are those of the solution to",
        "1%; `draws`, `estimators` and `reward_steps` have bounds from 40 seeds (but for",
        "`logprob_dev`, a rounding error, whose bound is 30 times its mean).",
        "`python tests/lab_mistakes.py` puts wrong functions into the code, and right ones in",
        "other styles, runs these experiments with seeds that the bounds don't know, and writes",
        "this page.",
        "",
        f"- Wrong answers, a random sample of {len(wrong)}: {len(seen)} change a figure. The rest",
        "  concerns an edge that these runs don't meet: a missing reward, a dtype.",
        f"  Of the {len(seen)}, {len(caught)} ({len(caught) / max(1, len(seen)):.0%}) are told",
        "  by a figure outside of its bounds, or by an error.",
        *(
            [
                f"- Right answers in other styles, with other seeds: {len(right)} runs;",
                f"  {num_outside} of {num_figures} figures are outside, in {len(alarms)} runs.",
            ]
            if right
            else ["- Right answers in other styles have not been run yet."]
        ),
        f"- The seeds themselves: {alone[0]} of {alone[1]:,} figures are outside of the bounds",
        f"  that the other seeds give ({alone[0] / alone[1]:.2%}).",
        "",
        "| wrong answer | problem | told by |",
        "|---|---|---|",
    ]
    for bug, r in sorted(seen.items(), key=lambda x: (x[1]["problem"], x[0])):
        told = (
            f"error: {r['error']}" if r.get("error") else ", ".join(r["outside"]) or "**nothing**"
        )
        lines.append(f"| {bug} | {r['problem']} | {told.replace('|', ' ')[:120]} |")
    if alarms:
        lines += ["", "False alarms:", ""]
    lines += [f"- {k}: {', '.join(r.get('outside', [])) or r['error']}" for k, r in alarms.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
