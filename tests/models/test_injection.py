"""Inject and eject are exact inverses, whatever lies over what and whatever goes wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fisedit.errors import AdapterError
from fisedit.models.injection import Injection, injected


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x))


def plus(amount):
    """Adds to whatever was there before."""
    return lambda inner: lambda *args: inner(*args) + amount


@pytest.fixture
def model():
    return Model()


X = torch.ones(2, 3)


def untouched(model, before):
    return not any("forward" in vars(module) for module in model.modules()) and torch.equal(model(X), before)


def test_ejecting_leaves_no_trace(model):
    before, keys = model(X), list(model.state_dict())
    with Injection([(model.second, plus(1.0)), (model.first, plus(2.0))]):
        assert not torch.equal(model(X), before)
        assert list(model.state_dict()) == keys
    assert untouched(model, before)


def test_injections_lie_over_one_another(model):
    before = model(X)
    with Injection([(model.second, plus(1.0))]):
        once = model(X)
        with Injection([(model.second, plus(2.0))]), Injection([(model, plus(4.0))]):
            assert torch.allclose(model(X), before + 7.0)
        assert torch.equal(model(X), once)
    assert untouched(model, before)


def test_one_module_may_change_twice_at_once(model):
    before = model(X)
    with Injection([(model.second, plus(1.0)), (model.second, plus(2.0))]):
        assert torch.allclose(model(X), before + 3.0)
    assert untouched(model, before)


def test_a_forward_of_its_own_comes_back(model):
    def own(x):
        return x

    model.first.forward = own
    before = model(X)
    with injected([(model.first, lambda x: -x)]):
        assert not torch.equal(model(X), before)
    assert model.first.forward is own
    assert torch.equal(model(X), before)


def test_injecting_twice_is_an_error(model):
    injection = Injection([(model.first, plus(1.0))]).inject()
    once = model(X)
    with pytest.raises(AdapterError, match="injected already"):
        injection.inject()
    assert torch.equal(model(X), once)
    injection.eject()
    with pytest.raises(AdapterError, match="not injected"):
        injection.eject()
    assert not injection.injected
    assert injection.inject().injected


def test_what_came_last_goes_first(model):
    before = model(X)
    under, over = (Injection([(model.first, plus(x))]) for x in (1.0, 2.0))
    under.inject(), over.inject()
    both = model(X)
    with pytest.raises(AdapterError, match="over this"):
        under.eject()
    assert torch.equal(model(X), both)
    over.eject(), under.eject()
    assert untouched(model, before)


def test_an_exception_ejects(model):
    before = model(X)
    with pytest.raises(ZeroDivisionError), Injection([(model.first, plus(1.0))]):
        raise ZeroDivisionError
    assert untouched(model, before)


def test_a_change_that_fails_halfway_is_undone(model):
    before = model(X)

    def burst(inner):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Injection([(model.first, plus(1.0)), (model.second, burst)]).inject()
    assert untouched(model, before)
