"""docs/from-trl-ppo.md and its evidence: every flag and default that they name, the fields of TRL's
two PPOConfigs, and the two files, run. The line references are checked by test_docs.py.
"""

import json
import re
import shlex
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from small import byte_tokenizer, save_model, small_gpt2
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import ppo
import reward_model
from plumbing.config import TRL_NAMES, ByModel

DOCS = Path(__file__).parent.parent / "docs"
SHORT = (DOCS / "from-trl-ppo.md").read_text(encoding="utf-8")
PAGE = (DOCS / "evidence" / "from-trl-ppo.md").read_text(encoding="utf-8")
OURS = {f.name: f.default for f in fields(ppo.Config)}

# What trl 1.12.0 has in trl/experimental/ppo/ppo_config.py: the fields and defaults of PPOConfig.
TRL_1_12 = """
learning_rate=3e-06 dataset_num_proc= num_mini_batches=1 total_episodes=
local_rollout_forward_batch_size=64 num_sample_generations=10 response_length=53 stop_token=
stop_token_id= temperature=0.7 missing_eos_penalty= sft_model_path=EleutherAI/pythia-160m
world_size= num_total_batches= micro_batch_size= local_batch_size= batch_size=
local_mini_batch_size= mini_batch_size= push_to_hub=false reward_model_path=EleutherAI/pythia-160m
model_adapter_name= ref_adapter_name= num_ppo_epochs=4 whiten_rewards=false kl_coef=0.05
kl_estimator=k1 cliprange=0.2 vf_coef=0.1 cliprange_value=0.2 gamma=1.0 lam=0.95
ds3_gather_for_generation=true
"""
# What its _BaseConfig (trl/trainer/base_config.py) changes of TrainingArguments.
TRL_BASE = "logging_steps=10 gradient_checkpointing=true bf16="
# What trl 0.11.4 has in trl/trainer/ppo_config.py. From exp_name on, the page gives no default.
TRL_0_11 = """
learning_rate=1.41e-05 init_kl_coef=0.2 adap_kl_ctrl=true target=6.0 horizon=10000.0 kl_penalty=kl
gamma=1.0 lam=0.95 cliprange=0.2 cliprange_value=0.2 vf_coef=0.1 batch_size=128 mini_batch_size=128
gradient_accumulation_steps=1 ppo_epochs=4 max_grad_norm= steps=20000 early_stopping=false
target_kl=1.0 ratio_threshold=10.0 score_clip= use_score_scaling=false use_score_norm=false
whiten_rewards=false gradient_checkpointing=false seed=0 log_with=
exp_name= task_name= tracker_project_name= tracker_kwargs= project_kwargs= model_name=
query_dataset= reward_model= push_to_hub_if_best_kwargs= compare_steps= remove_unused_columns=
dataset_num_proc= optimize_device_cache= optimize_cuda_cache= accelerator_kwargs= world_size=
is_encoder_decoder= is_peft_model= forward_batch_size= backward_batch_size=
global_backward_batch_size= global_batch_size=
"""


def recorded(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


def table(after: str) -> dict[str, list[str]]:
    """Field -> the other cells of its row, in the first table of fields behind `after`."""
    block = re.search(r"\| field \|.*?\n\n", PAGE[PAGE.index(after) :], re.DOTALL)[0]
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in block.strip().split("\n")[2:]]
    assert all(len(row) == 5 for row in rows)
    named = [(name, row[1:]) for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert len(named) == len(dict(named)), "a field that is there twice"
    return dict(named)


TABLES = {
    "1.12": table("## PPOConfig of TRL 1.12"),
    "arguments": table("Then those of TrainingArguments"),
    "0.11": table("## PPOConfig of TRL 0.11"),
}


def shown(value: object) -> str:
    """A default as the page writes it."""
    if isinstance(value, ByModel):
        tiny = "" if value.tiny is None else f"tiny {shown(value.tiny)}"
        return ", ".join(filter(None, (shown(value.other), tiny)))
    return "" if value in (None, MISSING) else json.dumps(value, default=str).strip('"')


def test_each_field_of_both_configs_of_trl_is_there_with_its_default():
    for release, text in (("1.12", TRL_1_12), ("0.11", TRL_0_11)):
        there = {name: cells[1] for name, cells in TABLES[release].items()}
        assert there == recorded(text)


def test_the_fields_of_training_arguments_have_the_defaults_of_transformers():
    defaults = {f.name: shown(f.default) for f in fields(transformers.TrainingArguments)}
    defaults |= recorded(TRL_BASE)
    # Not that of transformers: TRL's PPOConfig has its own, in the table before.
    assert "learning_rate" not in TABLES["arguments"]
    for name, cells in TABLES["arguments"].items():
        assert cells[1] == defaults[name].replace("SchedulerType.", "").lower(), name


@pytest.mark.parametrize("release", TABLES)
def test_each_flag_beside_a_field_has_the_default_that_the_page_gives(release):
    for name, (flag, _, default, _) in TABLES[release].items():
        assert re.fullmatch(r"none|`--\w+`", flag), name
        expected = "" if flag == "none" else shown(OURS[flag.strip("`-")])
        assert default == expected, f"{name}: {default!r} is {expected!r}"


def test_the_short_table_has_fields_of_trl_and_the_defaults_of_their_flags():
    text = SHORT.partition("| TRL 1.12 |")[2].partition("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text]
    assert len(rows) == 11
    for new, old, flags, default in rows:
        assert set(re.findall(r"`(\w+)`", new)) <= {*TABLES["1.12"], *TABLES["arguments"]}
        assert set(re.findall(r"`(\w+)`", old)) <= {*TABLES["0.11"], "generation_kwargs"}
        names = re.findall(r"`--(\w+)`", flags)
        defaults = default.split(", ") if ", " in default else [default] * len(names)
        for name, given in zip(names, defaults, strict=True):
            first = shown(OURS[name]).partition(",")[0]
            assert given == ("" if first.startswith("tiny") else first), name


def test_each_flag_of_the_page_exists_and_each_flag_of_ppo_is_on_the_page():
    text = re.sub(r"`(accelerate|python tools/)[^`]*`", "", PAGE)
    of_reward_models = {f.name for f in fields(reward_model.Config)} - set(OURS)
    text, count = re.subn(r"`--(\w+)` of reward_model.py", "", text)
    assert count == 1 and "center_rewards_coef" in of_reward_models
    short = re.sub(r"`python tools/[^`]*`", "", SHORT)
    named = set(re.findall(r"--(\w+)", text + short))
    assert named <= set(OURS), named - set(OURS)
    in_tables = set(re.findall(r"--(\w+)", "\n".join(x for x in text.split("\n") if x[:1] == "|")))
    assert set(OURS) == in_tables, set(OURS) - in_tables


def test_the_names_of_trl_that_are_understood_are_named():
    sentence = re.search(r"understands TRL's names(.*?)\.\s", PAGE, re.DOTALL)[1]
    known = {name: ours for name, ours in TRL_NAMES.items() if ours in OURS}
    of_ppo = {*TABLES["1.12"], *TABLES["arguments"]}
    assert set(re.findall(r"`(\w+)`", sentence)) == {n for n in known if n in of_ppo}
    for name in known.keys() & of_ppo:
        (cells,) = [t[name] for t in (TABLES["1.12"], TABLES["arguments"]) if name in t]
        assert cells[0] == f"`--{known[name]}`"


def block(start: str) -> str:
    """The indented block behind `start`, which may have empty lines."""
    found = re.search(r"\n\n((?:    .*\n|\n(?=    ))+)", SHORT[SHORT.index(start) :])[1]
    return "\n".join(line[4:] for line in found.rstrip("\n").split("\n")) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with the two files of the page, and small models under their names."""
    save_model(tmp_path / "gpt2", small_gpt2(vocab_size=257), byte_tokenizer())
    torch.manual_seed(0)
    size = dict(dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=512)
    judge = DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=257, num_labels=2, initializer_range=0.5, **size)
    )
    words = byte_tokenizer()
    words.pad_token = words.eos_token
    save_model(tmp_path / "lvwerra" / "distilbert-imdb", judge, words)
    (tmp_path / "my_prompts.py").write_text(block("Run `my_prompts.py` once"))
    (tmp_path / "my_rewards.py").write_text(block("`my_rewards.py`:"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_reward_is_the_logit_of_the_second_label_of_prompt_and_completion(folder):
    functions = {}
    exec((folder / "my_rewards.py").read_text(), functions)
    prompts = ["The film", "I saw it and"] * 10  # more than one batch
    completions = [" was good." + "." * i for i in range(20)]
    found = functions["positive"](prompts=prompts, completions=completions, other=[None] * 20)
    model, tokenizer = functions["judge"], functions["tokenizer"]
    with torch.no_grad():
        for prompt, completion, score in zip(prompts, completions, found, strict=True):
            ids = torch.tensor([tokenizer(prompt + completion).input_ids], device=model.device)
            assert score == pytest.approx(model(input_ids=ids).logits[0, 1].item(), abs=1e-5)
    assert len(set(found)) == 20 and functions["positive"](["a" * 600], ["b"])


def test_the_two_files_and_the_command_run(folder, monkeypatch):
    rows = [{"text": f"Film {i} was a film that I have seen. " * 10} for i in range(12)]
    loaded = SimpleNamespace(load_dataset=lambda name, split: [*rows, {"text": "Too short."}])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", loaded)
        exec((folder / "my_prompts.py").read_text(), {})
    prompts = [
        json.loads(line)["prompt"] for line in Path("reviews.jsonl").read_text().split("\n")[:-1]
    ]
    assert len(prompts) == 12
    assert all(rows[0]["text"].startswith(p[:4]) and 2 <= len(p) <= 7 for p in prompts)

    command = block("These are the old\nscript's settings").replace("\\\n", " ")
    program, *flags = shlex.split(command)[1:]
    assert program == "ppo.py"
    small = (
        "--num_steps 1 --prompts_per_step 4 --max_new_tokens 4 --num_eval_prompts 2 --device cpu"
    )
    ppo.main([*flags, *small.split()])
    (run,) = (folder / "runs").iterdir()
    config = json.loads((run / "config.json").read_text())
    assert config["reward"] == ["my_rewards.py:positive"] and config["num_epochs"] == 4
    first = json.loads((run / "metrics.jsonl").read_text().split("\n")[0])
    assert first["objective/scores"] != 0
