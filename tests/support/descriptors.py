"""What a process has open."""

import gc
from collections import Counter
from contextlib import suppress
from pathlib import Path


def opened(process="self"):
    """What the descriptors of a process refer to, and how many refer to each.

    `not opened() - before` means that nothing is left open. What other tests have left may be closed at any time.
    """
    gc.collect()
    found = Counter()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as the one by which the folder is read
            found[str(each.readlink())] += 1
    return found
