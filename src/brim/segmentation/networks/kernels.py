"""Triton kernels for the operations between convolutions, on channels-last tensors.

Axes: P = B·H·W pixels, C channels; element (p, c) is at p·C + c. A program handles a block of pixels and of channels.
Sums are float32 in a fixed order, so that a result does not depend on what else is in the batch.
"""

import triton
import triton.language as tl


@triton.jit
def affine_relu(x_ptr, scale_ptr, shift_ptr, out_ptr, num_pixels, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """ReLU of x · scale + shift, per channel."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = p[:, None] * C + c[None, :]
    inside = (p < num_pixels)[:, None]
    x = tl.load(x_ptr + here, mask=inside).to(tl.float32)
    y = x * tl.load(scale_ptr + c)[None, :] + tl.load(shift_ptr + c)[None, :]
    tl.store(out_ptr + here, tl.maximum(y, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _corners(p, H, W, h, w):
    """Where the bilinear neighbours of output pixels are in a (B, h, w) map, and the weights of the far ones."""
    # sizes are multiplied, not converted: Triton makes a constant of an argument that is 1
    x, y, b = p % W, (p // W) % H, p // (W * H)
    sy = tl.maximum((y.to(tl.float32) + 0.5) * (h * 1.0 / H) - 0.5, 0.0)
    sx = tl.maximum((x.to(tl.float32) + 0.5) * (w * 1.0 / W) - 0.5, 0.0)
    y0, x0 = tl.minimum(sy.to(tl.int64), h - 1), tl.minimum(sx.to(tl.int64), w - 1)
    y1, x1 = tl.minimum(y0 + 1, h - 1), tl.minimum(x0 + 1, w - 1)
    top, bottom = (b * h + y0) * w, (b * h + y1) * w
    return top + x0, top + x1, bottom + x0, bottom + x1, sy - y0.to(tl.float32), sx - x0.to(tl.float32)


@triton.jit
def _part(ptr, p, c, inside, H, W, h, w, C: tl.constexpr, KIND: tl.constexpr):
    """Block (p, c) of a map of the output's size (KIND 1) or of one that is resampled bilinearly to it (KIND 2)."""
    if KIND == 1:
        return tl.load(ptr + p[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    p00, p01, p10, p11, fy, fx = _corners(p, H, W, h, w)
    v00 = tl.load(ptr + p00[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    v01 = tl.load(ptr + p01[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    v10 = tl.load(ptr + p10[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    v11 = tl.load(ptr + p11[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    fx, fy = fx[:, None], fy[:, None]
    return (v00 * (1 - fx) + v01 * fx) * (1 - fy) + (v10 * (1 - fx) + v11 * fx) * fy


@triton.jit
def _sum(a, b, d, e, p, c, inside, H, W, ha, wa, hb, wb, hd, wd, he, we, C: tl.constexpr,
         KA: tl.constexpr, KB: tl.constexpr, KD: tl.constexpr, KE: tl.constexpr):  # fmt: skip
    total = _part(a, p, c, inside, H, W, ha, wa, C, KA)
    if KB > 0:
        total += _part(b, p, c, inside, H, W, hb, wb, C, KB)
    if KD > 0:
        total += _part(d, p, c, inside, H, W, hd, wd, C, KD)
    if KE > 0:
        total += _part(e, p, c, inside, H, W, he, we, C, KE)
    return total


@triton.jit
def merge(a, b, d, e, shift_ptr, out_ptr, num_pixels, H, W, ha, wa, hb, wb, hd, wd, he, we, C: tl.constexpr,
          KA: tl.constexpr, KB: tl.constexpr, KD: tl.constexpr, KE: tl.constexpr,
          SHIFT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """ReLU of the sum of up to four maps, each resampled to the output's size, plus a shift per channel."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (p < num_pixels)[:, None]
    total = _sum(a, b, d, e, p, c, inside, H, W, ha, wa, hb, wb, hd, wd, he, we, C, KA, KB, KD, KE)
    if SHIFT:
        total += tl.load(shift_ptr + c)[None, :]
    total = tl.maximum(total, 0.0)
    tl.store(out_ptr + p[:, None] * C + c[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def merge_score(a, b, d, e, bias_ptr, weight_ptr, out_ptr, num_pixels, H, W, ha, wa, hb, wb, hd, wd, he, we,
                C: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KD: tl.constexpr, KE: tl.constexpr,
                BP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Per pixel the product of a weight vector with the ReLU of merged maps plus bias."""
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = (p < num_pixels)[:, None]
    score = tl.zeros([BP], tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        total = _sum(a, b, d, e, p, c, inside, H, W, ha, wa, hb, wb, hd, wd, he, we, C, KA, KB, KD, KE)
        total = tl.maximum(total + tl.load(bias_ptr + c)[None, :], 0.0)
        score += tl.sum(total * tl.load(weight_ptr + c)[None, :], 1)
    tl.store(out_ptr + p, score, mask=p < num_pixels)


@triton.jit
def beside(low_ptr, low_shift_ptr, skip_ptr, score_ptr, scale_ptr, shift_ptr, raw_ptr, act_ptr, num_pixels,
           H, W, h, w, hs, ws, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Two halves of 2·C channels, as they are and after affine and ReLU.

    The first half is the coarse map brought up plus its shift, the second the skip times its weights brought up.
    """
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (p < num_pixels)[:, None]
    if tl.program_id(2) == 0:
        value = _part(low_ptr, p, c, inside, H, W, h, w, C, 2) + tl.load(low_shift_ptr + c)[None, :]
        channel = c
    else:
        p00, p01, p10, p11, fy, fx = _corners(p, H, W, hs, ws)
        ok = p < num_pixels
        s00 = tl.load(score_ptr + p00, mask=ok, other=0.0).to(tl.float32)
        s01 = tl.load(score_ptr + p01, mask=ok, other=0.0).to(tl.float32)
        s10 = tl.load(score_ptr + p10, mask=ok, other=0.0).to(tl.float32)
        s11 = tl.load(score_ptr + p11, mask=ok, other=0.0).to(tl.float32)
        weight = (s00 * (1 - fx) + s01 * fx) * (1 - fy) + (s10 * (1 - fx) + s11 * fx) * fy
        skip = tl.load(skip_ptr + p[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = skip * weight[:, None]
        channel = c + C
    out = p[:, None] * (2 * C) + channel[None, :]
    tl.store(raw_ptr + out, value.to(raw_ptr.dtype.element_ty), mask=inside)
    act = value * tl.load(scale_ptr + channel)[None, :] + tl.load(shift_ptr + channel)[None, :]
    tl.store(act_ptr + out, tl.maximum(act, 0.0).to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weigh_add(x_ptr, shortcut_ptr, channel_ptr, centre_ptr, pixel_ptr, shift_ptr, scale_ptr, bias_ptr, out_ptr, act_ptr,
              pixels_per_image, C: tl.constexpr, KIND: tl.constexpr, SHIFT: tl.constexpr, ACT: tl.constexpr,
              BP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """shortcut + shift + x · weight, and with ACT its affine and ReLU too; a block lies within one image.

    KIND 0 has no weight, 1 one per image and channel, 2 that times one per pixel, 3 SimAM's from centre and inverse
    variance per image and channel.
    """
    b = tl.program_id(2).to(tl.int64)
    q = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = b * pixels_per_image + q
    inside = (q < pixels_per_image)[:, None]
    here = p[:, None] * C + c[None, :]
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if KIND > 0:
        channel = tl.load(channel_ptr + b * C + c)[None, :]
    if KIND == 1:
        x *= channel
    if KIND == 2:
        x *= channel * tl.load(pixel_ptr + p, mask=q < pixels_per_image, other=0.0).to(tl.float32)[:, None]
    if KIND == 3:
        away = x - tl.load(centre_ptr + b * C + c)[None, :]
        x *= tl.sigmoid(away * away * channel + 0.5)
    x += tl.load(shortcut_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        x += tl.load(shift_ptr + c)[None, :]
    tl.store(out_ptr + here, x.to(out_ptr.dtype.element_ty), mask=inside)
    if ACT:
        x = tl.maximum(x * tl.load(scale_ptr + c)[None, :] + tl.load(bias_ptr + c)[None, :], 0.0)
        tl.store(act_ptr + here, x.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit
def channel_sums(x_ptr, sum_ptr, square_ptr, max_ptr, pixels_per_image, chunks, C: tl.constexpr,
                 STEPS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Sum, sum of squares and maximum over a chunk of STEPS · BP pixels of one image, per channel."""
    b = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BP, BC], tl.float32)
    squares = tl.zeros([BP, BC], tl.float32)
    most = tl.full([BP, BC], float("-inf"), tl.float32)
    for step in range(STEPS):
        q = (chunk * STEPS + step) * BP + tl.arange(0, BP)
        inside = (q < pixels_per_image)[:, None]
        here = (b * pixels_per_image + q)[:, None] * C + c[None, :]
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        total += x
        squares += x * x
        most = tl.maximum(most, tl.where(inside, x, float("-inf")))
    out = (b * chunks + chunk) * C + c
    tl.store(sum_ptr + out, tl.sum(total, 0))
    tl.store(square_ptr + out, tl.sum(squares, 0))
    tl.store(max_ptr + out, tl.max(most, 0))


@triton.jit
def pixel_stats(x_ptr, channel_ptr, out_ptr, pixels_per_image, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Mean and maximum over channels of x · weight, as the two planes (B, 2, P)."""
    b = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    ok = q < pixels_per_image
    total = tl.zeros([BP], tl.float32)
    most = tl.full([BP], float("-inf"), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        here = (b * pixels_per_image + q)[:, None] * C + c[None, :]
        x = tl.load(x_ptr + here, mask=ok[:, None], other=0.0).to(tl.float32)
        x *= tl.load(channel_ptr + b * C + c)[None, :]
        total += tl.sum(x, 1)
        most = tl.maximum(most, tl.max(x, 1))
    plane = out_ptr + b * 2 * pixels_per_image + q
    tl.store(plane, (total / C).to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(plane + pixels_per_image, most.to(out_ptr.dtype.element_ty), mask=ok)
