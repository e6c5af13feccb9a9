"""Imports point down, without circles and frameworks; torch is loaded only where tensors are."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = {"train", "serve", "evaluate", "data_gen"}
# What the files of a place may import of the project, beside their own package.
BELOW = {"kernels": set(), "nanorchestra": set(), "nanorchestra.model": {"nanorchestra", "kernels"}}
BELOW["nanorchestra.engine"] = BELOW["nanorchestra.model"] | {"nanorchestra.model"}
BELOW["nanorchestra.agent"] = BELOW["nanorchestra.engine"] | {"nanorchestra.engine"}
CORE = BELOW["nanorchestra.agent"] | {"nanorchestra.agent"}
BELOW["nanorchestra.training"] = CORE
BELOW["nanorchestra.formats"] = BELOW["nanorchestra.serving"] = CORE | {"nanorchestra.tools"}
BELOW["nanorchestra.tools"] = CORE | {"nanorchestra.formats"}
BELOW["nanorchestra.report"] = CORE | {"nanorchestra.training"}
BELOW["tools"] = BELOW["reward"] = set(BELOW) - {"tools", "reward"}
BELOW["worlds"] = BELOW["tools"] | {"tools", "reward"}
BELOW |= {name: BELOW["worlds"] | {"worlds"} for name in COMMANDS}
BELOW["docs"] = BELOW["worlds"] | {"worlds"} | COMMANDS

OUTSIDE = "tests/", "benchmarks/", "examples/"  # examples are programs of users
OPTIONAL = {"gguf", "huggingface_hub", "litellm", "pyarrow", "tau2"}
# They bring huggingface_hub, gguf, jinja2, mcp and FastAPI, which few commands need.
DOORS = {f"nanorchestra.formats.{name}" for name in ("hub", "gguf", "template")}
LAZY = DOORS | {"nanorchestra.tools.mcp", "nanorchestra.serving.mcp"}
LAZY |= {"nanorchestra.serving.retrieval"}
FRAMEWORKS = {"transformers", "vllm", "trl", "ray", "accelerate", "deepspeed", "openai", "peft"}
TORCH_FREE = "engine.scheduler engine.block_manager engine.sequence engine.guide engine.stream"
TORCH_FREE += " model.chat model.parser records agent.loop"

# Packages whose modules have another name; that uvicorn takes by itself; of tau2-bench and Parquet.
PACKAGES = {"faiss": "faiss-cpu", "tomli_w": "tomli-w"}
UNNAMED = {"httptools", "uvloop"}
ELSEWHERE = {"litellm", "pyarrow", "tau2"}


if not (ROOT / ".git").exists():  # an archive has no list of its files
    pytest.skip("the layout is checked in a clone", allow_module_level=True)


def files():
    """The Python files of the project itself, by the name of their module."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = (Path(name) for name in listed if not name.startswith(OUTSIDE))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in wanted}


FILES = files()


def imports(node, inside=False):
    """(imported module, whether inside a function) of every import in a file."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield whole if whole in FILES else child.module, inside
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, inside
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif isinstance(child, ast.stmt | ast.excepthandler):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, inside or function)


def place(module):
    """The package or command whose rule holds for a module."""
    parts = module.split(".")
    package = ".".join(parts[:2])
    return package if package in BELOW else parts[0]


IMPORTS = {
    module: [*imports(ast.parse((ROOT / path).read_text()))] for module, path in FILES.items()
}


def test_imports_point_down():
    wrong = []
    for module, found in IMPORTS.items():
        here = place(module)
        for imported, inside in found:
            top, there = imported.split(".")[0], place(imported)
            late = inside and here not in COMMANDS and imported not in LAZY
            up = top in BELOW and there != here and there not in BELOW[here]
            if top in FRAMEWORKS or (late and top not in OPTIONAL):
                wrong.append(f"{module} imports {imported}, which no file may")
            elif up and module != "nanorchestra":
                wrong.append(f"{module} imports {imported}, which is above it")
    assert not wrong


def test_there_is_no_circle_of_imports():
    graph = {}
    for module, found in IMPORTS.items():
        imported = {name for name, _ in found}
        graph[module] = (imported & FILES.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_logic_of_the_engine_and_the_loop_loads_without_torch():
    modules = ", ".join(f"nanorchestra.{name}" for name in TORCH_FREE.split())
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def packages(name):
    """The packages of a file of requirements."""
    lines = (ROOT / name).read_text().splitlines()
    return {re.split("[=>]=", line)[0] for line in lines if "=" in line and line[0] not in "#-"}


def test_requirements_are_what_the_files_import_and_each_has_a_reason():
    tops = {name.split(".")[0] for found in IMPORTS.values() for name, _ in found}
    tops -= {*sys.stdlib_module_names, *(module.split(".")[0] for module in FILES)}
    imported = {PACKAGES.get(top, top) for top in tops - ELSEWHERE}
    listed, optional = packages("requirements.txt"), packages("requirements-mcp.txt")
    assert listed | optional == imported | UNNAMED
    assert packages("requirements-gpu.txt") ^ listed == {"faiss-cpu", "faiss-gpu", "triton"}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| (`.*?`) \|", page.split("## Packages")[1].split("## ")[0], re.M)
    assert set(re.findall("`(.*?)`", " ".join(table))) == listed | optional
