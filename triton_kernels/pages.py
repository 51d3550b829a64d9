"""The kernels. A tile is ``ITEMS`` slabs by ``CHUNK`` words; programs take tiles in turn.

Slabs are numbered with the layer innermost, then the head group, the component and the page, so that a tile
of small slabs is one dense piece of a page in a gather and dense rows of the engine's buffers in a scatter
of one layer. All sizes are 64-bit words unless they say units, see ``tables.Family``.

Annotations are not postponed here: Triton's interpreter looks for the class ``tl.constexpr`` itself.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton.language as tl

from hicache_ext.triton_kernels.interpret import jit


@jit
def _fold(words):
    bits = words.to(tl.uint64, bitcast=True)
    return (bits ^ (bits >> 32)).to(tl.int64, bitcast=True)


@jit
def _number(item, layers, GROUPS: tl.constexpr, COMPONENTS: tl.constexpr):
    """Page, component, group and layer (from the first of the call) of a slab."""
    layer = item % layers
    rest = item // layers
    group = rest % GROUPS
    rest = rest // GROUPS
    return (rest // COMPONENTS).to(tl.int64), rest % COMPONENTS, group, layer


@jit
def _units(index, live, page, group, start, slots, PAGE: tl.constexpr, FOUND: tl.constexpr,
           RUN: tl.constexpr, RUNS: tl.constexpr, SLOT_STRIDE: tl.constexpr,
           RUN_STRIDE: tl.constexpr):  # fmt: skip
    """Offsets of units ``index`` [1, CHUNK] of slabs [ITEMS, 1] in the engine's buffers."""
    token = index // (RUN * RUNS)
    if PAGE == 1:
        slot = tl.load(slots + page, mask=live, other=0)
    elif not FOUND:
        slot = tl.load(slots + page * PAGE + token, mask=live & (token < PAGE), other=0)
    else:
        # The slots of a page mostly lie in a row; then addresses do not wait for a load.
        scattered = tl.load(slots + page * PAGE + token, mask=live & (start < 0) & (token < PAGE), other=0)
        slot = tl.where(start < 0, scattered, start + token)
    run = group * RUNS + (index // RUN) % RUNS
    return slot * SLOT_STRIDE + run * RUN_STRIDE + index % RUN


@jit
def _typed(address, UNIT: tl.constexpr, VECTOR: tl.constexpr):
    if UNIT == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif UNIT == 4:
        pointer = address.to(tl.pointer_type(tl.uint32))
    elif UNIT == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    if VECTOR:
        pointer = tl.multiple_of(pointer, (16, 16))
    return pointer


@jit
def _read(base, index, mask, live, page, group, start, slots, PAGE: tl.constexpr, FOUND: tl.constexpr,
          UNIT: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, SLOT_STRIDE: tl.constexpr,
          RUN_STRIDE: tl.constexpr):  # fmt: skip
    """Words ``index`` of slabs in the engine's buffers, int64."""
    if UNIT == 8:
        at = _units(index, live, page, group, start, slots, PAGE, FOUND, RUN, RUNS, SLOT_STRIDE, RUN_STRIDE)
        words = tl.load(base + at, mask=mask, other=0)
    else:
        bits = tl.full(mask.shape, 0, tl.uint64)
        for part in tl.static_range(8 // UNIT):
            unit = index * (8 // UNIT) + part
            at = _units(
                unit, live, page, group, start, slots, PAGE, FOUND, RUN, RUNS, SLOT_STRIDE, RUN_STRIDE
            )
            bits |= tl.load(base + at, mask=mask, other=0).to(tl.uint64) << (part * 8 * UNIT)
        words = bits.to(tl.int64, bitcast=True)
    return words


@jit
def _write(base, words, index, mask, live, page, group, start, slots, PAGE: tl.constexpr,
           FOUND: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
           SLOT_STRIDE: tl.constexpr, RUN_STRIDE: tl.constexpr):  # fmt: skip
    """The reverse of ``_read``."""
    if UNIT == 8:
        at = _units(index, live, page, group, start, slots, PAGE, FOUND, RUN, RUNS, SLOT_STRIDE, RUN_STRIDE)
        tl.store(base + at, words, mask=mask)
    else:
        bits = words.to(tl.uint64, bitcast=True)
        for part in tl.static_range(8 // UNIT):
            unit = index * (8 // UNIT) + part
            at = _units(
                unit, live, page, group, start, slots, PAGE, FOUND, RUN, RUNS, SLOT_STRIDE, RUN_STRIDE
            )
            tl.store(base + at, (bits >> (part * 8 * UNIT)).to(base.dtype.element_ty), mask=mask)


@jit
def gather_kernel(pointers, slots, starts, pages, sealed, factors, words, sums, items, tiles, first, skip,
                  layers, LAYERS: tl.constexpr, PAGE: tl.constexpr, FOUND: tl.constexpr, GROUPS: tl.constexpr,
                  COMPONENTS: tl.constexpr, COMPONENT: tl.constexpr, SLAB: tl.constexpr, UNIT: tl.constexpr,
                  RUN: tl.constexpr, RUNS: tl.constexpr, SLOT_STRIDE: tl.constexpr, RUN_STRIDE: tl.constexpr,
                  VECTOR: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
                  BETWEEN: tl.constexpr, SUM_ROW: tl.constexpr, SUM_GROUP: tl.constexpr, SEAL: tl.constexpr,
                  ITEMS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Slabs of the engine's buffers -> rows of pages, and their checksums.

    The family starts with ``COMPONENT``, whose slabs start at ``OFFSET`` of a group; the next are ``BETWEEN``
    further.
    """
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        item = tile * ITEMS + tl.arange(0, ITEMS)
        live = item < items
        page, component, group, layer = _number(item, layers, GROUPS, COMPONENTS)
        slab = (COMPONENT + component) * LAYERS + first + layer
        base = _typed(tl.load(pointers + slab, mask=live, other=0)[:, None], UNIT, VECTOR)
        row = tl.load(pages + page, mask=live, other=0)
        target = row * ROW + group * GROUP + OFFSET + component * BETWEEN + (skip + layer) * SLAB
        start = tl.load(starts + page, mask=live, other=0)
        out = words + target[:, None]
        if VECTOR:
            out = tl.multiple_of(out, (16, 16))
        total = tl.full((ITEMS, CHUNK), 0, tl.int64)
        for chunk in range(0, SLAB, CHUNK):
            index = chunk + tl.arange(0, CHUNK)[None, :]
            mask = live[:, None] & (index < SLAB)
            data = _read(base, index, mask, live[:, None], page[:, None], group[:, None], start[:, None],
                         slots, PAGE, FOUND, UNIT, RUN, RUNS, SLOT_STRIDE, RUN_STRIDE)  # fmt: skip
            tl.store(out + index, data, mask=mask)
            if SEAL:
                total += _fold(data) * tl.load(factors + index, mask=index < SLAB, other=0)
        if SEAL:
            wanted = tl.load(sealed + page, mask=live, other=0) != 0
            made = tl.where(wanted, tl.reduce(total, 1, tl.standard._sum_combine), 0)
            tl.store(sums + row * SUM_ROW + group * SUM_GROUP + slab, made, mask=live)


@jit
def scatter_kernel(pointers, slots, starts, pages, checks, factors, words, sums, flags, items, tiles, first,
                   skip, layers, LAYERS: tl.constexpr, PAGE: tl.constexpr, FOUND: tl.constexpr,
                   GROUPS: tl.constexpr, COMPONENTS: tl.constexpr, COMPONENT: tl.constexpr,
                   SLAB: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
                   SLOT_STRIDE: tl.constexpr, RUN_STRIDE: tl.constexpr,
                   VECTOR: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
                   BETWEEN: tl.constexpr, SUM_ROW: tl.constexpr, SUM_GROUP: tl.constexpr,
                   VERIFY: tl.constexpr, ITEMS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Rows of pages -> slabs of the engine's buffers; zeros in place of a slab that fails its checksum."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        item = tile * ITEMS + tl.arange(0, ITEMS)
        live = item < items
        page, component, group, layer = _number(item, layers, GROUPS, COMPONENTS)
        slab = (COMPONENT + component) * LAYERS + first + layer
        base = _typed(tl.load(pointers + slab, mask=live, other=0)[:, None], UNIT, VECTOR)
        row = tl.load(pages + page, mask=live, other=0)
        start = tl.load(starts + page, mask=live, other=0)
        source = (
            words
            + (row * ROW + group * GROUP + OFFSET + component * BETWEEN + (skip + layer) * SLAB)[:, None]
        )
        if VECTOR:
            source = tl.multiple_of(source, (16, 16))
        if VERIFY:
            check = tl.load(checks + page, mask=live, other=0)
            checked = check == 1
            expected = tl.load(sums + row * SUM_ROW + group * SUM_GROUP + slab, mask=checked, other=0)
        total = tl.full((ITEMS, CHUNK), 0, tl.int64)
        for chunk in range(0, SLAB, CHUNK):
            index = chunk + tl.arange(0, CHUNK)[None, :]
            mask = live[:, None] & (index < SLAB)
            data = tl.load(source + index, mask=mask, other=0)
            _write(base, data, index, mask, live[:, None], page[:, None], group[:, None], start[:, None],
                   slots, PAGE, FOUND, UNIT, RUN, RUNS, SLOT_STRIDE, RUN_STRIDE)  # fmt: skip
            if VERIFY:
                total += _fold(data) * tl.load(factors + index, mask=index < SLAB, other=0)
        if VERIFY:
            bad = (check == 2) | (checked & (tl.reduce(total, 1, tl.standard._sum_combine) != expected))
            if tl.reduce(bad.to(tl.int32), 0, tl.standard._sum_combine) > 0:
                # Whoever wrote the bytes above has to be done before they are overwritten.
                tl.debug_barrier()
                for chunk in range(0, SLAB, CHUNK):
                    index = chunk + tl.arange(0, CHUNK)[None, :]
                    mask = bad[:, None] & (index < SLAB)
                    _write(base, tl.full((ITEMS, CHUNK), 0, tl.int64), index, mask, bad[:, None],
                           page[:, None], group[:, None], start[:, None], slots, PAGE, FOUND, UNIT, RUN, RUNS,
                           SLOT_STRIDE, RUN_STRIDE)  # fmt: skip
                tl.store(flags + page, tl.full((ITEMS,), 1, tl.int32), mask=bad)


@jit
def checksum_kernel(pages, factors, words, out, items, tiles, first, skip, layers, LAYERS: tl.constexpr,
                    GROUPS: tl.constexpr, COMPONENTS: tl.constexpr, COMPONENT: tl.constexpr,
                    SLABS: tl.constexpr, SLAB: tl.constexpr, VECTOR: tl.constexpr, ROW: tl.constexpr,
                    GROUP: tl.constexpr, OFFSET: tl.constexpr, BETWEEN: tl.constexpr, ITEMS: tl.constexpr,
                    CHUNK: tl.constexpr):  # fmt: skip
    """Checksums of slabs in rows of pages, to ``out`` ``[pages, GROUPS, SLABS]``."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        item = tile * ITEMS + tl.arange(0, ITEMS)
        live = item < items
        page, component, group, layer = _number(item, layers, GROUPS, COMPONENTS)
        slab = (COMPONENT + component) * LAYERS + first + layer
        row = tl.load(pages + page, mask=live, other=0)
        source = (
            words
            + (row * ROW + group * GROUP + OFFSET + component * BETWEEN + (skip + layer) * SLAB)[:, None]
        )
        if VECTOR:
            source = tl.multiple_of(source, (16, 16))
        total = tl.full((ITEMS, CHUNK), 0, tl.int64)
        for chunk in range(0, SLAB, CHUNK):
            index = chunk + tl.arange(0, CHUNK)[None, :]
            data = tl.load(source + index, mask=live[:, None] & (index < SLAB), other=0)
            total += _fold(data) * tl.load(factors + index, mask=index < SLAB, other=0)
        entry = (page * GROUPS + group) * SLABS + slab
        tl.store(out + entry, tl.reduce(total, 1, tl.standard._sum_combine), mask=live)


@jit
def headers_kernel(pages, words, out, items, tiles, GROUPS: tl.constexpr, ROW: tl.constexpr,
                   GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
                   ITEMS: tl.constexpr):  # fmt: skip
    """The first ``SIZE`` words of every head group, to ``out`` ``[pages, GROUPS, SIZE]``."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        item = (tile * ITEMS + tl.arange(0, ITEMS)).to(tl.int64)
        live = item < items
        row = tl.load(pages + item // GROUPS, mask=live, other=0)
        source = words + (row * ROW + (item % GROUPS) * GROUP)[:, None]
        index = tl.arange(0, WIDTH)[None, :]
        mask = live[:, None] & (index < SIZE)
        tl.store(out + item[:, None] * SIZE + index, tl.load(source + index, mask=mask, other=0), mask=mask)


@jit
def starts_kernel(slots, starts, pages, PAGE: tl.constexpr, WIDTH: tl.constexpr, ITEMS: tl.constexpr):
    """First slot of each page whose slots lie in a row, else -1; ``WIDTH`` is ``PAGE`` rounded up."""
    page = (tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)).to(tl.int64)
    token = tl.arange(0, WIDTH)[None, :]
    live = page < pages
    found = tl.load(slots + page[:, None] * PAGE + token, mask=live[:, None] & (token < PAGE), other=0)
    head = tl.load(slots + page * PAGE, mask=live, other=0)
    astray = (found != head[:, None] + token) & (token < PAGE)
    count = tl.reduce(astray.to(tl.int32), 1, tl.standard._sum_combine)
    tl.store(starts + page, tl.where(count == 0, head, -1), mask=live)
