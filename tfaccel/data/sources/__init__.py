"""Sources of images: each function takes a place on disk and returns one kind of source.

  class_folders("training")               root/<class>/<image>
  image_list("train.csv")                 a CSV file, or lines of "path label"
  tfrecord("train-*")                     TFRecord shards of tf.train.Example
  webdataset("train-*.tar")               tar shards of 000000.jpg, 000000.cls
  array_record("train.array_record-*")    ArrayRecord files of tf.train.Example
  tfds("flowers/3.0.1", "train")          a dataset as TFDS has written it
  random_access(mine)                     any object with a length and items, such as Grain's
  arrow("cats/train")                     Arrow or Parquet files, such as those of Hugging Face
  image_pairs("blurry", "sharp")          inputs and targets in matching sub-folders
  arrays("images.npy", "labels.npy")      decoded images, in memory or mapped
  npy_folders("training")                 root/<class>/<one image>.npy, loaded into memory

The first nine return an `ImageSource`, ranges of bytes in files. The last two return an
`ArraySource`. Two functions divide a source into one for training and one for validation:

  split(source, 0.2)                      a fifth of each class for validation
  fold(source, 0, num_folds=5)            the first of five folds for validation

One chooses which classes are used, and in which order they are numbered:

  select_classes(source, ["dog", "cat"])  the dogs are 0 and the cats 1

Needs no TensorFlow.
"""

from tfaccel.data.sources.array_record import array_record
from tfaccel.data.sources.arrays import arrays, npy_folders
from tfaccel.data.sources.arrow import arrow
from tfaccel.data.sources.classes import select_classes
from tfaccel.data.sources.folders import class_folders
from tfaccel.data.sources.image_list import image_list
from tfaccel.data.sources.pairs import image_pairs
from tfaccel.data.sources.random_access import random_access
from tfaccel.data.sources.tfds import tfds
from tfaccel.data.sources.tfrecord import tfrecord
from tfaccel.data.sources.webdataset import webdataset
from tfaccel.data.split import fold, split

__all__ = [
    "array_record",
    "arrays",
    "arrow",
    "class_folders",
    "fold",
    "image_list",
    "image_pairs",
    "npy_folders",
    "random_access",
    "select_classes",
    "split",
    "tfds",
    "tfrecord",
    "webdataset",
]
