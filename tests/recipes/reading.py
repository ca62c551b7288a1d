"""What a line of digits reads as, and how far that is from what is written, in plain Python."""

from itertools import groupby

BLANK = 0


def greedy(logits):
    """The likeliest label of each step, repetitions and blanks left out."""
    return [label for label, _ in groupby(int(step.argmax()) for step in logits) if label != BLANK]


def distance(read, written):
    """Levenshtein's distance."""
    row = list(range(len(written) + 1))
    for number, one in enumerate(read, 1):
        before, row = row, [number]
        for place, other in enumerate(written):
            row.append(min(before[place] + (one != other), before[place + 1] + 1, row[place] + 1))
    return row[-1]
