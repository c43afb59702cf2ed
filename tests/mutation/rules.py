"""Mutations of source text: each a class of mistake, applied at one place (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of", "sample"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change."""

    file: str
    line: int
    """From 1."""
    rule: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """What it is, without its line's number: changes elsewhere in the file don't rename it."""
        return f"{self.file}: {self.rule}: {self.before.strip()} -> {self.after.strip()}"

    def apply(self, text: str) -> str:
        lines = text.split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines)


Rule = Callable[[str], Iterator[str]]


def _replace(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Rule:
    compiled = re.compile(pattern)

    def rule(code: str) -> Iterator[str]:
        for match in compiled.finditer(code):
            made = new(match) if callable(new) else match.expand(new)
            yield code[: match.start()] + made + code[match.end() :]

    return rule


def _any(*rules: Rule) -> Rule:
    def rule(code: str) -> Iterator[str]:
        for one in rules:
            yield from one(code)

    return rule


def _arguments(code: str, start: int) -> tuple[list[str], int] | None:
    """Return the arguments of the call whose parenthesis opens at `start`, and where it ends."""
    depth, at, found = 0, start + 1, []
    for i in range(start, len(code)):
        if code[i] in "([{":
            depth += 1
        elif code[i] in ")]}":
            depth -= 1
            if depth == 0:
                found.append(code[at:i].strip())
                return found, i + 1
        elif code[i] == "," and depth == 1:
            found.append(code[at:i].strip())
            at = i + 1
    return None


def _calls(names: str, make: Callable[[str, list[str]], str | None]) -> Rule:
    compiled = re.compile(rf"\b({names})\(")

    def rule(code: str) -> Iterator[str]:
        for match in compiled.finditer(code):
            found = _arguments(code, match.end() - 1)
            if found is None or "VF " in found[0][0] or code.lstrip().startswith("CANON"):
                continue
            made = make(match[1], found[0])
            if made is not None:
                yield code[: match.start()] + made + code[found[1] :]

    return rule


def _unfused(_: str, a: list[str]) -> str | None:
    return f"f_add(f_mul({a[0]}, {a[1]}), {a[2]})" if len(a) == 3 else None


def _swapped(name: str, a: list[str]) -> str | None:
    return f"{name}({', '.join([a[1], a[0], *a[2:]])})" if len(a) >= 2 and a[0] != a[1] else None


def _flip_last_bit(match: re.Match[str]) -> str:
    return f"0x{int(match[1], 16) ^ 1:08X}"


def _one_more(match: re.Match[str]) -> str:
    return str(int(match[0]) + 1)


_NAMES = {
    "f_add": "f_sub", "f_sub": "f_add", "f_mul": "f_add", "f_div": "f_mul",
    "f_max": "f_min", "f_min": "f_max",
    "i_add": "i_sub", "i_sub": "i_add", "i_and": "i_or", "i_or": "i_and", "i_shl": "i_sar", "i_sar": "i_shl",
}  # fmt: skip

_INFIX: Rule = _any(
    _replace(r"(?<=[\w\])]) \+ (?=[\w(*-])", " - "),
    _replace(r"(?<=[\w\])]) - (?=[\w(*])", " + "),
    _replace(r"(?<=[\w\])]) \* (?=[\w(])", " + "),
    _replace(r"(?<=[\w\])]) // (?=[\w(])", " * "),
    _replace(r"(?<=[\w\])]) / (?=[\w(])", " * "),
    _replace(r"(?<=[\w\])]) % (?=[\w(])", " / "),
    _replace(r"(?<=[\w\])]) >> (?=[\w(])", " << "),
    _replace(r"\+= ", "-= "),
)
_COMPARE: Rule = _any(
    _replace(r" < (?=[\w(*-])", " <= "),
    _replace(r" <= (?=[\w(*-])", " < "),
    _replace(r" > (?=[\w(*-])", " >= "),
    _replace(r" >= (?=[\w(*-])", " > "),
    _replace(r" == ", " != "),
)

CPP: dict[str, Rule] = {
    "operator swapped": _replace(rf"\b({'|'.join(_NAMES)})(?=[(<])", lambda m: _NAMES[m[1]]),
    "product unfused": _calls("f_fma", _unfused),
    "operands swapped": _calls("f_sub|f_div|f_pick_lt|i_sub", _swapped),
    "last bit of a constant": _replace(r"0x([0-9A-Fa-f]{8})", _flip_last_bit),
    "arithmetic swapped": _INFIX,
    "comparison": _COMPARE,
    "off by one": _replace(r"(?<![\w.])\d{1,4}(?![\w.]|::)", _one_more),
    "sign of zero": _replace(r"\b0\.0f", "-0.0f"),
    "rounding": _any(
        _replace(r"cvtps_epi32", "cvttps_epi32"),
        _replace(r"\brintf?\b", "floorf"),
        _replace(r"\bi_to_f\(", "0.5f * i_to_f("),
    ),
    "branches swapped": _replace(r" \? ([^:?]+) : ([^;,)]+)", r" ? \2 : \1"),
    "and, or": _any(_replace(r" && ", " || "), _replace(r" \|\| ", " && ")),
    "statement dropped": _replace(
        r"^(\s+)(?!return|const|auto|int|float|VF|VI|for|if)[\w.\[\]>-]+ [+|&^-]?= .*;\s*$", r"\1;"
    ),
}
PYTHON: dict[str, Rule] = {
    "arithmetic swapped": _INFIX,
    "comparison": _COMPARE,
    "off by one": _replace(r"(?<![\w.\"'\]])\d{1,4}(?![\w.\"'])", _one_more),
    "last bit of a constant": _replace(r"0x([0-9A-Fa-f]{8})\b", _flip_last_bit),
    "and, or": _any(_replace(r" and ", " or "), _replace(r" or ", " and ")),
    "not": _any(_replace(r"\bif not ", "if "), _replace(r"\bif (?!not|TYPE)", "if not ")),
    "min, max": _any(_replace(r"\bmin\(", "max("), _replace(r"\bmax\(", "min(")),
    "names swapped": _any(
        _replace(r"\bq_norm\b", "k_norm"), _replace(r"\bgate_proj\b", "up_proj"), _replace(r"\bcos\b", "sin")
    ),
}  # fmt: skip


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of a source file, in the order of its lines."""
    is_python = file.endswith(".py")
    rules = PYTHON if is_python else CPP
    in_docstring = False
    for number, line in enumerate(text.split("\n"), start=1):
        if is_python:
            was_in = in_docstring
            if line.count('"""') % 2:
                in_docstring = not in_docstring
            if (
                was_in
                or in_docstring
                or '"""' in line
                or line.startswith(("from ", "import ", "@", "__all__"))
            ):
                continue
        if line.lstrip().startswith(("//", "#", "static_assert", "template", "raise", 'f"')):
            continue
        code, comment = _split_comment(line, "#" if is_python else "//")
        if not code.strip():
            continue
        for rule, apply in rules.items():
            for made in apply(code):
                if made != code:
                    yield Mutant(file, number, rule, line, made + comment)


def _split_comment(line: str, mark: str) -> tuple[str, str]:
    at = line.find(f"  {mark}")
    return (line, "") if at < 0 else (line[:at], line[at:])


def sample(mutants: list[Mutant], per_rule: int) -> list[Mutant]:
    """Return, of each file and rule, `per_rule` mutants spread evenly over the file."""
    groups: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault((mutant.file, mutant.rule), []).append(mutant)
    chosen = []
    for group in groups.values():
        count = min(per_rule, len(group))
        chosen += [group[(2 * i + 1) * len(group) // (2 * count)] for i in range(count)]
    return chosen
