# SPDX-License-Identifier: Apache-2.0
"""The rules of the house: imports run one way, private names stay home, files name the license."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "custom_ops"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "meta_kernels" not in p.parts)
# Each room imports from those before it.
ROOMS = (
    "meta_kernels",
    "ops",
    "recipes",
    "quantized",
    "autograd",
    "nn",
    "te",
    "parallel",
    "integrations",
    "contrib",
)


def room_of(module: str) -> str:
    """The room of ``grouped_linear.<room>.<module>``; empty for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of every import from the package, those inside of functions among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grouped_linear"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_room = node.module == "grouped_linear" and alias.name in ROOMS
                yield (whole if is_room else str(node.module)), alias.name


def test_imports_run_one_way() -> None:
    for path in MODULES:
        own = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
        if own not in ROOMS:  # the package's front imports from every room
            continue
        for module, name in imports(path):
            room = room_of(module)
            way = f"{path}: {own} imports {module}.{name}"
            assert not room or ROOMS.index(room) <= ROOMS.index(own), way
            assert room == own or not name.startswith("_"), f"{way}, which is private"


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(("grouped_linear", *parts)).removesuffix(".__init__")
        graph[name] = {module for module, _ in imports(path)} - {name}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        # A room's front imports its modules, which may import the fronts of other rooms alone.
        for imported in graph.get(module, ()):
            visit(imported, (*trail, module))
        done.add(module)

    for module in graph:
        if module != "grouped_linear":
            visit(module, ())


#: What tools import besides public names: a check of arguments, and how a table is printed.
NOT_PUBLIC = {"nn.checks.check_model", "integrations.convert.aligned"}


def test_tools_stand_on_public_names() -> None:
    """Those of docs/reference, by which a tool of a user's own goes, too."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    public = {"ops", *re.findall(r"^::: grouped_linear\.(?:\S+\.)?(\w+)$", pages, re.MULTILINE)}
    imported = {i for path in (PACKAGE / "contrib").glob("*.py") for i in imports(path)}
    left = {i for i in imported if room_of(i[0]) != "contrib" and i[1] not in public}
    assert {".".join(i).removeprefix("grouped_linear.") for i in left} == NOT_PUBLIC


def test_files_name_their_license() -> None:
    folders = ("custom_ops", "meta_kernels", "csrc", "tests", "benchmarks", "examples")
    kinds = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".inc"}
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    assert len(files) > 500
    for path in files:
        first, _, _ = path.read_text().partition("\n")
        assert first.endswith(" SPDX-License-Identifier: Apache-2.0"), path
