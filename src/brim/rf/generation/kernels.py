"""The GPU's half of the physics: one Triton program per record, chunk or block of a record.

No program reads another record, so a record's bits do not depend on the batch it is in. Each kernel has its plain torch
counterpart, named in its docstring, and is tested against it. FAST picks the hardware's sine, cosine and logarithm,
which the interpreter (TRITON_INTERPRET=1) does not have.

Axes: M records, P paths, J fading points, L points at 50 kHz, N samples at 200 kHz, C chunks, W points at 25 kHz.
Complex tensors are passed as their real and imaginary parts in turn.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_HALF_TURN = tl.constexpr(1.4629180792671596e-09)  # π·2^-31: rad per unit of a 32-bit phase
_TURN = tl.constexpr(6.283185307179586)
_PER_TURN = tl.constexpr(0.15915494309189535)
_BIT24 = tl.constexpr(5.960464477539063e-08)  # 2^-24
_BIT32 = tl.constexpr(2.3283064365386963e-10)  # 2^-32


@triton.jit
def _sincos(angle, FAST: tl.constexpr):
    """Sine and cosine of an angle in [−π, π]."""
    if FAST:
        return libdevice.fast_sinf(angle), libdevice.fast_cosf(angle)
    return tl.sin(angle), tl.cos(angle)


@triton.jit
def _wrap(angle):
    """An angle brought to [−π, π], where the hardware's sine is accurate."""
    turns = angle * _PER_TURN
    return (turns - tl.floor(turns + 0.5)) * _TURN


@triton.jit
def message_kernel(
    step, phase, amplitude, frequency, table, peaks,
    num_points, guard, num_blocks,
    K: tl.constexpr, AM: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """waveform.make_table for nbfm and am.  table (B, T), peaks (B, num_blocks)"""
    sample, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    clock = at - guard
    wave = tl.zeros([BLOCK], tl.float32)
    integral = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        turn = clock * tl.load(step + sample * K + k) + tl.load(phase + sample * K + k)  # int32: wraps as it should
        a = tl.load(amplitude + sample * K + k)
        sin, cos = _sincos(turn.to(tl.float32) * _HALF_TURN, FAST)
        wave += a * cos
        integral += (a / tl.load(frequency + sample * K + k)) * sin
    inside = at < num_points
    tl.store(table + sample.to(tl.int64) * num_points + at, wave if AM else integral, mask=inside)
    tl.store(peaks + sample * num_blocks + block, tl.max(tl.where(inside, tl.abs(wave), 0.0)))


@triton.jit
def fading_kernel(
    item_low, item_high, receiver, doppler, gain,
    seed, num_points, k_direct, k_scattered,
    P: tl.constexpr, SINUSOIDS: tl.constexpr, FADES: tl.constexpr, PURPOSE: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """channel.fading.  gain (M, P, J, 2); k_direct and k_scattered are the direct path's Rician amplitudes"""
    record, path = tl.program_id(0), tl.program_id(1)
    low, high = tl.load(item_low + record), tl.load(item_high + record)
    stream = (tl.load(receiver + record) + path * STRIDE) | (PURPOSE << 16)
    doppler_hz = tl.load(doppler + record)
    at = tl.arange(0, BLOCK)
    time = (at - 1).to(tl.float32) * 1e-3
    real = tl.zeros([BLOCK], tl.float32)
    imag = tl.zeros([BLOCK], tl.float32)
    w0, w1, w2, w3 = tl.philox(seed, SINUSOIDS // 2 + 0 * stream, stream, low, high)
    still = w0.to(tl.float32) * _BIT32  # phase of what does not fade
    if FADES:
        for k in range(SINUSOIDS // 2):
            w0, w1, w2, w3 = tl.philox(seed, k + 0 * stream, stream, low, high)
            for half in tl.static_range(2):
                place = (w0 if half == 0 else w2).to(tl.float32) * _BIT32
                start = (w1 if half == 0 else w3).to(tl.float32) * _BIT32
                arrival = (2 * k + half + place) * (_TURN / SINUSOIDS)
                sin, toward = _sincos(_wrap(arrival), FAST)
                sin, cos = _sincos(_wrap((doppler_hz * toward * time + start) * _TURN), FAST)
                real += cos
                imag += sin
        real *= SINUSOIDS**-0.5
        imag *= SINUSOIDS**-0.5
    sin0, cos0 = _sincos(_wrap(still * _TURN), FAST)
    if FADES:
        direct = tl.where(path == 0, k_direct, 0.0)
        scattered = tl.where(path == 0, k_scattered, 1.0)
    else:
        direct = 1.0 + 0.0 * k_direct
        scattered = 0.0 * k_direct
    real = real * scattered + cos0 * direct
    imag = imag * scattered + sin0 * direct
    out = gain + ((record.to(tl.int64) * P + path) * num_points + at) * 2
    tl.store(out, real, mask=at < num_points)
    tl.store(out + 1, imag, mask=at < num_points)


@triton.jit
def channel_kernel(
    table, scale, sample, amplitude, shift, weights, offset_step, gain, signal, clean,
    num_table, num_points, num_fades, num_clean,
    P: tl.constexpr, TAPS: tl.constexpr, MARGIN: tl.constexpr, PER_FADE: tl.constexpr, AM: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """channel.receive.  signal (M, L + 2·MARGIN, 2); clean (M, C·W, 2) is every STRIDE-th point of it"""
    record, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_points
    row = tl.load(sample + record)
    factor = tl.load(scale + row)
    source = table + row.to(tl.int64) * num_table
    dense = at + (PER_FADE - MARGIN)
    fade = dense // PER_FADE
    fraction = (dense - fade * PER_FADE).to(tl.float32) / PER_FADE
    real = tl.zeros([BLOCK], tl.float32)
    imag = tl.zeros([BLOCK], tl.float32)
    for p in tl.static_range(P):
        strength = tl.load(amplitude + record * P + p)
        begin = tl.load(shift + record * P + p)
        late = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TAPS):
            late += tl.load(weights + (record * P + p) * TAPS + k) * tl.load(source + begin + at + k, inside, 0.0)
        here = gain + ((record.to(tl.int64) * P + p) * num_fades + fade) * 2
        g_real, g_imag = tl.load(here, inside, 0.0), tl.load(here + 1, inside, 0.0)
        g_real += (tl.load(here + 2, inside, 0.0) - g_real) * fraction
        g_imag += (tl.load(here + 3, inside, 0.0) - g_imag) * fraction
        if AM:
            wave = strength * (late * factor + 1) / tl.sqrt(1 + factor * factor)
            real += wave * g_real
            imag += wave * g_imag
        else:
            sin, cos = _sincos(_wrap(late * factor), FAST)
            real += strength * (cos * g_real - sin * g_imag)
            imag += strength * (cos * g_imag + sin * g_real)
    turn = (at - MARGIN) * tl.load(offset_step + record)
    sin, cos = _sincos(turn.to(tl.float32) * _HALF_TURN, FAST)
    out_real, out_imag = real * cos - imag * sin, real * sin + imag * cos
    out = signal + (record.to(tl.int64) * num_points + at) * 2
    tl.store(out, out_real, mask=inside)
    tl.store(out + 1, out_imag, mask=inside)
    point = (at - MARGIN) // STRIDE
    kept = (at >= MARGIN) & (point * STRIDE == at - MARGIN) & (point < num_clean)
    out = clean + (record.to(tl.int64) * num_clean + point) * 2
    tl.store(out, out_real, mask=kept)
    tl.store(out + 1, out_imag, mask=kept)


@triton.jit
def _gaussian(radius_word, angle_word, noise_power, FAST: tl.constexpr):
    """Two normal numbers, each with half the noise power (Box-Muller)."""
    uniform = ((radius_word >> 8).to(tl.float32) + 0.5) * _BIT24
    logarithm = libdevice.fast_logf(uniform) if FAST else tl.log(uniform)
    radius = tl.sqrt(-noise_power * logarithm)
    sin, cos = _sincos(angle_word.to(tl.int32, bitcast=True).to(tl.float32) * _HALF_TURN, FAST)
    return radius * cos, radius * sin


@triton.jit
def record_kernel(
    signal, upsampling, item_low, item_high, receiver, iq,
    seed, num_signal, num_low, num_padded, pad, noise_power,
    TAPS: tl.constexpr, FIRST: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """receiver.record.  iq (M, 2, padded N): four samples of signal and noise for each point at 50 kHz"""
    record, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_low
    low, high = tl.load(item_low + record), tl.load(item_high + record)
    stream = tl.load(receiver + record) | (PURPOSE << 16)
    u0, u1, u2, u3 = tl.philox(seed, 2 * at, stream + 0 * at, low + 0 * at, high + 0 * at)
    v0, v1, v2, v3 = tl.philox(seed, 2 * at + 1, stream + 0 * at, low + 0 * at, high + 0 * at)
    r0, i0 = _gaussian(u0, u1, noise_power, FAST)
    r1, i1 = _gaussian(u2, u3, noise_power, FAST)
    r2, i2 = _gaussian(v0, v1, noise_power, FAST)
    r3, i3 = _gaussian(v2, v3, noise_power, FAST)
    source = signal + (record.to(tl.int64) * num_signal + FIRST + at) * 2
    for k in tl.static_range(TAPS):
        x, y = tl.load(source + 2 * k, inside, 0.0), tl.load(source + 2 * k + 1, inside, 0.0)
        w0, w1 = tl.load(upsampling + 4 * k), tl.load(upsampling + 4 * k + 1)
        w2, w3 = tl.load(upsampling + 4 * k + 2), tl.load(upsampling + 4 * k + 3)
        r0 += w0 * x
        i0 += w0 * y
        r1 += w1 * x
        i1 += w1 * y
        r2 += w2 * x
        i2 += w2 * y
        r3 += w3 * x
        i3 += w3 * y
    # The four samples of a point are interleaved in registers, so that the stores are contiguous.
    place = block * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    out = iq + record.to(tl.int64) * 2 * num_padded + pad + place
    real = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    tl.store(out, real, mask=place < num_low * 4)
    imag = tl.interleave(tl.interleave(i0, i2), tl.interleave(i1, i3))
    tl.store(out + num_padded, imag, mask=place < num_low * 4)


@triton.jit
def _dot(x, h, total):
    """total + x·h as two tf32 products: h has no more bits than tf32, x is split into two parts that do."""
    upper = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    total = tl.dot(x - upper, h, total, input_precision="tf32")
    return tl.dot(upper, h, total, input_precision="tf32")


@triton.jit
def tune_kernel(
    iq, filters, stream,
    num_padded, num_rows, num_points,
    ROW: tl.constexpr, POINTS: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """receiver.tune: the channel filter as a matrix product.  stream (M, C·W, 2); a block of a record's rows each

    The record is padded so that no load needs a mask; rows past its last repeat that and are not stored.
    """
    record = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    source = iq + record * 2 * num_padded
    start = tl.minimum(row, num_rows - 1) * ROW
    real = tl.zeros([ROWS, COLUMNS], tl.float32)
    imag = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, WINDOW, STEP):
        tap = first + tl.arange(0, STEP)
        at = source + start[:, None] + tap[None, :]
        h = tl.load(filters + tap[:, None] * COLUMNS + column[None, :])
        real = _dot(tl.load(at), h, real)
        imag = _dot(tl.load(at + num_padded), h, imag)
    place = row[:, None] * POINTS + column[None, :]
    kept = (column < POINTS)[None, :] & (place < num_points)
    pair = 2 * (record * num_points + place)[:, :, None] + tl.arange(0, 2)[None, None, :]
    tl.store(stream + pair, tl.join(real, imag), mask=kept[:, :, None])


@triton.jit
def segment_kernel(
    iq, starts, taper, segments,
    num_padded, num_segments,
    POINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """receiver.floor_samples, tapered.  starts (C·T,) samples of the padded record; segments (M, C·T, POINTS, 2)"""
    record = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (segment < num_segments)[:, None]
    point = tl.arange(0, POINTS)
    start = tl.load(starts + segment, segment < num_segments, 0)
    at = iq + record * 2 * num_padded + start[:, None] + point[None, :]
    weight = tl.load(taper + point)[None, :]
    real, imag = tl.load(at, inside, 0.0) * weight, tl.load(at + num_padded, inside, 0.0) * weight
    place = (record * num_segments + segment[:, None]) * POINTS * 2 + tl.arange(0, 2 * POINTS)[None, :]
    tl.store(segments + place, tl.interleave(real, imag), mask=inside)


@triton.jit
def _rank(values, number, counts):
    """How many of the values that count come before each in ascending order; equal ones keep theirs."""
    one, other = values[:, None], values[None, :]
    before = (other < one) | ((other == one) & (number[None, :] < number[:, None]))
    return tl.sum((before & counts[None, :]).to(tl.int32), 1)


@triton.jit
def floor_kernel(
    spectrum, bins, floor,
    first, second, third, quiet_nepers, unit,
    POINTS: tl.constexpr, SEGMENTS: tl.constexpr, BINS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """receiver.noise_floor.  spectrum (M, C, T, POINTS, 2) of the segments, floor (M, C); one chunk each

    bins (POINTS,) is 1 for the BINS bins that are looked at. Rows are read whole, in wide loads.
    """
    program = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, POINTS)
    counted, looked_at = row < SEGMENTS, tl.load(bins + column) > 0
    at = spectrum + (program * SEGMENTS + row[:, None]) * POINTS * 2 + tl.arange(0, 2 * POINTS)[None, :]
    parts = tl.load(at, counted[:, None], 0.0)
    power = tl.sum(tl.reshape(parts * parts, [ROWS, POINTS, 2]), 2)
    floored = tl.maximum(power, 1e-30)
    logarithm = libdevice.fast_logf(floored) if FAST else tl.log(floored)
    level = tl.sum(tl.where(looked_at[None, :], logarithm, 0.0), 1) / BINS
    quartile = tl.sum(tl.where((_rank(level, row, counted) == SEGMENTS // 4) & counted, level, 0.0))
    quiet = counted & (level <= quartile + quiet_nepers)
    kept = tl.sum(quiet.to(tl.float32))
    mean = tl.sum(tl.where(quiet[:, None], power, 0.0), 0) / kept
    rank = _rank(mean, column, looked_at)
    low = tl.sum(tl.where((rank >= LOW) & (rank < HIGH) & looked_at, mean, 0.0)) / (HIGH - LOW)
    a, b = 1 - 1 / (9 * kept), 1 / (3 * tl.sqrt(kept))
    expected = a * a * a + 3 * a * a * b * first + 3 * a * b * b * second + b * b * b * third
    tl.store(floor + program, low / expected / unit)


@triton.jit
def align_kernel(
    demodulated, scales, references, shifts, packed,
    POINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """features.align.  packed (M, C·W, 2): a record moved earlier beside its reference, each with unit power"""
    record, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    reference = tl.load(references + record).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    place = at + tl.load(shifts + record)
    inside = (at < POINTS) & (place >= 0) & (place < POINTS)
    one = tl.load(demodulated + record * POINTS + place, inside, 0.0) * tl.load(scales + record)
    two = tl.load(demodulated + reference * POINTS + at, inside, 0.0) * tl.load(scales + reference)
    pair = 2 * (record * POINTS + at)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(packed + pair, tl.join(one, two), mask=(at < POINTS)[:, None])


@triton.jit(do_not_specialize=["first_chunk", "num_chunks"])
def unpack_kernel(
    spectrum, band, first_chunk, num_chunks,
    first_line,
    POINTS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The timing band of two real signals from the spectrum of one complex signal.

    spectrum (chunks, W, 2) of a tile; band (2 · num_chunks, LINES, 2): the records' chunks, then their references'
    """
    chunk = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, BLOCK)
    inside = line < LINES
    here = spectrum + (chunk * POINTS + first_line + line) * 2
    mirrored = spectrum + (chunk * POINTS + POINTS - first_line - line) * 2
    a, b = tl.load(here, inside, 0.0), tl.load(here + 1, inside, 0.0)
    c, d = tl.load(mirrored, inside, 0.0), tl.load(mirrored + 1, inside, 0.0)
    pair = 2 * line[:, None] + tl.arange(0, 2)[None, :]
    one = band + (first_chunk + chunk) * LINES * 2
    tl.store(one + pair, tl.join((a + c) * 0.5, (b - d) * 0.5), mask=inside[:, None])
    two = band + (num_chunks + first_chunk + chunk) * LINES * 2
    tl.store(two + pair, tl.join((b + d) * 0.5, (c - a) * 0.5), mask=inside[:, None])


@triton.jit
def envelope_kernel(
    stream, demodulated, sums,
    POINTS: tl.constexpr, AM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """features.sum_envelope.  demodulated (M, C, W), sums (M, C, 9) in the order of EnvelopeSums; one chunk each"""
    program = tl.program_id(0).to(tl.int64)
    zero = tl.zeros([BLOCK], tl.float32)
    envelope, square, peak, crossings = zero, zero, zero, zero
    s_p, s_pp, s_t, s_tt, s_pt = zero, zero, zero, zero, zero
    for begin in range(0, POINTS, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < POINTS
        paired = at < POINTS - 1
        here = stream + (program * POINTS + at) * 2
        x, y = tl.load(here, inside, 0.0), tl.load(here + 1, inside, 0.0)
        u, v = tl.load(here + 2, paired, 0.0), tl.load(here + 3, paired, 0.0)
        power = x * x + y * y
        size = tl.sqrt(power)
        p = tl.where(paired, (power + u * u + v * v) * 0.5, 0.0)
        t = v * x - u * y
        t = tl.where(paired, t, 0.0)
        envelope += size
        square += power
        peak = tl.maximum(peak, size)
        crossings += tl.where(paired & (x * u < 0), 1.0, 0.0)
        s_p += p
        s_pp += p * p
        s_t += t
        s_tt += t * t
        s_pt += p * t
        tl.store(demodulated + program * POINTS + at, p if AM else t, mask=inside)
    out = sums + program * 9
    tl.store(out, tl.sum(envelope))
    tl.store(out + 1, tl.sum(square))
    tl.store(out + 2, tl.max(peak))
    tl.store(out + 3, tl.sum(crossings))
    tl.store(out + 4, tl.sum(s_p))
    tl.store(out + 5, tl.sum(s_pp))
    tl.store(out + 6, tl.sum(s_t))
    tl.store(out + 7, tl.sum(s_tt))
    tl.store(out + 8, tl.sum(s_pt))


@triton.jit
def _bin_power(spectrum, line, half, num_points, mask, weight):
    """Power of channel bins, counted from −6.25 kHz."""
    at = tl.where(line < half, line - half + num_points, line - half)
    x, y = tl.load(spectrum + 2 * at, mask, 0.0), tl.load(spectrum + 2 * at + 1, mask, 0.0)
    return (x * x + y * y) * weight


@triton.jit
def _edge(bands, share, level, band, position):
    """Where, in bands, the running share passes the level inside the given band."""
    inside = tl.sum(tl.where(position == band, bands, 0.0))
    before = tl.sum(tl.where(position == band, share, 0.0)) - inside
    part = (level - before) / tl.maximum(inside, 1e-30)
    return band.to(tl.float32) + tl.minimum(tl.maximum(part, 0.0), 1.0)


@triton.jit
def spectrum_kernel(
    spectrum, floor, sums,
    bin_hz, reach, tail, rolloff,
    POINTS: tl.constexpr, BINS: tl.constexpr, BANDS: tl.constexpr, PER_BAND: tl.constexpr,
    LINES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """features.sum_spectrum.  spectrum (M, C, W, 2), sums (M, C, 8) as SpectrumSums; one chunk each"""
    program = tl.program_id(0).to(tl.int64)
    source = spectrum + program * POINTS * 2
    noise = tl.load(floor + program)
    half = BINS // 2
    weight = 1.0 / POINTS / POINTS
    position = tl.arange(0, 128)
    real_band = position < BANDS
    line = tl.arange(0, LINES)
    number = position[:, None] * PER_BAND + line[None, :]
    there = real_band[:, None] & (line < PER_BAND)[None, :]
    power = _bin_power(source, number, half, POINTS, there, weight)
    frequency = (number - half).to(tl.float32) * bin_hz
    close = there & (number >= half - reach) & (number < half + reach)
    near = tl.where(close, power - noise / BINS, 0.0)

    bands = tl.sum(power, 1)
    total = tl.sum(bands)
    floored = tl.maximum(bands, 1e-30)
    logarithm = libdevice.fast_logf(floored) if FAST else tl.log(floored)

    side = tl.arange(0, 64)
    upper = (BANDS // 2 + side)[:, None] * PER_BAND + line[None, :]
    lower = (BANDS // 2 - 1 - side)[:, None] * PER_BAND + line[None, :]
    both = (side < BANDS // 2)[:, None] & (line < PER_BAND)[None, :]
    folded = _bin_power(source, upper, half, POINTS, both, weight)
    folded += _bin_power(source, lower, half, POINTS, both, weight)
    running = tl.cumsum(tl.sum(folded, 1))
    below_rolloff = (side < BANDS // 2) & (running < rolloff * tl.max(running))

    quiet = tl.where(real_band, bands - noise / BANDS, 0.0)
    share = tl.cumsum(quiet)
    whole = tl.maximum(tl.sum(tl.where(position == BANDS - 1, share, 0.0)), 1e-30)
    low = tl.min(tl.where(real_band & (share >= tail * whole), position, BANDS - 1))
    high = tl.max(tl.where(real_band & (share < (1 - tail) * whole), position, -1)) + 1
    high = tl.minimum(high, BANDS - 1)
    width = _edge(quiet, share, (1 - tail) * whole, high, position) - _edge(quiet, share, tail * whole, low, position)

    out = sums + program * 8
    tl.store(out, total)
    tl.store(out + 1, tl.sum(power * frequency))
    tl.store(out + 2, tl.sum(near))
    tl.store(out + 3, tl.sum(near * frequency))
    tl.store(out + 4, tl.max(bands))
    tl.store(out + 5, tl.sum(tl.where(real_band, logarithm, 0.0)) / BANDS)
    tl.store(out + 6, tl.sum(below_rolloff.to(tl.float32)) + 1)
    tl.store(out + 7, tl.minimum(tl.maximum(width, 0.0), BANDS))


@triton.jit
def truth_kernel(
    spectrum, truth,
    bin_hz, tail,
    POINTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """features.measure_truth.  spectrum (M, C, W, 2) of the noiseless signal, truth (M, C, 2); one chunk each"""
    program = tl.program_id(0).to(tl.int64)
    source = spectrum + program * POINTS * 2
    half = BINS // 2
    weight = 1.0 / POINTS / POINTS
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, BINS, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        sums += _bin_power(source, number, half, POINTS, number < BINS, weight)
    total = tl.sum(sums)
    before = 0.0
    below = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, BINS, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        power = _bin_power(source, number, half, POINTS, number < BINS, weight)
        share = before + tl.cumsum(power)
        inside = number < BINS
        below += tl.where(inside & (share < (1 - tail) * total), 1.0, 0.0)
        below -= tl.where(inside & (share < tail * total), 1.0, 0.0)
        before += tl.sum(power)
    tl.store(truth + program * 2, total)
    tl.store(truth + program * 2 + 1, tl.sum(below) * bin_hz)


@triton.jit
def _cross(spectrum, scales, record, reference, chunk, at, mask, C: tl.constexpr, LINES: tl.constexpr):
    """Cross-spectrum of a record's chunk with the reference's, each scaled to unit power lest it overflow."""
    one = spectrum + ((record.to(tl.int64) * C + chunk) * LINES + at) * 2
    two = spectrum + ((reference.to(tl.int64) * C + chunk) * LINES + at) * 2
    a, b = tl.load(one, mask, 0.0), tl.load(one + 1, mask, 0.0)
    c, d = tl.load(two, mask, 0.0), tl.load(two + 1, mask, 0.0)
    first, second = tl.load(scales + record), tl.load(scales + reference)
    a, b, c, d = a * first, b * first, c * second, d * second
    return a * c + b * d, b * c - a * d


@triton.jit
def arrival_kernel(
    spectrum, scales, references, limits, arrival,
    first_line, bin_rad_s, lag_step_s, max_step_s, prior, unknown_s,
    LAGS: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, NEWTON: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """features.measure_arrival.  spectrum (M, C, timing bins, 2), arrival (M, C, 2) in s; one record each"""
    record = tl.program_id(0)
    reference = tl.load(references + record)
    limit = tl.load(limits + record)
    group, line = tl.arange(0, ROWS), tl.arange(0, LINES)
    mask = (group < GROUPS)[:, None] & (line < PER_GROUP)[None, :]
    at = group[:, None] * PER_GROUP + line[None, :]
    turn = (first_line + at).to(tl.float32) * bin_rad_s
    real = tl.zeros([ROWS, LINES], tl.float32)
    imag = tl.zeros([ROWS, LINES], tl.float32)
    for chunk in range(C):
        a, b = _cross(spectrum, scales, record, reference, chunk, at, mask, C, GROUPS * PER_GROUP)
        real += a
        imag += b

    best, lag = -float("inf"), 0.0
    for n in range(-LAGS, LAGS + 1):
        here = n * lag_step_s
        sin, cos = _sincos(_wrap(turn * here), FAST)
        height = tl.sum(real * cos - imag * sin)
        better = (height > best) & (tl.abs(here) <= limit)
        best = tl.where(better, height, best)
        lag = tl.where(better, here, lag)
    for _ in range(NEWTON):
        sin, cos = _sincos(_wrap(turn * lag), FAST)
        pull = -tl.sum((real * sin + imag * cos) * turn)
        stiff = tl.sum((real * cos - imag * sin) * turn * turn)
        step = tl.minimum(tl.maximum(pull / tl.maximum(stiff, 1e-30), -max_step_s), max_step_s)
        lag = tl.where(stiff > 0, lag + step, lag)
        lag = tl.minimum(tl.maximum(lag, -limit), limit)

    sin, cos = _sincos(_wrap(turn * lag), FAST)
    stiff = tl.sum((real * cos - imag * sin) * turn * turn)
    for chunk in range(C):
        a, b = _cross(spectrum, scales, record, reference, chunk, at, mask, C, GROUPS * PER_GROUP)
        torque = -(a * sin + b * cos) * turn
        firm = tl.maximum(tl.sum((a * cos - b * sin) * turn * turn), 0.0) + prior * tl.maximum(stiff, 0.0) / C
        known = (firm > 0) & (stiff > 0)
        safe = tl.where(known, firm, 1.0)
        pulled = tl.sum(torque, 1)
        step = tl.minimum(tl.maximum(tl.sum(pulled) / safe, -max_step_s), max_step_s)
        sigma = tl.minimum(tl.sqrt(tl.sum(pulled * pulled)) / safe, unknown_s)
        value = tl.where(known, lag + step, 0.0)
        sigma = tl.where(known, sigma, unknown_s)
        own = record == reference
        out = arrival + (record.to(tl.int64) * C + chunk) * 2
        tl.store(out, tl.where(own, 0.0, value))
        tl.store(out + 1, tl.where(own, 0.0, sigma))
