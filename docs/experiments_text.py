"""The words of docs/experiments.md: claims, results, and what one sees. A figure in braces,
{variant|figure}, is looked up in course/reference.json; with an = it is the mean alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drawing import SIZES, VARIANTS

INTRODUCTION = """# Experiments

Common claims about RLHF, tested on the embedded model. It has 0.6 M parameters and answers a
sum with up to four tokens, so what holds here need not hold for your model. But you can watch
it happen: a run takes less than two minutes on two CPU cores.

± is the standard deviation over {seeds} seeds; where nothing is trained, over more. Accuracy is
the share of held-out sums that are right, sampled, after the last step. Before the first step
it is 0.44 (0.22 at temperature 1.5).
[All figures, and the flags of every run](evidence/experiments.md), are on another page, with
the experiments in which the seeds show no difference. `python docs/experiments.py` makes both
pages from [reference.json](../course/reference.json) and [curves.json](../course/curves.json)."""


@dataclass
class Claim:
    """A line of the table, a section, a picture: its curves are those of the experiment `name` of
    course/labs.py, its dots figures of that experiment, with their titles.
    """

    name: str
    claim: str
    result: str
    text: str
    dots: dict[str, str] = field(default_factory=dict)
    curves: bool = True
    colours: tuple[str, ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)  # where the axis of a figure ends
    labels: dict[str, str] = field(default_factory=dict)  # other names of variants, in the picture
    together: str = ""  # the unit of the dots, where all are in one panel
    each_seed: bool = False
    zero: bool = False  # a line at 0
    heading: str = ""
    command: str = ""
    picture: str = ""

    def __post_init__(self) -> None:
        self.heading = self.heading or self.name
        self.command = self.command or f"python course/labs.py {self.name} --seeds 5"
        self.picture = self.picture or f"experiments/{self.name}.png"


SHARE = {"accuracy": 1.0}
CLAIMS = [
    Claim(
        "estimators",
        "k1 and k3 estimate the KL without bias, k2 doesn't",
        "exact {tiny|=exact}; k1 {tiny|k1}, k3 {tiny|k3}, k2 {tiny|k2}",
        """Nothing is trained: the model at temperature 0.7 is compared with itself at 1, where
all probabilities are known. k2 is a third too low, and its small spread over tokens
({tiny|=k2_std}; k1 {tiny|=k1_std}, k3 {tiny|=k3_std}) is no merit. k3 is never negative. It
varies most, because a token that the policy has made much rarer counts a lot when it is drawn.""",
        {"exact": "exact KL", "k1": "k1", "k2": "k2", "k3": "k3"},
        together="KL, nats per token",
    ),
    Claim(
        "dropout",
        "Dropout that is left on destroys the run",
        "accuracy {left on|accuracy}; with dropout off {off|accuracy}",
        """With dropout, the policy that is trained differs from the one that sampled. Before
the first update, where the KL should be 0 and nothing clipped, the KL is {left on|kl_first} and
{left on|clip_first} of the completions are clipped. Nothing is learnt, and what the model knew
is lost. Without dropout both are exactly 0.""",
        {"accuracy": "accuracy at the end"},
        labels={"off": "dropout off", "left on": "dropout left on"},
        most=SHARE,
    ),
    Claim(
        "top_k",
        "Sampling with top_k makes a policy look better than it is",
        "reward {top_k 5|=reward}, accuracy {top_k 5|accuracy}; without top_k"
        " {softmax alone|accuracy}",
        """Both runs sample at temperature 1.5, one with top_k 5. Its reward is higher in
training. But the policy itself, measured without top_k, is worse than that of the right run:
tokens that top_k never draws are never punished, and keep their probability. Measure a policy
without top_k.""",
        {"reward": "reward, last 5 steps", "accuracy": "accuracy, without top_k"},
        curves=False,
        most=SHARE | {"reward": 1.0},
    ),
    Claim(
        "top_k_kl",
        "top_k makes the measured KL negative where the policy is less sure than the reference",
        "k1 {less sure|k1_top_k}, exact {less sure|=exact_top_k}; surer: {surer|k1_top_k}, exact"
        " {surer|=exact_top_k}",
        """Nothing is trained: the model is the policy at temperature 0.7 (surer) and at 1.4
(less sure), and the reference at 1. Sampled with top_k 5, k1 is too large where the policy is
surer, and negative where it is less sure. The true KL at the same tokens is positive in both.
k3 can't be negative, so it hides the mistake.""",
        {
            "k1": "k1, no top_k",
            "exact_top_k": "exact KL at the same tokens",
            "k1_top_k": "k1, top_k 5",
        },
        together="KL, nats per token",
    ),
    Claim(
        "temperature",
        "Sampling at one temperature and scoring at another shows only in the KL",
        "KL {forgotten|kl}, right {right|kl}; accuracy {forgotten|accuracy}, right"
        " {right|accuracy}",
        """Completions are sampled at temperature 1.5, and the log-probs are those at 1. No
error is raised, the ratio is 1, and the sums are learnt equally well. But the KL is that of
another distribution: half of what it should be, and below 0 for a while in every seed. In the
right run it is never below -0.01. Where sampling and log-probs may differ, compare those of
`generate` with those of the training forward pass.""",
        {"kl": "KL, last 5 steps", "accuracy": "accuracy at the end"},
        most=SHARE,
        zero=True,
    ),
    Claim(
        "kl_coef",
        "A wrong reward gets what it asks for; the KL penalty keeps the rest",
        "accuracy {kl_coef 0|accuracy} with kl_coef 0, {kl_coef 0.05|accuracy} with 0.05,"
        " {kl_coef 0.5|accuracy} with 0.5",
        """The reward counts nines, and right sums are what was meant. With a weight of 0 or
0.05 the model answers `99` and more nines to everything; at 0.05 a KL of {kl_coef 0.05|=kl}
shows it too. With 0.5 the KL stays at {kl_coef 0.5|kl}, and a third of the sums are still
right. The reward doesn't show the damage: read the samples.""",
        {"accuracy": "accuracy at the end"},
        colours=(SIZES[0], SIZES[2], SIZES[4]),
        most={"accuracy": 0.5},
    ),
    Claim(
        "learning_rate",
        "Without a warm-up the first steps destroy what the rest must win back",
        "lowest reward {8e-4, none|lowest}, with warm-up {8e-4, warm-up|lowest}; accuracy"
        " {8e-4, none|accuracy} and {8e-4, warm-up|accuracy}",
        """Adam divides the gradient by its size, so its first steps are as large as the
learning rate. At 8e-4, the default, ten steps of warm-up prevent most of the fall in mean
reward. A rate of 1e-4 is safe and slow ({1e-4, warm-up|accuracy}); 4e-3 ruins the model with
and without a warm-up. With a model of your own, watch the first ten steps: if the reward falls
and the KL jumps, lower the rate.""",
        {"lowest": "lowest reward of a step", "accuracy": "accuracy at the end"},
        colours=(SIZES[0], SIZES[0], SIZES[2], SIZES[2], SIZES[4], SIZES[4]),
        styles={f"{rate}, none": "--" for rate in ("1e-4", "8e-4", "4e-3")},
        labels={f"{rate}, none": f"{rate}, no warm-up" for rate in ("1e-4", "8e-4", "4e-3")},
        most=SHARE,
    ),
    Claim(
        "base_model",
        "RL mends a wrong habit; it adds little to a model that doesn't know",
        "pass@1 {embedded, before|=pass@1} to {embedded, learning rate 8e-4|=pass@1}; unfinished"
        " {unfinished, before|=pass@1} to {unfinished, learning rate 8e-4|pass@1}",
        """pass@k is the chance that one of k samples is right. Both models start alike: half of
the sums right greedily, nearly all in 256 samples. The embedded model knows sums and prefers to
forget the carry; RLOO mends that. The unfinished one has seen too few sums. RLOO makes it surer
of what it finds: pass@1 rises a little, pass@16 falls from {unfinished, before|=pass@16} to
{unfinished, learning rate 8e-4|pass@16}. Yue et al. 2025 (arXiv 2504.13837) saw this in
reasoning. A model that doesn't know needs answers to learn from first. (One unfinished model; ±
is over RLOO's seeds.)""",
    ),
    Claim(
        "group_size",
        "At equal cost, large groups learn less",
        "accuracy {G = 32|accuracy} in groups of 32, {G = 4|accuracy} in groups of 4",
        """Each step has 64 completions, in groups of 2 to 32. Groups of 2, 4 and 8 are alike
within their spread. Larger ones see fewer prompts: a good baseline for two sums is worth less
than a rough one for sixteen. More of the small groups are flat (all right or all wrong) and
teach nothing: {G = 2|flat} of the groups of 2 at the end.""",
        {"accuracy": "accuracy at the end", "flat": "flat groups, last 5 steps"},
        colours=SIZES,
        most=SHARE | {"flat": 1.0},
    ),
    Claim(
        "missing_eos",
        "A penalty for a missing EOS, without room for EOS, breaks the task",
        "without EOS {penalty 0|truncated} to {penalty 2|truncated}; accuracy {penalty 0|accuracy}"
        " to {penalty 2|accuracy}",
        """With room for three tokens, a sum of three digits has none left for EOS. Without the
penalty the model answers rightly and is cut off. With a penalty of 2 it learns to end in time,
with two digits where three are right. Raise `--max_new_tokens` before you punish for reaching
it.""",
        {"accuracy": "accuracy at the end"},
        most=SHARE,
    ),
    Claim(
        "lambda",
        "lambda 0 fails while the value model knows nothing",
        "accuracy {lam 0.0|accuracy}; {lam 0.95|accuracy} at 0.95, {lam 1.0|accuracy} at 1",
        """With lambda 0 a digit hears of the score only through the next value, and the values
start at 0. So whitening makes the first advantages of all digits negative, right or wrong, and
the model doesn't recover. Without whitening it fails too ({lam 0.0, not whitened|accuracy}).
0.95 and 1 are alike for answers of four tokens. The value model explains almost nothing of the
returns here, and PPO learns all the same.""",
        {"accuracy": "accuracy at the end"},
        colours=(VARIANTS[1], VARIANTS[0], VARIANTS[2], VARIANTS[3]),
        most=SHARE,
    ),
    Claim(
        "epochs",
        "More passes over the same completions learn more from them",
        "accuracy {4 epochs|accuracy} after 4 passes, {1 epochs|accuracy} after 1",
        """Both runs sample the same number of completions. Four passes move the policy further
in an update: {4 epochs|clipfrac} of the tokens are clipped instead of {1 epochs|clipfrac}, and
the KL ends at {4 epochs|kl} instead of {1 epochs|kl}. The update costs four times as much.""",
        {"accuracy": "accuracy at the end", "kl": "KL, last 5 steps"},
        labels={"1 epochs": "1 pass", "4 epochs": "4 passes"},
        most=SHARE,
    ),
    Claim(
        "pad_is_eos",
        "With a mask inferred from ids, and pad equal to EOS, ending can't be learnt",
        "reward {mask inferred|reward}, mask carried {mask carried|reward}",
        """The reward favours short text. If every id that equals padding is masked, EOS gets no
gradient. The reward moves in no seed. The entropy stays high: training can only lower other
tokens. With the mask carried from sampling, three of five seeds learn to end within 60 steps
(their entropy falls). The symptom: `length/truncated_frac` is 1 from step 0.""",
        {"reward": "reward, last 5 steps", "truncated": "share without EOS"},
        each_seed=True,
        most={"reward": 1.0},
    ),
    Claim(
        "length_bias",
        "GRPO's gradient pushes right answers to end early, wrong ones to go on",
        "push on EOS {grpo|right} and {grpo|wrong}; Dr. GRPO {dr_grpo|right} and {dr_grpo|wrong}",
        """This is the gradient of one step at temperature 3. Only the first digit is judged, so
length is not rewarded. A push of 1 would mean that EOS is raised everywhere. GRPO divides by
the length of a completion: a right one gains most per token if it is short, a wrong one loses
least if it is long. Dr. GRPO and DAPO hardly push. In 60 steps of training, the lengths of the
three don't differ.""",
        {"right": "push on EOS, right completions", "wrong": "push on EOS, wrong completions"},
    ),
    Claim(
        "dynamic_sampling",
        "Replacing flat groups is no better than sampling more prompts",
        "accuracy {8 prompts, replaced|accuracy} and {11 prompts|accuracy}, at"
        " {8 prompts, replaced|=sampled} and {11 prompts|=sampled} completions",
        """DAPO replaces groups whose rewards are all equal with other prompts. With 8 prompts a
step it samples as many completions as a plain run with 11. It leaves {8 prompts, replaced|flat}
of the groups flat instead of {11 prompts|flat}, and learns as much. It should pay where updates
cost more than sampling.""",
        {"accuracy": "accuracy at the end", "flat": "flat groups, last 5 steps"},
        curves=False,
        most=SHARE | {"flat": 1.0},
    ),
    Claim(
        "overlong",
        "DAPO's soft penalty keeps completions below the limit",
        "share cut off {penalty|truncated}; without it {no penalty|truncated}",
        """The reward pays for length, up to 12 tokens. With a penalty over the last 6 tokens,
the length settles at {penalty|length} tokens, just below where the penalty begins: there one
token more earns 1/12 and costs 1/6.""",
        {"truncated": "share without EOS"},
        most={"truncated": 1.0},
    ),
    Claim(
        "overoptimisation",
        "Trust a reward model too far, and its score rises while the truth falls",
        "of 5,000 pairs: right sums 0.43 to 0.26 ± 0.12 with kl_coef 0.01, 0.70 ± 0.08 with 0.1",
        """PPO trains on reward models that have seen 50 to 5,000 pairs; the right sums are
never a reward. The score rises in every run. With kl_coef 0.01 all four reward models end below
the start, even the one that ranks 92% of held-out pairs rightly: it first leads to 62%, then to
26%. More pairs raise the accuracy's peak and move it to the right. Choosing the best of n
samples, without training, shows the same rise and fall. kl_coef 0.1 stops the run of 5,000
pairs near its top, at 70%; with fewer pairs a penalty can't add what the reward model never
learnt. The score doesn't say when to stop: right answers or people do. The KL gives a hint:
look at the samples long before it is 3. (Gao et al. 2023, arXiv 2210.10760.)""",
        heading="Trusted too far",
        command="python benchmarks/overoptimisation.py",
        picture="overoptimisation.png",
    ),
]

EVIDENCE = """# The experiments: runs and figures

Every experiment of the labs, with its commands and all its figures: mean and standard deviation
over the seeds, whose number is in [reference.json](../../course/reference.json).
[experiments.md](../experiments.md) says what they show. Experiments on this
page alone have a paragraph that says what they show. `python docs/experiments.py` makes this
page from [reference.json](../../course/reference.json).

`accuracy` is that of sampled answers to held-out sums after the last step, at the temperature
of the run; `accuracy_first` that before the first step. `reward`, `kl`, `entropy`, `length`,
`truncated`, `flat` and `explained` are means of the last five steps. Names that end in `_first`
and `ratio_dev` are of step 0. `lowest` is the lowest reward of a step, `kl_largest` the largest
KL, `sampler_dev` the largest deviation, `sampled` the number of completions, dropped ones
included. `one_of_8` is the weight of a group with one right answer of 8, `hard` and `easy` the
chance of a right sample at the end. `judge` is the share of held-out pairs that the reward model
ranks rightly, `score`
what it gives to answers to held-out sums after the last step. `accuracy_best` and `best_step`
are those of the best evaluation. The others are means of all steps. [metrics.md](../metrics.md)
has the definitions."""

# On the page of evidence alone: no difference that the seeds show, or no training at all.
UNDECIDED = {
    "whitening": """The accuracies are equal within their spread. What changes is the gradient:
{advantages|grad_norm} with whitening, {neither|grad_norm} without. `--max_grad_norm` means
something else then; Adam hides the rest.""",
    "off_policy": """At this rate 32 updates with each rollout ruin the policy without a ratio
({no ratio|accuracy}) and with one that isn't clipped ({not clipped|accuracy}). The clip limits
the harm ({clipped|accuracy}, GSPO {GSPO|accuracy}), and one seed of five ends at 0.23 all the
same. One update for each rollout, 10 in all, gives {1 update|accuracy}. At a quarter of the
rate the 320 updates need no ratio: {no ratio, rate / 4|accuracy}.""",
    "rejection": """At one update for each rollout imitation of the right samples is not behind
GRPO. It bears 32 updates, at which GRPO falls back at this rate, since it pushes nothing away.
The price is the entropy, {right ones, 32 updates|entropy} instead of
{right ones, 1 update|entropy}, and in four of five seeds pass@8.""",
    "difficulty": """Divided by the std of its group, a group with one right answer of 8 weighs
0.66 of one with four, else 0.44. After 60 steps the hard sums do not differ by more than the
seeds do.""",
    "skipped_rows": """The figures are the same with and without these rows, in each seed.""",
    "score_slot": """This is arithmetic, without seeds. While V is 0 and the score is one slot
after EOS, EOS gets lambda times the score, and the token before it lambda squared times. TRL,
which has the score there, trains V in that slot, so later more of it arrives. With the score on
EOS itself the last token gets all of it.""",
    "loss_types": """No difference beyond the spread. This model is sure of its EOS after two or
three digits, and 60 steps don't change that.""",
    "entropy_bonus": """The entropy is higher with 0.1. Accuracy and pass@8 differ by less than
the seeds do: these sums are solved without more exploration.""",
    "importance_cap": """In float32 sampler and policy agree to 1e-5. In bfloat16 single tokens
are off by {bfloat16|sampler_dev} nats. The accuracies agree within their spread, with the
weights and without. Yao et al. 2025 report runs that fail, of large models with another engine
for sampling: look at `val/sampler_kl` before you use the flag.""",
    "overoptimisation": """A short form of "Trusted too far" for the course. The score rises in
all four runs; the sums get better in one, that of 5,000 pairs with kl_coef 0.1.""",
}
