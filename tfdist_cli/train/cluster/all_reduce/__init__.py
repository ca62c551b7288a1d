"""All-reduce over direct TCP connections: each task sums one part of the tensor for all tasks.

A tensor of n numbers is split into N parts, one per task. Each task sends every other task that task's part, sums the
parts that it receives, and sends the sum to all: a reduce-scatter and an all-gather. A task sends and receives
2·n·(N − 1)/N numbers, in two messages per other task. All tasks get bitwise equal sums, since each part is summed once.

Two tasks send each other all numbers, and both add them: as many bytes in one message instead of two. The sums are
bitwise equal, since a + b is b + a. Several tensors need not be packed for that, nor the sums be split.

The connection of a task that exits is closed. A stopped task keeps its connection open: a task that waits for it longer
than two seconds probes it regularly, and fails if it does not answer for ten seconds.

Of a large table a step changes only some rows. These are gathered instead: each task sends its rows with their numbers
to all others. How many they are differs from task to task, so each message says it.

TensorFlow's collectives copy the data to protobuf messages and back, several times in each direction, and pass it
between threads. Here it goes from the tensor's memory to the socket and back. To tasks on the same host only the place
of the data is sent, see `shared_memory`: a task writes it there once, and the others add to it what they have.
"""
