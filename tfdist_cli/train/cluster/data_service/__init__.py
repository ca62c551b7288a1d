"""`tf.data`'s service: data workers prepare the batches, and each pass has each example once.

The dispatcher distributes the source of the data (elements, or names of files) to the data workers on request; they
map, shuffle and batch. A pass ends when all its examples have been read; then the next one starts.

A data worker leaves a training that runs in three steps, so that no example is lost or comes twice:

1. It asks the chief, which lets it go if another data worker stays (`membership`).
2. It takes no more examples. Those that it has pass through its pipeline as at the end of a pass, and the chief reads
   them (`server`).
3. It tells the chief, which lists it no longer in the passes that follow (`filter_program`), and exits.
"""
