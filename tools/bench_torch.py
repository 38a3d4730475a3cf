"""torchvision's pipeline for bench_loaders.py, in another process: torch and TensorFlow share none.

Reads lines of JSON from standard input: first the settings, then seconds, again and again. For each
of these it takes batches that long, and prints the images per CPU second. Without workers: they
would be other processes' CPU seconds, and cost more.
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
        """Takes the files, Pillow's name of their channels, and what is done to each."""
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
      files: of the images.
      channels: 1 or 3.
      degrees: that images are turned by at most, as they are; None for random windows of 224x224.
      mean: of all channels.
      std: likewise.
      batch_size: in images.
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
    """Answers each line."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)  # more would spin while they wait for each other
    stream = batches(**settings)
    for line in sys.stdin:
        cpu, ends, num_batches = time.process_time(), time.monotonic() + json.loads(line), 0
        while time.monotonic() < ends:
            next(stream)
            num_batches += 1
        print(num_batches * settings["batch_size"] / (time.process_time() - cpu), flush=True)


if __name__ == "__main__":
    main()
