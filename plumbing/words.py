"""The words that the reward of the task sentiment counts."""

POSITIVE = frozenset(
    """amazing amazingly appealing astonishing awesome beautiful beautifully best brilliant
    captivating charming classic clever compelling delight delighted delightful deserves
    elegant emotional engaging enjoy enjoyable enjoyed entertaining epic excellent exceptional
    excited exciting exquisite extraordinary fantastic fascinating favorite fine fresh fun
    funny gem genius good gorgeous great greatest gripping happy heartwarming hilarious
    impressed impressive incredible incredibly inspiring intriguing joy liked love loved
    lovely magnificent masterful masterpiece memorable moving outstanding perfect perfectly
    phenomenal pleasant pleasure powerful recommend refreshing remarkable rich satisfying
    smart solid special spectacular splendid strong stunning success successful superb
    terrific thrilled thrilling touching unforgettable wonderful wonderfully worth""".split()
)

NEGATIVE = frozenset(
    """absurd annoying avoid awful awkward bad badly bland bored boring cheap cliche clumsy
    confused confusing contrived dated depressing disappointed disappointing disappointment
    disaster dreadful dull empty fail failed fails failure flat flawed forgettable garbage
    generic hate hated horrible horrific incoherent lack lacked lacking lame lazy lousy
    mediocre mess messy miserable mistake nonsense pathetic pointless poor poorly predictable
    pretentious problem repetitive ridiculous ruined rushed sad shallow silly slow stupid
    tedious terrible terribly tired tiresome trash ugly unconvincing unfortunately unfunny
    uninteresting unnecessary waste wasted weak worse worst wrong""".split()
)
