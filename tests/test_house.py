"""The house rules of docs/design.md §7, read from the syntax trees and from real processes.

Import directions, length of functions, purity of core, who may remove anything, and what status and daemon
never load.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.house import PAGE, ROOT, circles, graph_of, room_of, rooms, with_rooms

PACKAGE = ROOT / "ckptd"
MODULES = sorted(PACKAGE.rglob("*.py"))
DEMO = sorted((ROOT / "examples" / "demo").glob("*.py"))
FUNCTION_LINES = 60

ROOMS = (
    ("errors", "trainer"),
    ("base",),
    ("formats.torchfile", "core.model", "observe"),
    ("core.completeness", "core.policy", "formats.zero", "config"),
    ("storage.journal", "storage.local", "maintenance.install", "conversion"),
    ("storage.stores", "storage.remote", "storage.child", "conversion.engine"),
    ("recover.select", "conversion.remote", "conversion.cluster"),
    ("daemon.resources", "daemon.state", "daemon.uploads", "recover", "filesystem"),
    ("maintenance", "maintenance.status", "daemon.intake"),
    ("daemon.actions",),
    ("daemon.health",),
    ("daemon", "api", "page"),
    ("cli", "cli.status", "cli.daemon", "cli.setup", "cli.checkpoints"),
    ("__main__",),
)
"""A module imports what stands in a row above its own, or in its own row as long as there is no circle."""

IMPURE = {
    "os", "io", "time", "threading", "socket", "random", "secrets", "subprocess", "shutil", "tempfile",
    "asyncio", "multiprocessing", "logging", "glob", "sqlite3", "urllib.request", "uuid",
}  # fmt: skip

ROUNDING = ("conversion/dtypes.py", "numpy")
"""The one use of numpy  (ADR 0082)."""

LOADING = "maintenance/deepspeed_load_child.py"
"""The one process that loads torch and DeepSpeed: because somebody asked for it (ADR 0217)."""

HEAVY = ("torch", "deepspeed", "numpy", "matplotlib")
CLOUD = ("boto3", "botocore", "s3fs", "aiobotocore", "moto")

REMOVERS = {
    "remove", "unlink", "rmdir", "removedirs", "rename", "renames", "replace", "rmtree", "move", "link",
    "remove_file", "remove_tree", "remove_empty", "rename_noreplace", "rename_new", "rename_exchange",
}  # fmt: skip

MAY_REMOVE = {
    "filesystem.py": "renames its own download into place, or removes it",
    "base/files.py": "defines the descriptor-relative primitives",
    "storage/local/fs.py": (
        "prunes with a permit; one folder that a person gave up; holds, derived forms and trash are ours"
    ),
    "observe/logs.py": "its own log, once it is full",
    "observe/event_log.py": "its own log, once it is full",
    "storage/remote/kept.py": "what it kept of COMMITs that do not count any more, in the state directory",
    "storage/local/state_dir.py": "the status of a job that waits, out of its user's own place",
    "daemon/resources/reserve.py": "its own reserve for a full disk, and what it tries the room with",
    "storage/local/probe.py": "proves rights on its own temporaries (P19)",
    "storage/stores/directory.py": (
        "remote retention, its own parts; empty folders of the remote after retention"
    ),
    "storage/stores/sftp.py": "remote retention on an SFTP server, its own temporaries there",
    "storage/journal/schema.py": "sets a journal of another schema aside (P8)",
    "conversion/engine/staging.py": "its own plan and partial folders",
    "conversion/engine/executor.py": "publishes its own temporary files",
    "conversion/engine/executor_child.py": "links and publishes its own files",
    "storage/local/clones.py": "its own half clones, and names of holds",
    "recover/execute.py": (
        "renames into _ckptd/aside and out of staging; removes its own staging alone; its own "
        "empty folders, where there is nothing to resume from"
    ),
    "recover/files.py": "swaps a fetched file with a bad one, which then lies in _ckptd/aside",
    "maintenance/uninstall.py": (
        "empty folders of ours; journal, status and word of a job that a person took back"
    ),
    "conversion/cluster/destination.py": "what is not planned, in its own partial folder",
    "conversion/cluster/conversion.py": "another plan's files in its own partial folder",
    "recover/fetch.py": "its own files in staging",
    "maintenance/install/execute.py": "units that bear its mark",
}
"""Every module that removes or renames, and why it may."""


OPENERS = {"open_store", "DirectoryStore"}
OPENS_STORES = {
    "storage/stores/open.py": "defines it",
    "storage/child/apart.py": "for a remote that is no directory",
    "storage/child/apart_child.py": "the process that serves one directory to a command",
    "storage/child/service.py": "a remote's own child",
    "conversion/cluster/conversion.py": "its own partial folder, where no remote of ckptd lies",
    "conversion/cluster/work.py": "the partial folder, or the bucket, that a conversion is made in",
}
"""Every module that opens a store in its own process, where a call on a dead mount has no end."""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported(path: Path) -> list[tuple[str, int]]:
    """Absolute names imported anywhere in a module, with the line; `from a import b` gives a and a.b."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} relative import"
            found.append((str(node.module), node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def test_permits_are_made_in_one_place() -> None:
    """The right to delete comes from the planner alone (P1)."""
    makers = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("DeletePermit", "OptOutPermit")
    }
    assert makers == {"core/policy/deletion.py"}


def test_imports_run_one_way() -> None:
    rank = {room: number for number, row in enumerate(ROOMS) for room in row}
    wrong = [
        f"{module} imports {other}"
        for module, others in graph_of(ROOT, for_types=False).items()
        for other in others
        if rank[room_of(other)] > rank[room_of(module)]
    ]
    assert not wrong


def test_there_is_no_circle() -> None:
    """Among modules imports for types count; among rooms those that run."""
    assert circles(graph_of(ROOT, for_types=True)) == []
    assert circles(rooms()) == []


def test_the_picture_of_the_rooms_is_of_this_code() -> None:
    """`make house` writes it into docs/internals/architecture.md."""
    assert PAGE.read_text() == with_rooms(PAGE.read_text())


def test_every_room_is_in_the_table() -> None:
    named = set(re.findall(r"`([\w.]+)`", PAGE.read_text().split("## The rooms")[1].split("<!-- rooms")[0]))
    tops = {room.split(".")[0] if room.startswith("cli") else room for row in ROOMS for room in row}
    assert {f"{room}.py" if (PACKAGE / f"{room}.py").exists() else room for room in tops} - named == {
        "__main__.py"
    }


def test_files_that_internal_pages_link_are_there() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGE.parent.glob("*.md")
        for target in re.findall(r"\]\((\.\./\.\./(?!docs/)[^)#]+)", page.read_text())
        if not (page.parent / target).is_file()
    ]
    assert not broken


_LINK = r"\[[^\]]+\]\(\.\./\.\./(ckptd/[^)#]+\.py)\)"
_NAMES = r"((?:`[A-Za-z_][\w.]*`(?:, | and )?)+)"
_ARE_DATA = {"latest", "status.json"}


def test_functions_that_the_journeys_name_are_in_the_linked_file() -> None:
    """One named beside a link is defined in that file, any other one in a file that its journey links."""
    wrong = []
    journeys = PAGE.read_text().split("## Three journeys")[1].split("\n## ")[0].split("\n### ")[1:]
    assert len(journeys) == 3
    for journey in journeys:
        beside = [(names, file) for names, file in re.findall(f"{_NAMES} in {_LINK}", journey)]
        beside += [(names, file) for file, names in re.findall(rf"{_LINK},? \(?{_NAMES}(?! in )", journey)]
        for names, file in beside:
            wrong += [f"{name} in {file}" for name in _named(names) if name not in _defined(ROOT / file)]
        linked = {name for file in re.findall(_LINK, journey) for name in _defined(ROOT / file)}
        wrong += sorted(_named(journey) - linked)
    assert not wrong


def _named(text: str) -> set[str]:
    return set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text)) - _ARE_DATA


def _defined(path: Path) -> set[str]:
    """Functions and classes at the top of a module, and methods, also as `Class.method`."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            found |= methods | {f"{node.name}.{name}" for name in methods}
    return found


def test_decisions_and_pages_that_code_names_are_there() -> None:
    """A record that was folded into a page of docs/internals leaves no name behind."""
    records = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("*.md")}
    broken = []
    for folder in ("ckptd", "tests", "bench", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            named = re.findall(r"(?:adr/|ADR )(\d{4})", text)
            pages = re.findall(r"docs/internals/\w+\.md", text)
            broken += [f"{path}: {number}" for number in named if number not in records]
            broken += [f"{path}: {page}" for page in pages if not (ROOT / page).is_file()]
    assert not broken


def test_the_demonstration_uses_ckptd_from_outside() -> None:
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in DEMO
        for name, line in imported(path)
        if name.split(".")[0] == "ckptd" and not name.startswith("ckptd.errors")
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["judge", "promises", "checks_remote", "checks_node", "evidence", "remote_view", "observer"]
)
def test_judge_and_observer_are_not_ckptd(module: str) -> None:
    path = ROOT / "examples" / "demo" / f"{module}.py"
    judges = {"examples.demo"} | {
        f"examples.demo.{name}"
        for name in ("judge", "promises", "checks_remote", "checks_node", "evidence", "remote_view")
    }
    names = {name for name, _ in imported(path) if name.split(".")[0] not in sys.stdlib_module_names}
    own = {name for name in names if any(name == j or name.startswith(f"{j}.") for j in judges)}
    assert names == own


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_fit_on_a_screen(path: Path) -> None:
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]
    assert not long


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)) or not path.read_text().strip()


def test_core_is_pure() -> None:
    wrong = []
    for path in MODULES:
        if part_of(path) != "core":
            continue
        wrong += [f"{name_of(path)}:{line} imports {n}" for n, line in imported(path) if n in IMPURE]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Name) and called.id in ("open", "print", "input"):
                    wrong.append(f"{name_of(path)}:{node.lineno} calls {called.id}")
                if isinstance(called, ast.Attribute) and called.attr in ("now", "utcnow", "today"):
                    wrong.append(f"{name_of(path)}:{node.lineno} reads the clock")
    assert not wrong


def test_only_these_remove_or_rename() -> None:
    callers: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in REMOVERS and not _is_text_or_data(name, node):
                callers.setdefault(name_of(path), []).append(f"{name} at line {node.lineno}")
    assert {k: v for k, v in callers.items() if k not in MAY_REMOVE} == {}
    assert set(MAY_REMOVE) <= set(callers) | {"base/files.py"}, (
        "a module that removes nothing any more is listed"
    )


def test_open_directories_are_listed_by_one_function() -> None:
    """`os.listdir` of a descriptor goes on where another thread's listing of a duplicate is."""
    wrong = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.listdir", "os.scandir"):
                listed = ast.unparse(node.args[0]).rpartition(".")[2]
                is_open = listed.endswith("fd") or ast.unparse(node.func) == "os.scandir"
                wrong += [f"{name_of(path)}:{node.lineno} lists {listed}"] if is_open else []
    assert not wrong, "ckptd.base.owned_dirs.list_dir is for that"


def _is_text_or_data(name: str, node: ast.Call) -> bool:
    """str.replace, datetime.replace, dataclasses.replace, list.remove: no file is touched."""
    if name == "replace":
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return not (isinstance(owner, ast.Name) and owner.id == "os")
    if name in ("remove", "move"):
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return not (isinstance(owner, ast.Name) and owner.id in ("os", "files", "shutil"))
    return False


def test_only_children_touch_a_directory_remote() -> None:
    """Every other process opens a remote by `open_apart`, whose calls end within a limit (docs/adr/0182)."""
    found = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.ImportFrom) and {name.name for name in node.names} & OPENERS)
        or (isinstance(node, ast.FunctionDef) and node.name == "open_store")
    }
    assert found == set(OPENS_STORES)


def test_no_training_stack_in_ckptd() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in MODULES
        for name, line in imported(path)
        if name.split(".")[0] in HEAVY and (name_of(path), name) != ROUNDING and name_of(path) != LOADING
    ]
    assert not wrong


def test_numpy_is_imported_by_the_call_that_rounds() -> None:
    """Not with the module: the daemon and the planning child load it and have no use for numpy."""
    path = PACKAGE / ROUNDING[0]
    functions = {id(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)}
    inside = {id(node) for top in ast.walk(tree_of(path)) if id(top) in functions for node in ast.walk(top)}
    imports = [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import) and any(a.name == ROUNDING[1] for a in node.names)
    ]
    assert imports
    assert all(id(node) in inside for node in imports)


def test_cloud_libraries_only_where_a_store_asks_for_them() -> None:
    wrong = []
    for path in MODULES:
        top = {id(node) for node in tree_of(path).body}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                if any(n.split(".")[0] in CLOUD for n in names) and (
                    id(node) in top or part_of(path) != "storage"
                ):
                    wrong.append(f"{name_of(path)}:{node.lineno} imports {names}")
    assert not wrong


def test_dask_is_imported_by_the_calls_that_use_it() -> None:
    """It comes with an extra: no module of ckptd needs it to be loaded (docs/internals/conversion.md)."""
    places: dict[str, list[bool]] = {}
    for path in MODULES:
        inside = {
            id(node)
            for top in ast.walk(tree_of(path))
            if isinstance(top, ast.FunctionDef)
            for node in ast.walk(top)
        }
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                if any(name.split(".")[0] in ("dask", "distributed", "dask_jobqueue") for name in names):
                    places.setdefault(name_of(path), []).append(id(node) in inside)
    assert sorted(places) == ["conversion/cluster/pool.py", "conversion/cluster/work.py"]
    assert all(all(found) for found in places.values())


def loaded_by(program: str) -> set[str]:
    """Top-level packages in sys.modules after a program ran in a fresh interpreter."""
    code = f"import sys\n{program}\nprint('\\n'.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
        timeout=200,
    )
    return set(done.stdout.split())


def test_status_loads_neither_the_training_stack_nor_the_cloud() -> None:
    program = (
        "from ckptd.cli.main import main\n"
        "try:\n    main(['status', '/nowhere/at/all'])\nexcept SystemExit:\n    pass"
    )
    assert not loaded_by(program) & {*HEAVY, *CLOUD}


def test_status_of_a_job_loads_what_it_shows_alone(tmp_path: Path) -> None:
    """Neither pydantic nor the journal nor metrics; a table's library only for a table (≤ 0.2 s)."""
    state = tmp_path / "state" / "a"
    (tmp_path / "jobs.d").mkdir()
    state.mkdir(parents=True)
    (tmp_path / "ckptd.toml").write_text(f'state_dir = "{tmp_path}/state"\n')
    (tmp_path / "jobs.d" / "a.toml").write_text(f'save_dir = "{tmp_path}/nvme"\n')
    at = "2026-01-01T00:00:00.000Z"
    empty: dict[str, Any] = {"opt_outs": [], "problems": [], "checkpoints": []}
    job = {"name": "a", "save_dir": f"{tmp_path}/nvme", "state": "ok", "as_of": at, **empty}
    daemon = {"pid": 1, "alive": False, "version": "0", "started_at": at}
    text = json.dumps({"schema_version": 1, "generated_at": at, "daemon": daemon, "jobs": [job]})
    (state / "status.json").write_text(text)
    unwanted = {*HEAVY, *CLOUD, "pydantic", "typer", "prometheus_client", "sqlite3", "psutil", "fsspec"}
    unwanted |= {"awscrt", "ctypes"}
    for words in ([], ["a"], ["--json"], ["--live"]):
        arguments = ["status", *words, "--config-dir", str(tmp_path)]
        program = (
            "import contextlib, io\nfrom ckptd.cli.main import main\nsaid = io.StringIO()\n"
            "with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):\n"
            f"    main({arguments})\n"
            "assert 'stopped' in said.getvalue() or '\"jobs\"' in said.getvalue()"
        )
        if words == ["--live"]:
            program = program.replace(f", '--config-dir', '{tmp_path}'", f", '--state-dir', '{state}'")
        found = loaded_by(program)
        assert not found & (unwanted | ({"rich"} if words[:1] in (["--json"], ["--live"]) else set())), words


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "daemon.crash_recovery",
            ("formats", "conversion.weights", "conversion.reader", "recover", "maintenance"),
        ),
        ("storage.child.child", ("core.policy.planner", "conversion", "daemon", "config.schema")),
    ],
)
def test_a_process_at_rest_holds_no_code_that_it_does_not_run(module: str, unwanted: tuple[str, ...]) -> None:
    """Converters, the unpickler and the policy cost megabytes in each process that has them."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, ckptd.{module}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
        timeout=200,
    )
    held = [
        name for name in done.stdout.split() if name.startswith(tuple(f"ckptd.{room}" for room in unwanted))
    ]
    assert held == []


def test_a_daemon_without_need_loads_neither_metrics_nor_clouds(tmp_path: Path) -> None:
    """The real process, after it has looked, published and found nothing to do."""
    (tmp_path / "nvme").mkdir()
    arguments = ["run", f"{tmp_path}/nvme", f"{tmp_path}/nas", "--same-filesystem", "--once"]
    program = (
        "import contextlib\nfrom ckptd.cli.main import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({arguments})"
    )
    found = loaded_by(program)
    assert {"watchdog", "sqlite3", "pydantic"} & found
    assert not found & {*HEAVY, *CLOUD, "prometheus_client", "rich", "fsspec", "awscrt", "paramiko", "dask"}


def test_daemon_loads_neither_the_training_stack_nor_the_cloud() -> None:
    names = [
        "ckptd." + name_of(p).removesuffix(".py").replace("/", ".")
        for p in MODULES
        if part_of(p) in ("daemon", "recover", "conversion", "storage", "core", "observe", "maintenance")
        and p.name not in ("__init__.py", "__main__.py")
    ]
    program = "import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names)
    assert not loaded_by(program) & {*HEAVY, *CLOUD}
