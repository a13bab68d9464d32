"""Partition: against brute force, on graphs without torch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_avgpipe.capture.graph import CallGraph, Node, Value
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Costs, Link, Memory, cut_at, cut_balanced, cut_like, make_plan
from lightning_avgpipe.planning.balance import gaps
from lightning_avgpipe.planning.memory import Flow
from tests.planning.known_costs import of_nodes


def graph_of(
    nodes: Sequence[tuple[str, str, Sequence[int], Sequence[str]]], nbytes: Sequence[int], kept: Sequence[int] = ()
) -> CallGraph:
    """A graph from ``(kind, name, inputs, parameters)``; node i makes value i of ``nbytes[i]``."""
    made = tuple(
        Node(i, kind, name, "line", tuple(inputs), (i,), parameters=tuple(parameters))  # type: ignore[arg-type]
        for i, (kind, name, inputs, parameters) in enumerate(nodes)
    )
    values = tuple(Value(i, made[i].name, (n,), "float32", n, True, i) for i, n in enumerate(nbytes))
    return CallGraph("training_step", made, values, frozenset(kept), tuple(n.name for n in made), frozenset())


def chain(count: int, nbytes: Sequence[int] | None = None) -> CallGraph:
    nodes = [("call", f"u{i}", [i - 1] if i else [], [f"u{i}.w"]) for i in range(count)]
    return graph_of(nodes, nbytes or [4] * count, kept=[count - 1])


def random_graph(rng: random.Random) -> tuple[CallGraph, Costs]:
    """Calls and glue with random skips, shared parameters and sizes."""
    count = rng.randint(3, 9)
    nodes = []
    for i in range(count):
        call = rng.random() < 0.7 or i in (0, count - 1)
        inputs = sorted({i - 1, *rng.sample(range(i), k=min(i, rng.randint(0, 2)))}) if i else []
        shared = ["shared"] if rng.random() < 0.15 else []
        nodes.append(("call" if call else "glue", f"n{i}", inputs, [f"n{i}.w", *shared] if call else []))
    graph = graph_of(nodes, [rng.choice([1, 4, 16]) for _ in range(count)], kept=[count - 1])
    return graph, of_nodes(tuple(rng.uniform(0, 10) for _ in range(count)), rng.choice([0.0, 0.2, 2.0]))


def bottleneck(graph: CallGraph, costs: Costs, cuts: Sequence[int]) -> float:
    bounds = [0, *cuts, len(graph.nodes)]
    stages = [sum(costs.node[a:b]) for a, b in itertools.pairwise(bounds)]
    return max([*stages, *(costs.link(0).per_byte * graph.boundary_bytes[cut] for cut in cuts)])


def roughness(graph: CallGraph, costs: Costs, cuts: Sequence[int], best: float) -> float:
    bounds = [0, *cuts, len(graph.nodes)]
    squares = sum(sum(costs.node[a:b]) ** 2 for a, b in itertools.pairwise(bounds)) / (best * 1.01)
    return squares + sum(costs.link(0).per_byte * graph.boundary_bytes[cut] for cut in cuts)


def test_the_bottleneck_is_that_of_brute_force() -> None:
    rng = random.Random(0)
    divided = refused = 0
    for _ in range(300):
        graph, costs = random_graph(rng)
        num_stages = rng.randint(1, 4)
        legal = [gap.position for gap in gaps(graph) if gap.obstacle is None]
        every = list(itertools.combinations(legal, num_stages - 1))
        if not every:
            refused += 1
            with pytest.raises(PartitionError, match=f"num_stages={num_stages} needs {num_stages - 1} cuts"):
                cut_balanced(graph, costs, num_stages)
            continue
        divided += 1
        best = min(bottleneck(graph, costs, cuts) for cuts in every)
        found = cut_balanced(graph, costs, num_stages)
        assert bottleneck(graph, costs, found) <= best * 1.01 + 1e-9
        # and among the cuts that are as good, there is none that is more even with as little traffic
        good = [cuts for cuts in every if bottleneck(graph, costs, cuts) <= best * 1.01]
        assert roughness(graph, costs, found, best) == pytest.approx(
            min(roughness(graph, costs, cuts, best) for cuts in good)
        )
    assert divided > 100 and refused > 20


def copied_graph(rng: random.Random) -> tuple[CallGraph, Costs, Memory, int]:
    """Parameters with several users, a link of its own for every hop, and a limit on memory that may matter."""
    count, num_stages = rng.randint(4, 9), rng.randint(2, 4)
    nodes = []
    for i in range(count):
        inputs = sorted({i - 1, *rng.sample(range(i), k=min(i, rng.randint(0, 1)))}) if i else []
        nodes.append(("call", f"n{i}", inputs, [f"n{i}.w", *rng.sample(["a", "b", "c"], rng.choice([0, 0, 0, 1, 2]))]))
    graph = graph_of(nodes, [rng.choice([1, 4, 16]) for _ in range(count)], kept=[count - 1])
    costs = Costs(
        tuple(rng.uniform(0, 5) for _ in range(count)),
        tuple(rng.uniform(0, 5) for _ in range(count)),
        tuple(rng.randint(0, 20) for _ in range(count)),
        tuple(Link(rng.choice([0.0, 0.1, 1.0])) for _ in range(num_stages - 1)),
    )
    names = {name for node in graph.nodes for name in node.parameters}
    weights = {name: rng.randint(1, 30) for name in sorted(names)}
    flights = sorted((rng.randint(1, 4) for _ in range(num_stages)), reverse=True)
    flows = tuple(Flow(count, count) for count in flights)
    limit = rng.choice([math.inf, rng.uniform(50, 400)])
    return graph, costs, Memory(limit, weights, {n: 4 * w for n, w in weights.items()}, flows, 2), num_stages


def stage_costs(graph: CallGraph, costs: Costs, memory: Memory, cuts: Sequence[int]) -> list[tuple[float, float]]:
    """Seconds and bytes of each stage, from the definitions."""
    bounds = [0, *cuts, len(graph.nodes)]
    used = [{n for node in graph.nodes[a:b] for n in node.parameters} for a, b in itertools.pairwise(bounds)]
    slowest = max(link.per_byte for link in costs.links)
    found = []
    for k, (a, b) in enumerate(itertools.pairwise(bounds)):
        copies = used[k] & set().union(*(other for i, other in enumerate(used) if i != k))
        summing = sum(memory.weights[name] for name in copies) * slowest / memory.num_microbatches
        stash = sum(costs.stash_bytes[a:b]) + (graph.boundary_bytes[a] if k else 0)
        held = sum(memory.persistent[name] for name in used[k])
        found.append((sum(costs.node[a:b]) + summing, held + stash * memory.flows[k].stashed))
    return found


def test_copies_links_and_memory_are_those_of_brute_force() -> None:
    rng = random.Random(3)
    divided = refused = limited = 0
    for _ in range(250):
        graph, costs, memory, num_stages = copied_graph(rng)
        legal = [gap.position for gap in gaps(graph) if gap.obstacle is None]
        if len(legal) < num_stages - 1:
            continue
        every = {
            cuts: stage_costs(graph, costs, memory, cuts) for cuts in itertools.combinations(legal, num_stages - 1)
        }
        fitting = {c: s for c, s in every.items() if all(nbytes <= memory.limit for _, nbytes in s)}
        if not fitting:
            refused += 1
            least = min(max(nbytes for _, nbytes in stages) for stages in every.values())
            with pytest.raises(PartitionError, match=f"a stage needs at least {least:.0f} B, which is"):
                cut_balanced(graph, costs, num_stages, memory)
            continue

        def pace(cuts: tuple[int, ...], stages: list[tuple[float, float]]) -> float:
            sent = [costs.link(k).per_byte * graph.boundary_bytes[cut] for k, cut in enumerate(cuts)]  # noqa: B023
            return max([*(seconds for seconds, _ in stages), *sent])

        divided += 1
        limited += len(fitting) < len(every)
        found = cut_balanced(graph, costs, num_stages, memory)
        assert found in fitting
        assert pace(found, fitting[found]) <= min(itertools.starmap(pace, fitting.items())) * 1.01 + 1e-9
        sizes = dict.fromkeys(memory.weights, 1)
        plan = make_plan(graph, found, costs, sizes, memory)
        assert [stage.memory.total for stage in plan.stages] == [nbytes for _, nbytes in fitting[found]]
    assert divided > 100 and refused > 15 and limited > 15


def test_too_little_memory_says_how_much_is_missing_where() -> None:
    graph = chain(4)
    weights = {f"u{i}.w": 1024 * (5 if i == 3 else 1) for i in range(4)}
    costs = Costs((1.0,) * 4, (2.0,) * 4, (256,) * 4)
    with pytest.raises(PartitionError) as error:
        cut_balanced(graph, costs, 2, Memory(2048, weights, weights, (Flow(2, 2), Flow())))
    assert str(error.value) == (
        "training_step does not fit into num_stages=2 stages with memory_limit=2.0 KiB: however it is cut, a stage "
        "needs at least 5.3 KiB, which is 3.3 KiB too much. That is stage 1 (u3), with 5.0 KiB of weights, gradients "
        "and optimizer states, 256 B stashed by 1 micro-batch in flight, 4 B of values received for it; use more "
        "stages, or raise memory_limit"
    )


def test_what_crosses_a_cut_is_what_is_used_after_it() -> None:
    rng = random.Random(1)
    for _ in range(200):
        graph, _ = random_graph(rng)
        for position in range(len(graph.nodes) + 1):
            used = {v for node in graph.nodes[position:] for v in node.inputs} | graph.observed
            assert set(graph.live(position)) == {v for v in used if v < position}
            assert graph.boundary_bytes[position] == sum(graph.values[v].nbytes for v in graph.live(position))


def test_split_points_may_name_a_unit_or_what_holds_it() -> None:
    nodes = [("call", name, [i - 1] if i else [], [f"{name}.w"]) for i, name in enumerate(["a", "b.0", "b.1", "c"])]
    graph = graph_of(nodes, [4] * 4, kept=[3])
    assert cut_at(graph, ["b", "c"], 3) == (1, 3)
    assert cut_at(graph, ["b.1"], 2) == (2,)
    # with num_stages="auto" the number of stages is not known when options are checked
    with pytest.raises(PartitionError, match="names 2 units, but num_stages=4 needs 3"):
        cut_at(graph, ["b", "c"], 4)


def test_another_step_is_cut_where_the_parameters_are() -> None:
    train = chain(6)
    plan = make_plan(train, (2, 4), of_nodes((1.0,) * 6), {f"u{i}.w": 3 for i in range(6)})
    assert [stage.num_parameters for stage in plan.stages] == [6, 6, 6]
    shorter = graph_of(
        [("call", "u1", [], ["u1.w"]), ("glue", "add", [0], []), ("call", "u4", [1], ["u4.w"])], [4, 1, 4], kept=[2]
    )
    cuts = cut_like(shorter, plan.stages_of, 3)
    assert cuts == (2, 2)  # stage 1 is empty, and the narrower value crosses
    backwards = graph_of([("call", "u4", [], ["u4.w"]), ("call", "u1", [0], ["u1.w"])], [4, 4], kept=[1])
    with pytest.raises(PartitionError, match=r"goes back from stage 2 \(unit 'u4' at line\) to stage 0 \(unit 'u1'"):
        cut_like(backwards, plan.stages_of, 3)


def test_a_plan_is_a_table() -> None:
    plan = make_plan(chain(4), (1,), of_nodes((3.0, 1.0, 1.0, 1.0)), {f"u{i}.w": 1500 for i in range(4)})
    assert str(plan).splitlines() == [
        "stage  units         parameters  time  memory  sends to the next",
        "-------------------------------------------------------------------------",
        "0      u0            1.5 K       50%   0 B     1 value, 4 B a micro-batch",
        "1      u1 .. u3 (3)  4.5 K       50%   4 B     -",
        "times are shares of counted operations, not measured",
    ]
    plan = replace(plan, remarks=("0 < 1",))
    assert plan._repr_html_() == (  # what notebooks show
        "<table><tr><th>stage</th><th>units</th><th>parameters</th><th>time</th><th>memory</th>"
        "<th>sends to the next</th></tr><tr><td>0</td><td>u0</td><td>1.5 K</td><td>50%</td><td>0 B</td>"
        "<td>1 value, 4 B a micro-batch</td></tr><tr><td>1</td><td>u1 .. u3 (3)</td><td>4.5 K</td><td>50%</td>"
        "<td>4 B</td><td>-</td></tr></table><p>0 &lt; 1<br>times are shares of counted operations, not measured</p>"
    )
    assert plan.brief == "stage 0: u0; stage 1: u1 .. u3 (3)"
    assert replace(plan, devices=((2, 3), (0, 1))).brief == "stage 0 (rank 2, 3): u0; stage 1 (rank 0, 1): u1 .. u3 (3)"
