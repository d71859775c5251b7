# SPDX-License-Identifier: Apache-2.0
"""Prints how large the package is: lines, classes, public names, long signatures, tests.

    python .ci/counts.py [pytest's output]

It never fails: the numbers are for whoever adds or removes something.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_PARAMETERS = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef
KERNELS = {".h", ".cpp", ".cu", ".cuh", ".inc", ".pyi"}
#: What is no engine, by its folder or file; the first that fits.
PARTS: dict[str, Callable[[Path], bool]] = {
    "contrib": lambda path: "contrib" in path.parts,
    "formats": lambda path: "checkpoints" in path.parts,
    "integrations": lambda path: "integrations" in path.parts,
}
RECIPES = {"DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling"}


def sources(*folders: str) -> list[Path]:
    """The Python files of folders, none of them by a link."""
    found = (p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return sorted({p.resolve() for p in found})


def lines(paths: list[Path]) -> int:
    """The lines of files, empty ones and comments among them."""
    return sum(len(p.read_text().splitlines()) for p in paths)


def public_names() -> int:
    """The names in ``grouped_linear.__all__``."""
    for node in ast.walk(ast.parse((ROOT / "custom_ops" / "__init__.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def parameters(function: Function) -> int:
    """The parameters of a function, without ``*args`` and ``**options``."""
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def asks_about_a_format(node: ast.AST) -> bool:
    """Whether an expression compares a format's scaling or function, or asks for a recipe's class.

    ``recipe.has_state`` and ``format.reads_any_dtype`` do not count: the recipe answers them. Nor
    does the scaling of an adapter, which is compared with a number.
    """
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        if any(isinstance(s, ast.Constant) and isinstance(s.value, int) for s in sides):
            return False
        return any(
            isinstance(s, ast.Attribute) and s.attr in ("scaling", "quantize") for s in sides
        )
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return not RECIPES.isdisjoint(
            n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)
        )
    return False


def counts() -> Iterator[tuple[str, object]]:
    """Each number with its name, then where it comes from."""
    package = sources("custom_ops", "meta_kernels")
    every = [(path, node) for path in package for node in ast.walk(ast.parse(path.read_text()))]
    long, asked = {}, {}
    for path, node in every:
        place = f"  {path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, Function) and parameters(node) > MOST_PARAMETERS:
            long[f"{place} {node.name}"] = parameters(node)
        elif ROOT / "custom_ops" / "recipes" not in path.parents and asks_about_a_format(node):
            asked[place] = path.read_text().splitlines()[node.lineno - 1].strip()
    by_part: dict[str, list[Path]] = {name: [] for name in ("engine", *PARTS)}
    for path in package:
        inside = (name for name, within in PARTS.items() if within(path.relative_to(ROOT)))
        by_part[next(inside, "engine")].append(path)
    for name, paths in by_part.items():
        yield f"lines of Python, {name}", lines(paths)
        yield f"modules, {name}", sum(path.name != "__init__.py" for path in paths)
    yield "lines of custom_ops and meta_kernels", lines(package)
    yield "lines of csrc", lines([p for p in (ROOT / "csrc").rglob("*") if p.suffix in KERNELS])
    yield "classes", sum(isinstance(node, ast.ClassDef) for _, node in every)
    yield "public names", public_names()
    yield f"functions with more than {MOST_PARAMETERS} parameters", len(long)
    yield from long.items()
    yield "lines that ask about a format, outside of custom_ops/recipes", len(asked)
    yield from asked.items()
    yield "lines of tests", lines(sources("tests"))


def of_log(log: str) -> Iterator[tuple[str, object]]:
    """The numbers in the last line of pytest's output."""
    summary = next((line for line in reversed(log.splitlines()) if " passed" in line), "")
    for word in ("passed", "skipped", "failed"):
        yield f"tests {word}", next(iter(re.findall(rf"(\d+) {word}", summary)), 0)
    seconds = re.findall(r" in ([0-9.]+)s", summary)
    yield "minutes of pytest", f"{float(seconds[0]) / 60:.1f}" if seconds else "unknown"


def main() -> None:
    """Print the counts, and those of each log that is given."""
    for name, value in counts():
        print(f"{name:<72}{value}")
    for log in sys.argv[1:]:
        for name, value in of_log(Path(log).read_text()):
            print(f"{name:<72}{value}")


if __name__ == "__main__":
    main()
