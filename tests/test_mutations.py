"""The list of bugs that tests/mutations.py plants."""

from mutations import BUGS, planted


def test_every_bug_can_be_planted_and_has_a_name_of_its_own():
    stale = []
    for target, old, new, bug in BUGS:
        try:
            path, text = planted(target, old, new)
            compile(text, path, "exec")
        except (StopIteration, SyntaxError, ValueError) as e:
            stale.append(f"{bug}: {e!r}")
    assert not stale, "\n".join(stale)
    assert len({bug for *_, bug in BUGS}) == len(BUGS)
