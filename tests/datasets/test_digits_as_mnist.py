"""The digits in MNIST's format are read like MNIST, and test digits are never trained."""

import numpy as np

from tfdist_cli.datasets import digits, digits_as_mnist, mnist


def test_the_files_are_read_as_mnist(tmp_path):
    digits_as_mnist.write(tmp_path / "new", train=70, test=40)
    x, y = mnist.load(tmp_path / "new", "train", validation=20)
    assert (x.shape, x.dtype, y.shape) == ((50, 784), np.float32, (50,))
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert set(y.tolist()) <= set(range(10))
    assert len(mnist.load(tmp_path / "new", "test")[1]) == 40


def test_an_image_is_an_enlarged_digit_of_its_split(tmp_path):
    digits_as_mnist.write(tmp_path, train=30, test=30)
    small, labels = digits.load("test")
    x, y = mnist.load(tmp_path, "test")
    for image, label in zip(x.reshape(-1, 28, 28), y, strict=True):
        # The corners of the 20 × 20 pixels are those of the 8 × 8.
        ends = [image[top : top + 20, left : left + 20][::19, ::19] for top in range(9) for left in range(9)]
        originals = small[labels == label].reshape(-1, 8, 8)[:, ::7, ::7]
        assert any(np.abs(originals - end).max(axis=(1, 2)).min() < 1 / 255 for end in ends)


def test_the_images_are_the_same_each_time(tmp_path):
    for name in ("one", "two"):
        digits_as_mnist.write(tmp_path / name, train=10, test=10)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 4
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
