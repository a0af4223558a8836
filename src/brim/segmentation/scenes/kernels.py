"""The GPU's half of drawing: each kernel does what the function of `drawing` named in its docstring does.

A program reads one image alone, so an image's bits do not depend on the batch it is in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from brim.segmentation.scenes import drawing
from brim.segmentation.scenes.drawing import EMPTY, QUANTITIES

_Q = {name: tl.constexpr(number) for number, name in enumerate(QUANTITIES)}
_NUM_Q = tl.constexpr(len(QUANTITIES))
_NUM_O = tl.constexpr(len(drawing.OBJECT))
_REACH, _BRIGHTNESS = tl.constexpr(drawing.REACH), tl.constexpr(drawing.BRIGHTNESS)
_STEPS, _EMPTY, _TAPS, _OUTER = (tl.constexpr(n) for n in (drawing.STEPS, EMPTY, drawing.TAPS, drawing.HALO))
_PURPOSE, _ACROSS, _DOWN = (tl.constexpr(n) for n in (drawing.PURPOSE, drawing.ACROSS, drawing.DOWN))
_PLACE, _COARSE, _FINE, _HAZE, _FIBRE, _DEBRIS, _LIGHT, _NOISE, _CAMERA = (
    tl.constexpr(number) for number in range(drawing.PLACE, drawing.CAMERA + 1)
)
_H0, _H1, _H2, _E0, _E1, _E2 = (tl.constexpr(value) for value in (*drawing.HAEMATOXYLIN, *drawing.EOSIN))
_TURN = tl.constexpr(6.283185307179586)

BLOCK = 1024


@triton.jit
def _mix(x):
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _unit(word):
    return (word >> 8).to(tl.float32) * 5.960464477539063e-08


@triton.jit
def _camera(key, number):
    return _unit(_mix(_mix(key + _CAMERA * _PURPOSE) + number))


@triton.jit
def _noise(key, x, y):
    """drawing.value_noise"""
    left, top = tl.floor(x), tl.floor(y)
    fx, fy = x - left, y - top
    fx, fy = fx * fx * (3 - 2 * fx), fy * fy * (3 - 2 * fy)
    base = left.to(tl.int32).to(tl.uint32) * _ACROSS + key + top.to(tl.int32).to(tl.uint32) * _DOWN
    a, b = _unit(_mix(base)), _unit(_mix(base + _ACROSS))
    c, d = _unit(_mix(base + _DOWN)), _unit(_mix(base + _ACROSS + _DOWN))
    upper, lower = a + (b - a) * fx, c + (d - c) * fx
    return upper + (lower - upper) * fy


@triton.jit
def _bump(t):
    t = tl.maximum(1 - t * t, 0.0)
    return t * t


@triton.jit
def _place(key, step, number):
    return _unit(_mix(_mix(key + (_PLACE + 16 * step) * _PURPOSE) + number.to(tl.uint32)))


@triton.jit
def _normal(u1, u2):
    return tl.sqrt(-2 * tl.log(u1 + 2.9802322387695312e-08)) * tl.cos(_TURN * u2)


@triton.jit
def place_kernel(
    quantities, keys, objects, num_places, height, width,
    DIAMETER: tl.constexpr, SPACING: tl.constexpr, JITTER: tl.constexpr, OCCUPANCY: tl.constexpr,
    CLUMPING: tl.constexpr, SPREAD: tl.constexpr, ELONGATION: tl.constexpr, ROD: tl.constexpr, WAVINESS: tl.constexpr,
    MITOSIS: tl.constexpr, BRIGHTNESS: tl.constexpr, BRIGHTNESS_SPREAD: tl.constexpr, HALO: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """drawing.place_objects"""
    image = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = number < num_places
    q, key = quantities + image * _NUM_Q, tl.load(keys + image).to(tl.uint32)
    diameter, jitter = tl.load(q + DIAMETER), tl.load(q + JITTER)
    pitch = diameter * tl.load(q + SPACING)
    columns = (width / pitch).to(tl.int32) + 3
    row, column = number // columns, number % columns
    shift_x, shift_y = _camera(key, 0), _camera(key, 1)
    x = pitch * (column - shift_x - 0.5 + 0.5 * (row % 2) + jitter * (2 * _place(key, 0, number) - 1))
    y = pitch * (0.866 * (row - shift_y - 0.5) + jitter * (2 * _place(key, 1, number) - 1))
    crowd = _noise(key + _PLACE, x / (5 * pitch), y / (5 * pitch))
    clumping = tl.load(q + CLUMPING)
    present = _place(key, 2, number) < tl.load(q + OCCUPANCY) * (1 - clumping + clumping * (3 * crowd - 1))
    condensed = tl.where(_place(key, 3, number) < tl.load(q + MITOSIS), 1.0, 0.0)
    radius = tl.exp(tl.load(q + SPREAD) * _normal(_place(key, 4, number), _place(key, 5, number)))
    radius = 0.5 * diameter * radius * (1 - 0.4 * condensed)
    ratio = tl.sqrt(1 + tl.load(q + ELONGATION) * _place(key, 6, number) + condensed * _place(key, 13, number))
    angle = _TURN * _place(key, 7, number)
    amplitude = tl.load(q + WAVINESS) * (1 + 2 * condensed)
    half = 2 * radius * tl.load(q + ROD) * _place(key, 11, number)
    outer = tl.where(tl.load(q + HALO) != 0, _OUTER, 1.0)
    reach = half + radius * ratio * (1 + 2.3 * amplitude) * outer + 1
    visible = present & (x > -reach) & (x < width + reach) & (y > -reach) & (y < height + reach)
    visible = visible & (row * 0.866 * pitch < height + 2 * pitch)
    brightness = tl.exp(tl.load(q + BRIGHTNESS_SPREAD) * _normal(_place(key, 12, number), _place(key, 14, number)))
    brightness = tl.load(q + BRIGHTNESS) * brightness * (1 + 5 * condensed * _place(key, 15, number))
    at = objects + (image * num_places + number) * _NUM_O
    tl.store(at, x, mask=within)
    tl.store(at + 1, y, mask=within)
    tl.store(at + 2, tl.cos(angle), mask=within)
    tl.store(at + 3, tl.sin(angle), mask=within)
    tl.store(at + 4, half, mask=within)
    tl.store(at + 5, 1 / (radius * ratio), mask=within)
    tl.store(at + 6, ratio / radius, mask=within)
    for wave in tl.static_range(3):
        turn = _TURN * _place(key, 8 + wave, number)
        size = amplitude * (1.0 if wave == 0 else (0.8 if wave == 1 else 0.5))
        tl.store(at + 7 + 2 * wave, size * tl.cos(turn), mask=within)
        tl.store(at + 8 + 2 * wave, size * tl.sin(turn), mask=within)
    tl.store(at + _REACH, tl.where(visible, reach, 0.0), mask=within)
    tl.store(at + _BRIGHTNESS, brightness, mask=within)


@triton.jit
def stamp_kernel(objects, quantities, canvas, num_places, height, width, HALO: tl.constexpr, TILE: tl.constexpr):
    """drawing.stamp; one program per place."""
    image, place = tl.program_id(0) // num_places, tl.program_id(0) % num_places
    row = objects + (image.to(tl.int64) * num_places + place) * _NUM_O
    reach = tl.load(row + _REACH)
    if reach > 0:
        x, y, cos, sin, half = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
        per_a, per_b = tl.load(row + 5), tl.load(row + 6)
        a2, b2, a3, b3 = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10)
        a4, b4 = tl.load(row + 11), tl.load(row + 12)
        outer = tl.where(tl.load(quantities + image * _NUM_Q + HALO) != 0, _OUTER, 1.0)
        left, top = tl.maximum(tl.floor(x - reach), 0).to(tl.int32), tl.maximum(tl.floor(y - reach), 0).to(tl.int32)
        right = tl.minimum(tl.floor(x + reach) + 1, width).to(tl.int32)
        bottom = tl.minimum(tl.floor(y + reach) + 1, height).to(tl.int32)
        for up in range(top, bottom, TILE):
            for start in range(left, right, TILE):
                rows, columns = up + tl.arange(0, TILE)[:, None], start + tl.arange(0, TILE)[None, :]
                dx, dy = columns + 0.5 - x, rows + 0.5 - y
                u, v = dx * cos + dy * sin, dy * cos - dx * sin
                u = (u - tl.minimum(tl.maximum(u, -half), half)) * per_a
                v = v * per_b
                rho = tl.sqrt(u * u + v * v) + 1e-6
                c, s = u / rho, v / rho
                c2, s2 = c * c - s * s, 2 * c * s
                c3, s3 = c2 * c - s2 * s, s2 * c + c2 * s
                c4, s4 = c2 * c2 - s2 * s2, 2 * c2 * s2
                d = rho / (1 + a2 * c2 + b2 * s2 + a3 * c3 + b3 * s3 + a4 * c4 + b4 * s4)
                inside = (d < outer) & (rows < bottom) & (columns < right)
                packed = ((d * (_STEPS / 2)).to(tl.int32) << 16) | place
                at = canvas + image.to(tl.int64) * height * width + rows * width + columns
                tl.atomic_min(at, packed, mask=inside, sem="relaxed")


@triton.jit
def shade_kernel(
    canvas, objects, quantities, keys, planes, num_places, height, width,
    DIAMETER: tl.constexpr, BRIGHTNESS: tl.constexpr, DOME: tl.constexpr, RIM: tl.constexpr, HALO: tl.constexpr,
    CORE: tl.constexpr, TEXTURE: tl.constexpr, CHROMATIN: tl.constexpr, BACKGROUND: tl.constexpr, HAZE: tl.constexpr,
    FIBRE: tl.constexpr, SPECKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """drawing.render, up to the blur.  planes (B, 2, H, W) float32"""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < height * width
    x, y = (at % width) + 0.5, (at // width) + 0.5
    q = quantities + image * _NUM_Q
    key = tl.load(keys + image).to(tl.uint32)
    packed = tl.load(canvas + image * height * width + at, mask=within, other=_EMPTY)
    d, place = (packed >> 16).to(tl.float32) * (2 / _STEPS), packed & 0xFFFF
    known = packed != _EMPTY
    brightness = tl.load(objects + (image * num_places + place) * _NUM_O + _BRIGHTNESS, mask=known, other=0.0)
    diameter = tl.load(q + DIAMETER)
    coarse_px = 0.22 * diameter
    fine_px = 0.3 * coarse_px + 0.8
    own = key + place.to(tl.uint32) * 0x5BD1E995
    coarse = _noise(own + _COARSE, x / coarse_px, y / coarse_px)
    fine = _noise(own + _FINE, x / fine_px, y / fine_px)
    texture = 1 + tl.load(q + TEXTURE) * (2 * coarse - 1) + tl.load(q + CHROMATIN) * (2 * fine - 1)
    profile = 1 - tl.load(q + DOME) * d * d + tl.load(q + RIM) * _bump((d - 0.9) / 0.25)
    profile += tl.load(q + CORE) * _bump(d / 0.6)
    halo = tl.where(known, tl.load(q + HALO) * 0.5 * _bump((d - 1.1) / 0.2), 0.0)
    stain = tl.where(d < 1, brightness * profile * texture, halo)

    strength = tl.abs(tl.load(q + BRIGHTNESS))
    cloud = 2 * _noise(key + _HAZE, x / (1.6 * diameter), y / (1.6 * diameter)) - 0.9
    rest = tl.load(q + BACKGROUND) + tl.load(q + HAZE) * strength * tl.maximum(cloud, 0.0)
    angle = _TURN * _camera(key, 12)
    cos, sin = tl.cos(angle), tl.sin(angle)
    fibres = _noise(key + _FIBRE, (x * cos + y * sin) / (0.9 * diameter), (y * cos - x * sin) / (0.25 * diameter))
    rest += tl.load(q + FIBRE) * (fibres - 0.4)
    column, row = tl.floor(x / 32), tl.floor(y / 32)
    cell = _mix(key + _DEBRIS + column.to(tl.uint32) * _ACROSS + row.to(tl.uint32) * _DOWN)
    right, down = x - 32 * column - 4 - 24 * _unit(_mix(cell + 1)), y - 32 * row - 4 - 24 * _unit(_mix(cell + 2))
    radius = _unit(_mix(cell + 3))
    radius = 1 + 3 * radius * radius
    spot = tl.maximum(1 - (right * right + down * down) / (radius * radius), 0.0)
    rest += tl.where(_unit(cell) < tl.load(q + SPECKS), spot * (0.3 + strength), 0.0)
    tl.store(planes + image * 2 * height * width + at, stain, mask=within)
    tl.store(planes + (image * 2 + 1) * height * width + at, rest, mask=within)


@triton.jit
def blur_kernel(planes, blurred, weights, height, width, BLOCK: tl.constexpr):
    """drawing.blur along rows."""
    plane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < height * width
    column, row = at % width, at // width
    total = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(2 * _TAPS + 1):
        near = tl.minimum(tl.maximum(column + (t - _TAPS), 0), width - 1)
        weight = tl.load(weights + (plane // 2) * (2 * _TAPS + 1) + t)
        total += weight * tl.load(planes + plane * height * width + row * width + near, mask=within, other=0.0)
    tl.store(blurred + plane * height * width + at, total, mask=within)


@triton.jit
def photograph_kernel(
    blurred, weights, quantities, keys, images, height, width,
    UNEVEN: tl.constexpr, COLOUR: tl.constexpr, ABSORBING: tl.constexpr, GAMMA: tl.constexpr, READ: tl.constexpr,
    SHOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """drawing.blur along columns, then drawing.photograph"""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < height * width
    column, row = at % width, at // width
    q, key = quantities + image * _NUM_Q, tl.load(keys + image).to(tl.uint32)
    stain, rest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    source = blurred + image * 2 * height * width
    for t in tl.static_range(2 * _TAPS + 1):
        near = tl.minimum(tl.maximum(row + (t - _TAPS), 0), height - 1) * width + column
        weight = tl.load(weights + image * (2 * _TAPS + 1) + t)
        stain += weight * tl.load(source + near, mask=within, other=0.0)
        rest += weight * tl.load(source + height * width + near, mask=within, other=0.0)
    x, y = column + 0.5, row + 0.5
    long = tl.maximum(height, width)
    slow = _noise(key + _LIGHT, x / (0.7 * long), y / (0.7 * long)) - 0.5
    tilt = (2 * _camera(key, 2) - 1) * (x / width - 0.5) + (2 * _camera(key, 3) - 1) * (y / height - 0.5)
    light = 1 + tl.load(q + UNEVEN) * (tilt + slow)
    raw_colour = tl.load(q + COLOUR)
    colour = tl.minimum(tl.maximum(raw_colour, 0.0), 1.0)
    absorbing = tl.load(q + ABSORBING) > 0.5
    gamma, read, shot = tl.load(q + GAMMA), tl.load(q + READ), tl.load(q + SHOT)
    exposure = _camera(key, 10)
    gain = tl.where(absorbing, 0.75 + 0.35 * exposure, 0.8 + 0.6 * exposure)
    for c in tl.static_range(3):
        tint = 1 + colour * (_camera(key, 4 + c) - 1)
        dark = 2 * (_H0 if c == 0 else (_H1 if c == 1 else _H2)) * (0.8 + 0.4 * _camera(key, 7))
        pale = (_E0 if c == 0 else (_E1 if c == 1 else _E2)) * (0.8 + 0.4 * _camera(key, 8))
        depth = stain * (1 + colour * (dark - 1)) + rest * (1 + colour * (pale - 1))
        absorbed = (0.8 + 0.2 * _camera(key, 9)) * light * tl.exp(-depth)
        value = tl.where(absorbing, absorbed, tint * light * (stain + rest))
        value = tl.minimum(tl.maximum(value, 1e-12), 1.0)
        value = tl.exp(gamma * tl.log(value))
        number = at * 3 + tl.where(raw_colour > 0, c, 0)
        word = _mix(_mix(key + _NOISE) + number.to(tl.uint32))
        total = (word & 255) + ((word >> 8) & 255) + ((word >> 16) & 255) + (word >> 24)
        value += tl.sqrt(read * read + shot * shot * value) * (total.to(tl.float32) - 510) * (1 / 147.8)
        shown = tl.minimum(tl.maximum(tl.floor(value * gain * 255 + 0.5), 0.0), 255.0)
        tl.store(images + (image * 3 + c) * height * width + at, shown.to(tl.uint8), mask=within)


@triton.jit
def compress_kernel(images, quantities, cosines, table, height, width, COMPRESSION: tl.constexpr):
    """drawing.compress, four squares a program"""
    plane = tl.program_id(0).to(tl.int64)
    step = tl.load(quantities + (plane // 3) * _NUM_Q + COMPRESSION)
    if step > 0:
        line, at = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
        row, column = tl.program_id(1) * 16 + line, tl.program_id(2) * 16 + at
        within = (row < height // 8 * 8) & (column < width // 8 * 8)
        places = images + plane * height * width + row * width + column
        square = tl.load(places, mask=within, other=128).to(tl.float32) - 128
        same = (line // 8) == (at // 8)  # two squares of 8 along the diagonal of 16 × 16
        cosine = tl.where(same, tl.load(cosines + (line % 8) * 8 + at % 8), 0.0)
        turned = tl.trans(cosine)
        coarse = step * tl.load(table + (line % 8) * 8 + at % 8) + 1e-6
        coefficients = tl.dot(tl.dot(cosine, square, input_precision="ieee"), turned, input_precision="ieee") / coarse
        coefficients = tl.floor(coefficients + 0.5) * coarse
        back = tl.dot(tl.dot(turned, coefficients, input_precision="ieee"), cosine, input_precision="ieee") + 128.5
        tl.store(places, tl.minimum(tl.maximum(tl.floor(back), 0.0), 255.0).to(tl.uint8), mask=within)


def _numbers(**names: str) -> dict[str, tl.constexpr]:
    return {argument: _Q[name] for argument, name in names.items()}


def place_objects(quantities: Tensor, keys: Tensor, height: int, width: int, places: int) -> Tensor:
    """drawing.place_objects"""
    objects = torch.empty((len(keys), places, len(drawing.OBJECT)), device=keys.device)
    place_kernel[(len(keys), triton.cdiv(places, 256))](
        quantities, keys, objects, places, height, width, BLOCK=256,
        **_numbers(
            DIAMETER="diameter", SPACING="spacing", JITTER="jitter", OCCUPANCY="occupancy", CLUMPING="clumping",
            SPREAD="size_spread", ELONGATION="elongation", ROD="rod", WAVINESS="waviness", MITOSIS="mitosis",
            BRIGHTNESS="brightness", BRIGHTNESS_SPREAD="brightness_spread", HALO="halo",
        ),
    )  # fmt: skip
    return objects


def stamp(objects: Tensor, quantities: Tensor, height: int, width: int) -> Tensor:
    """drawing.stamp"""
    canvas = torch.full((len(objects), height, width), EMPTY, dtype=torch.int32, device=objects.device)
    places = objects.shape[1]
    stamp_kernel[(len(objects) * places,)](objects, quantities, canvas, places, height, width, HALO=_Q["halo"], TILE=32)
    return canvas


def render(canvas: Tensor, objects: Tensor, quantities: Tensor, keys: Tensor) -> Tensor:
    """drawing.render"""
    batch, height, width = canvas.shape
    blocks = triton.cdiv(height * width, BLOCK)
    planes = torch.empty((batch, 2, height, width), device=canvas.device)
    shade_kernel[batch, blocks](
        canvas, objects, quantities, keys, planes, objects.shape[1], height, width, BLOCK=BLOCK,
        **_numbers(
            DIAMETER="diameter", BRIGHTNESS="brightness", DOME="dome", RIM="rim", HALO="halo", CORE="core",
            TEXTURE="texture", CHROMATIN="chromatin", BACKGROUND="background", HAZE="haze", FIBRE="fibre",
            SPECKS="debris",
        ),
    )  # fmt: skip
    weights, blurred = drawing.blur_weights(quantities), torch.empty_like(planes)
    blur_kernel[2 * batch, blocks](planes, blurred, weights, height, width, BLOCK=BLOCK)
    images = torch.empty((batch, 3, height, width), dtype=torch.uint8, device=canvas.device)
    photograph_kernel[batch, blocks](
        blurred, weights, quantities, keys, images, height, width, BLOCK=BLOCK,
        **_numbers(
            UNEVEN="uneven", COLOUR="colour", ABSORBING="absorbing", GAMMA="gamma", READ="read_noise",
            SHOT="shot_noise",
        ),
    )  # fmt: skip
    compress_kernel[3 * batch, triton.cdiv(height, 16), triton.cdiv(width, 16)](
        images, quantities, drawing.cosine_matrix(images.device), drawing.rounding_table(images.device), height, width,
        COMPRESSION=_Q["compression"], num_warps=1,
    )  # fmt: skip
    return images
