"""Parsing one cell of a log: bytes ``[start, end)`` of a buffer to a number, an id or a time.

Each parser returns ``(value, code)``; code 0 is success, the others are the keys of :data:`EXPECTED`. Shared by the
text reader and the Parquet reader, so that a value means the same in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm.data.hashing import FNV_OFFSET, FNV_PRIME, mix64
from dlrm.data.transform import log1p_clipped
from embcache.kernels.jit import I64, inline, kernel, pasted

SKIP, LABEL, LABEL_THRESHOLD, LABEL_POSITIVE, DENSE_LOG1P, DENSE_IDENTITY = range(6)
ID_HEX, ID_DECIMAL, ID_STRING, BAG_HEX, BAG_DECIMAL, BAG_STRING = range(6, 12)
TIME_YYMMDDHH, TIME_UNIX, TIME_UNIX_MS, TIME_ISO = range(12, 16)

FEW, MANY, NUMBER, LABEL_RANGE, HEX, HEX_LONG, INTEGER, INTEGER_BIG, BAD_TIME, QUOTE, ABSENT, TOO_BIG = range(1, 13)
EXPECTED = {
    NUMBER: "a number",
    LABEL_RANGE: "a label in [0, 1]",
    HEX: "a hexadecimal id",
    HEX_LONG: "at most 16 hexadecimal digits",
    INTEGER: "a decimal id",
    INTEGER_BIG: "an id in the range of int64",
    QUOTE: "a closing quote before a delimiter or the line's end",
    ABSENT: "a value (this column cannot be missing)",
    TOO_BIG: "a number in the range of float32",
}
TIME_EXPECTED = {
    "yymmddhh": "a time as YYMMDDHH",
    "unix": "a time in seconds",
    "unix_ms": "a time in milliseconds",
    "iso": "a time as YYYY-MM-DD, optionally with HH:MM:SS",
}

_FOUR, _FIFTEEN, _SIXTEEN = np.uint64(4), np.uint64(15), 16
_DIGITS = np.full(256, 255, np.uint64)
_DIGITS[48:58], _DIGITS[65:71], _DIGITS[97:103] = range(10), range(10, 16), range(10, 16)
_POWERS = np.array([10.0**k for k in range(23)])
_FLOAT32_MAX = float(np.finfo(np.float32).max)
LOG_TABLE_SIZE = 4096


@kernel
def log_table() -> np.ndarray:
    """``log1p_clipped`` of 0..4095, float32: most counts are small."""
    out = np.empty(LOG_TABLE_SIZE, np.float32)
    for i in range(LOG_TABLE_SIZE):
        out[i] = log1p_clipped(np.float64(i))
    return out


@inline
def same_text(buf: np.ndarray, start: int, end: int, texts: np.ndarray, bounds: np.ndarray) -> bool:
    """Whether the cell equals one of the texts packed in ``texts`` at ``bounds`` ``[n + 1]``."""
    for m in range(bounds.shape[0] - 1):
        if bounds[m + 1] - bounds[m] == end - start:
            equal = True
            for k in range(end - start):
                if buf[start + k] != texts[bounds[m] + k]:
                    equal = False
                    break
            if equal:
                return True
    return False


@pasted
def parse_hex(buf: np.ndarray, start: int, end: int) -> tuple[I64, int]:
    """Up to 16 hexadecimal digits of either case, read as uint64 and kept as int64."""
    value, wrong = np.uint64(0), np.uint64(0)
    for k in range(start, end):  # no branch on the digit: letters and figures alternate at random
        digit = _DIGITS[buf[k]]
        wrong |= digit
        value = (value << _FOUR) | digit
    if wrong > _FIFTEEN:
        return np.int64(0), HEX
    if end - start > _SIXTEEN:
        return np.int64(0), HEX_LONG
    return np.int64(value), 0


@inline
def parse_decimal(buf: np.ndarray, start: int, end: int) -> tuple[I64, int]:
    """A signed 64-bit integer."""
    negative = buf[start] == 45
    at = start + 1 if negative or buf[start] == 43 else start
    if at == end:
        return np.int64(0), INTEGER
    value = np.uint64(0)
    for k in range(at, end):
        c = buf[k]
        if c < 48 or c > 57:
            return np.int64(0), INTEGER
        if value > np.uint64(922337203685477580):
            return np.int64(0), INTEGER_BIG
        value = value * np.uint64(10) + np.uint64(c - 48)
    limit = np.uint64(9223372036854775808) if negative else np.uint64(9223372036854775807)
    if value > limit:
        return np.int64(0), INTEGER_BIG
    return np.int64(np.uint64(0) - value) if negative else np.int64(value), 0


@inline
def parse_string(buf: np.ndarray, start: int, end: int) -> I64:
    """64-bit hash of the bytes: ``mix64(fnv1a64(bytes))``."""
    h = FNV_OFFSET
    for k in range(start, end):
        h = (h ^ np.uint64(buf[k])) * FNV_PRIME
    return np.int64(mix64(h))


@inline
def parse_number(buf: np.ndarray, start: int, end: int) -> tuple[float, int]:
    """Decimal number with optional sign, fraction and exponent, within an ulp or two of float64; finite as float32."""
    negative = buf[start] == 45
    at = start + 1 if negative or buf[start] == 43 else start
    mantissa, exponent, digits, fraction = np.uint64(0), 0, 0, False
    while at < end:
        c = buf[at]
        if 48 <= c <= 57:
            digits += 1
            if mantissa < np.uint64(1000000000000000000):
                mantissa = mantissa * np.uint64(10) + np.uint64(c - 48)
                exponent -= 1 if fraction else 0
            else:
                exponent += 0 if fraction else 1
        elif c == 46 and not fraction:
            fraction = True
        else:
            break
        at += 1
    if digits == 0:
        return 0.0, NUMBER
    if at < end:
        if buf[at] not in (69, 101):
            return 0.0, NUMBER
        at += 1
        minus = at < end and buf[at] == 45
        at += 1 if at < end and buf[at] in (43, 45) else 0
        if at == end:
            return 0.0, NUMBER
        power: I64 = 0
        for k in range(at, end):
            if buf[k] < 48 or buf[k] > 57:
                return 0.0, NUMBER
            power = min(power * 10 + np.int64(buf[k] - 48), 100000)
        exponent += -power if minus else power
    value = np.float64(mantissa)
    if mantissa != np.uint64(0) and exponent != 0:
        if 0 < exponent <= 22:
            value *= _POWERS[exponent]
        elif -22 <= exponent < 0:
            value /= _POWERS[-exponent]
        else:
            value *= 10.0 ** np.float64(exponent)
    if value > _FLOAT32_MAX:
        return 0.0, TOO_BIG
    return -value if negative else value, 0


@inline
def _digits(buf: np.ndarray, start: int, end: int) -> int:
    value: I64 = 0
    for k in range(start, end):
        if buf[k] < 48 or buf[k] > 57:
            return -1
        value = value * 10 + np.int64(buf[k] - 48)
    return value


@inline
def _seconds(year: int, month: int, day: int, rest: int) -> tuple[I64, int]:
    # Days from the civil calendar (Hinnant's algorithm), then seconds.
    if year < 0 or month < 1 or month > 12 or day < 1 or rest < 0:
        return np.int64(0), BAD_TIME
    leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    last = 28 + (1 if leap else 0) if month == 2 else 30 if month in (4, 6, 9, 11) else 31
    if day > last:
        return np.int64(0), BAD_TIME
    y = year - 1 if month <= 2 else year
    era = y // 400
    of_era = y - era * 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    days = era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
    return np.int64(days * 86400 + rest), 0


@inline
def parse_time(buf: np.ndarray, start: int, end: int, kind: int) -> tuple[I64, int]:
    """Seconds since 1970 (UTC)."""
    if kind in (TIME_UNIX, TIME_UNIX_MS):
        value, code = parse_decimal(buf, start, end)
        if code != 0:
            return np.int64(0), BAD_TIME
        return value // 1000 if kind == TIME_UNIX_MS else value, 0
    if kind == TIME_YYMMDDHH:
        if end - start != 8:
            return np.int64(0), BAD_TIME
        hour = _digits(buf, start + 6, end)
        year, month = _digits(buf, start, start + 2), _digits(buf, start + 2, start + 4)
        if hour < 0 or hour > 23 or year < 0:
            return np.int64(0), BAD_TIME
        return _seconds(2000 + year, month, _digits(buf, start + 4, start + 6), hour * 3600)
    if end - start < 10 or buf[start + 4] != 45 or buf[start + 7] != 45:
        return np.int64(0), BAD_TIME
    rest = 0
    if end - start > 10:
        length = end - start - (1 if buf[end - 1] == 90 else 0)
        if length not in (16, 19) or buf[start + 10] not in (32, 84) or buf[start + 13] != 58:
            return np.int64(0), BAD_TIME
        hour, minute, second = _digits(buf, start + 11, start + 13), _digits(buf, start + 14, start + 16), 0
        if length == 19:
            second = _digits(buf, start + 17, start + 19) if buf[start + 16] == 58 else -1
        if not (0 <= hour < 24 and 0 <= minute < 60 and 0 <= second < 60):
            return np.int64(0), BAD_TIME
        rest = hour * 3600 + minute * 60 + second
    year, month = _digits(buf, start, start + 4), _digits(buf, start + 5, start + 7)
    return _seconds(year, month, _digits(buf, start + 8, start + 10), rest)


@inline
def parse_key(buf: np.ndarray, start: int, end: int, encoding: int) -> tuple[I64, int]:
    """An id by its encoding: 0 hexadecimal, 1 decimal, 2 string."""
    if encoding == 0:
        return parse_hex(buf, start, end)
    if encoding == 1:
        return parse_decimal(buf, start, end)
    return parse_string(buf, start, end), 0


@inline
def dense_value(x: float, kind: int) -> np.float32:
    """A number after its column's transform."""
    return log1p_clipped(x) if kind == DENSE_LOG1P else np.float32(x)


@inline
def label_value(x: float, kind: int, threshold: float) -> tuple[np.float32, int]:
    """A numeric label after its rule."""
    if kind == LABEL_THRESHOLD:
        return np.float32(1.0) if x >= threshold else np.float32(0.0), 0
    if not 0.0 <= x <= 1.0:
        return np.float32(0.0), LABEL_RANGE
    return np.float32(x), 0


@inline
def parse_label(
    buf: np.ndarray, start: I64, end: I64, kind: I64, threshold: float, texts: np.ndarray, positive: np.ndarray
) -> tuple[Any, I64]:
    """The label (float32) of a cell by its rule."""
    if kind == LABEL_POSITIVE:
        return np.float32(1.0) if same_text(buf, start, end, texts, positive) else np.float32(0.0), 0
    number, code = parse_number(buf, start, end)
    return label_value(number, kind, threshold) if code == 0 else (np.float32(0.0), code)


@pasted
def parse_dense(buf: np.ndarray, start: I64, end: I64, kind: I64, logs: np.ndarray) -> tuple[Any, I64]:
    """A number (float32) after its transform; figures up to 999 come from the table."""
    short, value = end - start <= 3, np.int64(0)
    for k in range(start, min(end, start + 3)):
        figure = np.int64(buf[k]) - 48
        short = short and 0 <= figure <= 9
        value = value * 10 + figure
    if short:
        return logs[value] if kind == DENSE_LOG1P else np.float32(value), 0
    number, code = parse_number(buf, start, end)
    return dense_value(number, kind), code
