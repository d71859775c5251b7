# SPDX-License-Identifier: Apache-2.0
"""What the README and docs/ show runs, and links lead somewhere."""

import ast
import builtins
import doctest
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import grouped_linear
from benchmarks import bench_lora, convergence_report, front_page, timing
from grouped_linear import contrib, ops, parallel, recipes, te
from support.documents import ROOT, examples
from support.gpt_oss import write_checkpoint
from support.versions import AOTI_READS_DTYPES, skipping_for_old_transformers

README = (ROOT / "README.md").read_text()
LOSSES = timing.RESULTS / "convergence_nvidia_h200.csv"
EXPERTS = (*bench_lora.OF_QWEN3, bench_lora.MXFP4, bench_lora.MXFP4_FP8)
PAGES = sorted((ROOT / "docs").glob("*.md"))
WITH_EXAMPLES = [page for page in PAGES if examples(page.read_text())]


SNIPPETS = dict(zip(("layer", "convert", "adapters"), examples(README), strict=True))


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run_as_they_are_copied(snippet: str) -> None:
    """Each by itself, and with nothing before it."""
    code, names = SNIPPETS[snippet], dict[str, Any]()
    for package in ("transformers", "peft"):
        if f"from {package} import" in code:
            pytest.importorskip(package)
    with skipping_for_old_transformers():
        exec(compile(code, "README.md", "exec"), names)
    if snippet == "adapters":
        tokens = torch.arange(12)[None]
        names["model"](input_ids=tokens, labels=tokens).loss.backward()
    learning = names["mlp" if snippet == "layer" else "model"]
    found = {name: p.grad for name, p in learning.named_parameters() if p.requires_grad}
    assert found
    assert all(grad is not None for grad in found.values())


def test_figures_of_the_readme_are_those_that_are_printed() -> None:
    gpu = "nvidia_h200"
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert front_page.table(gpu) in README
    assert front_page.whole_table(front_page.steps(gpu)) in performance
    page = (ROOT / "docs" / "convergence.md").read_text()
    recorded = convergence_report.recorded(LOSSES)
    for corpus in {row.corpus for row in recorded}:
        of_corpus = [row for row in recorded if (row.corpus, row.tokens) == (corpus, 100_000_000)]
        runs = convergence_report.runs_of(of_corpus)
        assert timing.markdown(convergence_report.table(runs)) in page
    gradients = (timing.RESULTS / "gradient_error_20M_nvidia_h200.md").read_text()
    of_modes = gradients[gradients.index("|") :].split("\n\n")[0]
    assert of_modes in page
    for model, record in {"Qwen3-30B-A3B": "", "GPT-OSS-20B": "gpt_oss_20b_"}.items():
        rows = rows_of(f"bench_lora_{record}compiled_{gpu}")
        by_weights = {row[1]: row for row in rows if row[0] == "attention and experts"}
        for title, i in {f"{model}, ms": 2, "GiB at the peak": 5}.items():
            cells = [by_weights[w][i] if w in by_weights else "" for w in EXPERTS]
            assert f"| {title} | {' | '.join(cells)} |".replace("  ", " ") in performance
    for _, layers, by, ms, _, _, peak, *_ in rows_of(f"finetune_peers_{gpu}"):
        assert not layers.isdigit() or f"| {by} | {ms} | {peak} |" in performance
    found = [rows_of(f"bench_expert_layer_{part}nvidia_h100_80gb_hbm3") for part in ("", "narrow_")]
    layers = {tuple(row[:2]): row[2:] for rows in found for row in reversed(rows)}
    names = [layer for layer in front_page.LAYERS if "Sonic" not in layer]
    for shape in (shape for shape, layer in layers if layer == front_page.TORCH):
        torchs, *ours = (layers[shape, layer] for layer in names)
        row = f"| {float(torchs[0]):.2f} ms | {' | '.join(speed for _, speed, *_ in ours)} |"
        assert row in performance


def rows_of(record: str) -> list[list[str]]:
    lines = (timing.RESULTS / f"{record}.md").read_text().splitlines()
    return [[*map(str.strip, line.split("|")[1:-1])] for line in lines if line.startswith("|")]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_examples_of_pages_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One after the other, in one module, as a reader would run them, but for a small GPT-OSS."""
    text = page.read_text()
    if "from peft import" in text:
        pytest.importorskip("peft")
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo imports what it inlines from
    for example in examples(text):
        if "openai/gpt-oss-20b" in example:
            folder = str(write_checkpoint(tmp_path / "gpt_oss"))
            text = text.replace("openai/gpt-oss-20b", folder)
            example = example.replace("openai/gpt-oss-20b", folder)
        if "aoti_load_package" in example and not AOTI_READS_DTYPES:
            pytest.skip("AOTInductor of torch 2.11 takes the dtype that an op is given for another")
        line = text[: text.index(example)].count("\n")
        with skipping_for_old_transformers():
            exec(compile("\n" * line + example, str(page), "exec"), vars(module))


def test_every_argument_is_compared_with_transformer_engine() -> None:
    page = (ROOT / "docs" / "from_other_libraries.md").read_text()
    signatures = map(inspect.signature, (te.GroupedLinear, te.GroupedLinear.forward))
    arguments = {name for signature in signatures for name in signature.parameters} - {"self"}
    assert not {name for name in arguments if not re.search(rf"`{name}\b", page)}


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "docs" / "notes").glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))],
    ids=lambda page: page.stem,
)
def test_files_that_pages_name_exist(page: Path) -> None:
    folders = "benchmarks|csrc|custom_ops|docs|examples|meta_kernels|python|tests|\\.ci"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


ON_THE_SITE = [*PAGES, *(ROOT / "docs" / "reference").glob("*.md"), ROOT / "CONTRIBUTING.md"]
ON_THE_SITE += [ROOT / "README.md", *(ROOT / "examples").rglob("README.md")]


@pytest.mark.parametrize("page", ON_THE_SITE, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_blocks_are_not_cut_on_the_site(page: Path) -> None:
    """1280 px show 96 columns, of which the copy button hides some; output may take them all."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [(kind, line) for kind, block in blocks for line in block.splitlines()]
    assert not [line for kind, line in lines if len(line) > (96 if kind == "text" else 88)]


def test_examples_do_not_round_rotary_frequencies() -> None:
    """As ``to(dtype)`` of a model does: saved and loaded it would compute something else."""
    files = [ROOT / "README.md", *PAGES, *(ROOT / "examples").glob("*.py")]
    assert not [f.name for f in files if re.search(r"ForCausalLM\(.*\)\.to\(", f.read_text())]


def test_ops_with_a_gradient_are_those_that_the_page_names() -> None:
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    differentiable = {
        op
        for namespace, op in names
        if namespace == "grouped_linear" and has_kernel(f"{namespace}::{op}", "Autograd")
    }
    said = re.search(r"\*\*Gradients.\*\* (.*?) have one", (ROOT / "docs" / "ops.md").read_text())
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) == differentiable


def test_files_to_read_first_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"^\d\. `([^`]+)`:", page[page.index("Read first:") :], re.MULTILINE)
    assert len(files) == 5
    assert all((ROOT / file).is_file() for file in files)


def entries_of_reference() -> set[str]:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    return set(re.findall(r"^::: grouped_linear\.(\S+)$", pages, re.MULTILINE))


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.stem
)
def test_reference_names_what_it_lists(page: Path) -> None:
    """In words, for who reads it in a clone."""
    words, *entries = re.split(r"^::: grouped_linear\.", page.read_text(), flags=re.MULTILINE)
    names = {entry.split()[0].rsplit(".", 1)[-1] for entry in entries}
    assert names <= {name.rsplit(".", 1)[-1] for name in re.findall(r"`([\w.]+)`", words)}


def test_reference_has_every_public_name() -> None:
    listed = entries_of_reference()
    for module in (grouped_linear, ops, recipes, parallel):
        path = module.__name__.removeprefix("grouped_linear").lstrip(".")
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            # What the package's front has too is listed once, as users import it.
            by_file = f"{getattr(value, '__module__', '')}.{name}".removeprefix("grouped_linear.")
            assert listed & {name, f"{path}.{name}".lstrip("."), by_file}, f"{path}.{name}"


@pytest.mark.parametrize("module", [grouped_linear, ops, recipes, parallel, te, contrib])
def test_examples_in_docstrings_take_public_names(module: ModuleType) -> None:
    """And torch, as the package's docstring says; the doctests run with all of their file."""
    given = {"torch", *vars(builtins), *grouped_linear.__all__, *module.__all__}
    for name in module.__all__:
        parts = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(module, name)) or "")
        nodes = [*ast.walk(ast.parse("".join(part.source for part in parts)))]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        own |= {a.asname or a.name for node in nodes for a in getattr(node, "names", ())}
        own |= {str(getattr(node, field, "")) for node in nodes for field in ("name", "arg")}
        assert {node.id for node in names} <= own | given, name


def test_reference_shows_functions_and_not_their_files() -> None:
    """Of a function and a file of one name the site finds the file, with all that it has inside."""
    for entry in entries_of_reference():
        path, _, name = entry.rpartition(".")
        if path.startswith("integrations."):  # which import other packages
            continue
        try:
            module: Any = import_module(f"grouped_linear.{path}".rstrip("."))
        except ImportError:  # a method
            continue
        value = getattr(module, name)
        assert not isinstance(value, ModuleType), entry
        if inspect.isfunction(value):
            package, _, last = value.__module__.rpartition(".")
            is_hidden = getattr(import_module(package), last) is value
            assert not is_hidden or module.__name__ == value.__module__, entry
