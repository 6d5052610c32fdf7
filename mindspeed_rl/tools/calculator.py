"""Arithmetic on a parsed expression: nothing is evaluated but numbers, + - * / // % ** and brackets."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from mindspeed_rl.tools.registry import Tool, ToolError

_LONGEST = 500  # characters; keeps brackets from going too deep, too
_LARGEST_BITS = 4096  # of a result
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculate(expression: str) -> str:
    """Its value: whole numbers exactly, others in float64.

    Raises:
        ToolError: it is no arithmetic, has no value, or one that is too large.
    """
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ToolError(f"the expression must be text of at most {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"this is no arithmetic: {error}") from error
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from error
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _of_size(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value: int | float = _UNARY[type(node.op)](_value(node.operand))
        return value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > _LARGEST_BITS:
            raise ToolError("the result is too large")
        return _of_size(_BINARY[type(node.op)](left, right))
    raise ToolError(f"this is no arithmetic: {ast.unparse(node):.80}")


def _of_size(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ToolError("the result is too large")
    assert isinstance(value, int | float)
    return value


CALCULATOR = Tool(
    "calculator",
    "Computes an arithmetic expression.",
    {"expression": {"type": "string", "description": "numbers, + - * / // % ** and brackets"}},
    calculate,
)
