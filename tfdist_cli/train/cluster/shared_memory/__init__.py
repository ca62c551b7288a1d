"""Memory that tasks of the same host share: what they send each other there is copied once, and crosses no socket.

`memory` has the files that the memory is, and opens those of another task. Mirrored workers sum in it, see
`all_reduce`. Between workers and ps, `tensors` sends large tensors in `buffers`, each of which is used again when its
reader has let go of it.

In synchronous updates they meet in `rounds`, whose operations are in `round_operations`: each task shows the others its
arrays on a board, see `boards`, and short messages in `pipes` say that there are new ones.

In asynchronous updates workers change the `parameters` in the memory of a ps, under one of its `locks`. The operations
are in `parameter_operations`.
"""
