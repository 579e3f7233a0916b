"""Sampling kernels in the order of `../../reference_sampling.py`; a program samples one row of logits at a time.

Weights are float64. Nothing is sorted: a filter finds its threshold by bisection. Sums have another order than the
reference's, so a decision closer than TIE_TOLERANCE is UNDECIDED and left to it. Scratch of a row: scaled logits s and
e = exp(s); dropped tokens have s = -inf and e = 0. A pass that writes ends with a barrier, since other threads read.

Logits of tokens that a row's mask forbids are read as -inf, by the scan for the largest and where the scratch is
filled: all that follows sees dropped tokens. A row without a mask takes one branch per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNDECIDED, NOT_FINITE = -1, -2  # in place of a token
MAX_LOGIT = tl.constexpr(1e300)  # penalized logits stay finite
NUM_INTS, NUM_FLOATS = tl.constexpr(13), tl.constexpr(7)  # of a row
TIE_TOLERANCE = tl.constexpr(1e-10)  # of the total weight: sums this close are left to the reference sampler
MAX_BISECTIONS = tl.constexpr(100)
BY_COUNT, BY_MASS, BY_SURPRISAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INF = tl.constexpr(float("inf"))
NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def philox_uniform(ints):
    """Return a number in [0, 1): Philox4x32-10 keyed by (seed, sample index, position)."""
    k0, k1 = tl.load(ints + 2).to(tl.uint32, bitcast=True), tl.load(ints + 3).to(tl.uint32, bitcast=True)
    c0, c1 = tl.load(ints + 6).to(tl.uint32, bitcast=True), tl.load(ints + 4).to(tl.uint32, bitcast=True)
    c2 = tl.load(ints + 7).to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c2)
    for _ in tl.static_range(10):
        a, b = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
        high0, low0, high1, low1 = tl.umulhi(a, c0), a * c0, tl.umulhi(b, c2), b * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + tl.full((), 0x9E3779B9, tl.uint32), k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return (c0.to(tl.float64) * 2097152.0 + (c1 >> 11).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def draw_token(e, vocabulary, fraction, BLOCK: tl.constexpr):
    """Return the token at `fraction` of the cumulative weight in id order, or UNDECIDED near a boundary."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(e + i, mask=i < vocabulary, other=0.0)
    total_weight = tl.sum(total, 0)
    drawn, tolerance = fraction * total_weight, TIE_TOLERANCE * total_weight
    token, before, after, sum_before = vocabulary, total_weight * 0.0, total_weight * 0.0, total_weight * 0.0
    start = 0
    while (start < vocabulary) & (token == vocabulary):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        sums = sum_before + tl.cumsum(w, 0)
        token = tl.min(tl.where((sums > drawn) & (w > 0.0), i, vocabulary), 0)
        after = tl.sum(tl.where(i == token, sums, 0.0), 0)
        before = after - tl.sum(tl.where(i == token, w, 0.0), 0)
        sum_before += tl.sum(w, 0)
        start += BLOCK
    is_sure = (token < vocabulary) & (drawn - before > tolerance) & (after - drawn > tolerance)
    return tl.where(is_sure, token, -1)


@triton.jit
def find_mask(mask_index, row, mask_words):
    """Return the offset of a row's mask, negative where it has none; `mask_words` is 0 where no row has one."""
    offset = tl.full((), -1, tl.int64)
    if mask_words > 0:
        offset = tl.load(mask_index + row).to(tl.int64) * mask_words
    return offset


@triton.jit
def load_values(x, masks, mask, i, vocabulary):
    """Return values of tokens i, -inf where the mask (`find_mask`) has a cleared bit, and past the vocabulary."""
    v = tl.load(x + i, mask=i < vocabulary, other=-INF)
    if mask >= 0:
        words = tl.load(masks + mask + i // 32, mask=i < vocabulary, other=0)
        v = tl.where((words >> (i % 32)) & 1 != 0, v, -INF)
    return v


@triton.jit
def scan_row(x, masks, mask, vocabulary, BLOCK: tl.constexpr):
    """Return the largest value, the lowest id that has it, and whether a token can be sampled: the largest is finite
    and no value is NaN."""
    best = tl.full((BLOCK,), -INF, x.dtype.element_ty)
    at = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    is_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = load_values(x, masks, mask, i, vocabulary)
        is_nan |= (v != v).to(tl.int32)
        at = tl.where(v > best, i, at)
        best = tl.maximum(best, v)
    top = tl.max(best, 0)
    is_sampleable = (tl.max(is_nan, 0) == 0) & (top > -INF) & (top < INF)
    return top, tl.min(tl.where(best == top, at, NO_TOKEN), 0), is_sampleable


@triton.jit
def widen(x, s, vocabulary, BLOCK: tl.constexpr):
    """Set s to the logits in float64."""
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(s + i, tl.load(x + i, mask=i < vocabulary, other=0.0).to(tl.float64), mask=i < vocabulary)
    tl.debug_barrier()


@triton.jit
def fill_zero(e, vocabulary, BLOCK: tl.constexpr):
    """Set all weights to zero."""
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(e + i, 0.0, mask=i < vocabulary)
    tl.debug_barrier()


@triton.jit
def load_tokens(ids, pending, i, mask):
    """Return tokens of a list. A negative one, -1 - r, stands for token r of the step in flight; where that step failed
    to sample it, any token will do: this step is discarded."""
    token = tl.load(ids + i, mask=mask, other=0)
    sampled = tl.load(pending - 1 - token, mask=mask & (token < 0), other=0)
    return tl.where(token < 0, tl.maximum(sampled, 0), token)


@triton.jit
def apply_penalties(s, e, ids, pending, biases, ints, floats, vocabulary, BLOCK: tl.constexpr, LIST_TILE: tl.constexpr):
    """Apply logit bias, then the repetition penalty, then presence and frequency; e counts the uses of a token."""
    first, second, third, last = tl.load(ints + 8), tl.load(ints + 9), tl.load(ints + 10), tl.load(ints + 11)
    for start in range(first, second, LIST_TILE):
        i = start + tl.arange(0, LIST_TILE)
        at = s + tl.load(ids + i, mask=i < second, other=0)
        bias = tl.load(biases + i - first + tl.load(ints + 12), mask=i < second, other=0.0)
        tl.store(at, tl.load(at, mask=i < second, other=0.0) + bias, mask=i < second)
    tl.debug_barrier()
    if third > second:
        factor = tl.load(floats + 4)
        fill_zero(e, vocabulary, BLOCK)
        for start in range(second, third, LIST_TILE):
            i = start + tl.arange(0, LIST_TILE)
            tl.store(e + load_tokens(ids, pending, i, i < third), 1.0, mask=i < third)
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            v = tl.load(s + i, mask=i < vocabulary, other=0.0)
            changed = tl.where(v > 0.0, v / factor, v * factor)
            changed = tl.minimum(tl.maximum(changed, -MAX_LOGIT), MAX_LOGIT)
            listed = tl.load(e + i, mask=i < vocabulary, other=0.0) > 0.0
            tl.store(s + i, changed, mask=listed & (i < vocabulary))
        tl.debug_barrier()
    if last > third:
        presence, frequency = tl.load(floats + 5), tl.load(floats + 6)
        fill_zero(e, vocabulary, BLOCK)
        for start in range(third, last, LIST_TILE):
            i = start + tl.arange(0, LIST_TILE)
            one = tl.full((LIST_TILE,), 1.0, tl.float64)
            tl.atomic_add(e + load_tokens(ids, pending, i, i < last), one, mask=i < last)
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            v = tl.load(s + i, mask=i < vocabulary, other=0.0)
            count = tl.load(e + i, mask=i < vocabulary, other=0.0)
            tl.store(s + i, v - (presence + frequency * count), mask=(count > 0.0) & (i < vocabulary))
        tl.debug_barrier()


@triton.jit
def apply_temperature(x, masks, mask, s, e, vocabulary, top, temperature, BLOCK: tl.constexpr):
    """Set s = (x - top) / temperature and e = exp(s); drop tokens whose e is 0, and those that the mask forbids."""
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = (load_values(x, masks, mask, i, vocabulary).to(tl.float64) - top) / temperature
        w = tl.where(v > -745.0, tl.exp(v), 0.0)
        tl.store(s + i, tl.where(w > 0.0, v, -INF), mask=i < vocabulary)
        tl.store(e + i, w, mask=i < vocabulary)
    tl.debug_barrier()


@triton.jit
def load_keys(s, e, start, vocabulary, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of ids, what a filter orders them by, largest first (the logit, or how near the surprisal is to
    its mean), and what it adds up (their weight, or 1 of each)."""
    i = start + tl.arange(0, BLOCK)
    v = tl.load(s + i, mask=i < vocabulary, other=-INF)
    key = tl.where(v > -INF, -tl.abs(center - v), -INF) if BY == BY_SURPRISAL else v
    weight = (v > -INF).to(tl.float64) if BY == BY_COUNT else tl.load(e + i, mask=i < vocabulary, other=0.0)
    return i, key, weight


@triton.jit
def weight_above(s, e, vocabulary, low, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Return weight, number and smallest of the keys >= low, the largest key below, and the largest of all."""
    total = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    least = tl.full((BLOCK,), INF, tl.float64)
    below = tl.full((BLOCK,), -INF, tl.float64)
    best = tl.full((BLOCK,), -INF, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        _, key, w = load_keys(s, e, start, vocabulary, center, BY, BLOCK)
        above_low = (key >= low) & (key > -INF)
        total += tl.where(above_low, w, 0.0)
        count += above_low.to(tl.int32)
        least = tl.minimum(least, tl.where(above_low, key, INF))
        below = tl.maximum(below, tl.where(above_low, -INF, key))
        best = tl.maximum(best, key)
    return tl.sum(total, 0), tl.sum(count, 0), tl.min(least, 0), tl.max(below, 0), tl.max(best, 0)


@triton.jit
def gather_candidates(s, e, candidates, vocabulary, low, high, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the keys in low .. high, at most BLOCK of them, and their weights, in registers."""
    before = 0
    for start in range(0, vocabulary, BLOCK):
        _, key, w = load_keys(s, e, start, vocabulary, center, BY, BLOCK)
        here = (key >= low) & (key <= high)
        at = before + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(candidates + at, key, mask=here & (at < BLOCK))
        if BY != BY_COUNT:
            tl.store(candidates + BLOCK + at, w, mask=here & (at < BLOCK))
        before += tl.sum(here.to(tl.int32), 0)
    tl.debug_barrier()
    i = tl.arange(0, BLOCK)
    key = tl.load(candidates + i, mask=i < before, other=-INF)
    if BY == BY_COUNT:
        weight = (key > -INF).to(tl.float64)
    else:
        weight = tl.load(candidates + BLOCK + i, mask=i < before, other=0.0)
    tl.debug_barrier()  # the next filter writes there
    return key, weight


@triton.jit
def inspect_threshold(s, e, vocabulary, threshold, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest and largest weight of the keys at the threshold, and how many others are too near to it."""
    large = tl.zeros((BLOCK,), tl.float64)
    small = tl.full((BLOCK,), INF, tl.float64)
    num_near = tl.zeros((BLOCK,), tl.int32)
    tolerance = TIE_TOLERANCE * (1.0 + tl.abs(threshold))
    for start in range(0, vocabulary, BLOCK):
        _, key, w = load_keys(s, e, start, vocabulary, center, BY, BLOCK)
        large = tl.maximum(large, tl.where(key == threshold, w, 0.0))
        small = tl.minimum(small, tl.where(key == threshold, w, INF))
        num_near += ((key != threshold) & (tl.abs(key - threshold) <= tolerance)).to(tl.int32)
    return tl.min(small, 0), tl.max(large, 0), tl.sum(num_near, 0)


@triton.jit
def drop_below(s, e, vocabulary, threshold, center, ties, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Drop the keys below the threshold, and those equal to it after the first `ties`."""
    before = 0
    for start in range(0, vocabulary, BLOCK):
        i, key, _ = load_keys(s, e, start, vocabulary, center, BY, BLOCK)
        same = (key == threshold).to(tl.int32)
        dropped = (key < threshold) | ((key == threshold) & (before + tl.cumsum(same, 0) > ties))
        tl.store(s + i, -INF, mask=dropped & (i < vocabulary))
        tl.store(e + i, 0.0, mask=dropped & (i < vocabulary))
        before += tl.sum(same, 0)
    tl.debug_barrier()


@triton.jit
def midpoint(low, high):
    """Return a number above low, at most high."""
    middle = (low + high) * 0.5
    return tl.where(middle <= low, high, middle)


@triton.jit
def keep_top(s, e, candidates, vocabulary, target, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Keep the fewest keys, largest and lowest id first, whose weights reach `target`: a number of tokens, or a
    fraction of the total weight. Return 1 if undecided."""
    total, count, low, _, high = weight_above(s, e, vocabulary, -INF, center, BY, BLOCK)
    need = target if BY == BY_COUNT else target * total
    undecided = 0
    if (BY != BY_COUNT) | (total > need):
        above = total * 0.0  # weight of the keys over `high`; the threshold lies in low .. high
        above_count = 0
        step = 0
        while (low < high) & (count - above_count > BLOCK) & (step < MAX_BISECTIONS):
            weight, number, least, below, _ = weight_above(s, e, vocabulary, midpoint(low, high), center, BY, BLOCK)
            reaches = weight >= need
            low = tl.where(reaches, least, low)
            count = tl.where(reaches, number, count)
            high = tl.where(reaches, high, below)
            above = tl.where(reaches, above, weight)
            above_count = tl.where(reaches, above_count, number)
            step += 1
        if (low < high) & (count - above_count <= BLOCK):
            keys, weights = gather_candidates(s, e, candidates, vocabulary, low, high, center, BY, BLOCK)
            known = above
            while (low < high) & (step < 2 * MAX_BISECTIONS):
                above_low = keys >= midpoint(low, high)
                weight = known + tl.sum(tl.where(above_low, weights, 0.0), 0)
                reaches = weight >= need
                low = tl.where(reaches, tl.min(tl.where(above_low, keys, INF), 0), low)
                high = tl.where(reaches, high, tl.max(tl.where(above_low, -INF, keys), 0))
                above = tl.where(reaches, above, weight)
                step += 1
        if BY == BY_COUNT:
            ties = need - above
        else:
            small, large, num_near = inspect_threshold(s, e, vocabulary, low, center, BY, BLOCK)
            ties = tl.maximum(tl.ceil((need - above) / large), 1.0)
            tolerance = TIE_TOLERANCE * total
            is_over = above + ties * large - need > tolerance
            is_under = (need - above - (ties - 1.0) * large > tolerance) | ((above == 0.0) & (ties == 1.0))
            undecided = tl.where(is_over & is_under & (small == large) & (num_near == 0), 0, 1)
        undecided = tl.where((low < high) | (total <= 0.0), 1, undecided)
        drop_below(s, e, vocabulary, low, center, tl.minimum(ties, 1e9).to(tl.int32), BY, BLOCK)
    return undecided


@triton.jit
def mean_surprisal(s, e, vocabulary, BLOCK: tl.constexpr):
    """Return the s of mean surprisal: -log(e / total) is log(total) - s."""
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        _, v, w = load_keys(s, e, start, vocabulary, 0.0, BY_MASS, BLOCK)
        total += w
        moment += tl.where(w > 0.0, w * v, 0.0)
    return tl.sum(moment, 0) / tl.sum(total, 0)


@triton.jit
def keep_min_p(e, s, vocabulary, fraction, typical_p, BLOCK: tl.constexpr):
    """Keep the tokens that are at least `fraction` as likely as the likeliest. Return 1 if undecided."""
    top = tl.full((), 1.0, tl.float64)  # e of the largest logit, which only typical-p may have dropped
    if typical_p < 1.0:
        top, _, _ = scan_row(e, None, -1, vocabulary, BLOCK)
    least = fraction * top
    num_near = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        num_near += ((w != top) & (w > 0.0) & (tl.abs(w - least) <= TIE_TOLERANCE * least)).to(tl.int32)
        dropped = (w < least) & (w < top)
        tl.store(s + i, -INF, mask=dropped & (i < vocabulary))
        tl.store(e + i, 0.0, mask=dropped & (i < vocabulary))
    tl.debug_barrier()
    return tl.minimum(tl.sum(num_near, 0), 1)


@triton.jit
def filter_and_draw(s, e, candidates, ints, floats, vocabulary, BLOCK: tl.constexpr):
    """Return a token drawn from the candidates that the filters leave, or UNDECIDED."""
    top_k, top_p, min_p, typical_p = tl.load(ints), tl.load(floats + 1), tl.load(floats + 2), tl.load(floats + 3)
    undecided = 0
    if (top_k > 0) & (top_k < vocabulary):
        undecided |= keep_top(s, e, candidates, vocabulary, top_k.to(tl.float64), 0.0, BY_COUNT, BLOCK)
    if typical_p < 1.0:
        center = mean_surprisal(s, e, vocabulary, BLOCK)
        undecided |= keep_top(s, e, candidates, vocabulary, typical_p, center, BY_SURPRISAL, BLOCK)
    if top_p < 1.0:
        undecided |= keep_top(s, e, candidates, vocabulary, top_p, 0.0, BY_MASS, BLOCK)
    if min_p > 0.0:
        undecided |= keep_min_p(e, s, vocabulary, min_p, typical_p, BLOCK)
    return tl.where(undecided == 0, draw_token(e, vocabulary, philox_uniform(ints), BLOCK), -1)


@triton.jit(do_not_specialize=["count", "mask_words"])
def sample_rows(
    logits, stride, ints, floats, ids, pending, biases, mask_index, masks, mask_words, scratch, candidate_scratch, out,
    count, vocabulary, BLOCK: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Sample a token for each of `count` rows, which the programs take in turn: each has scratch of one row.

    ints (rows, NUM_INTS): top_k, seed, sample index, position as pairs of int32; the offsets in `ids` of the biased,
    the penalty window's and the output tokens, and their end; the offset in `biases`. floats (rows, NUM_FLOATS):
    temperature, top_p, min_p, typical_p, three penalties. pending: the tokens of the step in flight. mask_index (rows):
    the mask of each row in masks (number, mask_words), -1: none. scratch (programs, 2, vocabulary) and
    candidate_scratch (programs, 2, BLOCK): float64."""
    program = tl.program_id(0).to(tl.int64)
    s, e = scratch + 2 * program * vocabulary, scratch + (2 * program + 1) * vocabulary
    candidates = candidate_scratch + 2 * program * BLOCK
    for n in tl.range(tl.program_id(0), count, tl.num_programs(0), disable_licm=True):
        tl.debug_barrier()  # the row before has been read
        row = tl.cast(n, tl.int64)
        x, row_ints, row_floats = logits + row * stride, ints + row * NUM_INTS, floats + row * NUM_FLOATS
        mask = find_mask(mask_index, row, mask_words)
        largest, token, is_sampleable = scan_row(x, masks, mask, vocabulary, BLOCK)
        top, temperature = largest.to(tl.float64), tl.load(row_floats)
        has_lists = tl.load(row_ints + 8) < tl.load(row_ints + 11)
        if has_lists:
            widen(x, s, vocabulary, BLOCK)
            apply_penalties(s, e, ids, pending, biases, row_ints, row_floats, vocabulary, BLOCK, LIST_TILE)
            top, token, _ = scan_row(s, masks, mask, vocabulary, BLOCK)
        if (temperature > 0.0) & is_sampleable:
            if has_lists:
                apply_temperature(s, masks, mask, s, e, vocabulary, top, temperature, BLOCK)
            else:
                apply_temperature(x, masks, mask, s, e, vocabulary, top, temperature, BLOCK)
            token = filter_and_draw(s, e, candidates, row_ints, row_floats, vocabulary, BLOCK)
        tl.store(out + row, tl.where(is_sampleable, token, -2))


@triton.jit(do_not_specialize=["mask_words"])
def argmax_rows(logits, stride, mask_index, masks, mask_words, out, vocabulary, BLOCK: tl.constexpr):
    """Store the id of the largest logit of each row, the lowest among equals, or NOT_FINITE. Masks: `sample_rows`."""
    row = tl.program_id(0)
    mask = find_mask(mask_index, row, mask_words)
    _, token, is_sampleable = scan_row(logits + row.to(tl.int64) * stride, masks, mask, vocabulary, BLOCK)
    tl.store(out + row, tl.where(is_sampleable, token, -2))


@triton.jit
def next_largest(x, masks, mask, value, token, vocabulary, BLOCK: tl.constexpr):
    """Return the successor of (value, token) in the order largest first, lowest id first among equals."""
    best = tl.full((BLOCK,), -INF, tl.float32)
    at = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = load_values(x, masks, mask, i, vocabulary)
        left = (i < vocabulary) & ((v < value) | ((v == value) & (i > token)))
        better = left & ((v > best) | (at == NO_TOKEN))
        at = tl.where(better, i, at)
        best = tl.where(better, v, best)
    top = tl.max(tl.where(at == NO_TOKEN, -INF, best), 0)
    return top, tl.min(tl.where(best == top, at, NO_TOKEN), 0)


@triton.jit(do_not_specialize=["k", "mask_words"])
def logprob_rows(
    logits, stride, wanted, chosen, mask_index, masks, mask_words, out, top_ids, vocabulary, k, BLOCK: tl.constexpr
):
    """Compute log-softmax in float64 at the chosen token and at the largest (lowest id first among equals).

    wanted (programs, 3): a row of `logits` and `chosen`, how many of its largest, at most k, and whether its mask
    applies (`sample_rows`). out (programs, 1 + k) float32, NaN where no token can be sampled; top_ids (programs, k)."""
    program = tl.program_id(0).to(tl.int64)
    row, count = tl.load(wanted + 3 * program).to(tl.int64), tl.load(wanted + 3 * program + 1)
    x = logits + row * stride
    mask = find_mask(mask_index, row, mask_words * tl.load(wanted + 3 * program + 2))
    top, _, is_sampleable = scan_row(x, masks, mask, vocabulary, BLOCK)
    wide = top.to(tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.exp(load_values(x, masks, mask, i, vocabulary).to(tl.float64) - wide)
    less = tl.log(tl.sum(total, 0))
    token = tl.maximum(tl.load(chosen + row), 0)  # undecided ones are sampled again
    own = load_values(x, masks, mask, token, vocabulary).to(tl.float64) - wide - less
    out += program * (1 + k)
    tl.store(out, tl.where(is_sampleable, own, float("nan")).to(tl.float32))
    value, token = INF, -1
    for n in range(count):
        value, token = next_largest(x, masks, mask, value, token, vocabulary, BLOCK)
        tl.store(out + 1 + n, (value.to(tl.float64) - wide - less).to(tl.float32))
        tl.store(top_ids + program * k + n, token)
