"""Formats numbers for people: bytes and seconds in the units that fit them."""


def size(count: float) -> str:
    """Return `count` bytes as text with three significant digits: "13.9 MB", "1.63 GB", "512 B"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= 0.9995 * unit:
            value = count / unit
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {name}"
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    """Return a time as text in its two largest units: "48 s", "3 min 05 s", "2 h 14 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60:,} h {minutes % 60:02} min"


def digits(value: float) -> float:
    """Return `value` rounded to 6 significant digits: no float32 sum has more."""
    return float(f"{value:.6g}")
