"""Greedy CTC decoding and the Levenshtein distance in plain Python."""

from itertools import groupby

BLANK = 0


def greedy(logits):
    """Returns the likeliest label of each step, without repetitions and blanks."""
    return [label for label, _ in groupby(int(step.argmax()) for step in logits) if label != BLANK]


def distance(decoded, expected):
    """Returns the Levenshtein distance of two sequences."""
    row = list(range(len(expected) + 1))
    for number, one in enumerate(decoded, 1):
        before, row = row, [number]
        for place, other in enumerate(expected):
            row.append(min(before[place] + (one != other), before[place + 1] + 1, row[place] + 1))
    return row[-1]
