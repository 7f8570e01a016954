"""Single changes of a module's expressions that a test should notice. Knows Python's syntax and nothing of fisedit.

Left alone are annotations, decorators, asserts, messages of exceptions, strings, and what only type checkers read.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
"""Each operator, and the one that takes its place."""

SKIPPED = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutation:
    """One changed expression of a file: where it stands, and what it was and becomes."""

    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        """Return `source` with the change made; everything else stays to the byte."""
        lines = source.encode().splitlines(keepends=True)
        first, last = lines[self.line - 1][: self.column], lines[self.end_line - 1][self.end_column :]
        lines[self.line - 1 : self.end_line] = [first + f"({self.after})".encode() + last]
        return b"".join(lines).decode()


def mutations(source: str) -> list[Mutation]:
    """List every change of a module, in the order of its lines."""
    found = []
    for node in _expressions(ast.parse(source)):
        place = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
        before = ast.unparse(node)
        changes = (Mutation(*place, before, ast.unparse(changed)) for changed in _changes(node))
        found += [one for one in changes if one.after != before]
    return sorted(found, key=lambda one: (one.line, one.column, one.end_line, one.end_column, one.after))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Every expression that runs."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED) and not _is_type(child):
                if isinstance(child, ast.expr) and isinstance(getattr(child, "ctx", ast.Load()), ast.Load):
                    yield child
                yield from _expressions(child)


def _is_type(node: ast.AST) -> bool:
    """Tell a docstring, and the alias of a type: `A = B | C` or `A = dict[B, C]` at a module's top."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Assign) and node.col_offset == 0 and ast.unparse(node.value).startswith(TYPES)


TYPES = ("Callable[", "Mapping[", "Sequence[", "dict[", "tuple[", "list[", "set[", "TypeVar(", "Literal[", "Union[")


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=operators):
            for i, operator in enumerate(operators):
                changed = deepcopy(node)
                changed.ops[i] = OPERATORS[type(operator)]()
                yield changed
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATORS:
            changed = deepcopy(node)
            changed.op = OPERATORS[type(operator)]()
            yield changed
        case ast.Call(args=elements) | ast.Tuple(elts=elements) if _can_swap(elements):
            changed = deepcopy(node)
            swapped = changed.args if isinstance(changed, ast.Call) else changed.elts
            swapped[:2] = reversed(swapped[:2])
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=other):
            yield ast.IfExp(test, other, body)
        case ast.Constant(value=value):
            yield from map(ast.Constant, _other_values(value))


def _can_swap(elements: list[ast.expr]) -> bool:
    return len(elements) > 1 and not any(isinstance(element, ast.Starred | ast.Slice) for element in elements)


def _other_values(value: object) -> list[object]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1]
        case float():
            return [value * 2 if value else 1.0]
    return []
