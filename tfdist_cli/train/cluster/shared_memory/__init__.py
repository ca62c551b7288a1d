"""Memory that tasks of the same host share: what they send each other there is copied once, and crosses no socket.

`memory` has the files that the memory is, and opens those of another task. Mirrored workers sum in it, see
`all_reduce`. Between workers and ps, `tensors` sends large tensors in `buffers`, each of which is used again when its
reader has let go of it.

In asynchronous updates workers change the `parameters` in the memory of a ps, under one of its `locks`. The operations
are in `parameter_operations`. Outside of a run, the variables have copies of what is `stored` there.

The folder `lockstep` has synchronous updates. Workers make most of them in the memory of the ps, each of them a part,
see `lockstep/memory`. The ps make the others, see `lockstep/rounds`: each task shows the others its arrays on a board,
see `boards`, and short messages in `pipes` say that there are new ones.
"""
