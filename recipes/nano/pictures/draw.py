"""Draw Sudoku grids, lines of text and shapes by Pillow, as files that a person might show.

These are for evaluation: `compose.py`, which draws for training, shares no code with them. A
picture is drawn large, turned by up to 3 degrees, seen from aside, blurred, made noisy and saved as
JPEG, each by a random amount.
"""

from io import BytesIO
from math import cos, pi, sin
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from recipes.nano.pictures.compose import COLOURS, FORMS

MAX_TURN = 3.0  # degrees
MAX_TILT = 0.03  # of the side, by which a corner moves


def draw_sudoku(puzzle: str, font: Path, rng: Random) -> bytes:
    """Draw a puzzle of 81 digits, 0 for an empty cell; returns a JPEG file."""
    side = rng.randint(360, 1400)
    margin = side * rng.uniform(0.03, 0.12)
    cell = (side - 2 * margin) / 9
    paper, ink = _colours(rng)
    image = Image.new("RGB", (side, side), paper)
    pen = ImageDraw.Draw(image)
    thin = max(1, round(cell * rng.uniform(0.015, 0.04)))
    thick = round(thin * rng.uniform(1.5, 3)) + 1
    for i in range(10):
        width, at = (thick if i % 3 == 0 else thin), margin + i * cell
        pen.line((at, margin, at, side - margin), ink, width)
        pen.line((margin, at, side - margin, at), ink, width)
    face = ImageFont.truetype(font, round(cell * rng.uniform(0.55, 0.85)))
    for i, digit in enumerate(puzzle):
        if digit != "0":
            x, y = margin + (i % 9 + 0.5) * cell, margin + (i // 9 + 0.5) * cell
            pen.text((x, y), digit, ink, face, anchor="mm")
    return damage(image, paper, rng)


def draw_line(text: str, font: Path, rng: Random) -> bytes:
    """Draw a line of text; returns a JPEG file."""
    size = rng.randint(22, 90)
    face = ImageFont.truetype(font, size)
    left, top, right, bottom = face.getbbox(text, anchor="ls")
    margin = size * rng.uniform(0.3, 0.9)
    paper, ink = _colours(rng)
    shape = (round(right - left + 2 * margin), round(bottom - top + 2 * margin))
    image = Image.new("RGB", shape, paper)
    ImageDraw.Draw(image).text((margin - left, margin - top), text, ink, face, anchor="ls")
    # A long line cannot be turned by much without leaving its picture.
    limit = margin / shape[0] * 180 / pi
    return damage(image, paper, rng, max_turn=min(MAX_TURN, limit), max_tilt=0.0)


def draw_shapes(objects: list[tuple[int, int]], rng: Random) -> bytes:
    """Draw objects, given as form and colour, in ninths of a square; returns a JPEG file."""
    side = rng.randint(300, 1000)
    paper = tuple(rng.randint(215, 255) for _ in range(3))
    image = Image.new("RGB", (side, side), paper)
    pen = ImageDraw.Draw(image)
    for (form, colour), place in zip(objects, rng.sample(range(9), len(objects)), strict=True):
        size = side * rng.uniform(0.1, 0.15)
        room = side / 6 - size
        x = side * (place % 3 + 0.5) / 3 + rng.uniform(-room, room)
        y = side * (place // 3 + 0.5) / 3 + rng.uniform(-room, room)
        fill = tuple(round(255 * c) for c in list(COLOURS.values())[colour])
        if FORMS[form] == "circle":
            pen.ellipse((x - size, y - size, x + size, y + size), fill)
        else:
            pen.polygon([(x + size * a, y + size * b) for a, b in outline(FORMS[form])], fill)
    return damage(image, paper, rng)


def outline(form: str) -> list[tuple[float, float]]:
    """Return the corners of a form of radius 1."""
    if form == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if form == "triangle":
        return [(0, -1), (0.87, 0.5), (-0.87, 0.5)]
    if form == "star":
        turns = ((i * pi / 5, 0.9 if i % 2 == 0 else 0.4) for i in range(10))
        return [(r * sin(t), -r * cos(t)) for t, r in turns]
    w = 0.3
    quarter = [(-w, -1.0), (w, -1.0), (w, -w), (1.0, -w), (1.0, w), (w, w)]
    return [*quarter, *((-a, -b) for a, b in quarter)]


def damage(
    image: Image.Image,
    paper: tuple[int, ...],
    rng: Random,
    *,
    max_turn: float = MAX_TURN,
    max_tilt: float = MAX_TILT,
) -> bytes:
    """Turn, tilt, blur and add noise; returns a JPEG file."""
    turn = rng.uniform(-max_turn, max_turn)
    image = image.rotate(turn, Image.Resampling.BICUBIC, fillcolor=paper)  # type: ignore[arg-type]
    width, height = image.size
    corners = [(0, 0), (0, height), (width, height), (width, 0)]
    moved = [
        value + rng.uniform(-max_tilt, max_tilt) * side
        for corner in corners
        for value, side in zip(corner, image.size, strict=True)
    ]
    if max_tilt:
        image = image.transform(
            image.size, Image.Transform.QUAD, moved, Image.Resampling.BICUBIC, fillcolor=paper
        )  # type: ignore[arg-type]
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.0018) * min(image.size)))
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 1, (height, width, 3))
    values = np.asarray(image) + rng.uniform(0, 10) * noise
    file = BytesIO()
    whole = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    whole.save(file, "JPEG", quality=rng.randint(45, 95))
    return file.getvalue()


def _colours(rng: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the colours of paper and ink; a tenth are light on dark."""
    paper = tuple(rng.randint(205, 255) for _ in range(3))
    ink = tuple(rng.randint(0, 90) for _ in range(3))
    return (ink, paper) if rng.random() < 0.1 else (paper, ink)
