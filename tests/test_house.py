"""Classes and files stay as small as a reader can hold in mind."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"

MOST_METHODS, MOST_ATTRIBUTES, MOST_LINES = 12, 10, 500

# What is larger, as (public methods, attributes), and why. The table only shrinks: an entry that is not needed fails.
EXEMPT: dict[str, tuple[int, int, str]] = {
    "callbacks/freezing.py:AdaptiveFreezing": (9, 17, "options of the user, and what is known of each layer so far"),
    "callbacks/tuner.py:AvgPipeTuner": (7, 13, "options of the user, and the search that they begin"),
    "comm/cluster.py:Cluster": (26, 27, "all that a process has of the others"),
    "comm/collectives.py:Collectives": (17, 5, "a method for each thing that processes do together"),
    "comm/meetings.py:Meetings": (7, 12, "one protocol, whose parties and rounds change together"),
    "comm/membership.py:Membership": (14, 9, "a question for each thing that may have become of a group"),
    "comm/monitor.py:Monitor": (13, 18, "what each of its threads watches"),
    "comm/returns.py:Returns": (12, 12, "one protocol: who asks, who invites, and who is there"),
    "comm/stage_map.py:StageMap": (18, 0, "a method for each question about who hosts what"),
    "elastic/ensemble.py:Ensemble": (19, 9, "one call for each moment in the life of parallel models"),
    "elastic/models.py:Models": (18, 5, "the models as one, for each thing that happens to them"),
    "elastic/staggered.py:StaggeredAveraging": (3, 11, "the terms of one formula"),
    "engine/abreast.py:Abreast": (6, 13, "where each of the micro-batches stands, and who waits for whom"),
    "engine/executor.py:Lane": (7, 13, "where a stage of a pipeline stands in an iteration"),
    "engine/frozen_outputs.py:FrozenOutputs": (12, 24, "the store, its limits, and what is being kept"),
    "engine/lockstep.py:Lockstep": (12, 11, "a tracer: a method for each kind of event"),
    "engine/pipeline.py:Pipeline": (16, 10, "the stages, and the questions about each loaded step"),
    "engine/replay.py:_Replayer": (8, 18, "where a replay stands in the graph"),
    "engine/stage.py:Stage": (7, 23, "all that the actions of a stage use"),
    "engine/stream.py:Stream": (5, 12, "where each lane of a stream of iterations stands"),
    "strategy/advance_control.py:AdvanceControl": (10, 15, "what has been measured, and what is decided from it"),
    "strategy/bundles.py:BundledLoader": (6, 13, "what Lightning asks of a loader, and where reading stands"),
    "strategy/iteration.py:Iterations": (6, 15, "an iteration uses all that a run has"),
    "strategy/log.py:StepLog": (7, 15, "what one batch has logged, and whom Lightning asks for it"),
    "strategy/parallel_models.py:ParallelModels": (20, 13, "Lightning's hooks, for each model"),
    "strategy/pipeline_run.py:PipelineRun": (17, 18, "the protocol of runs, with all that a run has"),
    "strategy/rolling.py:_Iteration": (0, 11, "a record that is filled while its batch is under way"),
    "strategy/schedule_choice.py:ScheduleChoice": (9, 13, "what is known of each schedule that is tried"),
    "strategy/schedule_control.py:ScheduleControl": (10, 18, "the schedule, and all that decides it"),
    "strategy/strategy.py:AvgPipeStrategy": (58, 14, "Lightning's hooks and properties, a line or two each"),
    "strategy/whole_run.py:WholeRun": (9, 12, "the protocol of runs, with all that a run has"),
    "utils/device.py:AcceleratorPort": (19, 1, "the same of accelerators"),
    "utils/device.py:DevicePort": (20, 1, "all that depends on the kind of device, and nothing else does"),
    "utils/objects.py:Objects": (17, 7, "one walk through objects, and the questions about what it met"),
}
LONG_FILES = {
    "strategy/strategy.py": "Lightning's hooks, a line or two each, and the docstring of every option",
}

# What records are made of, besides builtins and other records.
_PLAIN = {
    "Any", "Callable", "Collection", "Description", "Literal", "Mapping", "Path", "Sequence", "Tensor", "timedelta",
    "torch", *dir(builtins),
}  # fmt: skip


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Each class of the package, by ``file:name``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(PACKAGE)}:{node.name}", node


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (f for f in node.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)))


def fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    """Of a dataclass or a named tuple."""
    if dataclass_of(node) or "NamedTuple" in map(ast.unparse, node.bases):
        yield from (
            f for f in node.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f.annotation)
        )


def dataclass_of(node: ast.ClassDef) -> str:
    return next((text for text in map(ast.unparse, node.decorator_list) if text.startswith("dataclass")), "")


def methods(node: ast.ClassDef) -> set[str]:
    """Public methods and properties of the class body."""
    return {f.name for f in functions(node) if not f.name.startswith("_")}


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields, and what methods assign to ``self``."""
    found = {f.target.id for f in fields(node) if isinstance(f.target, ast.Name)}
    for function in functions(node):
        first = function.args.args[:1]
        found |= {
            a.attr
            for a in ast.walk(function)
            if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store) and isinstance(a.value, ast.Name)
            and [a.value.id] == [argument.arg for argument in first]
        }  # fmt: skip
    return found


def names(annotation: ast.AST) -> set[str]:
    """What a value is made of; what a function takes and gives does not matter."""
    if isinstance(annotation, ast.Name):
        return {annotation.id}
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Callable":
        return {"Callable"}
    return set().union(*map(names, ast.iter_child_nodes(annotation)))


def records() -> set[str]:
    """Frozen classes of plain values: builtins, tensors, functions, collections of them, and other records.

    Their fields say what something is, as options do, and nothing in them changes: however many, they do not count.
    """
    made_of: dict[str, set[str]] = {}
    for _, node in classes():
        frozen = "frozen=True" in dataclass_of(node) or "NamedTuple" in map(ast.unparse, node.bases)
        parts = set().union(*(names(f.annotation) for f in fields(node))) if frozen else {"what changes"}
        made_of[node.name] = made_of.get(node.name, set()) | parts
    found = set(made_of)
    while bad := {name for name in found if made_of[name] - _PLAIN - aliases() - found}:
        found -= bad
    return found


@functools.cache
def aliases() -> set[str]:
    """Names of types that are made of plain ones: ``Matrix = Sequence[Sequence[float]]``."""
    return {
        target.id
        for path in PACKAGE.rglob("*.py")
        for line in ast.parse(path.read_text()).body
        if isinstance(line, ast.Assign)
        and isinstance(line.value, (ast.BinOp, ast.Subscript))
        and names(line.value) <= _PLAIN
        for target in line.targets
        if isinstance(target, ast.Name)
    }


def sizes() -> dict[str, tuple[int, int]]:
    """Public methods and attributes of each class."""
    values = records()
    return {
        place: (len(methods(node)), 0 if node.name in values else len(attributes(node))) for place, node in classes()
    }


def test_classes_have_few_methods_and_attributes() -> None:
    large = {place: size for place, size in sizes().items() if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES}
    allowed = {place: (most, attributes) for place, (most, attributes, _) in EXEMPT.items()}
    new = {
        place: size
        for place, size in large.items()
        if size[0] > max(MOST_METHODS, allowed.get(place, (0, 0))[0])
        or size[1] > max(MOST_ATTRIBUTES, allowed.get(place, (0, 0))[1])
    }
    assert not new, f"(public methods, attributes) are too many: {new}; find what is missing, and give it a name"
    assert set(allowed) <= set(large), f"no exemptions any more: {set(allowed) - set(large)}; delete their entries"


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name for name, length in lengths.items() if length > MOST_LINES} == set(LONG_FILES)
