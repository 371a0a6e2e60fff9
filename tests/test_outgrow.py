"""docs/evidence/outgrow.md, tools/outgrow.py: what each flag is in TRL, and that it does so."""

import inspect
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from small import letter_tokenizer, save_model, small_llama
from test_trl_parity import PlainSGD

import grpo
import rloo
from plumbing.config import ByModel, parse_flags
from plumbing.errors import InputError
from plumbing.loading import load_policy
from tools import outgrow

trl = pytest.importorskip("trl", reason="TRL is not there: pip install -r requirements-dev.txt")
DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "evidence" / "outgrow.md").read_text(encoding="utf-8")
PAGE = PAGE.split("\n## verl, flag by flag")[0]  # test_outgrow_verl.py reads the rest
SHORT = (DOCS / "outgrow.md").read_text(encoding="utf-8").split("\n## To verl")[0]
SCRIPTS = {grpo: (trl.GRPOConfig, trl.GRPOTrainer), rloo: (trl.RLOOConfig, trl.RLOOTrainer)}


def shown(value: object) -> str:
    if isinstance(value, ByModel):
        tiny = "" if value.tiny is None else f"tiny {shown(value.tiny)}"
        return ", ".join(filter(None, (shown(value.other), tiny)))
    return "" if value in (None, MISSING) else json.dumps(value, default=str).strip('"')


def row(flag: str) -> list[str]:
    """What the page must say of a flag: its place in TRL, the default here, the default there."""
    field, argument = outgrow.FIELDS.get(flag), outgrow.ARGUMENTS.get(flag)
    ours, theirs = {}, {"": None} if field is None else {}  # ordered sets
    for script, (config, trainer) in SCRIPTS.items():
        if flag in (here := {f.name: shown(f.default) for f in fields(script.Config)}):
            ours[here[flag]] = None
            theirs |= {shown(f.default): None for f in fields(config) if f.name == field}
            only_grpo = field == "entropy_coef" and script is rloo
            assert only_grpo or {field, argument} <= {
                None,
                *dir(config),
                *inspect.signature(trainer).parameters,
            }
    place = f"`{field}`" if field else f"argument `{argument}`" if argument else "none"
    return [f"`{flag}`", place, "; RLOO ".join(ours), "; RLOO ".join(theirs)]


def test_the_page_has_each_flag_with_its_place_in_trl_and_both_defaults():
    flags = {f.name for script in SCRIPTS for f in fields(script.Config)}
    trls = {f.name: f.default for config, _ in SCRIPTS.values() for f in fields(config)}
    fixed = [[f"`{k}`", shown(v), shown(trls[k])] for k, v in outgrow.FIXED.items() if v != trls[k]]
    lines = re.findall(r"\n\| (`.*)", PAGE)
    cells = [[cell.strip() for cell in line.split("|")[:-2]] for line in lines]
    assert sorted(cells) == sorted([*map(row, flags), *fixed])
    names = set(re.findall(r"`(?:--)?([a-z]+_[a-z_]+)(?:=[^`]*)?`", PAGE + SHORT))
    others = {"log_extra", "log_metric", "trainer_state", "lora_alpha", "target_modules"}
    others |= {"get_soft_overlong_punishment"}
    assert names <= {*flags, *trls, *inspect.signature(trl.GRPOTrainer).parameters, *others}


def test_what_counts_rollouts_here_counts_updates_there():
    flags = "--num_epochs 2 --num_mini_batches 4 --warmup_steps 3 --save_every 5 --eval_every 7"
    config = parse_flags(grpo.Config, "", [*flags.split(), "--device", "cpu"])
    fields = outgrow.fields_of(config, Path("run"), [1.0], longest=10, max_steps=99)
    found = [fields[name] for name in ("warmup_steps", "save_steps", "eval_steps", "max_steps")]
    assert found == [8 * 3, 8 * 5, 8 * 7, 99]


def test_the_bound_of_cispo_and_the_upper_clip_have_one_name_in_trl():
    for flags, bound in (["--loss_type cispo --cispo_bound 3", 3], ["--clip_range_high 0.3", 0.3]):
        config = parse_flags(grpo.Config, "", [*flags.split(), "--device", "cpu"])
        fields = outgrow.fields_of(config, Path("run"), [1.0], longest=10, max_steps=9)
        assert fields["epsilon_high"] == bound


@pytest.mark.parametrize(
    ("script", "flag", "value"),
    [
        (grpo, "stop", ["a"]), (grpo, "dynamic_sampling", 2), (grpo, "importance_cap", 2.0),
        (rloo, "entropy_coef", 0.1), (rloo, "stop", ["a"]),
    ],
)  # fmt: skip
def test_what_trl_has_not_is_refused_and_not_left_out(script, flag, value):
    name = script.__name__
    config = parse_flags(script.Config, "", ["--device", "cpu"])
    outgrow.check_flags(name, config)
    setattr(config, flag, value)
    with pytest.raises(InputError, match=f"--{flag} .*: TRL's {name.upper()} has nothing like it"):
        outgrow.check_flags(name, config)


def test_the_entropy_bonus_and_the_completions_of_an_evaluation_are_fields_there():
    flags = "--entropy_coef 0.1 --eval_generations 3 --device cpu"
    config = parse_flags(grpo.Config, "", flags.split())
    outgrow.check_flags("grpo", config)
    fields = outgrow.fields_of(config, Path("run"), [1.0], longest=10, max_steps=9)
    assert (fields["entropy_coef"], fields["num_generations_eval"]) == (0.1, 3)


def test_the_length_penalty_is_a_reward_there(make_job, monkeypatch):
    given = []

    class Recorder:
        def __init__(self, policy, rewards, fields, rows, heldout, processing_class):
            given.extend([[r.__name__ for r in rewards], fields.reward_weights])

        train = save_model = lambda self, *args: None

    job = make_job(grpo)
    job(overlong_buffer=3, reward_weights=0.5)
    settings = json.loads((job.folder / "config.json").read_text())
    settings["prompts"] = same_length(job.folder.parent)
    (job.folder / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(trl, "GRPOTrainer", Recorder)
    outgrow.main([str(job.folder), "--max_steps", "1"])
    assert given == [["spread", "soft_overlong_punishment_reward"], [0.5, 1.0]]


def same_length(folder: Path) -> str:
    (folder / "same.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in "abcdehno"))
    return str(folder / "same.jsonl")


def test_the_prompts_of_a_last_rollout_that_is_not_used_up_are_there_too(make_job, monkeypatch):
    given = []

    class Recorder:
        def __init__(self, policy, rewards, fields, rows, heldout, processing_class):
            given.append((fields.max_steps, rows["prompt"]))

        train = save_model = lambda self, *args: None

    job = make_job(grpo)
    model = save_model(f"{job.model}-llama", small_llama(vocab_size=20), letter_tokenizer())
    job(model=model, num_steps=1, num_mini_batches=2, num_epochs=1)
    monkeypatch.setattr(trl, "GRPOTrainer", Recorder)
    config = json.loads((job.folder / "config.json").read_text())
    for steps, rollouts in ((1, 1), (3, 2), (4, 2)):
        outgrow.main([str(job.folder), "--max_steps", str(steps)])
        assert given[-1][0] == steps
        assert len(given[-1][1]) == rollouts * config["prompts_per_step"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_script_moves_the_weights_to_where_the_run_does(script, make_job, monkeypatch):
    rollouts, trainers, sample, job = [], [], script.sample, make_job(script)

    def recorded(*args: object, **options: object) -> object:
        return rollouts.append(sample(*args, **options)) or rollouts[-1]

    class Replaying(SCRIPTS[script][1]):
        def _generate_single_turn(self, prompt_ids: list, *others: object) -> object:
            if not self.model.training:
                return super()._generate_single_turn(prompt_ids, *others)
            rollout, T = rollouts[len(trainers)], rollouts[0].completion_mask.shape[1]
            trainers.append(self)
            rows = list(zip(rollout.tokens, rollout.attention_mask, strict=True))
            assert prompt_ids == [ids[:-T][real[:-T]].tolist() for ids, real in rows]
            ids = [ids[-T:][real[-T:]].tolist() for ids, real in rows]
            return (ids, None) if script is grpo else ids

    monkeypatch.setattr(script, "sample", recorded)
    monkeypatch.setattr(torch.optim, "AdamW", PlainSGD)  # AdamW would blow up rounding errors
    monkeypatch.setattr(trl, Replaying.__base__.__name__, Replaying)
    model = save_model(f"{job.model}-llama", small_llama(0.1, vocab_size=20), letter_tokenizer())
    sizes = {"num_steps": 2, "completions": 16, "rollout_batch_size": 16, "micro_batch_size": 5}
    metrics = job(model=model, kl_coef=0.3, learning_rate=0.5, warmup_steps=0, **sizes)
    outgrow.main([str(job.folder)])
    args, logs = trainers[-1].args, trainers[-1].state.log_history
    assert (args.generation_batch_size, args.gradient_accumulation_steps, args.beta) == (16, 4, 0.3)
    assert [x["learning_rate"] for x in logs if "loss" in x] == [x["lr"] for x in metrics[:2]]
    models = (load_policy(f"{p}") for p in (model, job.folder / "model", job.folder / "trl/model"))
    start, ours, theirs = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert (ours - start).abs().max() > 1e-2 and (ours - theirs).abs().max() < 1e-5
