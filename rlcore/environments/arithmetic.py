"""Arithmetic on text, by the syntax tree: nothing of it is ever executed as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_EXPRESSION = 200
"""Characters. A longer expression is no arithmetic question, and nesting stays shallow."""

MAX_BITS = 512
"""Of a numerator or denominator; bounds what a chain of products and powers can cost."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ArithmeticFault(ValueError):
    """An expression that is not computed; the message says why and repeats none of it."""


def evaluate(expression: str) -> Fraction:
    """The exact value of numbers, ``+ - * / **`` and parentheses; ArithmeticFault for anything else."""
    if len(expression) > MAX_EXPRESSION:
        raise ArithmeticFault(f"longer than {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise ArithmeticFault("no arithmetic expression") from None
    return _value(tree.body)


def show(value: Fraction) -> str:
    """As an integer where it is one, else rounded to 6 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ArithmeticFault("no arithmetic expression")
        case ast.Constant(value=int(number)):
            return _bounded(Fraction(number))
        case ast.Constant(value=float(number)):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Div) and b == 0:
                raise ArithmeticFault("division by zero")
            return _bounded(_BINARY[type(op)](a, b))
    raise ArithmeticFault("no arithmetic expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticFault("only whole exponents")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > MAX_BITS or bits * abs(exponent) > MAX_BITS:
        raise ArithmeticFault("too large")
    if base == 0 and exponent < 0:
        raise ArithmeticFault("division by zero")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ArithmeticFault("too large")
    return value
