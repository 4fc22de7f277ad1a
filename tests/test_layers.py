"""The house: what its rooms are, and that imports go down only."""

import ast
import re

import pytest
from architecture import (
    BUDGETS,
    LINKED,
    MODULES,
    ORDER,
    ROOT,
    TREES,
    circles,
    for_types,
    imports,
    lines,
    private_names,
    privates_met,
    upward,
)


def test_imports_go_down_only():
    assert not upward()


def test_no_modules_import_each_other():
    """Nor for types, nor with what they meet as `room.module`."""
    assert not circles(types=True)
    assert not circles(chains=True)


def test_modules_of_ours_are_imported_at_the_top():
    """What a warm process does without is met as `room.module`, see `jitkern._lazy.on_first_use`."""
    for name, tree in TREES.items():
        top = set(map(id, tree.body))
        for node, other in imports(tree):
            assert id(node) in top, f"{name} imports {other} inside a function"


def test_rooms_grow_in_no_lines():
    """A budget only goes down: a change that takes lines out lowers it."""
    counted = lines()
    assert counted.keys() == BUDGETS.keys()
    for room, budget in BUDGETS.items():
        assert counted[room] <= budget, f"{room} has {counted[room]} lines of {budget}"


def test_a_type_checker_is_told_of_each_module_of_a_room():
    """Of those that are met as `room.module`."""
    for room, path in MODULES.items():
        if "on_first_use(__name__)" not in path.read_text() and room != "jitkern.jit":
            continue
        hidden = for_types(TREES[room])
        told = {
            alias.name
            for node in ast.walk(TREES[room])
            if id(node) in hidden and isinstance(node, ast.ImportFrom) and node.module == room
            for alias in node.names
        }
        modules = {path.stem for path in MODULES[room].parent.glob("*.py")}
        assert modules - told <= {"__init__", "worker"}, room  # run by itself
        (condition,) = (n for n in TREES[room].body if isinstance(n, ast.If))
        (getter,) = condition.orelse
        assert ast.unparse(getter).startswith("__getattr__ ="), f"every name passes in {room}"


def test_kernels_need_only_declare():
    """Beside what several of them share, which needs no more."""
    folder = ROOT / "kernels_src"
    paths = [*folder.glob("*/kernel.py"), *folder.glob("*/*_triton.py")]
    for path in paths:  # it grows
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                shared = node.module.partition("kernels_src")[2].replace(".", "/").strip("/")
                if node.module.startswith("jitkern.kernels_src"):
                    known = [folder / f"{shared}.py", *(folder / shared / f"{n}.py" for n in names)]
                    paths += [one for one in known if one.exists() and one not in paths]
                    continue
                names = [node.module]
            elif not isinstance(node, ast.Import):
                continue
            for name in names:
                known = name.split(".")[0] in ("torch", "triton", "math", "__future__")
                assert known or name == "jitkern.declare", f"{path} imports {name}"
    assert folder / "rows.py" in paths


def test_modules_of_every_room_can_be_met_by_name():
    """Whatever was imported before: `room.module` needs no luck."""
    for name, path in MODULES.items():
        if path.name == "__init__.py" and not name.startswith("jitkern.cli"):
            assert "on_first_use" in path.read_text(), name


MAP = (ROOT / "docs" / "architecture.md").read_text()


def named_in_the_map():
    """(module, dotted name) of each function that the map names."""
    found = re.findall(r"`((?:[a-z_]+/)+[a-z_]+)\.([A-Za-z_.]+)`", MAP)
    return [(place, name) for place, name in found if name not in ("py", "c") and "." not in place]


def test_the_map_names_functions_where_they_are():
    for place, name in named_in_the_map():
        node = TREES[f"jitkern.{place.replace('/', '.')}".removesuffix(".__init__")]
        for part in name.split("."):
            names = {n.name: n for n in node.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
            assert part in names, f"{place}.{name}"
            node = names[part]


def test_the_map_has_each_room_and_few_words():
    rooms = re.findall(r"^\| `([a-z]+)/` \|", MAP, flags=re.MULTILINE)
    folders = [
        path.name
        for path in (ROOT / "jitkern").iterdir()
        if (path / "__init__.py").is_file() and path not in LINKED
    ]
    assert sorted(rooms) == sorted(folders)
    assert rooms == sorted(rooms, key=ORDER.index)
    words = MAP.partition("## Words")[2].count("\n| ") - 1
    assert len(named_in_the_map()) > 20 and 5 < words <= 15


@pytest.mark.long
def test_tests_meet_no_private_name():
    """What tests replace and reset is in `jitkern.testing`, which nothing of the product imports."""
    private = private_names()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if private & {*re.findall(r"(?=(_\w+))", text)}:  # at "\n_name" in a string, too
            assert not [*privates_met(ast.parse(text), private)], path
    text = "from jitkern.x import NAME\nx.NAME\nmonkeypatch.setattr('jitkern.x.NAME', 1)"
    text = text.replace("NAME", "_current")
    assert len([*privates_met(ast.parse(text), private)]) == 3
    assert len([*privates_met(ast.parse(repr(text)), private)]) == 3
    assert all(other != "jitkern.testing" for tree in TREES.values() for _, other in imports(tree))
