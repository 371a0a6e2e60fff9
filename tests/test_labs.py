"""The experiments of the labs: what they run, and the bounds beside their figures."""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "course"))

import labs
import make
from problems import BY_NAME

pytestmark = pytest.mark.slow  # runs of the scripts
REFERENCE = json.loads((REPOSITORY / "course/reference.json").read_text())["experiments"]
FEW = "--num_steps 2 --num_eval_prompts 4 --prompts_per_step 8 --num_generations 8"


# --- The reference and its bounds ---


def test_every_figure_of_every_experiment_is_in_the_reference_with_its_seeds():
    for name, experiment in labs.EXPERIMENTS.items():
        assert list(REFERENCE[name]) == [v.label for v in experiment.variants]
        for figures in REFERENCE[name].values():
            # Without a reference, at kl_coef 0, the KL is unknown.
            assert set(figures) in (set(experiment.figures), set(experiment.figures) - {"kl"})
            for figure, x in figures.items():
                assert x["seeds"] >= (1 if experiment.exact else 4), (name, figure)
                assert x["low"] is None or x["low"] <= x["mean"] <= x["high"], (name, figure)


def test_runs_beyond_the_first_five_of_older_experiments_are_on_file():
    runs = labs.read(labs.SEEDS)
    for name in ("estimators", "top_k_kl", "off_policy", "rejection", "difficulty"):
        for label, figures in REFERENCE[name].items():
            of = [x for x in runs if (x["experiment"], x["variant"]) == (name, label)]
            made = labs.summary(of, labs.EXPERIMENTS[name].figures)
            for figure, x in figures.items():
                assert (made[figure]["seeds"], made[figure]["mean"]) == pytest.approx(
                    (x["seeds"], x["mean"]), rel=1e-3, abs=1e-4
                )


def test_the_list_of_experiments_has_the_seconds_of_each(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["labs.py"])
    assert labs.main() == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[2]: int(line.split()[3]) for line in lines}
    assert found.keys() == labs.EXPERIMENTS.keys() and min(found.values()) > 0
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == sorted(numbers)


def test_the_page_for_teachers_has_the_seconds_of_each_lab():
    seconds, found = json.loads(labs.REFERENCE.read_text())["seconds"], [0] * 6
    for experiment, x in labs.EXPERIMENTS.items():
        found[x.lab - 1] += seconds[experiment]
    text = " ".join((REPOSITORY / "course" / "README.md").read_text().split())
    assert f"took {', '.join(map(str, found[:-1]))} and {found[-1]} seconds" in text


def test_a_summary_of_some_seeds_goes_on_where_another_one_ended():
    seeds = [{"accuracy": x, "score": 3 * x} for x in (0.5, 0.7, 0.6, 0.4, 0.55, 0.65, 0.72)]
    names = ["accuracy", "score"]
    apart = labs.summary(seeds[5:], names, labs.summary(seeds[:5], names))
    together = labs.summary(seeds, names)
    for name in names:
        assert apart[name] == pytest.approx(together[name], abs=1e-4)
        values = [seed[name] for seed in seeds]
        assert together[name]["std"] == pytest.approx(statistics.stdev(values), abs=1e-4)
    assert labs.summary([], names, together) == together


def test_quantiles_of_student_are_those_of_the_tables():
    for share, freedom, value in ((0.975, 1, 12.706), (0.995, 4, 4.604), (0.9995, 7, 5.408)):
        assert labs.student_t(share, freedom) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("seeds", [40, 100])
def test_the_bounds_of_a_share_miss_fewer_than_one_right_run_in_a_hundred(seeds):
    """Simulated: the chance of a right answer differs from seed to seed, as in training."""
    generator = torch.Generator().manual_seed(0)
    outside = shown = 0
    for _ in range(2000):
        angle = 0.9 + 0.06 * torch.randn(seeds + 1, generator=generator, dtype=torch.float64)
        right = torch.rand(seeds + 1, 256, generator=generator) < (angle.sin() ** 2).unsqueeze(1)
        *before, fresh = right.double().mean(1).tolist()
        found = labs.bounds("accuracy", seeds, statistics.mean(before), statistics.stdev(before))
        if found is not None:
            shown += 1
            outside += not found[0] <= fresh <= found[1]
    assert shown > 1900 and outside / shown < 0.005


def test_bounds_stay_in_what_is_possible_and_are_left_out_where_nearly_all_would_pass():
    low, high = labs.bounds("accuracy", 40, 0.99, 0.01)
    assert low > 0.8 and high == 1
    assert labs.bounds("truncated", 40, 0.0, 0.0)[1] > 0.005  # one of 256 is no alarm
    low, high = labs.bounds("logprob_dev", 40, 4.0, 1.0)  # in millionths
    assert low == 0, "no right answer is too exact"
    assert 50 < high < 1000, "rounding of other machines, and no mistake"
    assert labs.bounds("right", 40, 0.9, 0.1)[1] == 1
    assert labs.bounds("grad_norm", 40, 2.0, 0.2)[0] > 0
    for name, mean, std in (("reward", 0.5, 0.3), ("kl", 15.0, 9.0), ("explained", -1.3, 3.0)):
        assert labs.bounds(name, 40, mean, std) is None


def test_of_fewer_than_40_seeds_there_are_no_bounds_unless_the_figure_is_the_same_with_each():
    assert labs.bounds("accuracy", 40, 0.7, 0.03) is not None
    assert labs.bounds("accuracy", 39, 0.7, 0.03) is None
    assert labs.bounds("kl_first", 5, 0.0, 0.0) == (0.0, 0.0)
    assert labs.bounds("kl_first", 5, -1.4, 0.5) is None
    assert labs.bounds("accuracy", 5, 0.0, 0.0) is None  # by chance none of some samples is right
    bounded = [
        x for name in REFERENCE for figures in REFERENCE[name].values() for x in figures.items()
    ]
    assert all(x["low"] is None for name, x in bounded if x["seeds"] < 40 and x["std"] > 0)


def test_an_experiment_runs_and_lies_within_its_bounds():
    found = {"tiny": {"figures": [labs.estimators(seed=77)], "curves": [[]]}}
    text = labs.table("estimators", found, REFERENCE)
    assert text.count("(expected") == 7 and "NOT" not in text and "from 40 seeds" in text
    found["tiny"]["figures"][0]["k3"] += 1
    assert labs.table("estimators", found, REFERENCE).count("NOT within") == 1


def test_on_given_completions_the_figures_are_exact_and_a_wrong_function_shows():
    variant = labs.EXPERIMENTS["rloo_steps"].variants[0]

    def said(seed: int) -> str:
        found = {variant.label: {"figures": [labs.run_variant(("rloo_steps", 0, seed))[0]]}}
        return labs.table("rloo_steps", found, REFERENCE)

    text = said(78)
    assert text.count("(as expected: ") == 6 and "NOT" not in text

    def wrong(module: ModuleType) -> None:
        labs.give_completions(module)
        right = module.rloo_advantages
        module.rloo_advantages = lambda rewards, n, *more: right(rewards, n, *more) * (n - 1) / n

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant, "change", wrong)
        assert said(77).count("NOT the expected") >= 1


def test_a_figure_without_bounds_says_how_it_varies():
    expected = {"best_step": labs.summary([{"best_step": x} for x in (5, 0, 0)], ["best_step"])}
    label = labs.EXPERIMENTS["overoptimisation"].variants[0].label
    reference = {"overoptimisation": {label: expected["best_step"]}}
    found = {label: {"figures": [{"best_step": 40}]}}
    text = labs.table("overoptimisation", found, reference)
    assert "best_step 40.000 (no bounds: 1.667 ± 2.887 in 3 seeds)" in text


def test_that_the_unfinished_model_is_another_one_on_another_machine_is_said():
    label = labs.EXPERIMENTS["base_model"].variants[0].label
    found = {label: {"figures": [{"greedy": 0.53}], "curves": [[]]}}
    text = labs.table("base_model", found, REFERENCE)
    mean = REFERENCE["base_model"][label]["greedy"]["mean"]
    said = f"greedy 0.530 (no bounds: {mean:.3f} ± 0.000 in 5 seeds, with another machine's model)"
    assert label.startswith("unfinished") and said in text


# --- What is run ---


def test_a_run_that_two_experiments_have_is_made_once(monkeypatch):
    base = labs.Variant("base", "rloo", FEW)
    other = labs.Variant("other", "rloo", f"{FEW} --kl_coef 0")
    for name, variants in (("one", [base, other]), ("two", [labs.replace(base, label="same")])):
        monkeypatch.setitem(labs.EXPERIMENTS, name, labs.Experiment(2, "", variants, ["accuracy"]))
    made = []
    monkeypatch.setattr(labs, "run_variant", lambda job: (made.append(job), ({}, {}, []))[1])
    # In this process, where run_variant is the one above.
    monkeypatch.setattr(labs, "ProcessPoolExecutor", lambda n, _: ThreadPoolExecutor(n))
    found = dict(labs.run(["one", "two"], range(2)))
    assert sorted(made) == [("one", 0, 0), ("one", 0, 1), ("one", 1, 0), ("one", 1, 1)]
    assert list(found["one"]) == ["base", "other"] and list(found["two"]) == ["same"]


def test_adding_seeds_writes_the_means_the_runs_and_five_curves(tmp_path, monkeypatch):
    for name in ("REFERENCE", "SEEDS", "CURVES"):
        monkeypatch.setattr(labs, name, tmp_path / name)
    reference, curves = {"experiments": {}}, {}
    for seeds in (range(4), range(4, 7)):
        found = {
            variant.label: {
                "figures": [{"clip_first": 0.0, "kl_first": float(s), "x": 1.0} for s in seeds],
                "curves": [[float(s), None] for s in seeds],
                "samples": [],
            }
            for variant in labs.EXPERIMENTS["dropout"].variants
        }
        labs.add_seeds("dropout", found, seeds, reference, curves)
    written = json.loads((tmp_path / "REFERENCE").read_text())["experiments"]["dropout"]
    assert written["off"]["kl_first"]["mean"] == 3 and labs.seeds_of(written) == 7
    runs = labs.read(tmp_path / "SEEDS")
    assert [x["seed"] for x in runs if x["variant"] == "off"] == list(range(7))
    assert runs[0] == {"experiment": "dropout", "variant": "off", "seed": 0} | {
        "clip_first": 0.0,
        "kl_first": 0.0,
    }
    kept = json.loads((tmp_path / "CURVES").read_text())["dropout"]["left on"]
    assert kept == [[float(s), None] for s in range(5)]


def test_a_variant_with_a_judge_trains_on_the_reward_model_that_is_made_first(monkeypatch):
    few = "--num_steps 1 --num_eval_pairs 8 --num_pairs"
    flags = "--reward_model JUDGE/model --num_steps 1 --prompts_per_step 8 --num_eval_prompts 4"
    variants = [labs.Variant(n, "ppo", flags, judge=f"{few} {n}") for n in ("8", "64")]
    monkeypatch.setitem(labs.EXPERIMENTS, "few", labs.Experiment(6, "", variants, ["judge"]))
    (first, curves, _), (second, other, _) = (labs.run_variant(("few", i, 0)) for i in (0, 1))
    assert 0 <= first["judge"] <= 1 and first["accuracy_first"] == second["accuracy_first"]
    assert curves != other and first["score_first"] != second["score_first"]


def test_pass_at_k_is_the_chance_that_one_of_k_samples_is_right():
    found = labs.one_of_k(torch.tensor([0.5, 0.0, 1.0]))
    assert found["pass@1"] == pytest.approx(0.5) and found["pass@4"] == pytest.approx(1.9375 / 3)
    assert list(found) == ["pass@1", "pass@4", "pass@16", "pass@64", "pass@256"]


def test_one_slot_after_eos_the_score_is_discounted_before_it_arrives():
    """Worked out by hand: EOS hears lambda of it, the token before lambda squared."""
    on_eos, after = labs.share_of_score(None), labs.share_of_score(labs.one_slot_after)
    for lam in labs.LAMBDAS:
        assert (on_eos[f"EOS {lam}"], on_eos[f"before {lam}"]) == pytest.approx((1, lam))
        assert (after[f"EOS {lam}"], after[f"before {lam}"]) == pytest.approx((lam, lam**2))


MISTAKES = "top_k pad_is_eos temperature whitening off_policy rejection".split()


@pytest.mark.parametrize("name", MISTAKES)
def test_each_planted_mistake_of_the_labs_runs_and_changes_the_run(name):
    experiment = labs.EXPERIMENTS[name]
    wrong = next(v for v in experiment.variants if v.change)
    few = FEW if wrong.script != "ppo" else FEW.partition(" --num_generations")[0]
    entropies = [
        labs.train(labs.module_of(wrong.script, change), f"{wrong.flags} {few}", 0)[0][1]
        for change in (None, wrong.change)
    ]
    assert entropies[0]["policy/entropy_avg"] != entropies[1]["policy/entropy_avg"]


def test_rows_without_an_advantage_change_nothing_but_the_time():
    left_out, taken_along = labs.EXPERIMENTS["skipped_rows"].variants
    first, second = (
        labs.train(labs.module_of("grpo", v.change), f"{v.flags} {FEW} --num_generations 2", 0)[0]
        for v in (left_out, taken_along)
    )
    assert first[1]["reward/frac_flat_groups"] > 0
    assert first[1]["grad_norm"] == pytest.approx(second[1]["grad_norm"], rel=1e-3)


def test_only_right_completions_are_imitated():
    module = labs.module_of("grpo", labs.imitate_what_is_right)
    assert module.group_advantages(torch.tensor([1.0, 0.0, -1.0, 1.0]), 2).tolist() == [1, 0, 0, 1]
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    old = torch.full((2, 3), -9.0)  # has no influence: there is no ratio
    module.grpo_loss(logprobs, old, torch.tensor([1.0, 0.0]), mask, clip_range=0.2)[0].backward()
    assert torch.allclose(logprobs.grad, torch.tensor([[-1 / 6] * 3, [0.0] * 3]))


# --- Labs on a starter in which something isn't written yet ---


def test_an_experiment_names_the_function_that_is_not_written_yet(tmp_path):
    bare = tmp_path / "bare"
    assert make.main([str(bare), "--problems", "kl_estimate", "generate", "rloo_loop"]) == 0
    command = [sys.executable, "labs.py", "estimators"]
    run = subprocess.run(command, cwd=bare, capture_output=True, text=True)
    assert run.returncode == 2
    lines = [x for x in run.stderr.splitlines() if x and "Loading weights" not in x]
    # One line, and no warning of what a process has left behind.
    needs = "needs a function that is not written yet: generate in sampling.py"
    assert lines == [f"error: estimators {needs}"], run.stderr
    # A step of a loop, in the process that would run it.
    for problem in ("generate", "kl_estimate"):
        (bare / BY_NAME[problem].file).write_text((REPOSITORY / BY_NAME[problem].file).read_text())
    code = "import labs\ntry: labs.run_variant(('dropout', 0, 0))\n"
    code += "except labs.NotWritten as e: print(e)"
    run = subprocess.run([sys.executable, "-c", code], cwd=bare, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1].startswith("main in rloo.py, set "), run.stderr
