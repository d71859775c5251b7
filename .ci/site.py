# SPDX-License-Identifier: Apache-2.0
"""What mkdocs.yml hooks into MkDocs: pages from outside of docs/, and docstrings as Markdown.

Pages link to files as they lie in the repository. Files that are pages of the site are found from
there; a link to any other file becomes its path.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# File of the repository -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DESIGN.md": "design.md",
    "examples/README.md": "examples/index.md",
    "examples/aoti/README.md": "examples/aoti.md",
}
SCRIPTS = sorted(path.name for path in ROOT.glob("examples/*.py"))
OUTSIDE |= {f"examples/{name}": f"examples/{name.replace('.py', '.md')}" for name in SCRIPTS}
RESULTS = sorted(path.name for path in ROOT.glob("benchmarks/results/*"))
OUTSIDE |= {f"benchmarks/results/{name}": f"results/{name}" for name in RESULTS}
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/."""
    for source, page in OUTSIDE.items():
        path = ROOT / source
        if path.suffix == ".py":
            text = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
            files.append(File.generated(config, page, content=text))
        else:
            files.append(File.generated(config, page, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point links at pages of the site."""
    if page.file.abs_src_path is None:
        return markdown
    here = Path(page.file.abs_src_path).parent
    pages = {ROOT / source: target for source, target in OUTSIDE.items()}

    def linked(match: re.Match[str]) -> str:
        mark, text, path, anchor = match.groups()
        target = (here / path).resolve()
        uri = pages.get(target, os.path.relpath(target, ROOT / "docs"))
        if files.get_file_from_path(uri):
            relative = os.path.relpath(uri, os.path.dirname(page.file.src_uri) or ".")
            return f"{mark}[{text}]({relative}{anchor or ''})"
        name = str(target.relative_to(ROOT))
        return text if text.strip("`") == name else f"{text} (`{name}`)"

    parts = FENCED.split(markdown)
    return "".join(part if i % 2 else LINK.sub(linked, part) for i, part in enumerate(parts))


# Name -> what an entry of the reference calls it; of two of one name the first.
ENTRIES: dict[str, str] = {}
for _page in sorted(ROOT.glob("docs/reference/*.md")):
    for _entry in re.findall(r"^::: (\S+)", _page.read_text(), re.MULTILINE):
        ENTRIES.setdefault(_entry.rsplit(".", 1)[-1], _entry)


def _link(name: str, obj: griffe.Object) -> str:
    """What Sphinx writes as :func:`name` in obj's docstring, as a link where the site has it."""
    name = name.lstrip("~")
    first, *rest = name.split(".")
    cls = obj if obj.is_class else obj.parent
    entry = ENTRIES.get(name.rsplit(".", 1)[-1], "")
    if entry and len(set(entry.split(".")[-2:])) == 1:  # griffe finds the file of this name first
        identifier = entry
    elif first == "grouped_linear":
        identifier = name
    elif cls is not None and cls.is_class and first in cls.all_members:
        identifier = ".".join([cls.all_members[first].canonical_path, *rest])
    else:
        identifier = ".".join([ENTRIES.get(first, f"{obj.module.path}.{first}"), *rest])
    shown = name.rsplit(".", 1)[-1]
    return f'<autoref optional identifier="{identifier}"><code>{shown}</code></autoref>'


def _table(match: re.Match[str]) -> str:
    """A table of reStructuredText, whose columns begin where its rules do, as a list."""
    lines = match[0].splitlines()
    second = lines[0].index(" =") + 1
    items: list[list[str]] = []
    for line in lines[1:-1]:
        if set(line) <= {"=", " "}:
            continue
        name, text = line[:second].strip(), line[second:].strip()
        if name:
            items.append([name, text])
        else:
            items[-1][1] += " " + text
    return "\n".join(f"- {name}: {text}" for name, text in items) + "\n"


# An item of a section that names several parameters or attributes, with its further lines.
SEVERAL = re.compile(r"^ {4}(\w+(?:, \w+)+)((?: \([^)]*\))?:.*(?:\n {5,}\S.*)*)$", re.MULTILINE)


def _one_by_one(match: re.Match[str]) -> str:
    """The same text for each of the names."""
    return "\n".join(f"    {name}{match[2]}" for name in match[1].split(", "))


# The section of attributes, and in it an item without a type.
ATTRIBUTES = re.compile(r"^Attributes:\n(?: {4,}\S.*\n?)+", re.MULTILINE)
UNTYPED = re.compile(r"^ {4}(\w+):", re.MULTILINE)


def _write_types_of_attributes(cls: griffe.Class) -> None:
    """Give each listed attribute its type, or the constructor's of that name, or an empty one.

    Griffe shows an attribute whose type it does not find with the type of the one before.
    """

    def typed(match: re.Match[str]) -> str:
        name = match[1]
        known = [cls.all_members.get(name), *(p for p in cls.parameters if p.name == name)]
        types = [str(each.annotation) for each in known if getattr(each, "annotation", None)]
        return f"    {name} ({types[0] if types else ''}):"

    def rewritten(section: re.Match[str]) -> str:
        return UNTYPED.sub(typed, SEVERAL.sub(_one_by_one, section[0]))

    if cls.docstring is not None:
        cls.docstring.value = ATTRIBUTES.sub(rewritten, cls.docstring.value)


def _correct_constructor(cls: griffe.Class) -> None:
    """Write the arguments of a class that griffe does not find.

    It leaves in the fields that a dataclass itself sets, as recipes their formats, where they are
    arguments of a base, and knows no constructor of a NamedTuple or of a private base.
    """
    init = cls.members.get("__init__")
    if init is None and any(str(base) == "NamedTuple" for base in cls.bases):
        kind, fields = griffe.ParameterKind.positional_or_keyword, [griffe.Parameter("self")]
        for field in cls.members.values():
            if field.is_attribute and field.annotation and "property" not in field.labels:
                known = {"annotation": field.annotation, "default": field.value}
                fields.append(griffe.Parameter(field.name, kind=kind, **known))
        cls.set_member(
            "__init__", griffe.Function("__init__", parameters=griffe.Parameters(*fields))
        )
    elif init is None:
        for base in cls.resolved_bases:
            if base.name.startswith("_") and "__init__" in base.members:
                cls.members["__init__"] = base.members["__init__"]
    elif "dataclass" in cls.labels and isinstance(init, griffe.Function):
        for name in [parameter.name for parameter in init.parameters]:
            if "init=False" in str(getattr(cls.members.get(name), "value", "")):
                del init.parameters[name]


def _shown_bases(cls: griffe.Class) -> list[Any]:
    """The bases of a class; in the place of one of ours that has no entry, that one's bases."""
    ours = {
        base.name: base for base in cls.resolved_bases if base.path.startswith("grouped_linear.")
    }
    shown: list[Any] = []
    for base in cls.bases:
        name = str(base).rsplit(".", 1)[-1]
        shown += _shown_bases(ours[name]) if name in ours.keys() - ENTRIES.keys() else [base]
    return shown


def _link_to_page(match: re.Match[str]) -> str:
    """A page that a docstring names, from a page of the reference."""
    return f"[{match[0]}](../{match[0].removeprefix('docs/')})"


def _comments_above(attribute: griffe.Object) -> griffe.Docstring | None:
    """The comments ``#:`` above a constant, which are its docstring."""
    if not attribute.lineno or not isinstance(attribute.filepath, Path):
        return None
    before, comments = attribute.filepath.read_text().splitlines()[: attribute.lineno - 1], []
    while before and before[-1].startswith("#: "):
        comments.insert(0, before.pop().removeprefix("#: "))
    return griffe.Docstring("\n".join(comments), parent=attribute) if comments else None


class Docstrings(griffe.Extension):
    """The few forms of reStructuredText in our docstrings, as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring before it is parsed."""
        if obj.docstring is None and obj.is_attribute:
            obj.docstring = _comments_above(obj)
        if obj.docstring is None:
            return
        text = re.sub(r"^=+ +=+\n.*?^=+ +=+$", _table, obj.docstring.value, flags=re.DOTALL | re.M)
        text = SEVERAL.sub(_one_by_one, text)
        roles = r":(?:class|func|meth|mod):`([^`]+)`"
        text = re.sub(roles, lambda match: _link(match[1], obj), text)
        text = re.sub(r"docs/[\w/]+\.md", _link_to_page, text)
        text = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.M)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Write types of attributes, then leave out bases that the site does not have."""
        griffe.DataclassesExtension().on_package(pkg=pkg)  # which griffe calls last
        for cls in _classes(pkg):
            _correct_constructor(cls)
            _write_types_of_attributes(cls)
        for cls in _classes(pkg):
            cls.bases = _shown_bases(cls)


def _classes(of: griffe.Module) -> Iterator[griffe.Class]:
    for member in of.members.values():
        if member.is_alias:
            continue
        if member.is_class:
            yield member
        elif member.is_module:
            yield from _classes(member)
