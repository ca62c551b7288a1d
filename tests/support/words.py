"""Words in several scripts, by their numbers, with those that are hard to keep: an empty, a long and a broken one."""

LETTERS = 16
FIRSTS = {"Latin": 0x61, "Greek": 0x3B1, "Cyrillic": 0x430, "Hebrew": 0x5D0, "Devanagari": 0x905, "Chinese": 0x4E00}
"""The first letter of each script."""
FLAG = b"\xf0\x9f\x8f\xb3\xef\xb8\x8f\xe2\x80\x8d\xf0\x9f\x8c\x88"
"""An emoji of four characters, 14 bytes."""
HARD = [b"", b"\0", b"a\0\0", b"\xff\xfe", "é".encode() * 3000, b"x" * 32, b"y" * 33, FLAG]


def words(count):
    """Different words as bytes; the hard ones first."""
    return [*HARD, *(_word(number) for number in range(count - len(HARD)))]


def _word(number):
    first, rest = [*FIRSTS.values()][number % len(FIRSTS)], number // len(FIRSTS)
    text = chr(first + rest % LETTERS)
    while rest := rest // LETTERS:
        text += chr(first + rest % LETTERS)
    return text.encode()
