"""The experiments of the labs, as data. labs.py runs them.

Each asks what one choice, or one mistake, does to a run. Before it there is a question with a sign
or a number for an answer: what will you see?
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """A run of a script, with a change made to its module; or, where nothing is trained with flags,
    a function from the seed to the figures. Changes and measures are functions of labs.py.
    """

    script: str = ""
    flags: str = ""
    change: str = ""
    measure: str = ""
    arguments: tuple = ()
    pairs: int = 0  # a reward model of so many pairs comes first; JUDGE in the flags is its folder
    # THINKER in the flags is the model of the cups, retaught to work out this share of its answers.
    thinks: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Is a figure of a variant above (+), below (-) or at (0) a number, or another figure (its
    name, its variant)? Without `than`: which number is it? `near` is what counts as equal.
    """

    ask: str
    figure: str
    variant: str
    than: float | tuple[str, str] | None
    hint: str
    near: float = 0.01


@dataclass(frozen=True)
class Experiment:
    """Variants that differ in one thing, and the figures in which it shows."""

    lab: int
    question: str
    figures: str
    variants: dict[str, Variant]
    predict: Prediction
    curve: str = "objective/scores"
    samples: bool = False  # print some of the last completions


PPO = "--num_steps 30 --prompts_per_step 64 --num_eval_prompts 256 --eval_every 30"
GROUPS = "--num_steps 60 --prompts_per_step 8 --num_generations 8 --num_eval_prompts 256"
GROUPS += " --eval_every 60"
HOT = GROUPS.replace("prompts_per_step 8", "prompts_per_step 32") + " --temperature 1.5"
# 10 rollouts of 256 completions, 32 updates of 32 rows with each: 4 epochs of 8 minibatches.
ROLLOUTS = "--num_steps 10 --prompts_per_step 32 --num_generations 8 --num_eval_prompts 256"
ROLLOUTS += " --eval_every 10 --warmup_steps 0 --kl_coef 0 --eval_generations 8"
REUSED = f"{ROLLOUTS} --num_epochs 4 --num_mini_batches 8"
SHORT = f"{GROUPS} --reward REWARDS:short --temperature 1.5 --max_new_tokens 10"
LENGTHS = f"{GROUPS} --temperature 1.5 --max_new_tokens 12 --num_mini_batches 2"
LEARNT = "--reward_model JUDGE/model --num_steps 40 --prompts_per_step 64 --num_eval_prompts 256"
LEARNT += " --eval_every 5"
SIZED = " --num_eval_prompts 256 --eval_every 80 --learning_rate 3e-4"
# What the model of the cups has as defaults, for one that was retaught.
RETAUGHT = """--task cups --model THINKER --max_new_tokens 16 --learning_rate 1e-3 --kl_coef 0.01
--micro_batch_tokens 16384 --rollout_batch_size 256 --bf16 false --num_steps 80 --eval_every 80
--num_eval_prompts 256"""
# Games of one, two and six swaps; each token costs 0.02 of a reward of 1.
PRICED = """--task cups --prompts GAMES --reward REWARDS:right_less_tokens --verifier numeric_match
--num_steps 150 --eval_every 150 --num_eval_prompts 400"""
START = 0.436  # the share of right samples before the first step

EXPERIMENTS = {
    "estimators": Experiment(
        1,
        "k1, k2 and k3 estimate the same KL from samples. Which is unbiased, which varies least?"
        " (No training: the tiny model at temperature 0.7 against itself at 1, and the exact KL.)",
        "exact k1 k2 k3 k1_std k2_std k3_std",
        {"tiny": Variant(measure="estimators")},
        Prediction(
            "Is the mean of k2 above, below or at the exact KL?",
            "k2", "tiny", ("exact", "tiny"),
            "k2 = d²/2 is the KL only to second order in d, where policy and reference are close."
            " Its mean differs from the KL however many samples there are.",
        ),
    ),
    "dropout": Experiment(
        2,
        "What does dropout that is left on do to the KL before the first update, where it should be"
        " 0, and to what is learnt?",
        "accuracy kl_first sampler_kl_first reward",
        {
            "off": Variant("rloo", GROUPS),
            "left on": Variant("rloo", f"{GROUPS} --disable_dropout false"),
        },
        Prediction(
            "With dropout left on, is the measured KL before the first update (`kl_first`) above,"
            " below or at 0?",
            "kl_first", "left on", 0,
            "Who has drawn the tokens, and whose log-probs are compared? The tokens come from the"
            " policy without dropout, to which they are more likely than to the one with it.",
        ),
    ),
    "top_k": Experiment(
        2,
        "top_k 5 samples from something else than the policy whose log-probs are trained. Which way"
        " does it move the KL, as the policy gets surer of itself?",
        "accuracy kl reward accuracy_first",
        {
            "softmax alone": Variant("rloo", HOT),
            "top_k 5": Variant("rloo", HOT, "top_5"),
        },
        Prediction(
            "With top_k 5 in training: is `reward`, of the training samples, above or below"
            " `accuracy`, of samples without top_k?",
            "reward", "top_k 5", ("accuracy", "top_k 5"),
            "Tokens beyond the fifth are never drawn in training, so nothing punishes them. They"
            " keep their probability, and the evaluation draws them.",
        ),
        curve="objective/kl",
    ),
    "top_k_kl": Experiment(
        2,
        "top_k 5 is said to make the KL negative. When does it? (No training: the tiny model as"
        " policy, at temperature 0.7 surer than the reference at 1, at 1.4 less sure.)",
        "exact k1 exact_top_k k1_top_k",
        {
            "surer": Variant(measure="kl_of_top_k", arguments=(0.7,)),
            "less sure": Variant(measure="kl_of_top_k", arguments=(1.4,)),
        },
        Prediction(
            "The policy is less sure than the reference. Is `k1_top_k` above or below 0?",
            "k1_top_k", "less sure", 0,
            "The five likeliest tokens are those of which the surer model thinks more: here that is"
            " the reference, so log policy - log reference is negative at them.",
        ),
    ),
    "kl_coef": Experiment(
        2,
        "The reward counts nines, and right sums are what was meant. How much of them is left, for"
        " which weight of the KL? Read the samples below the figures.",
        "accuracy reward kl",
        {
            f"kl_coef {c}": Variant("rloo", f"{GROUPS} --reward REWARDS:nines --kl_coef {c}")
            for c in (0, 0.05, 0.5)
        },
        Prediction(
            "Which share of the sums is right in the end (`accuracy`) with kl_coef 0.05?",
            "accuracy", "kl_coef 0.05", None,
            "The best policy raises a completion by exp(1 / 0.05), half a billion, for each nine."
            " No right sum stands against that.",
        ),
        samples=True,
    ),
    "base_model": Experiment(
        2,
        "The unfinished model has seen too few sums to know them. The embedded one knows them, and"
        " prefers to forget the carry. What can RLOO add to each? (pass@k: the chance that one of k"
        " samples is right.)",
        "greedy pass@1 pass@4 pass@16 pass@64 pass@256",
        {
            f"{name}, {f'learning rate {rate}' if rate else 'before'}": Variant(
                measure="pass_at_k", arguments=(name == "unfinished", rate)
            )
            for name, rates in (
                ("unfinished", ("", "1e-4", "8e-4")), ("embedded", ("", "8e-4"))
            )
            for rate in rates
        },
        Prediction(
            "RLOO trains the unfinished model at 1e-4. Is `pass@16` then above, below or at what it"
            " was before?",
            "pass@16", "unfinished, learning rate 1e-4", ("pass@16", "unfinished, before"),
            "pass@1 rises, for the policy gets surer of what it had. What it had seldom, and right,"
            " it loses: that was a part of pass@16.",
            near=0.001,
        ),
    ),
    "group_size": Experiment(
        2, "64 completions a step, in groups of 2 to 32: more prompts, or a better baseline?",
        "accuracy flat grad_norm",
        {
            f"G = {g}": Variant(
                "rloo", f"--num_steps 80 --prompts_per_step {64 // g} --num_generations {g}{SIZED}"
            )
            for g in (2, 4, 8, 16, 32)
        },
        Prediction(
            "Is `accuracy` with G = 32 above or below that with G = 4?",
            "accuracy", "G = 32", ("accuracy", "G = 4"),
            "A step of 64 completions has two prompts then: a good baseline for two, and nothing"
            " about all the others.",
        ),
    ),
    "lambda": Experiment(
        3,
        "lambda 1 trusts the rewards, lambda 0 the value model. What does a value model that starts"
        " at 0 need?",
        "accuracy explained",
        {f"lam {x}": Variant("ppo", f"{PPO} --lam {x}") for x in (0.0, 0.95, 1.0)}
        | {"lam 0.0, not whitened": Variant("ppo", f"{PPO} --lam 0.0", "leave_advantages_raw")},
        Prediction(
            f"lambda 0: is `accuracy` above or below the {START} of the start?",
            "accuracy", "lam 0.0", START,
            "With V = 0 only the last token, EOS, has an advantage. The digits before it, which"
            " decide, all get one and the same number.",
        ),
    ),
    "whitening": Experiment(
        3,
        "Advantages whitened or not, rewards whitened as well: what happens to the gradient, and to"
        " what is learnt?",
        "accuracy grad_norm clipfrac",
        {
            "advantages": Variant("ppo", PPO),
            "both": Variant("ppo", PPO, "whiten_rewards_too"),
            "neither": Variant("ppo", PPO, "leave_advantages_raw"),
        },
        Prediction(
            "Is `grad_norm` without any whitening above or below that with advantages whitened?",
            "grad_norm", "neither", ("grad_norm", "advantages"),
            "Scores are 0 or 1, so raw advantages have a deviation below 1. Whitened ones have 1.",
        ),
        curve="grad_norm",
    ),
    "pad_is_eos": Experiment(
        4,
        "Pad and EOS are the same id, and the mask is inferred from the ids: EOS gets no gradient."
        " The reward is for short text. Who learns to end, and how can one learn it without?",
        "reward entropy truncated",
        {
            "mask carried": Variant("grpo", SHORT),
            "mask inferred": Variant("grpo", SHORT, "take_eos_for_padding"),
        },
        Prediction(
            "Which share of the completions counts as cut off (`truncated`) with `mask inferred`?",
            "truncated", "mask inferred", None,
            "A completion counts as ended where its EOS is within the mask. This mask has none.",
        ),
        curve="objective/entropy",
    ),
    "kl_in_loss": Experiment(
        4,
        "The reward counts nines, and GRPO's KL is to keep the sums. In the loss, k3 or k3 times"
        " the ratio (unbiased): which holds the policy back?",
        "accuracy kl reward",
        {
            f"{kl}, {c}": Variant(
                "grpo", f"{GROUPS} --reward REWARDS:nines --kl_coef {c} --kl_estimator {kl}"
            )
            for kl, c in (("k3", 0.5), ("k3", 1.5), ("unbiased", 0.5))
        },
        Prediction(
            "kl_coef 0.5: is `kl` with k3 above or below `kl` with unbiased?",
            "kl", "k3, 0.5", ("kl", "unbiased, 0.5"),
            "With d = log pi - log pi_ref, k3 pulls a token back with 1 - exp(-d), which is below 1"
            " however likely it became; unbiased pulls with d.",
        ),
        curve="objective/kl",
    ),
    "difficulty": Experiment(
        4,
        "Divided by the std of its group, of the batch, or not at all: how much does a group with"
        " one right answer of 8 weigh, where one with 4 weighs 1? Does the model learn more of the"
        " sums that were hard? (`hard` and `easy`: the chance of a right sample at the end.)",
        "one_of_8 hard easy",
        {x: Variant(measure="by_difficulty", arguments=(x,)) for x in ("group", "batch", "none")},
        Prediction(
            "Not divided: how much does a group with one right answer weigh (`one_of_8`)?",
            "one_of_8", "none", None,
            "The sum of |A| over a group with k right of G is 2 k (G - k) / G. Divide that of k = 1"
            " by that of k = 4.",
        ),
    ),
    "off_policy": Experiment(
        5,
        "32 updates with each rollout: the policy leaves the one that drew it. What happens without"
        " a ratio, with one that isn't clipped, with GRPO's clip and with GSPO's? What is the size"
        " of a step to blame for?",
        "accuracy approxkl clipfrac entropy",
        {
            "1 update": Variant("grpo", ROLLOUTS),
            "no ratio": Variant("grpo", REUSED, "drop_the_ratio"),
            "not clipped": Variant("grpo", f"{REUSED} --clip_range 1e6"),
            "clipped": Variant("grpo", REUSED),
            "GSPO": Variant("grpo", f"{REUSED} --loss_type gspo"),
            "no ratio, rate / 4": Variant(
                "grpo", f"{REUSED} --learning_rate 2e-4", "drop_the_ratio"
            ),
        },
        Prediction(
            f"32 updates without a ratio: is `accuracy` above or below the {START} of the start?",
            "accuracy", "no ratio", START,
            "A wrong completion is pushed down on and on, however rare it has become: -log p has no"
            " end, and other tokens get what it loses.",
        ),
    ),
    "length_bias": Experiment(
        5,
        "GRPO divides a completion by its length, Dr. GRPO by a constant, DAPO by all tokens. Where"
        " the first digit alone is judged, which way does each push EOS after it, in right and in"
        " wrong completions? (The gradient of one step; 1 would be: up, wherever EOS may be.)",
        "right wrong",
        {
            kind: Variant(measure="push_on_eos", arguments=(kind, scale))
            for kind, scale in (("grpo", "group"), ("dr_grpo", "none"), ("dapo", "group"))
        },
        Prediction(
            "GRPO: is EOS pushed up (+) or down (-) in wrong completions?",
            "wrong", "grpo", 0,
            "The tokens of a long wrong completion are punished less, each of them, than those of a"
            " short one: so it pays to go on.",
        ),
    ),
    "loss_types": Experiment(
        5, "GRPO, Dr. GRPO and DAPO in training: does the length of a completion move?",
        "accuracy accuracy_first length clipfrac",
        {
            "grpo": Variant("grpo", f"{LENGTHS} --loss_type grpo"),
            "dr_grpo": Variant("grpo", f"{LENGTHS} --loss_type dr_grpo --scale_rewards none"),
            "dapo": Variant("grpo", f"{LENGTHS} --loss_type dapo --clip_range_high 0.28"),
        },
        Prediction(
            "Is `length` with dr_grpo above, below or (to half a token) at that with grpo?",
            "length", "dr_grpo", ("length", "grpo"),
            "A sum has two or three digits and EOS, whatever the loss says: the reward decides.",
            near=0.5,
        ),
        curve="length/mean",
    ),
    "oversample": Experiment(
        5,
        "DAPO wants no groups of equal rewards: of 16 prompts a step, keep 8 that teach something."
        " Is that more than training on all 16?",
        "accuracy sampled flat grad_norm",
        {
            "8 prompts": Variant("grpo", GROUPS),
            "8 of 16 prompts": Variant("grpo", f"{GROUPS} --oversample 2"),
            "16 prompts": Variant("grpo", GROUPS.replace("per_step 8", "per_step 16")),
        },
        Prediction(
            "Is `flat` with 16 prompts a step above or below that with 8 of 16?",
            "flat", "16 prompts", ("flat", "8 of 16 prompts"),
            "More prompts of the same kind are flat as often.",
        ),
    ),
    "bfloat16": Experiment(
        5,
        "Decoding in bfloat16 draws from a rounded policy. How far is it from the one that trains,"
        " and does it change what is learnt?",
        "accuracy sampler_kl_x1000",
        {
            "float32": Variant("rloo", GROUPS),
            "bfloat16": Variant("rloo", f"{GROUPS} --bf16 true"),
        },
        Prediction(
            "Is the KL of sampler and policy in bfloat16, in thousandths of a nat for each token"
            " (`sampler_kl_x1000`), above or below 1?",
            "sampler_kl_x1000", "bfloat16", 1,
            "bfloat16 has three digits: logits of about 10 are off by some hundredths. A KL is half"
            " the mean square of such differences.",
        ),
    ),
    "cups_rare": Experiment(
        5,
        "The model of the cups works a game out in one answer of ten. How rare may that be, for"
        " GRPO to find that it pays? (256 completions a step, once 1,024; retaught: trained on with"
        " other shares. `worked_out`: the share of answers in the end.)",
        "accuracy worked_out length",
        {
            label: Variant("grpo", f"{RETAUGHT} --prompts_per_step {prompts}", thinks=share)
            for label, share, prompts in (
                ("10%", 0.1, 32), ("retaught to 3%", 0.03, 32), ("retaught to 1%", 0.01, 32),
                ("retaught to 1%, 1,024", 0.01, 128), ("retaught to 0%", 0.0, 32),
            )
        },
        Prediction(
            "Retaught to work out 3% of its answers: is `accuracy` after 80 steps above or below"
            " 0.5?",
            "accuracy", "retaught to 3%", 0.5,
            "Of the 8 answers to a prompt one is worked out in every fifth group or so. It is"
            " nearly always right, where a guess is right once in five: so its advantage is large.",
        ),
    ),
    "cups_base": Experiment(
        5,
        "64 answers to each of 96 games: is there anything that the model answers after GRPO and"
        " never before? (Without a KL. `thought@64`: one of the 64 is right and worked out;"
        " `majority`: the cup that most of them name.)",
        "pass@1 pass@64 thought@64 majority",
        {
            f"{label}, {'after' if trained else 'before'}": Variant(
                measure="of_64_answers", arguments=(share, trained)
            )
            for label, share in (("10%", 0.1), ("retaught to 0%", 0.0))
            for trained in (False, True)
        },
        Prediction(
            "The model works out one answer in ten. Is its `pass@64` after GRPO above, below or at"
            " what it was before?",
            "pass@64", "10%, after", ("pass@64", "10%, before"),
            "Of 64 answers six are worked out, and nearly all of these are right. So what is left"
            " to gain for 64 answers, and what for one?",
        ),
    ),
    "cups_kl": Experiment(
        5,
        "The model learns to work games out. At which token does it leave the model that it was?"
        " (The KL of the trained model to the first one, at the first token and at all others"
        " together, in nats.)",
        "kl_first kl_others right_when_worked_out",
        {"grpo": Variant(measure="kl_of_places")},
        Prediction(
            "In the end it works out nearly all of its answers, where it did one in ten. How large"
            " is `kl_first`, in nats?",
            "kl_first", "grpo", None,
            "The KL is the mean of log pi - log pi_ref. At the first token pi is about 1, and"
            " pi_ref 0.1.",
        ),
    ),
    "cups_price": Experiment(
        5,
        "Each token costs 0.02, where a right answer earns 1. Games have one, two or six swaps; at"
        " once the model is right in 99, 68 and 20% of them. Which does it go on working out, and"
        " what has the std to do with it? (`mixed`: divided by the std only in groups with right"
        " and wrong answers; `alike`: only in the others, where the price alone differs.)",
        "worked_out_2 accuracy worked_out_1 worked_out_6",
        {
            "std": Variant("grpo", PRICED),
            "no std": Variant("grpo", f"{PRICED} --scale_rewards none"),
            "std where mixed": Variant("grpo", PRICED, "divide_mixed_groups"),
            "std where alike": Variant("grpo", PRICED, "divide_groups_of_one_verdict"),
        },
        Prediction(
            "Two swaps: is `worked_out_2` with the std of each group above or below that without?",
            "worked_out_2", "std", ("worked_out_2", "no std"),
            "Take a group whose answers are all right, where some are 5 tokens long and others 2."
            " Their rewards differ by 0.06. By how much do their advantages?",
        ),
        curve="length/mean",
    ),
    "overoptimisation": Experiment(
        6,
        "PPO on a reward model that has learnt from few pairs, or from many: where does its score"
        " rise while the sums get worse, and what does the weight of the KL save?",
        "accuracy judge score_first score kl accuracy_first accuracy_best best_step",
        {
            f"{pairs} pairs, kl_coef {coef}": Variant(
                "ppo", f"{LEARNT} --kl_coef {coef}", pairs=pairs
            )
            for pairs in (200, 5000)
            for coef in (0.01, 0.1)
        },
        Prediction(
            f"200 pairs, kl_coef 0.01: is `accuracy` in the end above or below {START}?",
            "accuracy", "200 pairs, kl_coef 0.01", START,
            "The score is right near the texts of the pairs. PPO goes where it is high, and 200"
            " pairs don't say where it is wrong.",
        ),
        curve="eval/accuracy",
    ),
}  # fmt: skip
