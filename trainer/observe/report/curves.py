"""Draws curves as SVG: values by step, on a linear or a logarithmic axis, as measured and smoothed. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 26  # margins, in which the numbers of the axes stand
SPARK_WIDTH, SPARK_HEIGHT = 90, 22
MAX_POINTS = 400  # of a curve; of more, the lowest and the highest of each stretch are drawn
SMOOTHING = 0.9  # weight of the values before, of an exponential moving average
FEW = 60  # points that are marked one by one
TICKS = 5
LARGEST = 1e300
SAME = 1e-9  # relative difference below which values count as equal

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """The values of one run by global step."""

    name: str
    points: Points  # (step, value), by rising step
    hue: int = 0  # number of the colour
    is_dashed: bool = False

    @property
    def finite(self) -> Points:
        return [(x, y) for x, y in self.points if abs(y) < LARGEST]


@dataclass(frozen=True)
class Line:
    """A curve as drawn."""

    name: str
    path: str  # of SVG
    hue: int
    is_dashed: bool
    dots: Sequence[tuple[float, float, str]]  # x, y and what stands there; of a curve of few points


@dataclass(frozen=True)
class Axes:
    """A drawing of curves with its axes."""

    x_ticks: Sequence[tuple[float, str]]  # place in pixels, and number
    y_ticks: Sequence[tuple[float, str]]
    raw: Sequence[Line]
    smooth: Sequence[Line]


def draw(curves: Sequence[Curve], *, logarithmic: bool) -> Axes | None:
    """Draws curves in WIDTH x HEIGHT pixels; None if nothing can be drawn, as below 0 on a logarithmic axis."""
    shown = [(curve, [(x, y) for x, y in curve.finite if y > 0 or not logarithmic]) for curve in curves]
    shown = [(curve, points) for curve, points in shown if points]
    if not shown:
        return None
    try:
        return _place(shown, logarithmic=logarithmic)
    except OverflowError:  # numbers at the limit of floats
        return None


def spark(points: Points) -> str:
    """Returns the path of a small curve without axes, SPARK_WIDTH x SPARK_HEIGHT pixels; empty for under two points."""
    finite = Curve("", points).finite
    if len(finite) < 2:
        return ""
    x_scale = _Scale([x for x, _ in finite], 1, SPARK_WIDTH - 1, logarithmic=False)
    y_scale = _Scale([y for _, y in finite], SPARK_HEIGHT - 2, 2, logarithmic=False)
    return "M" + "L".join(f"{x_scale(x):g} {y_scale(y):g}" for x, y in finite)


def _place(shown: Sequence[tuple[Curve, Points]], *, logarithmic: bool) -> Axes:
    x_scale = _Scale([x for _, points in shown for x, _ in points], LEFT, WIDTH - RIGHT, logarithmic=False)
    y_scale = _Scale([y for _, points in shown for _, y in points], HEIGHT - BOTTOM, TOP, logarithmic=logarithmic)
    return Axes(
        x_ticks=[(x_scale(value), number(value)) for value in x_scale.ticks()],
        y_ticks=[(y_scale(value), number(value)) for value in y_scale.ticks()],
        raw=[_line(curve, points, x_scale, y_scale) for curve, points in shown],
        smooth=[_line(curve, list(_smoothed(points)), x_scale, y_scale) for curve, points in shown],
    )


def number(value: float) -> str:
    """Formats a number of an axis: 0.001, 2.5, 12k, 3M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    return f"{value:g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.0e}"


class _Scale:
    """Maps values to pixels."""

    def __init__(self, values: Sequence[float], first: float, last: float, *, logarithmic: bool) -> None:
        self._log, self._first, self._last = logarithmic, first, last
        low, high = min(values), max(values)
        if high - low <= SAME * max(abs(low), abs(high)):  # a flat curve is drawn in the middle
            low, high = (low / 2, high * 2) if logarithmic else (low - (abs(low) or 1), high + (abs(high) or 1))
        self._low, self._high = self._of(low), self._of(high)

    def _of(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return round(self._first + share * (self._last - self._first), 1)

    def ticks(self) -> list[float]:
        """Returns round values within the scale."""
        if self._log and self._high - self._low >= 1:
            every = max(1, round((self._high - self._low) / TICKS))
            return [10.0**power for power in range(math.ceil(self._low), math.floor(self._high) + 1, every)]
        low, high = (10**self._low, 10**self._high) if self._log else (self._low, self._high)
        step = 10 ** math.floor(math.log10((high - low) / TICKS))
        step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= TICKS)
        return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(curve: Curve, points: Points, x_scale: _Scale, y_scale: _Scale) -> Line:
    places = [(x_scale(x), y_scale(y)) for x, y in _thinned(points)]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    dots = [(x_scale(x), y_scale(y), f"{curve.name}, step {x:g}: {y:.6g}") for x, y in points]
    return Line(curve.name, path, curve.hue, curve.is_dashed, dots if len(points) <= FEW else [])


def _thinned(points: Points) -> Points:
    """Returns at most MAX_POINTS points, with every peak."""
    if len(points) <= MAX_POINTS:
        return points
    cuts = [round(i * len(points) / (MAX_POINTS // 2)) for i in range(MAX_POINTS // 2 + 1)]
    thinned: list[tuple[float, float]] = []
    for begin, end in pairwise(cuts):
        stretch = points[begin:end]
        thinned += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [points[0], *(point for point in thinned if point not in (points[0], points[-1])), points[-1]]


def _smoothed(points: Points) -> Iterator[tuple[float, float]]:
    """Yields an exponential moving average, corrected for its bias towards 0 at the start."""
    total = weight = 0.0
    for x, y in points:
        total, weight = SMOOTHING * total + (1 - SMOOTHING) * y, SMOOTHING * weight + (1 - SMOOTHING)
        yield x, total / weight
