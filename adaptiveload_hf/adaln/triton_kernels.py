"""What does one Triton program do with its rows? Two kernels for all ops, each part of them optional.

Forward:   residual = x + y * (gate + gate_table); out = rotate(norm(residual) * gain + offset)
Backward:  the same from the end, with the column sums kept in registers while the program walks down its rows.

A row of D columns is a tuple of equal tiles: the widths of real models are three or five times a power of two, and a
single block, which must be a power of two, would leave a third of its lanes idle. A program owns a chunk of rows that
share their modulation (or have one a token), loads what they share once, and fetches the next rows while it reduces.
An operand [B, T, D] is (pointer, batch stride, row stride), one of [D] is a pointer, and an absent one is None.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of_program(chunks, chunk_rows, segment_rows, segments):
    """(batch, first token, end): chunk after chunk of every segment, `segments` of them in a batch item."""
    program = tl.program_id(0).to(tl.int64)
    segment = program // chunks
    start = (segment % segments) * segment_rows
    first = start + (program % chunks) * chunk_rows
    return segment // segments, first, tl.minimum(first + chunk_rows, start + segment_rows)


@triton.jit
def _at(operand, batch, row):
    return operand[0] + batch * operand[1] + row * operand[2]


@triton.jit
def _load_tile(pointer, i: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    columns = i * TILE + tl.arange(0, TILE)
    if (i + 1) * TILE > D:
        values = tl.load(pointer + columns, mask=columns < D, other=0.0)
    else:
        values = tl.load(pointer + columns)
    return values.to(tl.float32)


@triton.jit
def _load(pointer, D: tl.constexpr, TILE: tl.constexpr):
    tiles = ()
    for i in tl.static_range((D + TILE - 1) // TILE):
        tiles += (_load_tile(pointer, i, D, TILE),)
    return tiles


@triton.jit
def _store(pointer, tiles, D: tl.constexpr, TILE: tl.constexpr):
    for i in tl.static_range(len(tiles)):
        columns = i * TILE + tl.arange(0, TILE)
        values = tiles[i].to(pointer.dtype.element_ty)
        if (i + 1) * TILE > D:
            tl.store(pointer + columns, values, mask=columns < D)
        else:
            tl.store(pointer + columns, values)


@triton.jit
def _column(table, offset, D: tl.constexpr, TILE: tl.constexpr):
    """offset + table."""
    tiles = ()
    for i in tl.static_range((D + TILE - 1) // TILE):
        values = tl.full((TILE,), offset, tl.float32)
        if table is not None:
            values += _load_tile(table, i, D, TILE)
        tiles += (values,)
    return tiles


@triton.jit
def _zeros(D: tl.constexpr, TILE: tl.constexpr):
    tiles = ()
    for _ in tl.static_range((D + TILE - 1) // TILE):
        tiles += (tl.zeros((TILE,), tl.float32),)
    return tiles


@triton.jit
def _add(a, b):
    tiles = ()
    for i in tl.static_range(len(a)):
        tiles += (a[i] + b[i],)
    return tiles


@triton.jit
def _multiply(a, b):
    tiles = ()
    for i in tl.static_range(len(a)):
        tiles += (a[i] * b[i],)
    return tiles


@triton.jit
def _shift_and_scale(a, offset, factor):
    tiles = ()
    for i in tl.static_range(len(a)):
        tiles += ((a[i] + offset) * factor,)
    return tiles


@triton.jit
def _centered(a, mean, D: tl.constexpr, TILE: tl.constexpr):
    """a - mean, and zero beyond column D."""
    tiles = ()
    for i in tl.static_range(len(a)):
        values = a[i] - mean
        if (i + 1) * TILE > D:
            values = tl.where(i * TILE + tl.arange(0, TILE) < D, values, 0.0)
        tiles += (values,)
    return tiles


@triton.jit
def _rounded(a, dtype: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(a)):
        tiles += (a[i].to(dtype).to(tl.float32),)
    return tiles


@triton.jit
def _mean(a, D: tl.constexpr):
    total = a[0]
    for i in tl.static_range(1, len(a)):
        total += a[i]
    return tl.sum(total, 0) / D


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_means(a, b, D: tl.constexpr):
    """Both in one reduction: one barrier of the program's warps instead of two."""
    first, second = a[0], b[0]
    for i in tl.static_range(1, len(a)):
        first += a[i]
        second += b[i]
    first, second = tl.reduce((first, second), 0, _add_pairs)
    return first / D, second / D


@triton.jit
def _rotated(a, cos, sin, turn, HEAD: tl.constexpr, TILE: tl.constexpr):
    """Pairs of columns turned by the angles of their token, which every head of HEAD columns shares."""
    tiles = ()
    for i in tl.static_range(len(a)):
        # Where TILE is a multiple of HEAD the addresses are those of the first tile, and so are the loaded values.
        columns = (tl.arange(0, TILE // 2) * 2 + (i * TILE) % HEAD) % HEAD
        c = tl.load(cos + columns).to(tl.float32)
        s = tl.load(sin + columns + 1).to(tl.float32) * turn
        even, odd = tl.split(tl.reshape(a[i], (TILE // 2, 2)))
        tiles += (tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (TILE,)),)
    return tiles


@triton.jit
def _present_column(table, offset, D: tl.constexpr, TILE: tl.constexpr):
    """offset + table, or None without a table: what is absent costs no arithmetic."""
    if table is None:
        column = None
    else:
        column = _column(table, offset, D, TILE)
    return column


@triton.jit
def _affine(a, weight, bias):
    """a * weight + bias of columns, which may be None."""
    if weight is not None:
        a = _multiply(a, weight)
    if bias is not None:
        a = _add(a, bias)
    return a


@triton.jit
def _plus_row(column, m, batch, row, D: tl.constexpr, TILE: tl.constexpr):
    """column + one row of a modulation."""
    if m is not None:
        column = _add(column, _load(_at(m, batch, row), D, TILE))
    return column


@triton.jit
def _gain_and_offset(
    scale_column, shift_column, weight, bias, scale, shift, batch, row, D: tl.constexpr, TILE: tl.constexpr
):
    """norm(x) * gain + offset is the whole modulation: (n * weight + bias) * m + shift, m = 1 + table + scale."""
    m = _plus_row(scale_column, scale, batch, row, D, TILE)
    offset = _plus_row(shift_column, shift, batch, row, D, TILE)
    if bias is not None:
        offset = _add(offset, _multiply(m, bias))
    return _affine(m, weight, None), offset


_SIZES = ["tokens", "segments", "segment_rows", "chunks", "chunk_rows", "gate_rows", "norm_rows"]


@triton.jit(do_not_specialize=_SIZES)
def forward(
    x, y, gate, gate_table, gate_offset, norm, cos, sin, residual, stats, out, eps,
    tokens, segments, segment_rows, chunks, chunk_rows, gate_rows, norm_rows,
    D: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, HEAD: tl.constexpr,
    GATE_PER_TOKEN: tl.constexpr, NORM_PER_TOKEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, first, end = _rows_of_program(chunks, chunk_rows, segment_rows, segments)
    if y is not None:
        factor = _column(gate_table, gate_offset, D, TILE)
        if not GATE_PER_TOKEN:
            factor = _plus_row(factor, gate, batch, first * gate_rows // tokens, D, TILE)
    if NORM:
        scale, shift, weight, bias, scale_table, shift_table, scale_offset, weight_offset = norm
        m, t = _column(scale_table, scale_offset, D, TILE), _column(shift_table, 0.0, D, TILE)
        w = _present_column(weight, weight_offset, D, TILE)
        b = _present_column(bias, 0.0, D, TILE)
        if not NORM_PER_TOKEN:
            gain, offset = _gain_and_offset(m, t, w, b, scale, shift, batch, first * norm_rows // tokens, D, TILE)
    for token in tl.range(first, end, num_stages=STAGES):
        place = batch * tokens + token
        row = _load(_at(x, batch, token), D, TILE)
        if y is not None:
            f = factor
            if GATE_PER_TOKEN:
                f = _plus_row(factor, gate, batch, token, D, TILE)
            row = _add(row, _multiply(_load(_at(y, batch, token), D, TILE), f))
            # The statistics are those of what backward will read.
            row = _rounded(row, residual.dtype.element_ty)
            _store(residual + place * D, row, D, TILE)
        if NORM:
            if NORM_PER_TOKEN:
                gain, offset = _gain_and_offset(m, t, w, b, scale, shift, batch, token, D, TILE)
            # Two passes over registers: E[x^2] - E[x]^2 loses all digits far from zero.
            if CENTER:
                mean = _mean(row, D)
                row = _centered(row, mean, D, TILE)
            rstd = tl.rsqrt(_mean(_multiply(row, row), D) + eps)
            if CENTER:
                tl.store(stats + place * 2, mean)
                tl.store(stats + place * 2 + 1, rstd)
            else:
                tl.store(stats + place, rstd)
            row = _add(_multiply(_shift_and_scale(row, 0.0, rstd), gain), offset)
            if HEAD:
                row = _rotated(row, _at(cos, batch, token), _at(sin, batch, token), 1.0, HEAD, TILE)
            _store(out + place * D, row, D, TILE)


@triton.jit
def _through_norm(g, weight, xh, rstd, CENTER: tl.constexpr, D: tl.constexpr):
    """rstd * (w - mean(w) - xh * mean(w * xh)) with w = g * weight; without its mean if the norm has none."""
    w = _affine(g, weight, None)
    if CENTER:
        mean, slope = _two_means(w, _multiply(w, xh), D)
    else:
        mean, slope = 0.0, _mean(_multiply(w, xh), D)
    tiles = ()
    for i in tl.static_range(len(g)):
        tiles += (rstd * (w[i] - mean - xh[i] * slope),)
    return tiles


@triton.jit
def _accumulated(totals, terms, sums):
    """totals + terms, for the sums that are wanted."""
    result = ()
    for k in tl.static_range(len(totals)):
        if sums[k] is None:
            result += (totals[k],)
        else:
            result += (_add(totals[k], terms[k]),)
    return result


@triton.jit(do_not_specialize=_SIZES)
def backward(
    grad, grad_residual, x, stats, y, gate, gate_table, gate_offset, norm, cos, sin, dx, dy, dgate, dscale, sums,
    tokens, segments, segment_rows, chunks, chunk_rows, gate_rows, norm_rows,
    D: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, HEAD: tl.constexpr,
    GATE_PER_TOKEN: tl.constexpr, NORM_PER_TOKEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # sums: for gate, scale, shift, weight and bias, [programs, D] or None.
    scale, _, weight, bias, scale_table, _, scale_offset, weight_offset = norm
    batch, first, end = _rows_of_program(chunks, chunk_rows, segment_rows, segments)
    if dy is not None:
        factor = _column(gate_table, gate_offset, D, TILE)
        if not GATE_PER_TOKEN:
            factor = _plus_row(factor, gate, batch, first * gate_rows // tokens, D, TILE)
    if NORM:
        affine = _present_column(weight, weight_offset, D, TILE)
        offset = _present_column(bias, 0.0, D, TILE)
        modulation = _column(scale_table, scale_offset, D, TILE)
        if not NORM_PER_TOKEN:
            modulation = _plus_row(modulation, scale, batch, first * norm_rows // tokens, D, TILE)
    totals = (_zeros(D, TILE), _zeros(D, TILE), _zeros(D, TILE), _zeros(D, TILE), _zeros(D, TILE))
    for token in tl.range(first, end, num_stages=STAGES):
        place = batch * tokens + token
        g = _load(_at(grad, batch, token), D, TILE)
        d, g_normed, g_m, g_m_xh, d_y = g, (), (), (), ()
        if NORM:
            if HEAD:
                g = _rotated(g, _at(cos, batch, token), _at(sin, batch, token), -1.0, HEAD, TILE)
            m = modulation
            if NORM_PER_TOKEN:
                m = _plus_row(modulation, scale, batch, token, D, TILE)
            if CENTER:
                mean, rstd = tl.load(stats + place * 2), tl.load(stats + place * 2 + 1)
            else:
                mean, rstd = 0.0, tl.load(stats + place)
            xh = _shift_and_scale(_load(_at(x, batch, token), D, TILE), -mean, rstd)
            g_m = _multiply(g, m)
            g_m_xh = _multiply(g_m, xh)
            g_normed = _multiply(g, _affine(xh, affine, offset))
            d = _through_norm(g_m, affine, xh, rstd, CENTER, D)
        if grad_residual is not None:
            d = _add(d, _load(_at(grad_residual, batch, token), D, TILE))
        if dx is not None:
            _store(dx + place * D, d, D, TILE)
        if dscale is not None:
            _store(dscale + place * D, g_normed, D, TILE)
        if dy is not None:
            f = factor
            if GATE_PER_TOKEN:
                f = _plus_row(factor, gate, batch, token, D, TILE)
            _store(dy + place * D, _multiply(d, f), D, TILE)
        if y is not None:
            d_y = _multiply(d, _load(_at(y, batch, token), D, TILE))
            if dgate is not None:
                _store(dgate + place * D, d_y, D, TILE)
        totals = _accumulated(totals, (d_y, g_normed, g, g_m_xh, g_m), sums)
    program = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(len(totals)):
        if sums[k] is not None:
            _store(sums[k] + program * D, totals[k], D, TILE)
