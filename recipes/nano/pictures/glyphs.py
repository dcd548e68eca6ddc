"""Write what pictures are composed of: glyphs of fonts and short sentences.

    python -m recipes.nano.pictures.glyphs --fonts DIR... --sentences DATA/train

The file has about 5 MB and is all that training needs besides this tree: no font and no Pillow.
Fonts are faces of the families below; those of `HELD_OUT` are for evaluation alone. Sentences are
of Tatoeba, at most eight words; every 50th is held out.

C printable ASCII characters.
"""

import argparse
import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from recipes.nano.pictures.compose import BASELINE, EM, LEFT, SIDE

FIRST, LAST = 32, 126
TRAINED = ("DejaVu", "Roboto", "Source Sans Pro", "Source Serif Pro", "Manrope", "Fredoka One")
HELD_OUT = ("STIXGeneral", "Caladea", "Hanken Grotesk")
SKIPPED = ("Math", "Display", "Variable", "Thin", "BlackItalic", "SemiBoldItalic", "MediumItalic")
MAX_WORDS, MAX_CHARS = 8, 48
HELD_OUT_EVERY = 50  # sentences
SENTENCES = 100_000


class Face(NamedTuple):
    name: str
    is_held_out: bool
    glyphs_C: NDArray[np.uint8]  # [C, SIDE, SIDE] coverage
    advance_C: NDArray[np.float32]  # of an em
    middle: float  # of the digits above the baseline, of an em


def find_faces(folders: list[Path]) -> list[Path]:
    """Return the font files of known families, one per face, in the order of their names."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted([*folder.rglob("*.ttf"), *folder.rglob("*.otf")]):
            if any(part in path.stem for part in SKIPPED):
                continue
            name = " ".join(ImageFont.truetype(path, EM).getname())  # type: ignore[arg-type]
            if name.startswith((*TRAINED, *HELD_OUT)):
                found.setdefault(name, path)
    return [found[name] for name in sorted(found)]


def draw_face(path: Path) -> Face:
    font = ImageFont.truetype(path, EM)
    family, style = font.getname()
    glyphs, advances = [], []
    for code in range(FIRST, LAST + 1):
        image = Image.new("L", (SIDE, SIDE))
        ImageDraw.Draw(image).text((LEFT, BASELINE), chr(code), fill=255, font=font, anchor="ls")
        glyphs.append(np.asarray(image))
        advances.append(font.getlength(chr(code)) / EM)
    top = font.getbbox("8", anchor="ls")[1]
    return Face(
        f"{family} {style}",
        str(family).startswith(HELD_OUT),
        np.stack(glyphs),
        np.array(advances, np.float32),
        -top / 2 / EM,
    )


def short_sentences(path: Path) -> list[str]:
    """Read the sentences of printable ASCII that have at most eight words, each once."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        texts = dict.fromkeys(line.strip() for line in lines)
    return [
        text
        for text in texts
        if text and len(text) <= MAX_CHARS and len(text.split()) <= MAX_WORDS
        if all(FIRST <= ord(c) <= LAST for c in text) and "  " not in text
    ]


def to_chars(texts: list[str]) -> NDArray[np.uint8]:
    """Return the numbers of characters, padded with 255."""
    chars = np.full((len(texts), MAX_CHARS), 255, np.uint8)
    for i, text in enumerate(texts):
        chars[i, : len(text)] = [ord(c) - FIRST for c in text]
    return chars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fonts", type=Path, nargs="+", required=True, help="folders of fonts")
    parser.add_argument("--sentences", type=Path, required=True, help="folder of Tatoeba's file")
    parser.add_argument("--out", type=Path, default=Path("out/pictures.npz"))
    options = parser.parse_args()
    faces = [draw_face(path) for path in find_faces(options.fonts)]
    rng = np.random.default_rng(5)
    texts = short_sentences(options.sentences / "tatoeba_en.txt.xz")
    texts = [texts[i] for i in rng.permutation(len(texts))[:SENTENCES]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        options.out,
        names=np.array([face.name for face in faces]),
        held_out=np.array([face.is_held_out for face in faces]),
        glyphs=np.stack([face.glyphs_C for face in faces]),
        advance=np.stack([face.advance_C for face in faces]),
        middle=np.array([face.middle for face in faces], np.float32),
        chars=to_chars(texts),
    )
    size = options.out.stat().st_size / 1e6
    held = [face.name for face in faces if face.is_held_out]
    print(f"{options.out}: {size:.1f} MB, {len(faces)} faces, {len(texts)} sentences; held out:")
    print(", ".join(held))


if __name__ == "__main__":
    main()
