"""Images of cells with their truth, drawn by the batch on the device.

Axes: B images, K places for objects, H rows, W columns, Q quantities of a scene.

A scene has its quantities (see `kinds`), objects on a jittered hexagonal lattice, and a camera. Every random number is
a hash of (seed, image, purpose, number), so an image is the same in any batch. An object is a star-shaped outline or a
rod with a normalised distance d: 0 at its centre, 1 at its edge. A pixel belongs to the object of the smallest d, so
neighbours that would overlap share a border. On a GPU the kernels of `kernels` do the same; the labels are equal there,
and the pixels up to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from brim.segmentation.scenes.kinds import KINDS, QUANTITIES

OBJECT = ("x", "y", "cos", "sin", "half", "per_a", "per_b", "a2", "b2", "a3", "b3", "a4", "b4", "reach", "brightness")
REACH, BRIGHTNESS = OBJECT.index("reach"), OBJECT.index("brightness")
EMPTY = 2**31 - 1  # a pixel of no object
STEPS = 16383  # of d, from 0 to 2
HALO = 1.3  # d up to which an object with a halo is drawn
TAPS = 8  # of the blur, pixels on each side
MOST_PLACES = 65535  # a place has 16 bits

# purposes, the second word of a hash
QUANTITY, PLACE, COARSE, FINE, HAZE, FIBRE, DEBRIS, LIGHT, NOISE, CAMERA = range(1, 11)
PURPOSE = 0x19660D
ACROSS, DOWN = 0x1B873593, 0x19D699A5  # what a step on a lattice adds to a hash

# Optical density in R, G, B: Ruifrok and Johnston, "Quantification of histochemical staining by color deconvolution"
# (2001), rounded.
HAEMATOXYLIN, EOSIN = (0.65, 0.70, 0.29), (0.15, 0.95, 0.25)


@dataclass(frozen=True, slots=True)
class DrawnScenes:
    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B, H, W) int32, 0 background; numbers of objects have gaps


def draw(kinds: Sequence[str], seed: int, index: Tensor, height: int, width: int) -> DrawnScenes:
    """The scenes of those numbers, each of one of the kinds, on the device of index (B,) int32."""
    keys = mix(mix(index) + _seed_word(seed))
    quantities = take_quantities(tuple(kinds), keys)
    places = most_places(kinds, height, width)
    if index.device.type == "cuda":
        from brim.segmentation.scenes import kernels

        objects = kernels.place_objects(quantities, keys, height, width, places)
        canvas = kernels.stamp(objects, quantities, height, width)
        images = kernels.render(canvas, objects, quantities, keys)
    else:
        objects = place_objects(quantities, keys, height, width, places)
        canvas = stamp(objects, quantities, height, width)
        one = [slice(i, i + 1) for i in range(len(index))]  # one by one: an image fits the cache
        images = torch.cat([render(canvas[i], objects[i], quantities[i], keys[i]) for i in one])
    return DrawnScenes(images, torch.where((canvas >> 16) < STEPS // 2, (canvas & 0xFFFF) + 1, 0))


# Random numbers


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit words (Wellons' lowbias32); int32 that wraps."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


def unit(words: Tensor) -> Tensor:
    """Uniform float32 in [0, 1) of 32-bit words."""
    return ((words >> 8) & 0xFFFFFF).float() * 2.0**-24


def uniform(keys: Tensor, purpose: int, number: Tensor | int) -> Tensor:
    """Uniform float32 of the common shape of keys and number, both int32."""
    return unit(mix(mix(keys + purpose * PURPOSE) + number))


def _seed_word(seed: int) -> int:
    word = (seed ^ (seed >> 32)) * 0x9E3779B1 & 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def _normal(u1: Tensor, u2: Tensor) -> Tensor:
    return torch.sqrt(-2 * torch.log(u1 + 2.0**-25)) * torch.cos(2 * torch.pi * u2)


def value_noise(keys: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Smooth noise in [0, 1) that changes over one unit of x and y; keys int32 broadcast against them."""
    left, top = x.floor(), y.floor()
    fx, fy = x - left, y - top
    fx, fy = fx * fx * (3 - 2 * fx), fy * fy * (3 - 2 * fy)
    word = left.int() * ACROSS + top.int() * DOWN + keys
    corners = [unit(mix(word + step)) for step in (0, ACROSS, DOWN, ACROSS + DOWN)]
    return torch.lerp(torch.lerp(corners[0], corners[1], fx), torch.lerp(corners[2], corners[3], fx), fy)


# What is in a scene


def take_quantities(kinds: tuple[str, ...], keys: Tensor) -> Tensor:
    """(B, Q) float32: one of the kinds for each image, and its quantities."""
    draws = uniform(keys[:, None], QUANTITY, torch.arange(len(QUANTITIES) + 1, dtype=torch.int32, device=keys.device))
    low, high = _ranges(kinds, keys.device)[(draws[:, -1] * len(kinds)).long()].unbind(-1)
    values = low + (high - low) * draws[:, :-1]
    values[:, 0] = low[:, 0] * (high[:, 0] / low[:, 0]) ** draws[:, 0]
    strength = values[:, QUANTITIES.index("brightness")]  # dark or bright, but visible
    strength.copy_(torch.where(strength < 0, strength.clamp(max=-0.08), strength.clamp(min=0.08)))
    return values


@cache
def _ranges(kinds: tuple[str, ...], device: torch.device) -> Tensor:
    """(kinds, Q, 2) float32; kept, since a step under capture cannot copy from the host."""
    return torch.tensor([[KINDS[kind][name] for name in QUANTITIES] for kind in kinds], device=device)


def most_places(kinds: Sequence[str], height: int, width: int) -> int:
    """Enough for the densest scene of the kinds."""
    pitch = min(KINDS[kind]["diameter"][0] * KINDS[kind]["spacing"][0] for kind in kinds)
    return min(MOST_PLACES, int(width / pitch + 3) * int(height / (0.866 * pitch) + 4))


def _named(quantities: Tensor, axes: int) -> dict[str, Tensor]:
    shape = (len(quantities), *(1 for _ in range(axes)))
    return {name: quantities[:, number].view(shape) for number, name in enumerate(QUANTITIES)}


def place_objects(quantities: Tensor, keys: Tensor, height: int, width: int, places: int) -> Tensor:
    """(B, K, columns of OBJECT) float32; reach is 0 where a place is empty."""
    q, key = _named(quantities, 1), keys[:, None]
    number = torch.arange(places, dtype=torch.int32, device=keys.device)
    draws = [uniform(key, PLACE + 16 * step, number) for step in range(16)]
    pitch = q["diameter"] * q["spacing"]
    columns = (width / pitch).int() + 3
    row, column = number // columns, number % columns
    x = pitch * (column - uniform(key, CAMERA, 0) - 0.5 + 0.5 * (row % 2) + q["jitter"] * (2 * draws[0] - 1))
    y = pitch * (0.866 * (row - uniform(key, CAMERA, 1) - 0.5) + q["jitter"] * (2 * draws[1] - 1))
    crowd = value_noise(key + PLACE, x / (5 * pitch), y / (5 * pitch))
    present = draws[2] < q["occupancy"] * (1 - q["clumping"] + q["clumping"] * (3 * crowd - 1))
    condensed = (draws[3] < q["mitosis"]).float()
    radius = 0.5 * q["diameter"] * torch.exp(q["size_spread"] * _normal(draws[4], draws[5])) * (1 - 0.4 * condensed)
    ratio = (1 + q["elongation"] * draws[6] + condensed * draws[13]).sqrt()
    angle = 2 * torch.pi * draws[7]
    half = 2 * radius * q["rod"] * draws[11]
    amplitude = q["waviness"] * (1 + 2 * condensed)
    waves = []
    for share, draw_ in zip((1.0, 0.8, 0.5), draws[8:11], strict=True):
        turn = 2 * torch.pi * draw_
        waves += [amplitude * share * turn.cos(), amplitude * share * turn.sin()]
    reach = half + radius * ratio * (1 + 2.3 * amplitude) * torch.where(q["halo"] != 0, HALO, 1.0) + 1
    visible = present & (x > -reach) & (x < width + reach) & (y > -reach) & (y < height + reach)
    visible &= row * 0.866 * pitch < height + 2 * pitch
    spread = torch.exp(q["brightness_spread"] * _normal(draws[12], draws[14]))
    brightness = q["brightness"] * spread * (1 + 5 * condensed * draws[15])
    shape = [x, y, angle.cos(), angle.sin(), half, 1 / (radius * ratio), ratio / radius]
    parts = [*shape, *waves, reach * visible, brightness]
    return torch.stack([part.expand(present.shape) for part in parts], -1)


# Pixels


def stamp(objects: Tensor, quantities: Tensor, height: int, width: int) -> Tensor:
    """(B, H, W) int32: d in steps << 16 | place of the nearest object, EMPTY where there is none."""
    canvas = torch.full((len(objects) * height * width,), EMPTY, dtype=torch.int32, device=objects.device)
    outer = torch.where(quantities[:, QUANTITIES.index("halo")] != 0, HALO, 1.0)
    reach, low = objects[..., REACH], 0.0
    for high in (6, 10, 16, 24, 36, 56, 90, 150, 260, 10_000):  # objects of about one size are stamped together
        image, place = torch.nonzero((reach > low) & (reach <= high), as_tuple=True)
        count = max(1, 2**21 // high**2)
        for start in range(0, len(image), count):
            where, number = image[start : start + count], place[start : start + count]
            own = objects[where, number]
            d, row, column = _distances(own)
            inside = (d < outer[where, None, None]) & (column >= 0) & (column < width) & (row >= 0) & (row < height)
            packed = ((d * (STEPS / 2)).int() << 16) | number[:, None, None].int()
            flat = where[:, None, None] * (height * width) + row * width + column
            canvas.scatter_reduce_(0, flat[inside], packed[inside], "amin")
        low = high
    return canvas.view(-1, height, width)


def _distances(objects: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """objects (N, columns) → d (N, S, S) in a window around each, and its rows (N, S, 1) and columns (N, 1, S)."""
    x, y, cos, sin, half, per_a, per_b, a2, b2, a3, b3, a4, b4, _, _ = objects[:, :, None, None].unbind(1)
    side = 2 * int(objects[:, REACH].max().ceil()) + 1
    steps = torch.arange(side) - side // 2
    column, row = x.floor().long() + steps, y.floor().long() + steps[:, None]
    right, down = column + 0.5 - x, row + 0.5 - y
    u, v = right * cos + down * sin, down * cos - right * sin
    u, v = (u - u.clamp(-half, half)) * per_a, v * per_b
    rho = (u * u + v * v).sqrt() + 1e-6
    c, s = u / rho, v / rho
    c2, s2 = c * c - s * s, 2 * c * s
    c3, s3 = c2 * c - s2 * s, s2 * c + c2 * s
    c4, s4 = c2 * c2 - s2 * s2, 2 * c2 * s2
    return rho / (1 + a2 * c2 + b2 * s2 + a3 * c3 + b3 * s3 + a4 * c4 + b4 * s4), row, column


def render(canvas: Tensor, objects: Tensor, quantities: Tensor, keys: Tensor) -> Tensor:
    """The camera's images (B, 3, H, W) uint8 of what was stamped."""
    q, key = _named(quantities, 2), keys[:, None, None]
    height, width = canvas.shape[1:]
    y = (torch.arange(height) + 0.5)[None, :, None].expand(1, height, width)
    x = (torch.arange(width) + 0.5).expand(1, height, width)
    d, place = (canvas >> 16).float() * (2 / STEPS), canvas & 0xFFFF
    known = canvas != EMPTY
    brightness = objects[..., BRIGHTNESS].gather(1, (place * known).flatten(1).long()).view_as(d)
    diameter, own = q["diameter"], key + place * 0x5BD1E995
    coarse_px = 0.22 * diameter
    fine_px = 0.3 * coarse_px + 0.8
    coarse, fine = (
        value_noise(own + COARSE, x / coarse_px, y / coarse_px),
        value_noise(own + FINE, x / fine_px, y / fine_px),
    )
    texture = 1 + q["texture"] * (2 * coarse - 1) + q["chromatin"] * (2 * fine - 1)
    profile = 1 - q["dome"] * d * d + q["rim"] * _bump((d - 0.9) / 0.25) + q["core"] * _bump(d / 0.6)
    stain = torch.where(d < 1, brightness * profile * texture, known * (q["halo"] * 0.5) * _bump((d - 1.1) / 0.2))
    strength = q["brightness"].abs()
    cloud = (2 * value_noise(key + HAZE, x / (1.6 * diameter), y / (1.6 * diameter)) - 0.9).clamp_(min=0)
    angle = 2 * torch.pi * uniform(key, CAMERA, 12)
    along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    fibres = value_noise(key + FIBRE, along / (0.9 * diameter), across / (0.25 * diameter)) - 0.4
    rest = q["background"] + q["haze"] * strength * cloud + q["fibre"] * fibres
    rest = rest + _debris(key, x, y, q["debris"]) * (0.3 + strength)
    planes = _blur(torch.stack([stain, rest], 1), blur_weights(quantities))
    return compress(_photograph(planes, q, key, x, y), quantities)


def _bump(t: Tensor) -> Tensor:
    """1 at 0, falling to 0 at ±1."""
    return (1 - t * t).clamp_(min=0).square_()


def _debris(key: Tensor, x: Tensor, y: Tensor, density: Tensor) -> Tensor:
    """Specks of 1 to 4 pixels, at most one in each square of 32 pixels."""
    column, row = (x / 32).floor(), (y / 32).floor()
    cell = mix(key + DEBRIS + column.int() * ACROSS + row.int() * DOWN)
    right, down = x - 32 * column - 4 - 24 * unit(mix(cell + 1)), y - 32 * row - 4 - 24 * unit(mix(cell + 2))
    radius = 1 + 3 * unit(mix(cell + 3)) ** 2
    return (1 - (right * right + down * down) / (radius * radius)).clamp_(min=0) * (unit(cell) < density)


def blur_weights(quantities: Tensor) -> Tensor:
    """(B, 2 · TAPS + 1) of a Gaussian; added in a fixed order, so that the bits do not depend on the batch."""
    sigma = quantities[:, QUANTITIES.index("blur")]
    weights = [torch.exp(-0.5 * (tap / sigma) ** 2) for tap in range(-TAPS, TAPS + 1)]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return torch.stack(weights, 1) / total[:, None]


def _blur(planes: Tensor, weights: Tensor) -> Tensor:
    """planes (B, C, H, W) → blurred; edges are continued."""
    for axis, pad in ((3, (TAPS, TAPS, 0, 0)), (2, (0, 0, TAPS, TAPS))):
        wide, length = F.pad(planes, pad, mode="replicate"), planes.shape[axis]
        planes = torch.zeros_like(planes)
        for tap in range(2 * TAPS + 1):
            planes.addcmul_(weights[:, tap, None, None, None], wide.narrow(axis, tap, length))
    return planes


def _photograph(planes: Tensor, q: dict[str, Tensor], key: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """planes (B, 2, H, W), the light or stain of the objects and of the rest → (B, 3, H, W) uint8."""
    height, width = planes.shape[2:]
    draws = [uniform(key, CAMERA, 2 + step) for step in range(9)]
    long = max(height, width)
    slow = value_noise(key + LIGHT, x / (0.7 * long), y / (0.7 * long)) - 0.5
    tilt = (2 * draws[0] - 1) * (x / width - 0.5) + (2 * draws[1] - 1) * (y / height - 0.5)
    light = 1 + q["uneven"] * (tilt + slow)
    absorbing, colour = q["absorbing"] > 0.5, q["colour"].clamp(0, 1)
    gain = 255 * torch.where(absorbing, 0.75 + 0.35 * draws[8], 0.8 + 0.6 * draws[8])
    stain, rest = planes.unbind(1)
    number = (y.int() * width + x.int()) * 3
    channels = []
    for c in range(3):
        dark, pale = 2 * HAEMATOXYLIN[c] * (0.8 + 0.4 * draws[5]), EOSIN[c] * (0.8 + 0.4 * draws[6])
        depth = stain * (1 + colour * (dark - 1)) + rest * (1 + colour * (pale - 1))
        absorbed = (0.8 + 0.2 * draws[7]) * light * torch.exp(-depth)
        value = torch.where(absorbing, absorbed, (1 + colour * (draws[2 + c] - 1)) * light * (stain + rest))
        value = value.clamp_(1e-12, 1) ** q["gamma"]
        deviation = torch.sqrt(q["read_noise"] ** 2 + q["shot_noise"] ** 2 * value)
        word = mix(mix(key + NOISE) + number + c * (q["colour"] > 0).int())  # a grey image has grey noise
        total = (word & 255) + ((word >> 8) & 255) + ((word >> 16) & 255) + ((word >> 24) & 255)  # about normal
        value = value + deviation * ((total.float() - 510) * (1 / 147.8))
        channels.append((value * gain + 0.5).floor_().clamp_(0, 255).to(torch.uint8))
    return torch.stack(channels, 1)


def compress(images: Tensor, quantities: Tensor) -> Tensor:
    """Round the cosine coefficients of squares of 8 pixels as JPEG does; the last rows and columns are kept."""
    step = quantities[:, QUANTITIES.index("compression")].clamp(min=0)
    batch, channels, height, width = images.shape
    rows, columns = height // 8 * 8, width // 8 * 8
    if not (rows and columns and bool((step > 0).any())):
        return images
    squares = images[:, :, :rows, :columns].float().reshape(batch, channels, rows // 8, 8, columns // 8, 8)
    cosines = cosine_matrix(images.device)
    table = step.view(-1, 1, 1, 1, 1, 1) * rounding_table(images.device).view(8, 1, 8) + 1e-6
    coefficients = torch.einsum("ui,bcrixj,vj->bcruxv", cosines, squares - 128, cosines)
    coefficients = (coefficients / table).round_() * table
    back = torch.einsum("ui,bcruxv,vj->bcrixj", cosines, coefficients, cosines) + 128
    squeezed = images.clone()
    squeezed[:, :, :rows, :columns] = (
        (back + 0.5).floor_().clamp_(0, 255).to(torch.uint8).reshape(batch, channels, rows, columns)
    )
    return torch.where(step.view(-1, 1, 1, 1) > 0, squeezed, images)


@cache
def cosine_matrix(device: torch.device) -> Tensor:
    """(8, 8) float32: frequency, pixel."""
    at = torch.arange(8, dtype=torch.float64)
    matrix = torch.cos(torch.pi * (at + 0.5) * at[:, None] / 8) / 2
    matrix[0] /= 2**0.5
    return matrix.float().to(device)


@cache
def rounding_table(device: torch.device) -> Tensor:
    """(8, 8) float32: high frequencies are rounded more coarsely."""
    at = torch.arange(8)
    return (1 + 0.5 * (at + at[:, None])).float().to(device)
