"""A document's conclusions, drawn again from the digits that it prints."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from .interval import Interval, exactly, printed

Verdict = Literal["agrees", "disagrees", "unknown"]

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Interval, Interval], Interval]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Rederivation:
    """One figure or conclusion of a document beside what comes out when it is computed again; `how` is the arithmetic."""

    id: str
    says: str
    stated: str
    derived: str
    verdict: Verdict
    how: str = ""


class Formula:
    """Arithmetic on printed figures, such as ``evict.wall_s - 2 * evict.steps``, or a comparison ``a < b`` of such.

    A figure's name is words and numbers with dots between them. A figure that is a text counts as everything that prints so; a whole number, and a
    number in the formula itself, is exact.

    Raises:
        ValueError: it is no such formula, or names a figure that there is not.

    """

    def __init__(self, text: str, figures: Mapping[str, str | int | None]) -> None:
        self.text = text
        names = list(dict.fromkeys(match[0] for match in _NAME.finditer(text)))
        for name in names:
            if name not in figures:
                raise ValueError(f"{text!r}: there is no figure {name}")
        self._printed = {name: figures[name] for name in names}
        try:
            self._tree = ast.parse(_NAME.sub(lambda match: f"_{names.index(match[0])}", text), mode="eval").body
        except SyntaxError:
            raise ValueError(f"{text!r} is no formula; write figures and numbers with + - * / between them") from None
        self._names = {f"_{place}": name for place, name in enumerate(names)}

    @property
    def missing(self) -> list[str]:
        """The figures in it that nobody knows."""
        return [name for name, figure in self._printed.items() if figure is None]

    @property
    def shown(self) -> str:
        """The formula with the printed digits in place of the names."""
        return _NAME.sub(lambda match: str(self._printed[match[0]]), self.text)

    def value(self) -> Interval:
        """Everything that it can give."""
        return self._value(self._tree)

    def holds(self) -> tuple[Interval, Interval, Verdict]:
        """Both sides of a comparison, and whether it holds for all that prints as its figures, for none, or for some."""
        tree = self._tree
        if not (isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Lt)):
            raise ValueError(f"{self.text!r} is no comparison a < b; write one, or what is stated")
        left, right = self._value(tree.left), self._value(tree.comparators[0])
        # rounding never swaps two numbers: where only the ends of two rounded figures meet, the order of the digits holds
        rounded = left.low < left.high and right.low < right.high
        surely = left.high < right.low or (rounded and left.high == right.low)
        return left, right, "agrees" if surely else "disagrees" if right.high <= left.low else "unknown"

    def _value(self, tree: ast.expr) -> Interval:
        if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATIONS:
            return _OPERATIONS[type(tree.op)](self._value(tree.left), self._value(tree.right))
        if isinstance(tree, ast.Name):
            figure = self._printed[self._names[tree.id]]
            return exactly(figure) if isinstance(figure, int) else printed(str(figure))
        if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
            return exactly(Fraction(str(tree.value)))
        raise ValueError(f"{self.text!r} holds more than figures, numbers and + - * /; write it with these")


def rederived(id: str, says: str, formula: Formula, stated: str | None, note: str = "") -> Rederivation:
    """A conclusion beside its formula's result: it agrees when the two overlap, or, where nothing is stated, when a < b holds."""
    if formula.missing:
        reason = f"{', '.join(formula.missing)} is unknown"
        return Rederivation(id, says, stated or "holds", reason, "unknown", formula.text)
    how = f"{formula.shown}; {note}" if note else formula.shown
    if stated is None:
        left, right, verdict = formula.holds()
        return Rederivation(id, says, "holds", f"{left} < {right}", verdict, how)
    derived = formula.value()
    return Rederivation(
        id, says, stated, str(derived), "agrees" if derived.overlaps(printed(stated)) else "disagrees", how
    )
