"""What the user gave wrongly is one line that says what, and exit code 2, without a traceback."""

import json
import sys
from pathlib import Path

import pytest
import small
from small import byte_tokenizer, files_below, letter_tokenizer, run_command, save_model, small_gpt2
from transformers import AutoModelForCausalLM as CausalLM
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import GPT2Config, Lfm2Config, RwkvConfig, XLNetConfig

from plumbing.errors import InputError, blame
from plumbing.models import add_adapter
from tools import exact, look

SCRIPTS = small.SCRIPTS | {"look": look, "exact": exact}
RUN = """--model small --prompts given.jsonl --reward brevity --prompts_per_step 2
--num_generations 2 --max_new_tokens 6 --output_dir new"""
# In front of all flags: where a check is lost, its row ends at once.
SHORT = dict.fromkeys(small.ALGORITHMS, "--num_steps 0 --num_eval_prompts 1 ")
SHORT["reward_model"] = "--num_steps 1 --num_eval_pairs 1 "
PAIRS = "--model small --pairs given.jsonl --output_dir new"
SETTINGS = {"script": "ppo", "model": "small", "prompts": "good.jsonl", "reward": ["brevity"]}
SETTINGS |= {"num_steps": 6, "prompts_per_step": 2, "num_generations": 1, "max_new_tokens": 6}
FILES = {
    "good.jsonl": "\n".join(json.dumps({"prompt": x}) for x in "abcdefgh"),
    "rewards.py": "number = 5",
    "exits.py": "raise SystemExit(0)",
    "a_run/config.json": json.dumps(SETTINGS),
    "edited/config.json": json.dumps(SETTINGS | {"num_steps": "6"}),
    "old_run/config.json": json.dumps(SETTINGS | {"clip": 0.2}),
    "listed/config.json": "[1]",
    "listed/tokens.jsonl": "{}\n",
    "listed/warnings.jsonl": "",
    "old_rloo/config.json": json.dumps({"script": "rloo", "num_epochs": 1}),
    "a_run/metrics.jsonl": '{"step": 0}\n{"step": 1}\n',
    "a_run/tokens.jsonl": "{}\n",
    "a_run/warnings.jsonl": "",
    "a_run/model/weights": "",
    "a_model/model/weights": "",
    "a_checkpoint/checkpoint.pt": "",
    "records/samples.jsonl": "",
    "empty/tokens.jsonl": "",
    "cut/config.json": json.dumps(SETTINGS),
    "cut/checkpoint.pt": "",
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
CHAT = [{"role": "user", "content": "a"}]
TWO = '{"prompt": "1+1=", "answer": "2"}\n'
PAIR = '{"chosen": "a", "rejected": "b", "margin": 1}'
BAD = [  # (script, flags, part of the line, given.jsonl)
    ("ppo", "--num_step=1", "unknown flag --num_step=1: --help lists them", ""),
    ("rloo", "--clip_range=0.1", "unknown flag --clip_range=0.1: grpo.py has it", ""),
    ("ppo", "--overwrite maybe", "--overwrite: must be true or false, not 'maybe'", ""),
    ("ppo", "--stop", "--stop: expected at least one argument", ""),
    ("ppo", "--prompts=", "--prompts: is empty; leave the flag out", ""),  # "$FILE", not set
    ("ppo", "--stop a --stop=", "--stop: is empty; leave the flag out", ""),
    ("ppo", "--device cuda:99", "--device cuda:99: ", ""),
    ("grpo", "--num_generations 1", "so give 2 or more", ""),
    ("rloo", "--num_generations 1", "so give 2 or more", ""),
    ("ppo", "--prompts_per_step 12 --num_mini_batches 5", "must divide the 12 completions", ""),
    ("grpo", "--reference tiny --kl_coef 0", "so give a --kl_coef above 0", ""),
    ("ppo", "--bf16 true --fp16 true", "trains in bfloat16: give one", ""),
    # Models
    ("ppo", "--model nowhere/at-all", "at-all (no folder, so a name on the hub): OSError", ""),
    ("ppo", "--model headless", "is no ModelForCausalLM, its checkpoint has no", ""),
    ("ppo", "--model own_config", "own_config contains custom code", ""),
    ("ppo", "--model own_tokenizer_config", "_config contains custom code", ""),
    ("ppo", "--model hybrid", "a Lfm2ForCausalLM has layers other than attention", ""),
    ("ppo", "--model state", "a RwkvForCausalLM has layers other than attention", ""),
    *(
        (script, flags, "a_run: is the folder of a run: give a_run/model", TWO)
        for script, flags in (
            ("ppo", f"{RUN} --model a_run"),
            ("grpo", f"{RUN} --reference a_run"),
            ("ppo", f"{RUN} --reward_model a_run"),
            ("reward_model", f"{PAIRS} --model a_run"),
        )
    ),
    ("ppo", f"{RUN} --model mixed", "they don't belong together", TWO),
    ("ppo", f"{RUN} --model adapter --lora_r 1", "holds an adapter, leave the flag out", TWO),
    ("grpo", f"{RUN} --reference small/no", "--reference small/no (no folder, so", TWO),
    ("rloo", f"{RUN} --reference other", "other: its tokens aren't those of --model", TWO),
    ("grpo", f"{RUN} --reference short", "6 new ones don't fit into its context of 6", TWO),
    ("ppo", f"{RUN} --stop ü", "--stop ['ü']: ", TWO),
    ("ppo", f"{RUN} --reward_model small", "has no score.weight, or in another size", TWO),
    ("ppo", f"{RUN} --reward_model two_labels", "has no score.weight, or in another size", TWO),
    ("reward_model", f"{PAIRS} --model adapter", "give its base model, and --lora_r", ""),
    ("reward_model", f"{PAIRS} --model no/such", "error: no/such: OSError", ""),
    ("reward_model", f"{PAIRS} --model xlnet", "XLNetForSequenceClassification can't be", ""),
    # Prompts
    ("ppo", "--prompts nowhere.jsonl", "(JSON lines, .csv, .tsv or a dataset): FileNot", ""),
    ("ppo", RUN, "line 2: give one JSON object a line: JSON", '{"prompt": "a"}\n{"prompt": '),
    ("ppo", RUN, "line 1: give one JSON object a line: TypeError", f"[{TWO}]".replace("\n", "")),
    ("ppo", RUN, "(--prompt_template?), {'text': 'a'}: KeyError: 'prompt'", '{"text": "a"}'),
    ("ppo", RUN, "a prompt is text or messages of text, not empty", '{"prompt": ""}'),
    ("ppo", RUN, "a prompt is text or messages of text", json.dumps({"prompt": PARTS})),
    ("ppo", RUN, "KeyError: 'content'", '{"prompt": [{"role": "user"}]}'),
    ("ppo", RUN, "KeyError: 'role'", '{"prompt": [{"content": "a"}]}'),
    ("ppo", RUN, "no chat template", '{"prompt": [{"role": "user", "content": "a"}]}'),
    ("ppo", RUN, "the prompts can't be turned into tokens: TypeError", r'{"prompt": "a\ud800"}'),
    ("ppo", RUN, "max_new_tokens or cut 'xx", TWO + json.dumps({"prompt": "x" * 59})),
    ("ppo", RUN, "gives id 20, and the model knows 20", '{"prompt": "a<new>"}\n{"prompt": "a"}'),
    ("ppo", f"{RUN} --system_prompt Hello", "not empty", '{"prompt": []}'),
    ("ppo", RUN, "some prompts are text and some messages", TWO + json.dumps({"prompt": CHAT})),
    ("ppo", RUN + r" --prompt_template {prompt}\boxed{}", "Braces that are text are {{ }}.", TWO),
    # Pairs
    ("reward_model", "--model small --output_dir new", "--pairs: is needed for --model small", ""),
    ("reward_model", PAIRS, "can't be read: KeyError: 'rejected'", '{"chosen": "a"}'),
    ("reward_model", PAIRS, "a margin is nan, and", PAIR.replace("1", "NaN")),
    ("reward_model", PAIRS, "no pair is left to train on", PAIR.replace("b", "a")),
    # Rewards
    ("ppo", "--task sentimant", "--task sentimant: choose from add, cups, sentiment", ""),
    ("ppo", "--reward my.txt:f", "my.txt:f: write a reward as FILE.py:FUNCTION, or choose", ""),
    ("ppo", "--verifier nowhere.py:f", "nowhere.py:f: FileNotFoundError", ""),
    ("ppo", "--reward rewards.py:f", "rewards.py:f: the file has no function f", ""),
    ("ppo", "--reward exits.py:f", "exits.py: exits: put that below", ""),
    ("ppo", "--reward_weights 1 2", "give one per reward, here 1", ""),
    ("ppo", "--prompts given.jsonl", "one number as an answer, not 'two'", TWO.replace("2", "two")),
    ("ppo", "--prompts given.jsonl", "one number as an answer, not '3/2'", TWO.replace("2", "3/2")),
    ("ppo", RUN.replace("--reward brevity", ""), "a column answer, and no --reward", TWO),
    # Folders
    ("ppo", "--output_dir a_run --model no/where", "a_run already holds a run: --overwrite", ""),
    ("ppo", f"{RUN} --output_dir rewards.py/new", "--output_dir rewards.py/new: NotADirect", TWO),
    *(
        ("ppo", f"{RUN} --output_dir {flags}", f"{words}: name another --output_dir", TWO)
        for more in ("", " --overwrite")
        for flags, words in (
            (f"small{more} --model tiny", "small already holds config.json, and no run"),
            (f"a_model{more}", "a_model already holds model, and no run"),
            (f"a_checkpoint{more}", "a_checkpoint already holds checkpoint.pt, and no run"),
            (f"records{more}", "records already holds samples.jsonl, and no run"),
            (f"small{more}", "/small, which the run needs"),
            (f".{more}", "/small, which the run needs"),
            (f"a_link{more} --model a_run/model", "/a_run/model, which the run needs"),
            (f"a_run{more} --reward_model a_link/model", "/a_run/model, which the run needs"),
            (f"a_run{more} --reference a_link/model", "/a_run/model, which the run needs"),
        )
    ),
    ("ppo", "--resume small", "--resume small: is not a run of ppo.py", ""),
    ("ppo", "--resume cut", "checkpoint.pt is cut short, or of another version: --overwrite", ""),
    ("ppo", "--resume nowhere", "nowhere/config.json: FileNotFoundError", ""),
    ("ppo", "--resume a_run", "there is no checkpoint: --overwrite erases the run, model/ too", ""),
    ("ppo", "--resume edited", "--num_steps '6': must be of type int", ""),
    ("ppo", "--resume listed", "listed/config.json: TypeError: ", ""),
    ("ppo", f"--output_dir {'x' * 300}", "File name too long", ""),  # or one that is forbidden
    ("ppo", f"--model {'x' * 300}", "File name too long", ""),
    ("ppo", f"--output_dir new --prompts {'x' * 300}.csv", "File name too long", ""),
    ("ppo", "--resume old_run", "--resume old_run: TypeError: ", ""),
    ("rloo", "--resume old_rloo", "unexpected keyword argument 'num_epochs'", ""),
    ("grpo", "--resume a_run", "--resume a_run: is not a run of grpo.py", ""),
    ("look", "nowhere --output x.png", "error: nowhere/metrics.jsonl: FileNotFoundError: ", ""),
    ("look", "a_run --output nowhere/x.png", "--output nowhere/x.png: FileNotFoundError", ""),
    ("look", "a_run --output nowhere/x.html", "--output nowhere/x.html: FileNotFoundError", ""),
    ("look", "listed", "listed/config.json: TypeError: ", ""),
    ("look", "empty", "empty/tokens.jsonl: holds no completions, or none yet", ""),
    ("exact", "--problems 0", "--problems 0: must be at least 1", ""),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with the files and the models of the commands."""
    folder, model, tokenizer = tmp_path_factory.mktemp("x"), small_gpt2(0.0, 20), letter_tokenizer()
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    (folder / "a_link").symlink_to("a_run")
    tokenizer.add_tokens("<new>")
    (same_number := letter_tokenizer()).add_tokens("<other>")
    of, sizes = CausalLM.from_config, {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20}
    few = {"vocab_size": 20, "n_layer": 1, "n_head": 2}
    hybrid = Lfm2Config(num_attention_heads=2, layer_types=["conv"] * 2, **sizes)
    for name, made in {
        "small": model,
        "short": of(GPT2Config(n_embd=8, n_positions=6, **few)),
        "own_config": small.small_llama(),
        "own_tokenizer_config": small.small_llama(),
        "hybrid": of(hybrid),
        "state": of(RwkvConfig(**sizes)),
        "two_labels": Classifier.from_config(GPT2Config(n_embd=32, num_labels=2, **few)),
        "xlnet": Classifier.from_config(XLNetConfig(d_model=16, d_inner=16, **few)),
    }.items():
        save_model(folder / name, made, tokenizer)
    save_model(folder / "other", model, same_number)
    save_model(folder / "mixed", model, byte_tokenizer())
    for name, auto_class in (("config", "AutoConfig"), ("tokenizer_config", "AutoTokenizer")):
        file = folder / f"own_{name}" / f"{name}.json"
        own = {"model_type": "own", "tokenizer_class": "Own", "auto_map": {auto_class: "own.Own"}}
        file.write_text(json.dumps(json.loads(file.read_text()) | own))
        file.with_name("own.py").write_text("")
    model.config.tie_word_embeddings = False
    save_model(folder / "headless", model.transformer, tokenizer)
    add_adapter(model, 2).save_pretrained(folder / "adapter")
    return folder


@pytest.mark.parametrize(("script", "flags", "words", "given"), BAD)
def test_a_bad_input_is_one_line_and_writes_nothing(
    script, flags, words, given, inputs, monkeypatch, capsys
):
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("builtins.input", lambda question: "y")  # it must not be asked
    monkeypatch.setattr(look, "curves_of", lambda folders: None)  # they take time
    Path("given.jsonl").write_text(given)
    before = files_below(".")
    flags = flags if "--resume" in flags else SHORT.get(script, "") + flags
    code, text = run_command(SCRIPTS[script], flags.split(), capsys)
    assert code == 2 and "Traceback" not in text
    assert text.splitlines()[-1].startswith("error: ") and words in text.splitlines()[-1]
    assert files_below(".") == before


def test_a_fault_keeps_the_reason_that_a_library_gives():
    for said, reason in (
        ("it is no model\nbecause of that", "it is no model"),
        ("Faults:\n  - the head\n  - the norm", "Faults: - the head - the norm"),
        ("x" * 200 + ":\nlate", "x" * 200 + ":"),
        ("x" * 400, "x" * 300),
    ):
        with pytest.raises(InputError) as error, blame("--model x"):
            raise ValueError(said)
        assert str(error.value) == f"--model x: ValueError: {reason}"
