"""torchvision's pipeline for bench_loaders.py, in its own process, without TensorFlow.

It reads lines of JSON from standard input. The first line has the settings, and each further line a
number of seconds. For each number, it draws batches for that long, and prints the images per CPU
second. It uses no worker processes, because they would need more CPU time, and in processes that
are not measured.
"""

import json
import sys
import time

import PIL.Image
import torch.utils.data
from torchvision import transforms


class Images(torch.utils.data.Dataset):
    """Image files, decoded one by one."""

    def __init__(self, files: list[str], mode: str, transform):
        """Takes the files, a Pillow mode, and the transform of each image."""
        self._files, self._mode, self._transform = files, mode, transform

    def __len__(self):
        """Returns the number of files."""
        return len(self._files)

    def __getitem__(self, index):
        """Returns an image and a label."""
        with PIL.Image.open(self._files[index]) as image:
            return self._transform(image.convert(self._mode)), 0


def batches(files, *, channels, degrees, mean, std, batch_size):
    """Yields batches without end.

    Args:
      files: the image files.
      channels: 1 or 3.
      degrees: the largest random rotation; None for random crops of 224x224.
      mean: the mean of every channel.
      std: the standard deviation of every channel.
      batch_size: the images of a batch.
    """
    steps = [transforms.RandomRotation(degrees)] if degrees else []
    if degrees is None:
        steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize([mean] * channels, [std] * channels)]
    images = Images(files, "L" if channels == 1 else "RGB", transforms.Compose(steps))
    while True:
        yield from torch.utils.data.DataLoader(
            images, batch_size=batch_size, shuffle=True, drop_last=True
        )


def main() -> None:
    """Answers each line of standard input."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)  # several threads would spin while they wait for each other
    stream = batches(**settings)
    for line in sys.stdin:
        cpu, ends, num_batches = time.process_time(), time.monotonic() + json.loads(line), 0
        while time.monotonic() < ends:
            next(stream)
            num_batches += 1
        print(num_batches * settings["batch_size"] / (time.process_time() - cpu), flush=True)


if __name__ == "__main__":
    main()
