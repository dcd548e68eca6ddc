"""Frames against transformers' video processor with the real torchvision, at ten sizes.

python -m tests.images.check_torchvision

torchvision belongs to one PyTorch. Beside one built for CPUs its compiled part cannot be loaded;
then two of its operators, which nothing here calls, are declared so that its Python part can be.
"""

from contextlib import suppress

import numpy as np
import torch
from torch.library import Library

OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
SIZES = [(64, 48), (33, 17), (900, 30), (180, 320), (320, 180), (528, 288), (640, 480)]
SIZES += [(1280, 720), (720, 1280), (1920, 1080)]


def main() -> None:
    library = Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # it is there
            library.define(name + OPERATOR)
    import torchvision
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    from dgemma.images import Image
    from dgemma.video import Video
    from tests.images.test_pixels import RELEASED
    from tests.images.tiny_tower import photo

    processor = Gemma4VideoProcessor()
    for size in SIZES:
        frames = [photo(*size, seed=seed) for seed in range(3)]
        stacked = np.stack([np.array(frame) for frame in frames])
        theirs = processor(videos=[stacked], do_sample_frames=False, return_tensors="pt")
        clip = Video([Image(frame) for frame in frames]).prepare(RELEASED)
        for picture, expected in zip(clip.frames, theirs["pixel_values_videos"], strict=True):
            patches = torch.from_numpy(picture.patches())
            assert torch.equal(patches, expected[: len(patches)]), size
        print(f"{size[0]}x{size[1]}: equal, {clip.frames[0].num_tokens} tokens a frame")
    print(f"torchvision {torchvision.__version__}, {len(SIZES)} sizes")


if __name__ == "__main__":
    main()
