"""How exact a product is: an argument of every op, and what it is where that is None."""

CHOICES = ("auto", "ieee")
_LATER = ("fp16x3",)

_default = "auto"  # a plain global: of all places for a default, compiled code guards only this one


class precision:
    """``with torch_sgemm.precision("ieee"):`` sets the precision of the calls inside, for all
    threads, where they are given none.

    "ieee": products and sums of IEEE FP32, on CUDA cores. "auto": the fastest of what meets the
    project's error rule for FP32; today that is "ieee".

    Raises:
        ValueError: for any other precision.
    """

    def __init__(self, precision: str):
        self.precision = checked(precision)
        self.before: list[str] = []

    def __enter__(self) -> None:
        global _default
        self.before.append(_default)
        _default = self.precision

    def __exit__(self, *_exception) -> None:
        global _default
        _default = self.before.pop()


def checked(precision: str) -> str:
    if precision not in CHOICES:
        choices = " or ".join(f'"{choice}"' for choice in CHOICES)
        later = ", which is not available yet" if precision in _LATER else ""
        raise ValueError(f"precision must be {choices}, got {precision!r}{later}")
    return precision


def resolved(precision: str | None) -> str:
    """An argument, or the default in its place."""
    return _default if precision is None else checked(precision)
