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
ROOT_FILES = {"nanorchestra"}
BELOW = {
    "kernels": set(),
    "nanorchestra": set(),
    "nanorchestra.model": ROOT_FILES | {"kernels"},
}
BELOW["nanorchestra.engine"] = BELOW["nanorchestra.model"] | {"nanorchestra.model"}
BELOW["nanorchestra.agent"] = BELOW["nanorchestra.engine"] | {"nanorchestra.engine"}
BELOW["nanorchestra.formats"] = BELOW["nanorchestra.agent"] | {
    "nanorchestra.agent",
    "nanorchestra.tools",
}
BELOW["nanorchestra.tools"] = BELOW["nanorchestra.formats"] | {"nanorchestra.formats"}
BELOW["nanorchestra.serving"] = BELOW["nanorchestra.formats"]
BELOW["nanorchestra.training"] = BELOW["nanorchestra.agent"] | {"nanorchestra.agent"}
BELOW["nanorchestra.report"] = BELOW["nanorchestra.training"] | {"nanorchestra.training"}
BELOW["tools"] = BELOW["reward"] = set(BELOW) - {"tools", "reward"}
BELOW["worlds"] = BELOW["tools"] | {"tools", "reward"}
BELOW |= {name: BELOW["worlds"] | {"worlds"} for name in COMMANDS}
BELOW["docs"] = BELOW["worlds"] | {"worlds"} | COMMANDS
CORE = {f"nanorchestra.{package}" for package in ("model", "engine", "agent", "training")}

OUTSIDE = "tests/", "benchmarks/", "examples/"  # examples are programs of users
OPTIONAL = {"gguf", "huggingface_hub", "litellm", "pyarrow", "tau2"}
# They bring huggingface_hub, gguf, jinja2, mcp and FastAPI, which few commands need.
DOORS = {f"nanorchestra.formats.{name}" for name in ("hub", "gguf", "template")}
LAZY = DOORS | {"nanorchestra.tools.mcp", "nanorchestra.serving.retrieval"}
FRAMEWORKS = {"transformers", "vllm", "trl", "ray", "accelerate", "deepspeed", "openai", "peft"}
TORCH_FREE = (
    "engine.scheduler",
    "engine.block_manager",
    "engine.sequence",
    "engine.guide",
    "engine.stream",
    "model.chat",
    "model.parser",
    "records",
    "agent.loop",
)

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


def imports(tree):
    """(imported module, whether inside a function) of every import in a file."""
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    unread = {
        node
        for condition in ast.walk(tree)
        if isinstance(condition, ast.If) and ast.unparse(condition.test) == "TYPE_CHECKING"
        for node in ast.walk(condition)
    }
    for node in set(ast.walk(tree)) - unread:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in FILES else node.module, node in inside
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in inside


def place(module):
    """The package or command whose rule holds for a module."""
    parts = module.split(".")
    package = ".".join(parts[:2])
    return package if package in BELOW else parts[0]


TREES = {module: ast.parse((ROOT / path).read_text()) for module, path in FILES.items()}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    here = place(module)
    for imported, inside in imports(TREES[module]):
        top = imported.split(".")[0]
        assert top not in FRAMEWORKS, f"{module} imports {imported}"
        if inside and here not in COMMANDS and imported not in LAZY:
            assert top in OPTIONAL, f"{module} imports {imported} inside a function"
        if top in BELOW and module != "nanorchestra":
            there = place(imported)
            assert there == here or there in BELOW[here], f"{module} imports {imported}"


def test_the_core_never_reaches_what_is_around_it():
    """What the core imports, and what that imports, has no file of the doors."""
    waiting = [module for module in FILES if place(module) in CORE]
    reached = set(waiting)
    while waiting:
        for imported, _ in imports(TREES[waiting.pop()]):
            if imported in FILES and imported not in reached:
                reached.add(imported)
                waiting.append(imported)
    doors = ("formats", "tools", "serving", "report")
    around = {"worlds", *(f"nanorchestra.{door}" for door in doors)}
    assert not [module for module in reached if place(module) in around]


def test_there_is_no_circle_of_imports():
    graph = {
        module: {
            imported for imported, _ in imports(tree) if imported in FILES and imported != module
        }
        for module, tree in TREES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_logic_of_the_engine_and_the_loop_loads_without_torch():
    modules = ", ".join(f"nanorchestra.{name}" for name in TORCH_FREE)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def packages(name):
    """The packages of a file of requirements."""
    lines = (ROOT / name).read_text().splitlines()
    return {re.split("[=>]=", line)[0] for line in lines if "=" in line and line[0] not in "#-"}


def test_requirements_are_what_the_files_import_and_each_has_a_reason():
    tops = {name.split(".")[0] for tree in TREES.values() for name, _ in imports(tree)}
    tops -= {*sys.stdlib_module_names, *(module.split(".")[0] for module in FILES)}
    imported = {PACKAGES.get(top, top) for top in tops - ELSEWHERE}
    listed, optional = packages("requirements.txt"), packages("requirements-mcp.txt")
    assert listed | optional == imported | UNNAMED
    for module, tree in TREES.items():
        tops = {name.split(".")[0] for name, _ in imports(tree)}
        assert module.endswith(".mcp") or not tops & optional, f"{module} imports what is optional"
    assert packages("requirements-gpu.txt") ^ listed == {"faiss-cpu", "faiss-gpu", "triton"}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| (`.*?`) \|", page.split("## Packages")[1].split("## ")[0], re.M)
    assert set(re.findall("`(.*?)`", " ".join(table))) == listed | optional
