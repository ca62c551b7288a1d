"""Files of many kinds, with a number in each row."""

import keras
import numpy as np
import pyarrow
import pyarrow.parquet
import tensorflow as tf


def numbered_files(kind, folder):
    """Writes files of a kind, with a number in each row or image; returns the numbers."""
    folder.mkdir()
    for number in range(4):
        rows = [3 * number + each for each in range(3)]
        if kind == "CSV":
            (folder / f"{number}.csv").write_text("a,b,y\n" + "".join(f"0.5,1.5,{row}\n" for row in rows))
        elif kind == "Lines of text":
            (folder / f"{number}.txt").write_text("".join(f"{row}\tsome words\n" for row in rows))
        elif kind == "TFRecord":
            with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
                for row in rows:
                    x = tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 1.5]))
                    y = tf.train.Feature(int64_list=tf.train.Int64List(value=[row]))
                    features = tf.train.Features(feature={"x": x, "y": y})
                    writer.write(tf.train.Example(features=features).SerializeToString())
        elif kind == "Parquet":
            table = pyarrow.table({"a": [0.5] * 3, "b": [1.5] * 3, "y": rows})
            pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=2)
    if kind == "Folders of images":
        for name in ("cat", "dog"):
            (folder / "images" / name).mkdir(parents=True)
            for number in range(6):
                keras.utils.save_img(folder / "images" / name / f"{number}.png", np.zeros((8, 8, 3)))
        return [0] * 6 + [1] * 6
    return list(range(12))
