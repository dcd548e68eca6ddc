"""Compose pictures on the device: Sudoku grids, lines of text and coloured shapes, with damage.

Every pixel is mapped back to the grid or the line, and samples a glyph there; so a batch is a few
dozen operations without a loop over its pictures. `draw.py` draws the same things by Pillow, for
evaluation and tests.

B pictures, H/W pixels, N = H * W, K things that a picture shows, L characters, M objects.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EM, SIDE, LEFT, BASELINE = 48, 64, 8, 46  # pixels of a glyph's square, and its origin in it
NUM_CHARS = 95
NO_CHAR = NUM_CHARS
FORMS = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (0.85, 0.12, 0.12),
    "green": (0.10, 0.60, 0.20),
    "blue": (0.12, 0.25, 0.85),
    "yellow": (0.95, 0.85, 0.10),
    "orange": (0.98, 0.52, 0.05),
    "purple": (0.50, 0.15, 0.65),
    "black": (0.05, 0.05, 0.05),
}
NUM_KINDS = NUM_CHARS + 1 + len(FORMS) * len(COLOURS)  # characters, nothing, forms by colour
CELL = 32  # pixels of a soft token's side
SHEET = 11  # soft tokens of a side of a straightened grid: nine, and a margin
BLURS = (1, 3, 5)  # pixels of the box that a glyph is averaged over, before it is sampled


class Pictures(NamedTuple):
    """Composed pictures, what each pixel shows, and the middles of what they show."""

    pixels: Tensor  # [B, H, W, 3] in [0, 1]
    kind: Tensor  # [B, H, W] a character, NO_CHAR, or a coloured form
    middle: Tensor  # [B, K, 2] x and y in pixels: of cells, characters or objects


@dataclass(frozen=True, slots=True)
class Atlas:
    """Glyphs of all faces, at several sharpnesses, on a device."""

    levels: Tensor  # uint8 [level, F * C, SIDE, SIDE], flat
    advance: Tensor  # [F, C]
    middle: Tensor  # [F]

    @classmethod
    def of(cls, glyphs: Tensor, advance: Tensor, middle: Tensor) -> "Atlas":
        flat = glyphs.flatten(0, 1)[:, None].float()
        levels = [F.avg_pool2d(flat, k, 1, k // 2).round().to(torch.uint8) for k in BLURS]
        return cls(torch.stack(levels).flatten(), advance, middle)

    def sample(self, level: Tensor, glyph: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return coverage in [0, 1] at pixel coordinates of glyph squares; 0 outside of them."""
        count = self.advance.numel()
        inside = (x >= 0) & (x < SIDE - 1) & (y >= 0) & (y < SIDE - 1)
        x, y = x.clamp(0, SIDE - 1.01), y.clamp(0, SIDE - 1.01)
        left, top = x.long(), y.long()
        base = ((level * count + glyph) * SIDE + top) * SIDE + left
        dx, dy = x - left, y - top
        rows = [
            self.levels[base + down].float() * (1 - dx) + self.levels[base + down + 1].float() * dx
            for down in (0, SIDE)
        ]
        return torch.where(inside, rows[0] * (1 - dy) + rows[1] * dy, 0) / 255


@dataclass(frozen=True, slots=True)
class Composer:
    """Draws batches of pictures from a generator's random numbers."""

    atlas: Atlas
    generator: torch.Generator
    damage: float = 1.0  # strength of rotation, noise and blur

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def uniform(self, count: int, low: float, high: float, *shape: int) -> Tensor:
        size = (count, *(shape or (1,)))
        return low + (high - low) * torch.rand(size, generator=self.generator, device=self.device)

    def chance(self, count: int, p: float) -> Tensor:
        return self.uniform(count, 0, 1) < p

    def points(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return x and y of the pixels' centres, [1, N]."""
        y, x = torch.meshgrid(
            torch.arange(height, device=self.device) + 0.5,
            torch.arange(width, device=self.device) + 0.5,
            indexing="ij",
        )
        return x.reshape(1, -1), y.reshape(1, -1)

    # --- Sudoku

    def sudoku(self, digits_B81: Tensor, face_B: Tensor) -> Pictures:
        """Draw straightened grids, a soft token a cell; digit 0 is an empty cell."""
        count, side = len(digits_B81), CELL * SHEET
        gx, gy, cell = self._grid_points(count, side)
        column, row = gx.floor().clamp(0, 8).long(), gy.floor().clamp(0, 8).long()
        is_inside = (gx >= 0) & (gx < 9) & (gy >= 0) & (gy < 9)
        number = row * 9 + column
        digit = digits_B81.gather(1, number)
        size = self.uniform(count, 0.5, 0.95)  # em of a cell
        jitter = self.uniform(count, -0.05, 0.05, 81, 2) + self.uniform(count, -0.06, 0.06, 1, 2)
        jx, jy = jitter[..., 0].gather(1, number), jitter[..., 1].gather(1, number)
        glyph = face_B[:, None] * NUM_CHARS + digit + 16  # "0" is the 16th
        fx, fy = gx - column - 0.5 - jx, gy - row - 0.5 - jy
        x = LEFT + EM * (self.atlas.advance.flatten()[glyph] / 2 + fx / size)
        y = BASELINE + EM * (fy / size - self.atlas.middle[face_B][:, None])
        ink = self.atlas.sample(self._level(size * cell), glyph, x, y)
        ink = ink * (is_inside & (digit > 0))
        lines = self._lines(gx, gy, cell)
        paper, dark = self._two_colours(count)
        line_colour = dark + self.uniform(count, 0, 0.6) * (paper - dark)
        shade = self._shade(count, row, column, digit) * is_inside
        image = paper[:, None] * (1 - shade[..., None])
        around = torch.where(self.chance(count, 0.3), self.uniform(count, 0, 1, 3), paper)
        outside = ~is_inside & (lines < 0.5)
        image = torch.where(outside[..., None], around[:, None], image)
        image = image + lines[..., None] * (line_colour[:, None] - image)
        image = image + ink[..., None] * (dark[:, None] - image)
        cells = torch.arange(81, device=self.device)
        middle = torch.stack([cells % 9 + 1.5, cells // 9 + 1.5], 1) * CELL
        return Pictures(
            self._damaged(image.view(count, side, side, 3)),
            torch.where(is_inside, digit + 16, NO_CHAR).view(count, side, side),
            middle.expand(count, -1, -1),
        )

    def _grid_points(self, count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Map pixels to grid coordinates, 0 to 9, nearly straight; returns a cell's pixels too."""
        x, y = self.points(side, side)
        u, v = x / side * 2 - 1, y / side * 2 - 1
        shift = self.uniform(count, -1, 1, 2) * 0.015 * self.damage
        u, v = u - shift[:, :1], v - shift[:, 1:]
        angle = self.uniform(count, -1, 1) * 0.015 * self.damage * self.chance(count, 0.7)
        tilt = self.uniform(count, -0.015, 0.015, 2) * self.damage * self.chance(count, 0.5)
        scale = 9 / SHEET * (1 + self.uniform(count, -0.02, 0.02) * self.damage)
        cos, sin = angle.cos(), angle.sin()
        a, b = cos * u + sin * v, -sin * u + cos * v
        a = a + self.uniform(count, -0.015, 0.015) * self.damage * b
        w = 1 + tilt[:, :1] * a + tilt[:, 1:] * b
        stretch = 1 + self.uniform(count, -0.015, 0.015) * self.damage
        gx, gy = a / (w * scale) * 4.5 + 4.5, b * stretch / (w * scale) * 4.5 + 4.5
        return gx, gy, scale * side / 9

    def _lines(self, gx: Tensor, gy: Tensor, cell: Tensor) -> Tensor:
        """Return the coverage of a grid's thin and thick lines."""
        count = len(gx)
        thin = self.uniform(count, 0.012, 0.05)
        thick = thin * self.uniform(count, 1, 3)
        thin = thin * ~self.chance(count, 0.06)
        found = torch.zeros_like(gx)
        for along, across in ((gx, gy), (gy, gx)):
            line = along.round().clamp(0, 9)
            half = torch.where(line % 3 == 0, thick, thin) / 2
            sharp = (half - (along - line).abs()) * cell + 0.5
            cover = sharp.clamp(0, 1) * (2 * half * cell).clamp(max=1)
            within = (across > -thick / 2) & (across < 9 + thick / 2)
            found = torch.maximum(found, cover * within)
        return found

    def _shade(self, count: int, row: Tensor, column: Tensor, digit: Tensor) -> Tensor:
        """Darken every second box, or the cells with a digit, of some pictures."""
        boxes = ((row // 3 + column // 3) % 2 == 1) & self.chance(count, 0.2)
        given = (digit > 0) & self.chance(count, 0.1)
        return (boxes | given) * self.uniform(count, 0, 0.2)

    # --- lines of text

    def line(self, chars_BL: Tensor, face_B: Tensor, height: int, width: int) -> Pictures:
        """Draw lines of text; 255 ends a line."""
        count, used = len(chars_BL), chars_BL < NUM_CHARS
        chars = torch.where(used, chars_BL, 0).long()
        advance = self.atlas.advance[face_B].gather(1, chars) * used
        advance = advance * (1 + self.uniform(count, 0, 0.06) * self.chance(count, 0.3))
        ends = advance.cumsum(1)
        total = ends[:, -1:].clamp(min=0.5)
        em = width * self.uniform(count, 0.78, 0.985) / total
        em = torch.minimum(em, height * self.uniform(count, 0.36, 0.82))
        tx, ty, middle = self._line_points(ends - advance / 2, height, width, em, total)
        place = torch.searchsorted(ends.contiguous(), tx.contiguous(), right=True)
        place = place.clamp(max=chars.shape[1] - 1)
        starts = ends - advance
        within = (tx - starts.gather(1, place)) / advance.gather(1, place).clamp(min=0.05)
        beside = (place + torch.where(within < 0.5, -1, 1)).clamp(0, chars.shape[1] - 1)
        ink = torch.zeros_like(tx)
        for number in (place, beside):
            glyph = face_B[:, None] * NUM_CHARS + chars.gather(1, number)
            x = LEFT + EM * (tx - starts.gather(1, number))
            one = self.atlas.sample(self._level(em), glyph, x, BASELINE + EM * ty)
            ink = torch.maximum(ink, one * used.gather(1, number))
        paper, dark = self._two_colours(count)
        image = paper[:, None] + ink[..., None] * (dark - paper)[:, None]
        is_text = (tx >= 0) & (tx < total) & (ty > -0.85) & (ty < 0.3)
        shape = (count, height, width)
        return Pictures(
            self._damaged(image.view(*shape, 3)),
            torch.where(is_text, chars.gather(1, place), NO_CHAR).view(shape),
            middle,
        )

    def _line_points(
        self, middle_BL: Tensor, height: int, width: int, em: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map pixels to ems from the line's origin, and middles of letters to pixels."""
        count = len(middle_BL)
        x, y = self.points(height, width)
        free = (width - total * em).clamp(min=0)
        at_left = self.chance(count, 0.3)
        left = free * torch.where(at_left, 0.05, self.uniform(count, 0.15, 0.85))
        top, bottom = 0.92 * em, height - 0.3 * em
        base = top + (bottom - top).clamp(min=0) * self.uniform(count, 0.15, 0.85)
        limit = (0.3 * (height - 1.2 * em).clamp(min=0) / (total * em)).clamp(max=0.055)
        angle = self.uniform(count, -1, 1) * limit * self.damage
        cos, sin = angle.cos(), angle.sin()
        cx, cy = left + total * em / 2, base - 0.35 * em
        a, b = x - cx, y - cy
        rx, ry = cos * a + sin * b + cx, -sin * a + cos * b + cy
        along = left + middle_BL * em - cx
        middle = torch.stack([cx + cos * along, cy + sin * along], 2)
        return (rx - left) / em, (ry - base) / em, middle

    # --- shapes

    def shapes(self, form_BM: Tensor, colour_BM: Tensor, height: int, width: int) -> Pictures:
        """Draw up to nine objects, each in a ninth of the picture; form -1 draws nothing."""
        count, most = form_BM.shape
        x, y = self.points(height, width)
        places = torch.rand((count, 9), generator=self.generator, device=self.device).argsort(1)
        table = torch.tensor(list(COLOURS.values()), device=self.device)
        light = self.uniform(count, 0.75, 1.0, 3)
        image = light[:, None].expand(count, height * width, 3)
        kind = torch.full((count, height * width), NO_CHAR, device=self.device)
        middles = []
        for k in range(most):
            form, place = form_BM[:, k : k + 1], places[:, k : k + 1]
            size = self.uniform(count, 0.09, 0.155) * min(height, width)
            cx = (place % 3 + 0.5) / 3 * width
            cy = (place // 3 + 0.5) / 3 * height
            cx = cx + (width / 6 - size) * self.uniform(count, -1, 1)
            cy = cy + (height / 6 - size) * self.uniform(count, -1, 1)
            middles.append(torch.cat([cx, cy], 1))
            angle = self.uniform(count, -0.25, 0.25)
            a, b = (x - cx) / size, (y - cy) / size
            a, b = angle.cos() * a + angle.sin() * b, -angle.sin() * a + angle.cos() * b
            cover = (distance(form, a, b) * -size + 0.5).clamp(0, 1) * (form >= 0)
            colour = table[colour_BM[:, k]] + self.uniform(count, -0.06, 0.06, 3)
            image = image + cover[..., None] * (colour[:, None] - image)
            number = NUM_CHARS + 1 + form * len(COLOURS) + colour_BM[:, k : k + 1]
            kind = torch.where(cover > 0.5, number, kind)
        shape = (count, height, width)
        return Pictures(
            self._damaged(image.clamp(0, 1).view(*shape, 3), colours=False),
            kind.view(shape),
            torch.stack(middles, 1),
        )

    # --- light and damage

    def _level(self, em: Tensor) -> Tensor:
        """Choose the sharpness of glyphs that are drawn with so many pixels an em."""
        return (em < 36).long() + (em < 20).long()

    def _two_colours(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw the colours of paper and ink; some pictures are light on dark."""
        paper = self.uniform(count, 0.62, 1.0) + self.uniform(count, -0.12, 0.05, 3)
        dark = self.uniform(count, 0.0, 0.3) + self.uniform(count, 0, 1, 3) * (
            0.35 * self.chance(count, 0.5)
        )
        swap = self.chance(count, 0.12)
        paper, dark = paper.clamp(0, 1), dark.clamp(0, 1)
        return torch.where(swap, dark, paper), torch.where(swap, paper, dark)

    def _damaged(self, image: Tensor, *, colours: bool = True) -> Tensor:
        """Shade, blur, add noise and blocks; `colours`: change contrast too."""
        count, height, width, _ = image.shape
        x, y = self.points(height, width)
        slope = self.uniform(count, -0.2, 0.2, 2) * self.damage
        light = 1 + slope[:, :1] * (x / width - 0.5) * 2 + slope[:, 1:] * (y / height - 0.5) * 2
        image = image * light.view(count, height, width, 1)
        if colours:
            gamma = self.uniform(count, 0.7, 1.4)[..., None, None]
            image = image.clamp(1e-3, 1) ** gamma
        planes = image.permute(0, 3, 1, 2)
        soft = F.avg_pool2d(planes, 3, 1, 1, count_include_pad=False)
        softer = F.avg_pool2d(soft, 3, 1, 1, count_include_pad=False)
        amount = self.uniform(count, -1.0, 1.6)[..., None, None].clamp(0, 1.5) * self.damage
        planes = planes + amount.clamp(max=1) * (soft - planes)
        planes = planes + (amount - 1).clamp(min=0) * (softer - planes)
        planes = self._blocks(planes)
        noise = self.uniform(count, -0.03, 0.07)[..., None, None].clamp(min=0) * self.damage
        planes = planes + noise * torch.randn(
            planes.shape, generator=self.generator, device=self.device
        )
        levels = (planes.clamp(0, 1) * 255).round() / 255
        return levels.permute(0, 2, 3, 1)

    def _blocks(self, planes: Tensor) -> Tensor:
        """Round the cosine transform of 8 by 8 blocks, as JPEG does, in half of the pictures."""
        count = len(planes)
        k = torch.arange(8, device=self.device)
        basis = torch.cos((2 * k[None] + 1) * k[:, None] * torch.pi / 16) / 2
        basis[0] /= 2**0.5
        blocks = planes.unfold(2, 8, 8).unfold(3, 8, 8)
        waves = basis @ blocks @ basis.T
        step = self.uniform(count, -0.08, 0.1)[..., None, None, None, None] * self.damage
        step = step.clamp(min=1e-4) * (1 + (k[:, None] + k[None]) / 3)
        blocks = basis.T @ ((waves / step).round() * step) @ basis
        return blocks.permute(0, 1, 2, 4, 3, 5).reshape(planes.shape)


def distance(form: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return about how far a point is outside of a form of radius 1, by its number in FORMS."""
    x, y = a.abs(), b.abs()
    circle = (a**2 + b**2).sqrt() - 1
    square = torch.maximum(x, y) - 0.85
    triangle = torch.maximum(x * 0.87 + b * -0.5, b) - 0.5
    theta, radius = torch.atan2(a, -b), (a**2 + b**2).sqrt()
    turn = torch.pi / 5
    fold = (torch.remainder(theta + turn, 2 * turn) - turn).abs()
    star = radius * (torch.cos(fold) + 1.2 * torch.sin(fold)) - 0.85
    cross = torch.minimum(torch.maximum(x - 0.3, y - 1), torch.maximum(y - 0.3, x - 1))
    forms = torch.stack([circle, square, triangle, star, cross])
    return forms.gather(0, form.clamp(min=0).expand_as(a)[None])[0]
