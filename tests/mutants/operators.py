"""Mutants of a source file: small faults, each a replacement of one span of the text.

Pure: text in, mutants out, in the order of their places. What no test is meant to see is left alone: assertions, the
`strict` of zip among them, logging, messages of errors, annotations, docstrings, and constants of a module or class,
which are tunables.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
}
_EXTREMES = {"min": "max", "max": "min"}
_SYMMETRIC = {"minimum", "maximum", "update"}  # of arrays, element by element; of sets


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: `before`, at this place, becomes `after`."""

    path: str
    start: int  # characters from the beginning of the file
    end: int
    line: int
    operator: str
    before: str
    after: str

    def applied_to(self, source: str) -> str:
        """The file with the fault."""
        assert source[self.start : self.end] == self.before
        return source[: self.start] + self.after + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Make all mutants of a file, in the order of their places."""
    return sorted(_Finder(path, source).found, key=lambda each: (each.start, each.end, each.operator, each.after))


def is_python(mutant: Mutant, source: str) -> bool:
    """True if the file with the fault compiles; a file that does not would be found by any test."""
    try:
        compile(mutant.applied_to(source), mutant.path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Walks through a file once."""

    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)
        self._depth = 0  # of functions
        self.visit(ast.parse(source))

    def _offset(self, line: int, column: int) -> int:
        """`column` counts bytes of UTF-8."""
        text = self._lines[line - 1].encode()[:column].decode()
        return self._line_starts[line - 1] + len(text)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, operator: str, span: tuple[int, int], after: str) -> None:
        start, end = span
        before = self._source[start:end]
        if self._depth and before != after:  # only what runs in functions
            line = self._source.count("\n", 0, start) + 1
            self.found.append(
                Mutant(path=self._path, start=start, end=end, line=line, operator=operator, before=before, after=after)
            )

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _add_between(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replaces the operator sign between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end]
        index = between.find(old)
        if index >= 0:
            self._add(operator, (start + index, start + index + len(old)), new)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> None:
        """States what would be our own bug."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words for people."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("dropped statement", self._span(node), "pass")

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # states what would be our own bug
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call) or _is_log(call):
            return
        self._add("dropped call", self._span(node), "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("dropped statement", self._span(node), "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("dropped statement", self._span(node), "pass")
        signs = _ARITHMETIC.get(type(node.op))
        if signs is not None:
            self._add_between("arithmetic", node.target, node.value, f"{signs[0]}=", f"{signs[1]}=")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("dropped statement", self._span(node), "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("dropped statement", self._span(node), "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("dropped statement", self._span(node), "pass")

    def visit_Return(self, node: ast.Return) -> None:
        is_falsy = isinstance(node.value, ast.Constant) and not node.value.value  # callers see no other than None
        if node.value is not None and not is_falsy:
            self._add("return None", self._span(node.value), "None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._add("negated condition", self._span(test), self._text(test.operand))
        else:
            self._add("negated condition", self._span(test), f"not ({self._text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, comparison in zip(operands, operands[1:], node.ops, strict=False):
            old, new = _COMPARISONS[type(comparison)]
            self._add_between("comparison", left, right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add_between("and/or", left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        signs = _ARITHMETIC.get(type(node.op))
        if signs is not None and not isinstance(node.left, ast.List | ast.Tuple):
            self._add_between("arithmetic", node.left, node.right, *signs)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _EXTREMES:  # in which the order means nothing
            self._add("min/max", self._span(node.func), _EXTREMES[node.func.id])
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _SYMMETRIC:
            pass
        elif len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
            first, second = node.args[:2]
            start, end = self._span(first)[0], self._span(second)[1]
            between = self._source[self._span(first)[1] : self._span(second)[0]]
            self._add("swapped arguments", (start, end), self._text(second) + between + self._text(first))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        for after in _other_constants(node.value):
            self._add("constant", self._span(node), after)


def _other_constants(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield str(value + 1)
    elif isinstance(value, float):
        yield repr(value * 2 + 1)


def _is_log(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "log"
