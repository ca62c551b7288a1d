"""Random numbers of a step: each step of each replica draws others, and a resumed run draws the same ones again."""
