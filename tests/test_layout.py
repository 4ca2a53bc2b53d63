"""The shape of the code: imports go one way, files and functions stay small."""

import ast
import builtins
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("topics", "actors", "asyncrl", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
}
FILE_LINES, FUNCTION_LINES = 400, 60
WITHOUT_BUS = (
    *("algorithms", "data", "engine", "environments", "rewards", "child_pool", "sandboxes", "sinks", "training"),
    "weights",
)
ALL_FILES = [*FILES.values(), *sorted((ROOT / "tests").rglob("*.py"))]
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "torch.load", "np.load", "numpy.load"}
# Which are started with arguments of their own.
PROCESSES = ("actors.main", "actors.learner.rank_process", "asyncrl.engine.embedded.__main__")
OLD_WORDS = re.compile("say|says|hear|hears|heard|heed|bury|buried|warden|strike|strikes|struck|watchman|pulse|told")
OF_ONE_KIND = {
    "actors.prompter.sources.__init__",
    "asyncrl.config.check_learner.trainer_contradictions",
    *(f"asyncrl.run.preflight.{name}" for name in ("_actors", "_directory", "_sinks", "_start")),
}
QUESTIONS = ("It ", "Who ", "What ", "Whether ", "How ", "Somebody ", "Nobody ", "Whoever ")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parse(path)))


@pytest.fixture(autouse=True, scope="module")
def uncollected() -> Iterator[None]:
    """Stop the garbage collector: its passes over a million nodes take as long as the tests."""
    gc.disable()
    yield
    gc.enable()


def layer(module: str) -> int:
    """topics → asyncrl → actors → asyncrl.cli → benchmarks."""
    if module == "asyncrl.cli" or module.startswith("asyncrl.cli."):
        return 3
    return ("topics", "asyncrl", "actors", "asyncrl.cli", "benchmarks").index(module.split(".")[0])


def imports(node: ast.AST) -> Iterator[str]:
    """Names of modules an import statement may load: `from a import b` loads a, and a.b where that is a module.

    So does a call of `import_module` with a text.
    """
    if isinstance(node, ast.Call) and "import_module" in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
        yield from (value.value for value in node.args if isinstance(value, ast.Constant))
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import of {node.module}: name the whole module"
        yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imported(module: str, *, types: bool = True) -> set[str]:
    """Return the modules that a module imports, with those for its types alone or without."""
    tree = nodes(FILES[module]) if types else loaded(parse(FILES[module]))
    return {name for node in tree for name in imports(node) if name in FILES}


def test_a_module_imports_only_from_its_left():
    wrong = []
    for module in FILES:
        most = (
            layer("actors") if module == "asyncrl" else layer(module)
        )  # it names what users import, actors' parts too
        wrong += [f"{module} imports {name}" for name in imported(module) if layer(name) > most]

    assert not wrong, "\n".join(wrong)


def loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """All code of a module, functions included, but for `if TYPE_CHECKING`."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left += node.orelse
        else:
            yield node
            left += ast.iter_child_nodes(node)


def circle(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what is left of a graph of imports when all is removed that imports nothing else of it."""
    left = {name: others - {name} for name, others in imported.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return {name: others & left.keys() for name, others in left.items()}


def test_no_files_import_each_other_in_a_circle_also_for_their_types():
    """But for `asyncrl` itself, which names what users import and loads none of it before it is used."""
    assert not circle({module: imported(module) for module in FILES if module != "asyncrl"})
    assert not circle({module: imported(module, types=False) for module in FILES})


def test_no_packages_inside_asyncrl_import_each_other_in_a_circle():
    packages: dict[str, set[str]] = {}
    for module in FILES:
        parts = module.split(".")
        if parts[0] == "asyncrl" and len(parts) > 1:
            inner = {name.split(".")[1] for name in imported(module, types=False) if name.startswith("asyncrl.")}
            packages.setdefault(parts[1], set()).update(inner)

    assert not circle(packages)


def test_what_knows_no_bus_does_not_import_it():
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.split(".")[:2] in [["asyncrl", package] for package in WITHOUT_BUS]
        for name in imported(module)
        if name.startswith("asyncrl.bus")
    ]

    assert not wrong, "\n".join(wrong)


def test_an_actor_imports_no_other_actor():
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.startswith("actors.") and module.count(".") > 1
        for name in imported(module)
        if name.startswith("actors.") and name.count(".") > 1
        if name.split(".")[1] not in (module.split(".")[1], "runtime")
    ]

    assert not wrong, "\n".join(wrong)


def test_what_a_rule_is_not_obeyed_for_is_written_beside():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in ALL_FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"#\s*noqa(?!: \w+ [-#] \S)", line) and path != Path(__file__)
    ]

    assert not wrong, "\n".join(wrong)


def test_files_stay_small():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ALL_FILES}
    wrong = [f"{name} has {lines} lines" for name, lines in lengths.items() if lines >= FILE_LINES]

    assert not wrong, "\n".join(wrong)


def test_files_of_tests_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]

    assert [name for name in set(names) if names.count(name) > 1] == [], "of two of one name pytest collects one"


def test_what_tests_share_is_in_the_harness():
    shared = re.compile(r"^\s*from ((?:test_|conftest|tests\.(?!harness))\S*) import", re.MULTILINE)
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / "tests").rglob("*.py")
        for module in shared.findall(path.read_text())
        if not module.endswith(path.stem)  # a script in a string, which another process runs
    ]

    assert not wrong, "\n".join(wrong)


def test_functions_stay_small():
    wrong = []
    for module in FILES:
        for node in nodes(FILES[module]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES:
                    wrong.append(f"{module}.{node.name} has {length} lines")

    assert not wrong, "\n".join(wrong)


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = []
    for path in ALL_FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                words = ast.get_docstring(node) or ""
                if words.startswith(QUESTIONS):
                    wrong.append(f"{path.relative_to(ROOT)}: {node.name}: {words.splitlines()[0]}")

    assert not wrong, "\n".join(wrong)


def methods(kind: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def described(kind: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> set[str]:
    """Methods of the bases of a class, of the protocols that its docstring names, and of theirs."""
    found, seen, left = set[str](), {kind.name}, [kind]
    while left:
        one = left.pop()
        names = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in one.bases} - seen
        names |= set(re.findall(r"`(?:\w+\.)*(\w+)", ast.get_docstring(one) or "")) - seen
        seen |= names
        others = [other for name in names for other in classes.get(name, [])]
        found.update(method.name for other in others for method in methods(other))
        left += others
    return found


def test_a_method_without_a_docstring_is_described_by_a_base_or_a_protocol():
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in [node for path in FILES.values() for node in nodes(path) if isinstance(node, ast.ClassDef)]:
        classes.setdefault(node.name, []).append(node)
    wrong = [
        f"{kind.name}.{method.name}"
        for same in classes.values()
        for kind in same
        for method in methods(kind)
        if not (kind.name.startswith("_") or method.name.startswith("_") or ast.get_docstring(method))
        if method.name not in described(kind, classes)
    ]
    commands = [node for module in FILES if module.startswith("asyncrl.cli") for node in parse(FILES[module]).body]
    functions = [node for node in commands if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bare = {node.name for node in functions if not (node.name.startswith("_") or ast.get_docstring(node))}

    assert not wrong, "\n".join(wrong)
    assert bare == {"add_arguments"}


def names_in(path: Path) -> set[str]:
    """Names that a module defines or uses."""
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg"}
    fields |= dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name")
    return {getattr(node, fields[type(node)]) or "" for node in nodes(path) if type(node) in fields}


def test_names_are_the_terms_of_the_field():
    wrong = [
        f"{module}: {name}"
        for module in FILES
        for name in names_in(FILES[module])
        if any(map(OLD_WORDS.fullmatch, re.sub("([a-z])([A-Z])", r"\1_\2", name).lower().split("_")))
    ]

    assert not wrong, "\n".join(wrong)


def test_commands_alone_know_their_command_line():
    wrong = [
        module
        for module in FILES
        if not module.startswith(("asyncrl.cli", "benchmarks")) and module not in PROCESSES
        if any("argparse" in imports(node) for node in nodes(FILES[module]))
    ]

    assert not wrong, "\n".join(wrong)


def tables_read(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the fields of its argument `config: Config` that a function reads, as far as it hands it on to none."""
    given = [arg for arg in [*function.args.args, *function.args.kwonlyargs] if arg.annotation is not None]
    names = {arg.arg for arg in given if ast.unparse(arg.annotation or arg) == "Config"}
    inside = list(ast.walk(function)) if names else []
    fields = [node for node in inside if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names]
    used = [node for node in inside if isinstance(node, ast.Name) and node.id in names]
    return {node.attr for node in fields} if len(used) == len(fields) else set()


def test_a_function_that_reads_one_table_of_the_config_takes_that_table():
    wrong = [
        f"{module}.{node.name} reads {tables_read(node)}"
        for module in FILES
        for node in nodes(FILES[module])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        # Those are called with others in one loop, or choose a part of a table by a name.
        if len(tables_read(node)) == 1 and f"{module}.{node.name}" not in OF_ONE_KIND
    ]

    assert not wrong, "\n".join(wrong)


def test_all_errors_have_one_root():
    known = {name for name, value in vars(builtins).items() if isinstance(value, type) and name.endswith("Error")}
    known |= {"Exception", "BaseException"}
    roots = [
        f"{module}.{node.name}"
        for module in FILES
        for node in nodes(FILES[module])
        if isinstance(node, ast.ClassDef) and node.bases and ast.unparse(node.bases[0]) in known
    ]

    assert roots == ["topics.errors.AsyncRLError"]


# SGLang takes tensors in memory as a pickle; read back it makes tensors alone.
PICKLES = ("asyncrl.weights.shared", "asyncrl.weights.shared_names")


def test_nothing_is_pickled_and_nothing_sleeps_on_a_thread():
    wrong = []
    for module in FILES:
        own = nodes(FILES[module])
        named = {name.split(".")[0] for node in own for name in imports(node)} & UNSAFE_MODULES
        calls = {ast.unparse(node.func) for node in own if isinstance(node, ast.Call)} & UNSAFE_CALLS
        slept = {"time.sleep"} & {ast.unparse(node) for node in own if isinstance(node, ast.Attribute)}
        found = calls | slept | (set() if module in PICKLES else named)
        wrong += [f"{module} uses {name}" for name in found]

    assert not wrong, "\n".join(wrong)


ID = re.compile(r"(\w+\.)*\w*(prompt|trajectory|eval|group)_id")
SPLITS = {"split", "rsplit", "partition", "rpartition", "startswith", "removeprefix"}


def takes_an_id_apart(node: ast.AST) -> bool:
    """Return whether it is `prompt_id[0]`, `prompt_id.split(...)`, or `f"{prompt_id}-{member}"`."""
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)  # rewards of groups are given a list of ids under the name of one
        return ID.fullmatch(name) is not None and name != "trajectory_id"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SPLITS:
        return ID.fullmatch(ast.unparse(node.func.value)) is not None
    if isinstance(node, ast.JoinedStr):
        parts = [
            ID.fullmatch(ast.unparse(part.value)) for part in node.values[:1] if isinstance(part, ast.FormattedValue)
        ]
        return any(parts) and ast.unparse(node)[2:].partition("}")[2].startswith("-")
    return False


def test_one_file_alone_knows_how_ids_are_written():
    wrong = [
        f"{module}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
        for module in FILES
        if module != "topics.ids"
        for node in nodes(FILES[module])
        if takes_an_id_apart(node)
    ]

    assert not wrong, "\n".join(wrong)
    planted = ast.parse("prompt_id[0]; row.prompt_id[1:]; trajectory_id.rsplit('-'); f'{one.prompt_id}-{member}'")
    assert sum(map(takes_an_id_apart, ast.walk(planted))) == 4


def test_every_actor_of_the_table_has_a_file():
    from topics.roles import ROLE_NAMES, ROLES
    from topics.table import TOPICS

    output = {role for topic in TOPICS for role in topic.publishers} - {"operator"}

    assert output == set(ROLE_NAMES)
    assert {role.module for role in ROLES} <= FILES.keys()


def test_the_name_of_a_kind_of_engines_is_only_in_its_folder():
    """And in the table of the kinds and their default; "scripted" is also a trainer, and benchmarks choose kinds."""
    kinds = {path.parent.name for path in (ROOT / "asyncrl" / "engine").glob("*/kind.py")}
    wrong = []
    for module, path in FILES.items():
        mine = {kind for kind in kinds if module.startswith(f"asyncrl.engine.{kind}.")}
        may_choose = module == "asyncrl.config.engine_settings" or module.startswith("benchmarks.")
        for node in nodes(path):
            compared = isinstance(node, ast.Compare)
            if may_choose and not compared:
                continue
            below = ast.walk(node) if compared else [node]
            names = {one.value for one in below if isinstance(one, ast.Constant) and isinstance(one.value, str)}
            if not compared or "trainer" in ast.unparse(node):
                names -= {"scripted"}
            wrong += [f"{module}:{getattr(node, 'lineno', 0)} has {name}" for name in names & kinds - mine]

    assert not wrong, "\n".join(wrong)
