"""The averaging step, with and without a barrier: what it is equal to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.averaging.averaging_step import AveragingStep
from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.staggered import StaggeredAveraging
from lightning_avgpipe.errors import ConfigurationError
from tests.comparing import assert_equal

SHAPES = ((3, 5), (7,), (2, 2, 2))

Model = list[Tensor]


def models(count: int, dtype: torch.dtype = torch.float32) -> tuple[list[Model], Model]:
    """Some models, and a reference that is their mean."""
    generator = torch.Generator().manual_seed(count)
    made = [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(count)]
    return made, mean(made)


def mean(made: list[Model]) -> Model:
    return [torch.stack(same).double().mean(0).to(same[0].dtype) for same in zip(*made, strict=True)]


def update(made: list[Model], active: int, seed: int) -> list[Model]:
    """Local steps of the first models; tells the mean of their updates."""
    generator = torch.Generator().manual_seed(seed)
    updates = [[0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in m] for m in made[:active]]
    for model, changes in zip(made, updates, strict=False):
        torch._foreach_add_(model, changes)
    return mean(updates)


def test_a_parameter_is_averaged_the_same_whatever_its_size_and_whatever_is_beside_it() -> None:
    made, reference = models(2)
    update(made, 1, 0)
    alone = [[t.clone() for t in m] for m in (*made, reference)]
    large = [torch.full((17 * 1024**2,), float(i)) for i in range(3)]  # so much is averaged in parts
    AveragingStep([[large[i], *m] for i, m in enumerate(made)], [large[2], *reference], 1).end(0.25, 2.0)
    AveragingStep(alone[:2], alone[2], 1).end(0.25, 2.0)
    assert_equal((*made, reference), alone)
    assert [t[-1].item() for t in large] == [t[0].item() for t in large]


def together(made: list[Model], reference: Model) -> None:
    AveragingStep(made, reference, len(made)).end(0.25, 2.0)


def one_by_one(made: list[Model], reference: Model) -> None:
    averaging = StaggeredAveraging(made, reference, 0.5, 1.5)
    made[0][1].mul_(0.5)
    averaging.end(0)


@pytest.mark.parametrize("use", [together, one_by_one])
def test_half_precision_is_averaged_in_single(use: Callable[[list[Model], Model], None]) -> None:
    made, reference = models(4, torch.bfloat16)
    made[0][0] += 1.0
    wide = [[t.float() for t in m] for m in made], [t.float() for t in reference]
    use(made, reference)
    use(*wide)
    for found, expected in zip((*reference, *made[3], *made[0]), (*wide[1], *wide[0][3], *wide[0][0]), strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16))


# -- what user code writes ---------------------------------------------------------------------------------------------


def ensemble_of_two(bias: bool = False, **options: Any) -> tuple[nn.Linear, Ensemble]:
    """Models of one weight, which is 1, and maybe a bias."""
    module = nn.Linear(1, 1, bias=bias)
    nn.init.constant_(module.weight, 1.0)
    optimizer = torch.optim.SGD(module.parameters())
    ensemble = Ensemble(module, lambda: [optimizer], Averaging(**options))
    ensemble.follow(2)
    return module, ensemble


HALF = torch.tensor([[0.5]])


def write(parameter: nn.Parameter) -> None:
    parameter.data.copy_(HALF)


def assign(parameter: nn.Parameter, half: Tensor = HALF) -> None:
    parameter.data = half  # by default the same memory for whoever does this


def fill(
    module: nn.Linear, ensemble: Ensemble, number: int | None, half: Callable[[nn.Parameter], None] = write
) -> None:
    with ensemble.lent(number):
        half(module.weight)


def iterate(module: nn.Linear, ensemble: Ensemble, rolling: bool, updates: tuple[float, float]) -> None:
    if rolling:
        ensemble.settle()
        ensemble.averager.begin_staggered()
    for n, change in enumerate(updates):
        with ensemble.placed(n), torch.no_grad():
            module.weight.add_(change)
        if rolling:
            ensemble.averager.average_one(n)
    if not rolling:
        ensemble.averager.stepped(2)


def filled(rolling: bool, *order: int | None) -> list[float]:
    """Two models, which hooks fill between two iterations of which the second has no update, and their reference."""
    module, ensemble = ensemble_of_two(rolling=rolling, alpha=0.25, outer_lr=1.5)
    iterate(module, ensemble, rolling, (0.5, -0.25))
    for number in order:
        fill(module, ensemble, number)
    iterate(module, ensemble, rolling, (0.0, 0.0))
    return weights(ensemble)


def weights(ensemble: Ensemble) -> list[float]:
    """Those of the models and of the reference."""
    ensemble.averager.finish()
    models, (reference,) = ensemble.models.tensors()
    return [weight.item() for (weight,) in models] + [reference.item()]


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("order", [(None, 0, 1), (0, 1, None)])
def test_what_a_hook_sets_in_all_models_and_the_reference_stays(rolling: bool, order: tuple[int | None, ...]) -> None:
    assert filled(rolling, *order) == [0.5] * 3


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("order", [(None, 0, 1), (0, 1)])
def test_models_train_on_alike_whether_a_hook_writes_into_them_or_assigns(
    rolling: bool, order: tuple[int | None, ...]
) -> None:
    found = []
    for half in (write, assign):
        module, ensemble = ensemble_of_two(rolling=rolling, alpha=0.25)
        iterate(module, ensemble, rolling, (0.5, -0.25))
        for number in order:
            fill(module, ensemble, number, half)
        for _ in range(2):
            iterate(module, ensemble, rolling, (0.125, -0.5))
        found.append(weights(ensemble))
    assert found[0] == found[1]
    assert HALF == 0.5


def test_a_model_whose_hook_before_its_step_assigns_a_weight_stays_in_the_averaging() -> None:
    found = []
    for half in (write, lambda parameter: assign(parameter, HALF.clone())):
        module, ensemble = ensemble_of_two(rolling=True, alpha=0.25)
        for updates in ((0.5, -0.25), (0.0, 0.0)):
            ensemble.averager.begin_staggered()
            for n, change in enumerate(updates):
                with ensemble.placed(n), torch.no_grad():
                    half(module.weight)
                    module.weight.add_(change)
                ensemble.averager.average_one(n)
        found.append(weights(ensemble))
    assert found[0] == found[1]


@pytest.mark.parametrize("half", [write, assign])
@pytest.mark.parametrize("first", [True, False])
def test_what_a_hook_of_a_validation_sets_in_the_reference_stays(
    half: Callable[[nn.Parameter], None], first: bool
) -> None:
    module, ensemble = ensemble_of_two(rolling=True, alpha=0.25, outer_lr=1.5)
    iterate(module, ensemble, True, (0.5, -0.25))
    with torch.inference_mode():
        ensemble.show_reference(True)
        if first:
            half(module.weight)
        for n in range(2):
            fill(module, ensemble, n, half)
        if not first:
            half(module.weight)
        ensemble.show_reference(False)
    assert weights(ensemble) == [0.5] * 3
    iterate(module, ensemble, True, (0.0, 0.0))
    assert weights(ensemble) == [0.5] * 3


def test_a_validation_that_sets_the_reference_before_a_late_averaging_has_ended_is_refused() -> None:
    module, ensemble = ensemble_of_two(every=2, delay=1)
    for _ in range(2):
        iterate(module, ensemble, False, (0.5, -0.25))
    ensemble.show_reference(True)
    write(module.weight)
    with pytest.raises(ConfigurationError, match="a hook has changed 'weight' of the reference"):
        ensemble.show_reference(False)


def test_a_hook_may_set_a_fragment_of_the_reference_while_another_is_in_flight() -> None:
    module, ensemble = ensemble_of_two(bias=True, every=2, fragments=2, delay=1)
    iterate(module, ensemble, False, (0.5, -0.25))  # the averaging of the weight has begun, and not that of the bias
    with ensemble.lent(None):
        module.bias.data.fill_(0.5)
    assert ensemble.models.reference["bias"] == 0.5
    with pytest.raises(ConfigurationError, match="a hook has changed 'weight' of the reference"):
        fill(module, ensemble, None)


def test_the_reference_follows_what_a_hook_sets_in_the_models_alone_with_the_next_averaging() -> None:
    *models, reference = filled(False, 0, 1)
    assert reference == pytest.approx(sum(models) / 2)
    assert reference < 0.75 < filled(False)[-1]


def do_nothing(ensemble: Ensemble) -> None:
    """Trains on."""


def save(ensemble: Ensemble) -> None:
    ensemble.settle()


def resume(ensemble: Ensemble) -> None:
    ensemble.settle()
    ensemble.averager.abandon()  # models and reference as they are now


def show(ensemble: Ensemble) -> None:
    with ensemble.lent(0):
        pass
    ensemble.settle()


@pytest.mark.parametrize("event", [do_nothing, save, resume, show, lambda ensemble: ensemble.averager.end_staggered()])
def test_with_rolling_the_reference_follows_the_models_before_the_next_iteration(
    event: Callable[[Ensemble], None],
) -> None:
    module, ensemble = ensemble_of_two(rolling=True, alpha=0.25, outer_lr=1.5)
    iterate(module, ensemble, True, (0.5, -0.25))
    for n in range(2):
        fill(module, ensemble, n)
    event(ensemble)
    iterate(module, ensemble, True, (0.0, 0.0))
    assert weights(ensemble) == [0.5] * 3
    iterate(module, ensemble, True, (0.5, -0.25))
    *models, reference = weights(ensemble)
    assert reference == sum(models) / 2 == 0.5 + 1.5 * 0.125


class Twins:
    """Two groups that do the same."""

    count = 2

    def begin_sum(self, tensors: list[Tensor]) -> Callable[[], None]:
        return lambda: torch._foreach_mul_(tensors, 2.0)


@pytest.mark.parametrize("resets", [False, True])
def test_with_groups_the_reference_follows_at_the_end_of_the_next_iteration(resets: bool) -> None:
    groups: Any = Twins()
    made, reference = [[torch.tensor([1.5])], [torch.tensor([0.5])]], [torch.tensor([1.0])]
    averaging = StaggeredAveraging(made, reference, 0.25, 1.5, groups)
    for (tensor,) in made:
        tensor.fill_(0.5)
    averaging.take_over(())
    averaging.settle()
    if resets:
        averaging.reset()
    assert reference[0] == 1.0
    for n in range(2):
        averaging.end(n)
    averaging.add_pending_sums()
    assert [*made[0], *made[1], *reference] == [0.5] * 3


def test_the_last_changes_of_a_hook_are_in_the_result() -> None:
    module, ensemble = ensemble_of_two(rolling=True, alpha=0.25, outer_lr=1.5)
    iterate(module, ensemble, True, (0.5, -0.25))
    for n in range(2):
        fill(module, ensemble, n)
    ensemble.dissolve()
    assert module.weight == 0.5


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("order", [(None, 0, 1), (0, 1, None)])
def test_what_a_hook_scales_in_all_models_and_the_reference_is_scaled_once(
    rolling: bool, order: tuple[int | None, ...]
) -> None:
    module, ensemble = ensemble_of_two(rolling=rolling, alpha=0.25)
    iterate(module, ensemble, rolling, (0.5, -0.25))
    before = weights(ensemble)
    for number in order:
        with ensemble.lent(number), torch.no_grad():
            module.weight.mul_(0.5)
    assert weights(ensemble) == [weight / 2 for weight in before]
    ensemble.settle()
    assert weights(ensemble) == [weight / 2 for weight in before]


def test_a_hook_that_sets_the_reference_before_a_late_averaging_has_ended_is_refused() -> None:
    module, ensemble = ensemble_of_two(every=2, delay=1)
    for _ in range(2):
        iterate(module, ensemble, False, (0.5, -0.25))
    with ensemble.lent(None):
        pass  # it may look at it
    fill(module, ensemble, 0)
    with pytest.raises(ConfigurationError, match=r"delay=1\) a hook has changed 'weight' of the reference .* delay=0"):
        fill(module, ensemble, None)
