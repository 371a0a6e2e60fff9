"""The bugs of the hunt, by the script in which they show and their names in tests/mutations.py: why
each shows as it does, in the metric that symptoms.json has for it.
"""

REASONS = {
    "ppo": {
        "mean over padding too": (
            "The sum has only real entries, and it is divided by the number of all: means come "
            "out too near 0. Whitening takes too small a mean off the advantages, so they keep a "
            "part of it, and the loss at ratio 1, minus their average, is not near 0."
        ),
        "whitening divides by the variance": (
            "Values are divided by the variance and not by its root. Where the deviation is below "
            "1 that makes them larger, where it is above 1 smaller: the policy's steps have "
            "another length than they should have."
        ),
        "whitening shifts the mean the wrong way": (
            "Advantages keep their mean, and rewards, which should keep it, lose it. The loss at "
            "ratio 1 is minus the mean advantage, and that is not 0 now."
        ),
        "GAE without the value of the state": (
            "Without - V_t the advantage contains the value, and the returns contain it twice. "
            "The better the value model fits them, the larger they get: its loss runs away "
            "instead of falling."
        ),
        "GAE bootstraps from the reward": (
            "delta takes the next reward in place of the next value, and rewards are counted "
            "again in the sum of deltas. The returns are of another size than the value model can "
            "come to agree with, so its loss begins higher and stays higher."
        ),
        "value model and policy share their weights": (
            "Each optimiser step moves the weights of both. The policy's gradient disturbs the "
            "values, and they explain less of the returns."
        ),
        "the score in the last column, not on the last token": (
            "Only completions that fill the width have a real token in the last column, all "
            "others never get their score. What is left is mostly the KL, which keeps the policy "
            "near the reference: its entropy stays where it began."
        ),
        "minimum for maximum in PPO's clip": (
            "The smaller of the two losses is the optimistic one. The clip takes the gradient "
            "where a step has made things worse, and leaves it where it has gone too far already. "
            "So updates that should be undone stay, and the scores fall."
        ),
        "no clip": (
            "The loss is that of the free ratio. Nothing holds it back where moving on pays, and "
            "it falls below that of the right runs as the ratio leaves the range."
        ),
        "PPO's ratio upside down": (
            "With old over new the gradient has the wrong sign: good tokens become unlikely and "
            "bad ones likely. The policy leaves the reference in the wrong direction, and the KL "
            "grows."
        ),
        "values clipped around 0": (
            "The old value is taken off before the clip and not added again, so the clipped "
            "prediction stays near 0, however large the return is. Its error is the larger one at "
            "most tokens: the loss is about half the squared return, and grows with the scores "
            "instead of falling."
        ),
        "no half in the value loss": (
            "The loss is that of the right runs times 2, from the first step on. Its gradient is "
            "doubled too, as if vf_coef were twice as large."
        ),
        "advantages not whitened": (
            "The loss at ratio 1 is minus the mean advantage. Whitening makes that mean 0; "
            "without it the loss shows how the rewards compare with what the value model expects, "
            "which is far from them at first."
        ),
        "PPO sums over tokens and averages over rows": (
            "The sum is divided by the rows and not by the tokens: the loss and its gradient are "
            "larger by the number of tokens of a completion."
        ),
        "the value loss is maximised": (
            "With a minus before it each step makes the error of the value model larger, and it "
            "grows through the whole run."
        ),
        "constant learning rate in PPO": (
            "The optimiser keeps the rate that it was made with. Without a warm-up the first "
            "updates are too large, without the fall to 0 the last ones are too: the KL between "
            "old and new policy is high at either end."
        ),
        "returns from whitened advantages": (
            "The targets are whitened advantages plus old values. Their mean and their deviation "
            "are set anew in each step, whatever the rewards are, so the error begins with "
            "another size and doesn't fall as it should."
        ),
        "num_mini_batches adds no steps": (
            "All rows are one minibatch: one optimiser step where there should be several. The "
            "policy learns more slowly, and is less sure of itself at the end."
        ),
        "the value model learns advantages": (
            "The targets are whitened advantages. They have mean 0 and variance 1 in each step "
            "and depend on the values themselves, so the error is of another size at first and "
            "hardly falls."
        ),
    },
    "grpo": {
        "positions start at 1": (
            "The model has learnt with positions from 0, and sampling and scoring both count from "
            "1. It meets each token at a place where it expects another, so its probabilities are "
            "off, and the first updates change them far more than in a right run, until it has "
            "got used to the shift."
        ),
        "temperature missing from the log-probs": (
            "The run samples at temperature 1.2, and log-probs and entropy are those at 1. "
            "Dividing by 1.2 makes a distribution flatter, and without it the entropy is lower "
            "from the first step on."
        ),
        "logits times the temperature": (
            "Multiplied by 1.2 in place of divided, the logits make a sharper distribution than "
            "the one that was sampled from: the entropy is too low from the first step on."
        ),
        "the completions of a prompt are not consecutive": (
            "The rows are prompt 1, 2, 3, 1, 2, 3, and all else takes the first G of them for "
            "completions of prompt 1. Each is scored against another prompt's answer: hardly any "
            "is right, and training has nothing to learn from."
        ),
        "EOS is masked out": (
            "The mask ends before EOS. No EOS is an action then, so none is counted, and the "
            "policy never learns when to end."
        ),
        "the mean of the batch for that of the group": (
            "The advantages of a group don't add up to 0 any more: an easy prompt's are all "
            "positive, a hard one's all negative. Divided by each group's own deviation they "
            "don't cancel over the batch either, and the loss leaves 0."
        ),
        "GRPO divides by the variance": (
            "A group that is nearly all right, or nearly all wrong, has a small deviation and a "
            "smaller variance. Divided by that its advantages are larger, and so is the gradient."
        ),
        "GRPO's ratio upside down": (
            "With old over new the gradient has the wrong sign: what was rewarded becomes "
            "unlikely. The policy gets less sure of itself, and its entropy rises where it should "
            "fall."
        ),
        "GRPO rewards the KL": (
            "With a minus before it the KL lowers the loss. The further the policy is from the "
            "reference, the lower the loss is, and nothing holds it near."
        ),
        "constant learning rate in GRPO": (
            "The optimiser keeps the rate that it was made with. Without a warm-up the first "
            "updates are larger, and more tokens leave the clip range, in the first steps and in "
            "the last ones, where the rate should be near 0."
        ),
    },
    "rloo": {
        "KL turned round": (
            "d is log reference - log policy, so k1 is minus the KL: the metric goes below 0, as "
            "it can't on average. As a part of the reward it pays the policy for leaving the "
            "reference."
        ),
        "the reference is the policy itself": (
            "The reference moves with the policy, so the two never differ and the KL is exactly 0 "
            "in each step. The penalty does nothing."
        ),
        "the baseline divides by G": (
            "The sum of the G - 1 others over G is too small a baseline. The advantages have a "
            "positive mean where rewards are positive, and the loss at ratio 1 is minus that "
            "mean."
        ),
        "the baseline holds its own reward": (
            "The sum of all G rewards over G - 1 is too large a baseline. The advantages have a "
            "negative mean where rewards are positive, and the loss at ratio 1 is minus that "
            "mean."
        ),
        "constant learning rate in RLOO": (
            "The optimiser keeps the rate that it was made with. Without a warm-up the first "
            "updates are too large, without the fall to 0 the last ones are too: the KL between "
            "old and new policy is high at either end."
        ),
    },
}
