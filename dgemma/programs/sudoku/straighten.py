"""Find the grid of a Sudoku in a picture, and straighten it.

The frame is connected ink that spans much of the picture and has ten lines each way. Its four sides
give the corners, and a perspective transform puts each cell on one soft token, with a margin of one
all around.

H/W pixels, N points of a side.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageFilter
from PIL.Image import Image as PILImage

from dgemma.images import Image, decoding

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

SHEET = 11  # soft tokens of a side: nine cells, and a margin of one
BUDGET = 140  # soft tokens, which hold 11 by 11
SIDE = 704  # pixels of a straightened picture, before it is fitted to the budget
SEARCHED = 640  # pixels of the longer side of the picture that is searched
MIN_SPAN = 0.35  # of the picture's sides, that a frame takes
MAX_RATIO = 1.6  # of opposite or neighbouring sides of a frame
MIN_CONTRAST = 6.0  # levels that ink is darker than its surroundings
MIN_LINES = 2.0  # times as much ink on the lines of a grid as beside them


def sheet_of(image: Image) -> Image:
    """Return the straightened grid of a picture, or the picture on a square; decodes it."""
    with decoding:
        pixels = image.decoded()
        corners_42 = find_frame(pixels)
        if corners_42 is not None:
            straight = straightened(pixels, corners_42)
            return replace(image, source=straight, tokens=BUDGET)
    return replace(image.squared(), tokens=BUDGET)


def straightened(image: PILImage, corners_42: Array) -> PILImage:
    """Return a square picture with these corners of a grid, clockwise, a margin from its own."""
    margin = SIDE / SHEET
    low, high = margin, SIDE - margin
    target = np.array([(low, low), (high, low), (high, high), (low, high)])
    longest = np.linalg.norm(corners_42 - np.roll(corners_42, 1, 0), axis=1).max()
    scale = min(1.0, 1.25 * (high - low) / longest)
    if scale < 1:
        size = tuple(max(1, round(side * scale)) for side in image.size)
        corners_42 = corners_42 * np.array(size) / np.array(image.size)
        image = image.resize(size, Pillow.Resampling.BOX)
    pixels = np.asarray(image)
    fill = tuple(int(level) for level in np.median(pixels.reshape(-1, 3), axis=0))
    return image.transform(
        (SIDE, SIDE),
        Pillow.Transform.PERSPECTIVE,
        perspective(target, corners_42),
        Pillow.Resampling.BICUBIC,
        fillcolor=fill,
    )


def perspective(source_42: Array, target_42: Array) -> list[float]:
    """Return a, b, ... h of (ax + by + c) / (gx + hy + 1) and (dx + ey + f) / (gx + hy + 1)."""
    rows, values = [], []
    for (x, y), (u, v) in zip(source_42, target_42, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    return [float(x) for x in np.linalg.solve(np.array(rows), np.array(values))]


def find_frame(image: PILImage) -> Array | None:
    """Return the corners of the grid's frame, clockwise from the upper left; None if none is."""
    small = image.convert("L")
    small.thumbnail((SEARCHED, SEARCHED), Pillow.Resampling.BOX)
    small = small.filter(ImageFilter.BoxBlur(1))
    around = small.filter(ImageFilter.BoxBlur(SEARCHED // 40))
    darker = np.asarray(around, float) - np.asarray(small, float)
    best, most = None, MIN_LINES
    for contrast in (darker, -darker):
        ink = contrast > max(MIN_CONTRAST, 0.3 * float(np.percentile(contrast, 98)))
        for mask in components(ink):
            corners = frame_corners(mask)
            if corners is None:
                continue
            lines = line_evidence(contrast, corners)
            if lines > most:
                best, most = corners, lines
    if best is None:
        return None
    found: Array = (best + 0.5) * np.array(image.size) / np.array(small.size)
    return found


def components(ink_HW: Mask) -> Iterator[Mask]:
    """Yield the connected parts that span much of the picture, at most three."""
    height, width = ink_HW.shape
    edges = np.diff(np.pad(ink_HW, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, begin = np.nonzero(edges == 1)
    end = np.nonzero(edges == -1)[1]
    label = _connected(row, begin, end, width)
    low, high = np.full((2, len(row), 2), width + height)
    high -= 2 * (width + height)
    np.minimum.at(low, label, np.stack([begin, row], 1))
    np.maximum.at(high, label, np.stack([end, row + 1], 1))
    spans = (high - low >= MIN_SPAN * np.array([width, height])).all(1)
    size = np.bincount(label, end - begin, len(row)) * spans
    for number in np.argsort(-size)[:3]:
        own = label == number
        if not spans[number]:
            return
        change = np.zeros((height, width + 1), np.int64)
        np.add.at(change, (row[own], begin[own]), 1)
        np.add.at(change, (row[own], end[own]), -1)
        yield change.cumsum(1)[:, :-1] > 0


def _connected(
    row: NDArray[np.intp], begin: NDArray[np.intp], end: NDArray[np.intp], width: int
) -> NDArray[np.intp]:
    """Return the least number of the runs of pixels that each run is connected to."""
    stride = width + 2
    low = np.searchsorted(row * stride + end, (row + 1) * stride + begin, "left")
    high = np.searchsorted(row * stride + begin, (row + 1) * stride + end, "right")
    count = np.maximum(high - low, 0)
    one = np.repeat(np.arange(len(row)), count)
    other = np.arange(len(one)) - np.repeat(count.cumsum() - count, count) + np.repeat(low, count)
    label = np.arange(len(row))
    while True:
        least = np.minimum(label[one], label[other])
        new = label.copy()
        for index in (one, other, label[one], label[other]):
            np.minimum.at(new, index, least)
        new = new[new]
        if (new == label).all():
            return label
        label = new


def frame_corners(mask_HW: Mask) -> Array | None:
    """Return where lines along the four sides of a component meet; None if it is not a square."""
    y, x = np.nonzero(mask_HW)
    points = np.stack([x, y], 1)
    along, across = x + y, x - y
    extreme = points[[along.argmin(), across.argmax(), along.argmax(), across.argmin()]]
    if not _is_squarish(extreme.astype(float)):
        return None
    height, width = mask_HW.shape
    outer = [  # of columns or rows: above, right, below, left
        mask_HW.argmax(0),
        width - 1 - mask_HW[:, ::-1].argmax(1),
        height - 1 - mask_HW[::-1].argmax(0),
        mask_HW.argmax(1),
    ]
    lines = []
    for number, place in enumerate(outer):
        axis = number % 2
        ends = sorted((extreme[number][axis], extreme[(number + 1) % 4][axis]))
        slope, start = fit_line(np.arange(ends[0], ends[1] + 1), place[ends[0] : ends[1] + 1])
        lines.append((-slope, 1.0, start) if axis == 0 else (1.0, -slope, start))
    corners = []
    for one, other in zip((lines[-1], *lines[:-1]), lines, strict=True):
        both = np.array([one, other])
        corners.append(np.linalg.solve(both[:, :2], both[:, 2]))
    return np.array(corners) if _is_squarish(np.array(corners)) else None


def _is_squarish(corners_42: Array) -> bool:
    """Tell if a convex shape has sides of about one length."""
    sides = np.roll(corners_42, -1, 0) - corners_42
    turned = np.roll(sides, -1, 0)
    is_convex = (sides[:, 0] * turned[:, 1] > sides[:, 1] * turned[:, 0]).all()
    length = np.linalg.norm(sides, axis=1)
    return bool(is_convex and length.max() <= MAX_RATIO * length.min())


def fit_line(x_N: NDArray[np.intp], y_N: NDArray[np.intp]) -> tuple[float, float]:
    """Return slope and start of a line through most of the points."""
    x, y = x_N.astype(float), y_N.astype(float)
    skip = len(x) // 20
    x, y = x[skip : len(x) - skip], y[skip : len(y) - skip]
    middle = float(np.median(y))
    weight = 1 / (1 + np.abs(y - middle))
    for _ in range(6):
        slope, start = np.polyfit(x, y, 1, w=weight)
        off = np.abs(y - slope * x - start)
        weight = 1 / (1 + (off / max(0.5, float(np.median(off)))) ** 2)
    return float(slope), float(start)


def line_evidence(contrast_HW: Array, corners_42: Array) -> float:
    """Return how much more ink is on the twenty lines of a grid than a quarter of a cell away."""
    height, width = contrast_HW.shape
    unit = np.array([(0, 0), (9, 0), (9, 9), (0, 9)], float)
    a, b, c, d, e, f, g, h = perspective(unit, corners_42)
    along = np.arange(0.1, 9, 0.2)
    total = np.zeros(2)
    for number, nearby in enumerate((0.0, 0.25)):
        at = np.arange(10) + np.where(np.arange(10) < 9, nearby, -nearby)
        reach = max(1, round(0.06 * float(np.linalg.norm(corners_42[1] - corners_42[0])) / 9))
        for swap in (False, True):
            u, v = np.meshgrid(at, along, indexing="ij")
            u, v = (v, u) if swap else (u, v)
            w = g * u + h * v + 1
            x, y = (a * u + b * v + c) / w, (d * u + e * v + f) / w
            steps = range(-reach, reach + 1)
            near = np.stack([
                contrast_HW[
                    (y + (s if swap else 0)).round().astype(int).clip(0, height - 1),
                    (x + (0 if swap else s)).round().astype(int).clip(0, width - 1),
                ]
                for s in steps
            ])  # fmt: skip
            total[number] += np.median(near.max(0).mean(1).clip(min=0))
    return float(total[0] / max(total[1], 1.0))
