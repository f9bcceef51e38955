"""Linears that have the same input, as one call, and norms between two optimizer steps."""

import copy
import gc
import weakref

import pytest
import torch
from dorad.train import _layers, _products, patch, tier
from lib.dora_training import adapted, perturb
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN, INNER = 24, 40
NAMES = ["q", "k", "v", "o", "gate", "up", "down"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        x = x + self.o(self.q(x) + (self.k(x) * self.v(x)).repeat(1, 3))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Blocks(nn.Module):
    def __init__(self, repeats=lambda block, x: block(x)):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.repeats = repeats

    def forward(self, x):
        for layer in self.layers:
            x = self.repeats(layer, x)
        return x


class Cross(nn.Module):
    """k and v have an input of their own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x, encoded):
        return self.q(x) + self.k(encoded) * self.v(encoded)


@pytest.fixture(autouse=True)
def fused():
    """At any size."""
    with tier("fused"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The numbers of linears of each call since the last look at it."""
    counts = []
    forward = _products.forward

    def counted(x, layers, *rest, **options):
        counts.append(len(layers))
        return forward(x, layers, *rest, **options)

    def look():
        found, counts[:] = list(counts), []
        return found

    monkeypatch.setattr(_products, "forward", counted)
    return look


@pytest.fixture
def norms(monkeypatch):
    """The number of norms that were made since the last look at it."""
    count = [0]
    make = _layers.FactoredLinear.detached_scale

    def counted(*given):
        count[0] += 1
        return make(*given)

    def look():
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(_layers.FactoredLinear, "detached_scale", counted)
    return look


def build(base=Blocks, dtype=torch.float32):
    torch.manual_seed(0)
    return adapted(base().to(dtype), target_modules=NAMES)


def pair(base=Blocks, dtype=torch.float32):
    """PEFT's model, and the same patched."""
    theirs = build(base, dtype)
    ours = copy.deepcopy(theirs)
    patch(ours)
    return theirs, ours


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def optimizer_of(model):
    return torch.optim.SGD(trained(model).values(), lr=0.05)


def inputs(count=2, rows=5):
    made = torch.Generator().manual_seed(1)
    return [torch.randn(rows, HIDDEN, generator=made).requires_grad_() for _ in range(count)]


def take_step(model, optimizer, *xs):
    """The gradients of a step of all xs, before the parameters change."""
    optimizer.zero_grad()
    for each in [model(x).square().mean() for x in xs]:
        each.backward()
    gradients = {name: p.grad.clone() for name, p in trained(model).items()}
    gradients |= {f"x {i}": x.grad.clone() for i, x in enumerate(xs)}
    for x in xs:
        x.grad = None
    optimizer.step()
    return gradients


def assert_close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=2e-4, atol=2e-6, msg=name)


def test_linears_with_one_input_are_one_call_after_the_first_step(calls):
    theirs, ours = pair()
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for expected in ([1] * 14, [3, 1, 2, 1] * 2, [3, 1, 2, 1] * 2):
        wanted = take_step(theirs, optimizers[0], *inputs(1))
        assert_same(take_step(ours, optimizers[1], *inputs(1)), wanted)
        assert calls() == expected
    with torch.no_grad():
        assert_close(ours(inputs()[1]), theirs(inputs()[1]))
    assert calls() == [3, 1, 2, 1] * 2


def test_without_gradients_the_second_forward_is_shared(calls):
    theirs, ours = pair()
    with torch.no_grad():
        for expected in ([1] * 14, [3, 1, 2, 1] * 2):
            assert_close(ours(inputs()[0]), theirs(inputs()[0]))
            assert calls() == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repeated_forward_is_shared_as_the_first_was(calls, reentrant):
    """Two forwards before their backwards, each repeated by the backward, with calls of other kinds
    in between: non-reentrant checkpointing compares the saved tensors."""
    theirs, _ = pair()
    again = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
    ours = build(lambda: Blocks(again))
    ours.load_state_dict(theirs.state_dict())
    patch(ours)
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for _ in range(3):
        wanted = take_step(theirs, optimizers[0], *inputs())
        optimizers[1].zero_grad()
        xs = inputs()
        losses = [ours(x).square().mean() for x in xs]
        with torch.no_grad():
            ours(xs[0])
        for loss in losses:
            loss.backward()
        got = {name: p.grad.clone() for name, p in trained(ours).items()}
        got |= {f"x {i}": x.grad for i, x in enumerate(xs)}
        assert_same(got, wanted)
        optimizers[1].step()
    assert 3 in calls()


def test_a_step_of_another_model_leaves_repeated_forwards_as_they_were():
    """As of a discriminator, between a generator's forward and its backward."""
    again = lambda block, x: checkpoint(block, x, use_reentrant=False)  # noqa: E731
    ours = build(lambda: Blocks(again))
    patch(ours)
    optimizer = optimizer_of(ours)
    other = nn.Linear(2, 2)
    for _ in range(3):
        loss = ours(inputs()[0]).square().mean()
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        loss.backward()
        optimizer.step()


def test_an_input_of_their_own_is_shared_by_those_that_have_it(calls):
    theirs, ours = pair(Cross)
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for expected in ([1, 1, 1], [1, 2]):
        x, encoded = inputs()
        results = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            y = model(x, encoded)
            y.square().mean().backward()
            results.append(y.detach())
            optimizer.step()
        assert_close(results[1], results[0])
        assert calls() == expected


class Sometimes(Block):
    """v, unless there is none."""

    def forward(self, x):
        self.times = getattr(self, "times", 0) + 1
        y = self.q(x) + self.k(x).repeat(1, 3)
        return y + self.v(x).repeat(1, 3) if self.times == 1 else y


def test_outputs_that_nobody_takes_are_soon_not_computed(calls):
    theirs, ours = pair(Sometimes)
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for expected in ([1, 1, 1], [3], [3], [3], [1, 1], [1, 1]):
        x = inputs()[0]
        outputs = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            y = model(x)
            y.square().mean().backward()
            outputs.append(y.detach())
            optimizer.step()
        assert_close(outputs[1], outputs[0])
        assert calls() == expected
        # An output without a use has no gradient, as in PEFT.
        for name, parameter in trained(ours).items():
            assert (parameter.grad is None) == (trained(theirs)[name].grad is None), name


class Changing(Block):
    """x is written to between two calls with it."""

    def forward(self, x):
        x = x.clone()
        y = self.q(x)
        x.mul_(2)
        return y + self.k(x).repeat(1, 3) + self.v(x).repeat(1, 3)


def test_an_input_that_is_written_to_between_two_calls_is_another(calls):
    theirs, ours = pair(Changing)
    with torch.no_grad():
        for _ in range(3):
            assert_close(ours(inputs()[0]), theirs(inputs()[0]))
    assert calls() == [1, 1, 1, 1, 2, 1, 2]


def test_an_input_that_a_hook_replaces_is_another(calls):
    theirs, ours = pair()
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for step in range(3):
        if step == 2:
            for module in (*theirs.modules(), *ours.modules()):
                if getattr(module, "out_features", None) == 8 and hasattr(module, "lora_A"):
                    module.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
        calls()
        wanted = take_step(theirs, optimizers[0], *inputs(1))
        assert_same(take_step(ours, optimizers[1], *inputs(1)), wanted)
    assert calls() == [1, 1, 1, 1, 2, 1] * 2


@pytest.mark.parametrize("changed", ["lora_A", "lora_B", "base_layer"])
def test_weights_that_change_before_the_backward_are_refused(changed):
    _, ours = pair()
    loss = ours(inputs()[0]).square().mean()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if changed in name and ".down." in name:
                parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_disabled_adapter_and_another_mode_take_nothing_of_a_call_before():
    theirs, ours = pair()
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for _ in range(2):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            take_step(model, optimizer, *inputs(1))
    x = inputs()[0]
    block, mine = (model.base_model.model.layers[0] for model in (theirs, ours))
    mine.q(x)  # k and v are there
    with torch.no_grad():
        k = mine.k(x)
    assert not k.requires_grad
    mine.q(x)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_close(mine.k(x), block.k(x))


def test_inputs_and_outputs_are_not_kept():
    _, ours = pair()
    optimizer = optimizer_of(ours)
    for _ in range(2):
        take_step(ours, optimizer, *inputs(1))
    x = inputs()[0]
    with torch.no_grad():
        y = ours(x)
    alive = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert [each() for each in alive] == [None, None]


# --- Norms ----------------------------------------------------------------------------------------


def test_norms_are_made_once_for_an_optimizer_step(norms):
    theirs, ours = pair()
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for expected in (28, 14, 14):  # no step before: nothing tells that weights have not changed
        wanted = take_step(theirs, optimizers[0], *inputs())
        assert_same(take_step(ours, optimizers[1], *inputs()), wanted)
        assert norms() == expected


def test_a_repeated_forward_has_the_norms_of_the_first(norms):
    again = lambda block, x: checkpoint(block, x, use_reentrant=False)  # noqa: E731
    ours = build(lambda: Blocks(again))
    patch(ours)
    ours(inputs()[0]).square().mean().backward()
    assert norms() == 14


def test_weights_that_are_written_past_their_versions_have_new_norms():
    """As loops without an optimizer do it."""
    theirs, ours = pair()
    for _ in range(3):
        results = []
        for model in (theirs, ours):
            x = inputs()[0]
            y = model(x)
            y.square().mean().backward()
            results.append(y.detach())
            for parameter in trained(model).values():
                parameter.data -= 0.05 * parameter.grad
                parameter.grad = None
        assert_close(results[1], results[0])


def test_weights_that_change_between_two_steps_have_new_norms():
    theirs, ours = pair()
    optimizers = optimizer_of(theirs), optimizer_of(ours)
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        take_step(model, optimizer, *inputs(1))
    x = inputs()[0]
    assert_close(ours(x), theirs(x))
    other = build()
    perturb(other)
    for model in (theirs, ours):
        model.load_state_dict(other.state_dict())
    assert_close(ours(x), theirs(x))
    for model in (theirs, ours):
        for module in model.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling["default"] *= 2
    assert_close(ours(x), theirs(x))
